// Split-KV decode attention with tensor cores over K q8_0 and V q5_1, in class `f16x2`.
//
// A warp owns one kv head and up to 8 * SETS queries (a query = one row of one query head of the
// group), in steps of 16 keys (common/attend_step.cuh); a thread block owns a range of keys and some
// neighbouring kv heads, whose slices of the rows it streams through shared memory.
//
// Chunks of keys at absolute positions each leave a weighted sum, a reference and a sum of weights;
// attend_mma_combine joins them in a fixed order. Steps and chunks are a function of the position
// alone: a row gets the same bits alone and among others, on a ring and on a flat plane, whichever
// block takes a chunk.
//
// A scale or minimum that is not finite makes NaN of the outputs that see it.
#include "common/attend_step.cuh"
#include "common/bulk.cuh"
#include "common/counters.cuh"
#include "common/dependent.cuh"
#include "common/pipeline.cuh"

constexpr int N_STAGES = 3;  // tiles of keys in flight or in use
constexpr int COPY_ASYNC = 0, COPY_BULK = 1;
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
constexpr int COPY_BEST = COPY_BULK;
#else
constexpr int COPY_BEST = COPY_ASYNC;
#endif
constexpr float LN_2 = 0.6931471805599453f;

// Chunks: 32 keys below 8192, 128 below 65536, 256 below 262144, then 512. Few enough for the
// combination, and fine enough to be shared out evenly at every length; and so few steps to a chunk
// that what the tensor cores cut off in its sums stays below 2e-6 of them.
__device__ __forceinline__ int32_t part_of(int32_t key) {
    const int32_t near = key < 8192 ? key >> 5 : 192 + (key >> 7);
    const int32_t far = key < 262144 ? 448 + (key >> 8) : 960 + (key >> 9);
    return key < 65536 ? near : far;
}
__device__ __forceinline__ int32_t part_begin(int32_t part) {
    const int32_t near = part < 256 ? part * 32 : (part - 192) * 128;
    const int32_t far = part < 1472 ? (part - 448) * 256 : (part - 960) * 512;
    return part < 704 ? near : far;
}

// The planes and counters of a launch, or of one row of a table, in 32 bits; common/counters.cuh says
// what they mean. A row r sees the keys [start, end) of seen(r - the row of the view).
struct Plane {
    const uint8_t* k;
    const uint8_t* v;
    int32_t bound;  // of the keys that the first row sees
    int32_t base, window, capacity;

    __device__ __forceinline__ Plane(const uint8_t* k_plane, const uint8_t* v_plane,
                                     const int32_t* len_d, const int32_t* base_d,
                                     const uint64_t* table, int row, int32_t window,
                                     int32_t counted, int32_t capacity)
        : window(window), capacity(capacity) {
        const RowView view = row_view(k_plane, v_plane, len_d, base_d, table, row);
        k = view.k, v = view.v;
        bound = int32_t(view.slot) + 1 - counted, base = int32_t(view.base);
    }
    __device__ __forceinline__ int2 seen(int r) const {
        const int32_t behind = bound + r;
        const int32_t first = window > 0 && behind > window ? behind - window : 0;
        const int32_t start = first > base ? first : base;
        const int32_t end = behind - base < capacity ? behind : base + capacity;
        return make_int2(start, end > start ? end : start);
    }
};

// Where the partial results of a launch lie: f32 [n_rows, n_heads, n_slots, D] weighted sums, then
// f32 [n_rows, n_heads, n_slots, 2] references (as exponents of 2) and sums of weights.
template <int D>
struct Partials {
    float* sums;
    float* marks;
    int32_t n_slots;
    __device__ __forceinline__ Partials(float* workspace, int32_t n_rows, int32_t n_heads,
                                        int32_t slots)
        : sums(workspace), marks(workspace + size_t(n_rows) * n_heads * slots * D), n_slots(slots) {}
};

// Leaves the sums of a chunk in its slot, those of the queries below n_queries.
template <int D, int SETS>
__device__ __forceinline__ void end_part(const WarpState<D, SETS>& state,
                                         const WarpTables<D, SETS>& tables, const Partials<D>& to,
                                         int32_t part, int n_rows, int group,
                                         int n_heads) {
    const int first_row = tables.place.x, first_query = tables.place.y;
    const int n_queries = tables.place.z;
    const int32_t slot = part - tables.slot_zero;
    const int kv_head = tables.place.w;
    const int lane = threadIdx.x % WARP_LANES, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        float weight = state.weight[s];
        weight = weight + __shfl_xor_sync(FULL_MASK, weight, 1);
        weight = weight + __shfl_xor_sync(FULL_MASK, weight, 2);
        size_t column[3];  // of the queries g, 2t, 2t + 1
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const uint32_t query = first_query + s * SET + (i == 0 ? g : 2 * t + i - 1);
            const uint32_t row = n_rows == 1 ? 0u : query / uint32_t(group);
            const uint32_t head = kv_head * group + query - row * group;
            column[i] = (size_t(first_row + row) * n_heads + head) * to.n_slots + slot;
        }
        const bool fits = slot < to.n_slots;
        const int left = fits ? n_queries - s * SET : 0;
        if (t == 0 && g < left)
            *reinterpret_cast<float2*>(to.marks + column[0] * 2) =
                make_float2(state.reference[s], weight);
