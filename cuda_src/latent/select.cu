// Exact choice of the best pools, in the order score descending, pool ascending. Scores that are not
// finite are never chosen; -0 equals +0. Integers only: both devices give the same bits.
//
// The greatest keys of many groups bound the wanted key from below: whoever wants k pools may forget
// all keys below the k-th greatest of the groups' greatest. Few keys stay, unless most are equal. A
// radix search over them finds the last chosen key; of those equal to it the first are taken.
//
// Few pools are one launch, select_choose. Many are three: select_maxima, select_filter,
// select_choose. Between them lie, per row of queries, in u32 words:
//   maxima  [ceil(n_pools / 32)]  greatest key of each group
//   counts  [n_segments]          pools that stay, of each segment
//   lists   [n_pools]             these pools, ascending, from the begin of their segment on
#include "common/dependent.cuh"
#include "common/device.cuh"

constexpr int SELECT_THREADS = 256;
constexpr int SELECT_OWN = 8;  // neighbouring pools of a thread
constexpr int SELECT_SEGMENT = SELECT_THREADS * SELECT_OWN;
constexpr int CHOOSE_THREADS = 1024;
constexpr int CHOOSE_LISTED = 4096;  // pools that are kept at hand; of more, all scores are read
constexpr int SELECT_BINS = 2048;
constexpr int MOST_GROUPS = 1024;
constexpr int LEAST_GROUP = 32, MOST_GROUP = WARP_LANES * SELECT_OWN;

