// Exact choice of the best pools, in the order score descending, pool ascending, by a radix search
// over the 32 bits of the score; ties are taken in ascending order of the pool. Scores that are not
// finite are never chosen; -0 equals +0. Integers only: both devices give the same bits.
//
// The launches are select_histogram<0>, <1>, <2>, select_count, select_write. Between them lie, per
// row of queries:
//   histograms  i32 [3][SELECT_BINS], zero before the first launch
//   state       u32 [8]: {digit 0 of the last chosen key, its rank under that digit (from 1),
//               digits 0 and 1, rank under both, the key, how many equal to it are chosen,
//               number of chosen pools, unused}; each word is written by one launch
//   counts      i32 [n_segments]: keys above the last chosen one, and 65536 * those equal to it
#include "common/device.cuh"

constexpr int SELECT_THREADS = 256;
constexpr int SELECT_OWN = 8;  // neighbouring pools of a thread
constexpr int SELECT_SEGMENT = SELECT_THREADS * SELECT_OWN;
constexpr int SELECT_BINS = 2048;
constexpr int SELECT_GROUPS = 16;
constexpr int SELECT_STATE = 8;

// Ascending with the score, and greater than 0; 0 if it is never chosen.
__device__ __forceinline__ uint32_t select_key(float score) {
    const uint32_t bits = __float_as_uint(score + 0.0f);
    if ((bits & 0x7F800000u) == 0x7F800000u) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <int PASS>
__device__ __forceinline__ uint32_t select_digit(uint32_t key) {
    return PASS == 0 ? key >> 21 : PASS == 1 ? key >> 10 & 2047u : key & 1023u;
}

// Sum of `value` over the lower threads of the block; `scratch` i32 [256 + 16 + 1] ends with the sum
// of all, written by the last thread. A barrier must lie between two uses of the scratch.
__device__ __forceinline__ int32_t sum_below(int32_t value, int32_t* scratch) {
    constexpr int SIZE = SELECT_THREADS / SELECT_GROUPS;
    const int thread = threadIdx.x;
    scratch[thread] = value;
    __syncthreads();
    if (thread < SELECT_GROUPS) {
        int32_t sum = 0;
        for (int i = 0; i < SIZE; i++) sum += scratch[thread * SIZE + i];
        scratch[SELECT_THREADS + thread] = sum;
    }
    __syncthreads();
    int32_t below = 0;
    for (int g = 0; g < thread / SIZE; g++) below += scratch[SELECT_THREADS + g];
    for (int i = thread / SIZE * SIZE; i < thread; i++) below += scratch[i];
    if (thread == SELECT_THREADS - 1) scratch[SELECT_THREADS + SELECT_GROUPS] = below + value;
    return below;
}

// The pools a row may choose from, and how many it wants.
struct Choice {
    int32_t n_pools;
    int32_t wanted;
};
__device__ __forceinline__ Choice choice_of(int row, int32_t n_pools, int32_t pool, int32_t top_k,
                                            int32_t counted, const int32_t* len_d) {
    const int64_t seen = (int64_t(len_d[0]) + row + 1 - counted) / pool;
    const int32_t own = seen < n_pools ? int32_t(seen) : n_pools;
    return {own, top_k / pool < own ? top_k / pool : own};
}

// Finds the digit that holds the `wanted`-th greatest key. `found` i32 [3] = {digit, rank within the
// digit (from 1), wanted, reduced to what there is}; all 0 if there is nothing.
__device__ __forceinline__ void find_digit(const int32_t* histogram, int32_t wanted,
                                           int32_t* scratch, int32_t* found) {
    constexpr int OWN = SELECT_BINS / SELECT_THREADS;
    const int thread = threadIdx.x;
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) sum += histogram[SELECT_BINS - 1 - (thread * OWN + i)];
    int32_t above = sum_below(sum, scratch);
    if (thread < 3) found[thread] = 0;
    __syncthreads();
    const int32_t all = scratch[SELECT_THREADS + SELECT_GROUPS];
    const int32_t rank = wanted < all ? wanted : all;
    if (above < rank && rank <= above + sum) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int digit = SELECT_BINS - 1 - (thread * OWN + i);
            const int32_t here = histogram[digit];
            if (above < rank && rank <= above + here) {
                found[0] = digit;
                found[1] = rank - above;
                found[2] = rank;
            }
            above += here;
        }
    }
    __syncthreads();
}