#pragma unroll
        for (int b = 0; b < D / 32; b++) {
            float middle = state.middles[s][b];
            middle = middle + __shfl_xor_sync(FULL_MASK, middle, 1);
            middle = middle + __shfl_xor_sync(FULL_MASK, middle, 2);
            const int channel = 32 * b + 2 * half_word(b, g);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float base = __shfl_sync(FULL_MASK, middle, 8 * t + 4 * i);
                const float* c = state.sums[s][b][0];
                const float* c1 = state.sums[s][b][1];
                if (2 * t + i < left) {
                    float* row = to.sums + column[1 + i] * D + channel;
                    *reinterpret_cast<float2*>(row) = make_float2(
                        fmaf(c[i], 0x1p24f, base), fmaf(c1[i], 0x1p23f, base));
                    *reinterpret_cast<float2*>(row + 16) =
                        make_float2(fmaf(c[2 + i], 0x1p20f, base), fmaf(c1[2 + i], 0x1p19f, base));
                }
            }
        }
    }
}

// Shared memory: N_STAGES tiles of keys_per_stage rows of K, then of V, of the block's heads; then
// per warp WarpTables, then the shared fragments of q; then LaneOffsets; then with COPY_BULK
// 2 * N_STAGES barriers.
//
// Grid (x: any number of blocks, which share the chunks; n_kv_heads / heads_per_block; query blocks),
// heads_per_block * warps_per_head warps. A query block is
// warps_per_head * SETS * 8 queries of all n_rows * group, or with a table of one row's group.
// Slices of heads_per_block heads and whole rows of K and V are multiples of 16 bytes, planes and q
// are 16-byte aligned. keys_per_stage: a multiple of 16. Other parameters as in kv/attend.cu.
template <int D, int SETS, int COPY = COPY_BEST>
__global__ void __launch_bounds__(256, D * SETS <= 128 ? 2 : 1)
    attend_mma(const float* __restrict__ q, const uint8_t* NULLABLE k_plane,
               const uint8_t* NULLABLE v_plane, int32_t n_rows, int32_t n_kv_heads, int32_t group,
               int32_t capacity, int32_t window, int32_t counted, float scale, float softcap,
               const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
               const uint64_t* NULLABLE table, float* __restrict__ workspace, int32_t n_slots,
               int32_t heads_per_block, int32_t warps_per_head, int32_t keys_per_stage) {
    constexpr int K_HEAD = D / 32 * K_BLOCK_BYTES, V_HEAD = D / 32 * V_BLOCK_BYTES;
    DYN_SMEM(uint8_t, shared);
    admit_successor();
    await_predecessor();
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int n_workers = heads_per_block * warps_per_head;
    const int slice_k = heads_per_block * K_HEAD, slice_v = heads_per_block * V_HEAD;
    const int pitch_k = k_pitch(slice_k), pitch_v = v_pitch(slice_v);
    const int stage_bytes = keys_per_stage * (pitch_k + pitch_v);
    WarpTables<D, SETS>* const tables =
        reinterpret_cast<WarpTables<D, SETS>*>(shared + N_STAGES * stage_bytes);
    uint4* const fragments = reinterpret_cast<uint4*>(tables + n_workers);
    const int n_heads = n_kv_heads * group;

    // Queries [first_query, first_query + n_queries) of the rows from first_row on.
    const uint32_t queries = warps_per_head * SETS * SET;
    uint32_t first_row = 0, first_query = blockIdx.z * queries, all_queries = n_rows * group;
    if (table != nullptr) {
        const uint32_t blocks_per_row = (group + queries - 1) / queries;
        first_row = blockIdx.z / blocks_per_row;
        first_query = (blockIdx.z - first_row * blocks_per_row) * queries;
        all_queries = group;
    }
    const uint32_t n_queries =
        all_queries - first_query < queries ? all_queries - first_query : queries;
    const auto row_of = [&](uint32_t query) {  // spares one row the division
        return all_queries == uint32_t(group) ? 0u : query / uint32_t(group);
    };

    const int head = warps_per_head == 1 ? warp : int(uint32_t(warp) / uint32_t(warps_per_head));
    const int kv_head = int(blockIdx.y) * heads_per_block + head;
    const uint32_t own_query = (warp - head * warps_per_head) * (SETS * SET);  // within the block
    RawQuery<D> raw[SETS];
    uint32_t rows[SETS];  // of this lane's queries; surplus lanes repeat the last one
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        uint32_t query = own_query + s * SET + lane / 4;
        query = first_query + (query < n_queries ? query : n_queries - 1);
        rows[s] = row_of(query);
        raw[s].load(q + (size_t(first_row + rows[s]) * n_heads + kv_head * group + query -
                         rows[s] * group) * D);
    }

    // Keys that some query sees, keys that all see, and this block's share of the chunks. The ranges
    // ascend with the row.
    const Plane plane(k_plane, v_plane, len_d, base_d, table, first_row, window, counted, capacity);
    const int2 top_keys = plane.seen(row_of(first_query));
    const int2 last_keys = plane.seen(row_of(first_query + n_queries - 1));
    const int32_t key_start = top_keys.x, key_end = last_keys.y;
    int32_t first_key = 0, last_key = 0;
    if (key_end > key_start) {
        const uint32_t first = part_of(key_start), n = part_of(key_end - 1) + 1 - first;
        const uint32_t share = blockIdx.x;
        if (n <= gridDim.x) {  // a chunk for each
            if (share < n) {
                first_key = part_begin(first + share);
                last_key = part_begin(first + share + 1);
            }
        } else {  // the chunks that begin in an equal share of the keys
            const uint32_t span = key_end - key_start;
            const uint32_t each = span / gridDim.x, more = span - each * gridDim.x;
            const int32_t from = key_start + int32_t(each * share + (share < more ? share : more));
            const int32_t to = from + int32_t(each + (share < more ? 1 : 0));
            first_key = share == 0 ? key_start : part_begin(part_of(from - 1) + 1);
            last_key = part_begin(part_of(to - 1) + 1);
        }
        first_key = first_key > key_start ? first_key : key_start;
        last_key = last_key < key_end ? last_key : key_end;
    }
    const int32_t stage_zero = first_key / STEP * STEP;
    const int32_t step_end = last_key > first_key ? (last_key + STEP - 1) / STEP * STEP : stage_zero;

    const int32_t row_k = n_kv_heads * K_HEAD, row_v = n_kv_heads * V_HEAD;
    WarpTables<D, SETS>& own = tables[warp];
    if (lane == 0) {
        own.keys = make_int4(first_key, last_key, last_keys.x, top_keys.y);
        own.place = make_int4(first_row, first_query + own_query, int(n_queries) - int(own_query),
                              kv_head);
        own.slot_zero = part_of(plane.seen(0).x);
        own.k = plane.k + blockIdx.y * slice_k - int64_t(plane.base) * row_k;
        own.v = plane.v + blockIdx.y * slice_v - int64_t(plane.base) * row_v;
    }
    __syncwarp();
    LaneOffsets* const offsets =
        reinterpret_cast<LaneOffsets*>(fragments + n_workers * WarpState<D, SETS>::SHARED * WARP_LANES);
    if (threadIdx.x < WARP_LANES) offsets[lane].set<D>(lane, pitch_k, pitch_v);
    uint64_t* const full = reinterpret_cast<uint64_t*>(offsets + WARP_LANES);
    uint64_t* const empty = full + N_STAGES;
    if constexpr (COPY == COPY_BULK) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < N_STAGES; i++) mbar_init(full + i, 1), mbar_init(empty + i, n_workers);
            mbar_publish();
        }
        __syncthreads();
    }
    // Rows outside the range ask for the nearest one inside: their keys are masked.
    const auto ask = [&](int32_t key, int slot) {
        const int n = step_end - key < keys_per_stage ? step_end - key : keys_per_stage;
        uint8_t* const k = shared + slot * stage_bytes;
        uint8_t* const v = k + keys_per_stage * pitch_k;
        const int low = own.keys.x, high = own.keys.y - 1;
        const uint8_t* const rows_k = own.k;
        const uint8_t* const rows_v = own.v;
        if constexpr (COPY == COPY_BULK) {
            // Each warp brings every n_workers-th row: two lanes a row.
            uint64_t* const there = full + slot;
            if (threadIdx.x == 0) mbar_arrive_expecting(there, n * (slice_k + slice_v));
            for (int r = warp + lane / 2 * n_workers; r < n; r += WARP_LANES / 2 * n_workers) {
                int32_t at = key + r < high ? key + r : high;
                at = at > low ? at : low;
                const uint8_t* const from = lane % 2 ? rows_v + int64_t(at) * row_v
                                                     : rows_k + int64_t(at) * row_k;
                bulk_copy(lane % 2 ? v + r * pitch_v : k + r * pitch_k, from,
                          lane % 2 ? slice_v : slice_k, there);
            }
        } else {
#pragma unroll 1
            for (int r = warp; r < n; r += n_workers) {
                int32_t at = key + r < high ? key + r : high;
                at = at > low ? at : low;
                const uint8_t* const from_k = rows_k + int64_t(at) * row_k;
                const uint8_t* const from_v = rows_v + int64_t(at) * row_v - slice_k;
#pragma unroll 2
                for (int x = lane * 16; x < slice_k + slice_v; x += WARP_LANES * 16)
                    cp_async<16>(x < slice_k ? k + r * pitch_k + x : v + r * pitch_v + x - slice_k,
                                 x < slice_k ? from_k + x : from_v + x);
            }
        }
    };