// Ascending with the score, and greater than 0; 0 if it is never chosen.
__device__ __forceinline__ uint32_t select_key(float score) {
    const uint32_t bits = __float_as_uint(score + 0.0f);
    if ((bits & 0x7F800000u) == 0x7F800000u) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The keys of N neighbouring pools from `first` on, 0 behind the last pool.
template <int N>
__device__ __forceinline__ void load_keys(uint32_t* keys, const float* scores, int32_t first,
                                          int32_t n_pools) {
    if (first + N <= n_pools && uintptr_t(scores) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(scores + first + i);
            keys[i] = select_key(four.x), keys[i + 1] = select_key(four.y);
            keys[i + 2] = select_key(four.z), keys[i + 3] = select_key(four.w);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            keys[i] = first + i < n_pools ? select_key(scores[first + i]) : 0;
    }
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

// Neighbouring pools that share a maximum: about 1024 groups, of 32 to 256.
__device__ __forceinline__ int32_t group_of(int32_t n_pools) {
    int32_t group = LEAST_GROUP;
    while (group < MOST_GROUP && group * MOST_GROUPS < n_pools) group *= 2;
    return group;
}

// Sum of `value` over the lower threads of the block, and of all; `scratch` i32 [warps + 1]. A barrier
// must lie between two uses of the scratch.
__device__ __forceinline__ int2 sum_below(int32_t value, int32_t* scratch) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    int32_t own = value;
#pragma unroll
    for (int offset = 1; offset < WARP_LANES; offset *= 2) {
        const int32_t other = __shfl_up_sync(FULL_MASK, own, offset);
        own += lane >= offset ? other : 0;
    }
    if (lane == WARP_LANES - 1) scratch[warp] = own;
    __syncthreads();
    // Every warp adds up the sums of all warps, at most 32.
    const int n_warps = blockDim.x / WARP_LANES;
    int32_t sums = lane < n_warps ? scratch[lane] : 0;
#pragma unroll
    for (int offset = 1; offset < WARP_LANES; offset *= 2) {
        const int32_t other = __shfl_up_sync(FULL_MASK, sums, offset);
        sums += lane >= offset ? other : 0;
    }
    const int32_t before = __shfl_sync(FULL_MASK, sums, warp == 0 ? 0 : warp - 1);
    return make_int2((warp == 0 ? 0 : before) + own - value,
                     __shfl_sync(FULL_MASK, sums, WARP_LANES - 1));
}

// A radix search for the `wanted`-th greatest of n keys.
struct Search {
    int32_t bins[SELECT_BINS];
    int32_t scratch[WARP_LANES];
    int32_t found[3];

    // Of the keys whose bits above `shift + bits` are those of `prefix` (all of them at first): the
    // digit of the wanted-th greatest, its rank under that digit (from 1), and `wanted`, reduced to
    // what there is. Without any key all are 0. Keys that are 0 do not count.
    template <class Key>
    __device__ __forceinline__ int3 digit(int shift, int bits, uint32_t prefix, int32_t wanted, int32_t n,
                                          Key key_at) {
        constexpr int LEAST_THREADS = 256;
        const int thread = threadIdx.x, n_threads = blockDim.x;
        for (int i = thread; i < SELECT_BINS; i += n_threads) bins[i] = 0;
        if (thread < 3) found[thread] = 0;
        __syncthreads();
        for (int32_t i = thread; i < n; i += n_threads) {
            const uint32_t key = key_at(i);
            if (key != 0 && uint32_t(uint64_t(key) >> (shift + bits)) == prefix)
                atomicAdd(bins + (key >> shift & ((1u << bits) - 1)), 1);
        }
        __syncthreads();
        const int own = SELECT_BINS / n_threads;  // neighbouring bins of a thread, from the top down
        int32_t here[SELECT_BINS / LEAST_THREADS];
        int32_t sum = 0;
#pragma unroll
        for (int i = 0; i < SELECT_BINS / LEAST_THREADS; i++) {
            here[i] = i < own ? bins[SELECT_BINS - 1 - (thread * own + i)] : 0;
            sum += here[i];
        }
        const int2 sums = sum_below(sum, scratch);
        const int32_t rank = wanted < sums.y ? wanted : sums.y;
        int32_t above = sums.x;
        if (above < rank && rank <= above + sum) {
#pragma unroll
            for (int i = 0; i < SELECT_BINS / LEAST_THREADS; i++) {
                if (above < rank && rank <= above + here[i]) {
                    found[0] = SELECT_BINS - 1 - (thread * own + i);
                    found[1] = rank - above;
                    found[2] = rank;
                }
                above += here[i];
            }
        }
        __syncthreads();
        return make_int3(found[0], found[1], found[2]);
    }

    // A key that at least `wanted` of the keys reach, 1 if there are fewer: exact in 22 bits.
    template <class Key>
    __device__ __forceinline__ uint32_t bound(int32_t wanted, int32_t n, Key key_at) {
        const int3 high = digit(21, 11, 0, wanted, n, key_at);
        __syncthreads();  // the bins are free
        const int3 low = digit(10, 11, uint32_t(high.x), high.y, n, key_at);
        const uint32_t key = uint32_t(high.x) << 21 | uint32_t(low.x) << 10;
        return high.z < wanted || key == 0 ? 1u : key;
    }
};

// The greatest key of each group. Grid (n_segments, n_rows), 256 threads.
//   scores  f32 [n_rows, stride]; row r sees pools below (len + r + 1 - counted) / pool, at most
//           n_pools
KERNEL void __launch_bounds__(SELECT_THREADS, 1)
    select_maxima(const float* __restrict__ scores, uint32_t* __restrict__ maxima, int32_t pool,
                  int32_t n_pools, int32_t stride, int32_t counted,
                  const int32_t* __restrict__ len_d) {
    admit_successor();
    await_predecessor();
    const int row = blockIdx.y;
    const Choice choice = choice_of(row, n_pools, pool, 0, counted, len_d);
    const int32_t first = int32_t(blockIdx.x) * SELECT_SEGMENT + threadIdx.x * SELECT_OWN;
    uint32_t keys[SELECT_OWN], most = 0;
    load_keys<SELECT_OWN>(keys, scores + size_t(row) * stride, first, choice.n_pools);
#pragma unroll
    for (int i = 0; i < SELECT_OWN; i++) most = keys[i] > most ? keys[i] : most;
    const int32_t group = group_of(choice.n_pools);
#pragma unroll
    for (int offset = 1; offset < WARP_LANES; offset *= 2) {
        const uint32_t other = __shfl_xor_sync(FULL_MASK, most, offset);
        if (offset * SELECT_OWN < group) most = other > most ? other : most;
    }
    if (first % group == 0 && first < choice.n_pools)
        maxima[size_t(row) * ((n_pools + LEAST_GROUP - 1) / LEAST_GROUP) + first / group] = most;
}

// Lists the pools that may be among the top_k / pool best. Grid (n_segments, n_rows), 256 threads.
KERNEL void __launch_bounds__(SELECT_THREADS, 1)
    select_filter(const float* __restrict__ scores, const uint32_t* __restrict__ maxima,
                  uint32_t* __restrict__ counts, uint32_t* __restrict__ lists, int32_t pool,
                  int32_t n_pools, int32_t stride, int32_t top_k, int32_t counted,
                  const int32_t* __restrict__ len_d) {
    __shared__ Search search;
    admit_successor();
    await_predecessor();
    const int row = blockIdx.y;
    const Choice choice = choice_of(row, n_pools, pool, top_k, counted, len_d);
    const int32_t first = int32_t(blockIdx.x) * SELECT_SEGMENT + threadIdx.x * SELECT_OWN;
    const int32_t group = group_of(choice.n_pools), n_groups = (choice.n_pools + group - 1) / group;
    uint32_t keys[SELECT_OWN];
    load_keys<SELECT_OWN>(keys, scores + size_t(row) * stride, first, choice.n_pools);
    const uint32_t* const own = maxima + size_t(row) * ((n_pools + LEAST_GROUP - 1) / LEAST_GROUP);
    const uint32_t least = search.bound(choice.wanted, n_groups, [&](int32_t i) { return own[i]; });
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < SELECT_OWN; i++) count += keys[i] >= least ? 1 : 0;
    const int2 sums = sum_below(count, search.scratch);
    const uint32_t to_segment = blockIdx.x;
    uint32_t* to = lists + size_t(row) * n_pools + size_t(to_segment) * SELECT_SEGMENT + sums.x;
#pragma unroll
    for (int i = 0; i < SELECT_OWN; i++)
        if (keys[i] >= least) *to++ = uint32_t(first + i);
    if (threadIdx.x == 0) counts[size_t(row) * gridDim.x + to_segment] = uint32_t(sums.y);
}