// Counts the digits of pass PASS over the keys whose higher digits are those of the last chosen one.
// Grid (n_segments, n_rows), 256 threads.
//   scores  f32 [n_rows, stride]; row r sees pools below (len + r + 1 - counted) / pool, at most
//           n_pools, of which the top_k / pool best are chosen
template <int PASS>
__global__ void __launch_bounds__(SELECT_THREADS, 1)
    select_histogram(const float* __restrict__ scores, int32_t* histograms, uint32_t* states,
                     int32_t pool, int32_t n_pools, int32_t stride, int32_t top_k, int32_t counted,
                     const int32_t* __restrict__ len_d) {
    __shared__ int32_t bins[SELECT_BINS];
    __shared__ int32_t scratch[SELECT_THREADS + SELECT_GROUPS + 1];
    __shared__ int32_t found[3];
    const int thread = threadIdx.x;
    const int row = blockIdx.y;
    const Choice choice = choice_of(row, n_pools, pool, top_k, counted, len_d);
    const int32_t first = int32_t(blockIdx.x) * SELECT_SEGMENT;
    int32_t* own = histograms + size_t(row) * 3 * SELECT_BINS;
    uint32_t* state = states + size_t(row) * SELECT_STATE;
    // Block 0 always works, because it leaves the state.
    if (first < choice.n_pools || blockIdx.x == 0) {
        uint32_t prefix = 0;
        if constexpr (PASS > 0) {
            const int32_t wanted = PASS == 1 ? choice.wanted : int32_t(state[1]);
            find_digit(own + (PASS - 1) * SELECT_BINS, wanted, scratch, found);
            prefix = PASS == 1 ? uint32_t(found[0]) : state[0] << 11 | uint32_t(found[0]);
            if (blockIdx.x == 0 && thread == 0) {
                state[2 * PASS - 2] = prefix;
                state[2 * PASS - 1] = uint32_t(found[1]);
                if (PASS == 1) state[6] = uint32_t(found[2]);
            }
        }
        for (int i = thread; i < SELECT_BINS; i += SELECT_THREADS) bins[i] = 0;
        __syncthreads();
        for (int i = 0; i < SELECT_OWN; i++) {
            const int32_t p = first + i * SELECT_THREADS + thread;
            if (p < choice.n_pools) {
                const uint32_t key = select_key(scores[size_t(row) * stride + p]);
                const bool same = PASS == 0   ? true
                                  : PASS == 1 ? select_digit<0>(key) == prefix
                                              : key >> 10 == prefix;
                if (key != 0 && same) atomicAdd(bins + select_digit<PASS>(key), 1);
            }
        }
        __syncthreads();
        for (int i = thread; i < SELECT_BINS; i += SELECT_THREADS)
            if (bins[i] != 0) atomicAdd(own + PASS * SELECT_BINS + i, bins[i]);
    }
}

// Counts what every segment contributes. Grid (n_segments, n_rows), 256 threads.
KERNEL void __launch_bounds__(SELECT_THREADS, 1)
    select_count(const float* __restrict__ scores, const int32_t* __restrict__ histograms,
                 uint32_t* states, int32_t* __restrict__ counts, int32_t pool, int32_t n_pools,
                 int32_t stride, int32_t top_k, int32_t counted,
                 const int32_t* __restrict__ len_d) {
    __shared__ int32_t scratch[SELECT_THREADS + SELECT_GROUPS + 1];
    __shared__ int32_t found[3];
    const int thread = threadIdx.x;
    const int row = blockIdx.y;
    const Choice choice = choice_of(row, n_pools, pool, top_k, counted, len_d);
    const int32_t first = int32_t(blockIdx.x) * SELECT_SEGMENT;
    uint32_t* state = states + size_t(row) * SELECT_STATE;
    if (first < choice.n_pools || blockIdx.x == 0) {
        find_digit(histograms + (size_t(row) * 3 + 2) * SELECT_BINS, int32_t(state[3]), scratch,
                   found);
        // Without a choice no key may count: none is as great as this.
        const uint32_t least =
            state[6] == 0 ? 0xFFFFFFFFu : state[2] << 10 | uint32_t(found[0]);
        if (blockIdx.x == 0 && thread == 0) {
            state[4] = least;
            state[5] = uint32_t(found[1]);
        }
        int32_t count = 0;
        for (int i = 0; i < SELECT_OWN; i++) {
            const int32_t p = first + i * SELECT_THREADS + thread;
            if (p < choice.n_pools) {
                const uint32_t key = select_key(scores[size_t(row) * stride + p]);
                count += key > least ? 1 : key == least ? 65536 : 0;
            }
        }
        sum_below(count, scratch);
        if (thread == SELECT_THREADS - 1)
            counts[size_t(row) * gridDim.x + blockIdx.x] =
                scratch[SELECT_THREADS + SELECT_GROUPS];
    }
}