#pragma unroll 1
    for (int i = 0; i < N_STAGES - 1; i++) {
        if (stage_zero + i * keys_per_stage < step_end) ask(stage_zero + i * keys_per_stage, i);
        if constexpr (COPY == COPY_ASYNC) cp_async_commit();
    }

    WarpState<D, SETS> state;
    state.q_shared = fragments + warp * (WarpState<D, SETS>::SHARED * WARP_LANES);
    if (stage_zero < step_end) {
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            const int2 keys = plane.seen(rows[s]);
            if (lane % 4 == 0) {
                own.start[s][lane / 4] = keys.x;
                own.end[s][lane / 4] = keys.y;
            }
            prepare_query<D, SETS>(state, own, s, raw[s], scale, softcap);
        }
        begin_part(state);
    }
    int32_t part_end = part_begin(part_of(first_key) + 1);
    int slot = 0, parity = 0;
    for (int32_t stage = stage_zero; stage < step_end; stage += keys_per_stage) {
        const int32_t next = stage + (N_STAGES - 1) * keys_per_stage;
        const int next_slot = slot == 0 ? N_STAGES - 1 : slot - 1;
        if constexpr (COPY == COPY_BULK) {
            mbar_wait(full + slot, parity);
        } else {
            cp_async_wait<N_STAGES - 2>();
            __syncthreads();
            if (next < step_end) ask(next, next_slot);
            cp_async_commit();
        }
        const uint8_t* k = shared + slot * stage_bytes + head * K_HEAD;
        const uint8_t* v = shared + slot * stage_bytes + keys_per_stage * pitch_k + head * V_HEAD;
        const int32_t stop = stage + keys_per_stage < step_end ? stage + keys_per_stage : step_end;
        for (int32_t key = stage; key < stop; key += STEP) {
            step<D, SETS>(state, own, offsets[lane], k, pitch_k, v, pitch_v, key, softcap);
            k += STEP * pitch_k, v += STEP * pitch_v;
            if (key + STEP == part_end || key + STEP == step_end) {
                end_part<D, SETS>(state, own, Partials<D>(workspace, n_rows, n_heads, n_slots),
                                  part_of(key), n_rows, group, n_heads);
                begin_part(state);
                part_end = part_begin(part_of(part_end) + 1);
            }
        }
        if constexpr (COPY == COPY_BULK) {
            __syncwarp();
            if (lane == 0) mbar_arrive(empty + slot);
            // The room of the stage before, which the other warps have left, too, or soon will.
            if (next < step_end) {
                if (stage > stage_zero) mbar_wait(empty + next_slot, slot == 0 ? parity ^ 1 : parity);
                ask(next, next_slot);
            }
        }
        if (++slot == N_STAGES) slot = 0, parity ^= 1;
    }
}