// Chooses, and writes the list of rows. Grid (n_rows), 1024 threads.
//   counts, lists  null: all pools are looked at, at most 1024 * OWN
//   out      i32 [n_rows, width]: the rows of the chosen pools in ascending order, the rows of the
//            pool that is not complete, then -1
//   width_d  i32[1] or null: entries that can differ from -1 for the last row of the launch
template <int OWN>
__global__ void __launch_bounds__(CHOOSE_THREADS, 1)
    select_choose(const float* __restrict__ scores, const uint32_t* NULLABLE counts,
                  const uint32_t* NULLABLE lists, int32_t n_segments, int32_t* __restrict__ out,
                  int32_t* NULLABLE width_d, int32_t pool, int32_t n_pools, int32_t stride,
                  int32_t top_k, int32_t width, int32_t counted,
                  const int32_t* __restrict__ len_d) {
    __shared__ Search search;
    __shared__ uint32_t keys[CHOOSE_LISTED];
    __shared__ int32_t pools[CHOOSE_LISTED];
    admit_successor();
    await_predecessor();
    const int thread = threadIdx.x, row = blockIdx.x;
    const Choice choice = choice_of(row, n_pools, pool, top_k, counted, len_d);
    const float* const own = scores + size_t(row) * stride;

    // What may be chosen, ascending, if it is not too much.
    int32_t n = 0;
    if (counts != nullptr) {
        // A thread has neighbouring segments.
        const int own_segments = (n_segments + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
        const uint32_t* const own_counts = counts + size_t(row) * n_segments;
        const auto count_of = [&](int s) {
            return s < n_segments && s * int64_t(SELECT_SEGMENT) < choice.n_pools
                       ? int32_t(own_counts[s])
                       : 0;
        };
        int32_t count = 0;
        for (int s = 0; s < own_segments; s++) count += count_of(thread * own_segments + s);
        const int2 sums = sum_below(count, search.scratch);
        n = sums.y;
        int32_t at = sums.x;
        for (int s = 0; s < own_segments && n <= CHOOSE_LISTED; s++) {
            const int segment = thread * own_segments + s;
            const uint32_t* from = lists + size_t(row) * n_pools + size_t(segment) * SELECT_SEGMENT;
            for (int32_t i = count_of(segment); i > 0; i--) pools[at++] = int32_t(*from++);
        }
        __syncthreads();
        for (int32_t i = thread; i < n && n <= CHOOSE_LISTED; i += CHOOSE_THREADS)
            keys[i] = select_key(own[pools[i]]);
    } else {
        uint32_t near[OWN], most = 0;
        load_keys<OWN>(near, own, thread * OWN, choice.n_pools);
#pragma unroll
        for (int i = 0; i < OWN; i++) most = near[i] > most ? near[i] : most;
        keys[thread] = most;
        const uint32_t least =
            search.bound(choice.wanted, CHOOSE_THREADS, [&](int32_t i) { return keys[i]; });
        int32_t count = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) count += near[i] >= least ? 1 : 0;
        const int2 sums = sum_below(count, search.scratch);
        n = sums.y;
        int32_t at = sums.x;
        if (n <= CHOOSE_LISTED) {
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (near[i] >= least) keys[at] = near[i], pools[at] = thread * OWN + i, at++;
        }
    }

    // Every search begins with a barrier: then keys and pools are there.
    const bool listed = n <= CHOOSE_LISTED;
    n = listed ? n : choice.n_pools;
    const auto key_at = [&](int32_t i) { return listed ? keys[i] : select_key(own[i]); };
    const int3 high = search.digit(21, 11, 0, choice.wanted, n, key_at);
    __syncthreads();  // the bins are free
    const int3 middle = search.digit(10, 11, uint32_t(high.x), high.y, n, key_at);
    const uint32_t prefix = uint32_t(high.x) << 11 | uint32_t(middle.x);
    __syncthreads();
    const int3 low = search.digit(0, 10, prefix, middle.y, n, key_at);
    const int32_t n_chosen = high.z, n_equal = low.y;
    // Without a choice no key may count: none is as great as this.
    const uint32_t last = n_chosen == 0 ? 0xFFFFFFFFu : prefix << 10 | uint32_t(low.x);

    // Ranks: a thread has neighbouring candidates.
    const int32_t each = (n + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
    const int32_t to = (thread + 1) * each < n ? (thread + 1) * each : n;
    int32_t greater = 0, equal = 0;
    for (int32_t i = thread * each; i < to; i++) {
        const uint32_t key = key_at(i);
        greater += key > last ? 1 : 0;
        equal += key == last ? 1 : 0;
    }
    // A list is short enough for both sums in one word.
    const int32_t below = sum_below(listed ? greater | equal << 16 : greater, search.scratch).x;
    int32_t above = listed ? below & 0xFFFF : below, ties = below >> 16;
    if (!listed) {
        __syncthreads();
        ties = sum_below(equal, search.scratch).x;
    }
    int32_t* const list = out + size_t(row) * width;
    for (int32_t i = thread * each; i < to; i++) {
        const uint32_t key = key_at(i);
        if (key > last || (key == last && ties < n_equal)) {
            const int32_t rank = above + (ties < n_equal ? ties : n_equal);
            const int32_t p = listed ? pools[i] : i;
            for (int s = 0; s < pool; s++) {
                const int32_t at = rank * pool + s;
                if (at < width) list[at] = p * pool + s;
            }
        }
        above += key > last ? 1 : 0;
        ties += key == last ? 1 : 0;
    }
    const int64_t visible = int64_t(len_d[0]) + row + 1 - counted;
    const int32_t tail = int32_t(visible % pool);
    for (int32_t at = n_chosen * pool + thread; at < width; at += CHOOSE_THREADS) {
        const int32_t s = at - n_chosen * pool;
        list[at] = s < tail ? int32_t(visible - tail + s) : -1;
    }
    if (width_d != nullptr && thread == 0 && row == int(gridDim.x) - 1)
        width_d[0] = choice.wanted * pool + pool - 1;
}