// Writes the list of rows. Grid (n_segments, n_rows), 256 threads.
//   out      i32 [n_rows, width]: the rows of the chosen pools in ascending order, the rows of the
//            pool that is not complete, then -1
//   width_d  i32[1] or null: entries that can differ from -1 for the last row of the launch
KERNEL void __launch_bounds__(SELECT_THREADS, 1)
    select_write(const float* __restrict__ scores, const uint32_t* __restrict__ states,
                 const int32_t* __restrict__ counts, int32_t* __restrict__ out,
                 int32_t* NULLABLE width_d, int32_t pool, int32_t n_pools, int32_t stride,
                 int32_t top_k, int32_t width, int32_t counted,
                 const int32_t* __restrict__ len_d) {
    __shared__ int32_t scratch[SELECT_THREADS + SELECT_GROUPS + 1];
    const int thread = threadIdx.x;
    const int row = blockIdx.y;
    const Choice choice = choice_of(row, n_pools, pool, top_k, counted, len_d);
    const int32_t first = int32_t(blockIdx.x) * SELECT_SEGMENT;
    const uint32_t* state = states + size_t(row) * SELECT_STATE;
    const uint32_t least = state[4];
    const int32_t n_equal = int32_t(state[5]);
    const int32_t n_chosen = int32_t(state[6]);
    int32_t* own = out + size_t(row) * width;
    if (first < choice.n_pools) {
        // Segments before this one: their sums are at most 2048 each, but many.
        int32_t above = 0, equal = 0;
        for (int s = thread; s < int(blockIdx.x); s += SELECT_THREADS) {
            const int32_t both = counts[size_t(row) * gridDim.x + s];
            above += both & 65535;
            equal += both >> 16;
        }
        sum_below(above, scratch);
        __syncthreads();
        above = scratch[SELECT_THREADS + SELECT_GROUPS];
        sum_below(equal, scratch);
        __syncthreads();
        equal = scratch[SELECT_THREADS + SELECT_GROUPS];

        uint32_t keys[SELECT_OWN];
        int32_t count = 0;
#pragma unroll
        for (int i = 0; i < SELECT_OWN; i++) {
            const int32_t p = first + thread * SELECT_OWN + i;
            keys[i] = p < choice.n_pools ? select_key(scores[size_t(row) * stride + p]) : 0;
            count += keys[i] > least ? 1 : keys[i] == least ? 65536 : 0;
        }
        const int32_t below = sum_below(count, scratch);
        above += below & 65535;
        equal += below >> 16;
#pragma unroll
        for (int i = 0; i < SELECT_OWN; i++) {
            const bool greater = keys[i] > least;
            const bool tie = keys[i] == least;
            if (greater || (tie && equal < n_equal)) {
                const int32_t rank = above + (equal < n_equal ? equal : n_equal);
                const int32_t p = first + thread * SELECT_OWN + i;
                for (int s = 0; s < pool; s++) {
                    const int32_t at = rank * pool + s;
                    if (at < width) own[at] = p * pool + s;
                }
            }
            above += greater ? 1 : 0;
            equal += tie ? 1 : 0;
        }
    }
    if (blockIdx.x == 0) {
        const int64_t visible = int64_t(len_d[0]) + row + 1 - counted;
        const int32_t tail = int32_t(visible % pool);
        for (int32_t at = n_chosen * pool + thread; at < width; at += SELECT_THREADS) {
            const int32_t s = at - n_chosen * pool;
            own[at] = s < tail ? int32_t(visible - tail + s) : -1;
        }
        if (width_d != nullptr && thread == 0 && row == int(gridDim.y) - 1)
            width_d[0] = choice.wanted * pool + pool - 1;
    }
}