// Joins the chunks of each row and head. Grid (n_heads, n_rows, D / 32), 256 threads; parameters,
// sinks, out and lse as in kv/attend.cu.
template <int D>
__global__ void __launch_bounds__(256)
    attend_mma_combine(float* __restrict__ workspace, const float* NULLABLE sinks,
                       float* __restrict__ out, float* NULLABLE lse, int32_t n_rows,
                       int32_t capacity, int32_t window, int32_t counted,
                       const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                       const uint64_t* NULLABLE table, int32_t n_slots) {
    constexpr int QUADS = 8, SPLITS = 32;  // chunk c belongs to split c % 32
    constexpr int WARPS = 8;
    __shared__ float4 rows[WARPS][QUADS];
    __shared__ float pivots[WARPS], weights[WARPS];
    float(*const sums)[4 * QUADS] = reinterpret_cast<float(*)[4 * QUADS]>(rows);
    admit_successor();
    await_predecessor();
    const int thread = threadIdx.x, quad = thread % QUADS, split = thread / QUADS;
    const int head = blockIdx.x, row = blockIdx.y, n_heads = gridDim.x;
    // A row of a table is its own first row.
    const Plane plane(nullptr, nullptr, len_d, base_d, table, row, window, counted, capacity);
    const int2 keys = plane.seen(0);
    const int32_t first = part_of(keys.x);
    const int32_t behind = keys.y > keys.x ? part_of(keys.y - 1) + 1 : first;
    const int32_t slot_zero = table != nullptr ? first : part_of(plane.seen(-row).x);
    const bool fits = behind - slot_zero <= n_slots;
    const int32_t last = fits ? behind : first;
    const Partials<D> partials(workspace, n_rows, n_heads, n_slots);
    const size_t column = (size_t(row) * n_heads + head) * n_slots;
    const float* marks = partials.marks + column * 2;
    const float* values = partials.sums + column * D + blockIdx.z * 32 + quad * 4;

    float pivot = NO_REFERENCE, weight = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    constexpr int BATCH = 8;  // chunks that are asked for at once
    int32_t c = first + (split - first % SPLITS + SPLITS) % SPLITS - slot_zero;
    for (; c < last - slot_zero; c += BATCH * SPLITS) {
        float2 mark[BATCH];
        float4 value[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int32_t slot = c + i * SPLITS;
            const bool there = slot < last - slot_zero;
            mark[i] = make_float2(NO_REFERENCE, 0.0f), value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (there) mark[i] = *reinterpret_cast<const float2*>(marks + size_t(slot) * 2);
            if (there) value[i] = *reinterpret_cast<const float4*>(values + size_t(slot) * D);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (mark[i].y == 0.0f) continue;  // the row sees no key of this chunk
            const float high = fmaxf(pivot, mark[i].x);
            const float old = exp2_whole(pivot - high), add = exp2_whole(mark[i].x - high);
            sum.x = fmaf(value[i].x, add, sum.x * old), sum.y = fmaf(value[i].y, add, sum.y * old);
            sum.z = fmaf(value[i].z, add, sum.z * old), sum.w = fmaf(value[i].w, add, sum.w * old);
            weight = fmaf(mark[i].y, add, weight * old);
            pivot = high;
        }
    }
    // The four splits of a warp, then the eight warps.
    float high = fmaxf(pivot, __shfl_xor_sync(FULL_MASK, pivot, 8));
    high = fmaxf(high, __shfl_xor_sync(FULL_MASK, high, 16));
    const float by = exp2_whole(pivot - high);
    float part[5] = {sum.x * by, sum.y * by, sum.z * by, sum.w * by, weight * by};
#pragma unroll
    for (int i = 0; i < 5; i++) {
        part[i] = part[i] + __shfl_xor_sync(FULL_MASK, part[i], 8);
        part[i] = part[i] + __shfl_xor_sync(FULL_MASK, part[i], 16);
    }
    const int warp = thread / WARP_LANES;
    if (thread % WARP_LANES < QUADS) {
        *reinterpret_cast<float4*>(sums[warp] + quad * 4) =
            make_float4(part[0], part[1], part[2], part[3]);
        if (quad == 0) pivots[warp] = high, weights[warp] = part[4];
    }
    __syncthreads();
    if (thread < WARP_LANES) {
        const float sink = sinks != nullptr ? sinks[head] * LOG2_E : -INF_F32;
        high = fmaxf(NO_REFERENCE, ceilf(sink));
#pragma unroll
        for (int w = 0; w < WARPS; w++) high = fmaxf(high, pivots[w]);
        float joined = 0.0f, total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float times = exp2_whole(pivots[w] - high);
            joined = fmaf(sums[w][thread], times, joined);
            total = fmaf(weights[w], times, total);
        }
        const bool empty = total == 0.0f;
        if (sinks != nullptr) total = total + exp2_fast(sink - high);
        const size_t at = size_t(row) * n_heads + head;
        out[at * D + blockIdx.z * 32 + thread] = !fits ? NAN_F32 : empty ? 0.0f : joined / total;
        if (thread == 0 && blockIdx.z == 0 && lse != nullptr)
            lse[at] = !fits   ? NAN_F32
                      : empty ? sinks != nullptr ? sinks[head] : -INF_F32
                              : high * LN_2 + logf(total);
    }
}
