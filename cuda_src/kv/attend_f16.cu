// Split-KV decode attention with tensor cores in f16, in class `exact`: K of f16, bf16, e4m3 or q8_0, V of
// these, q5_1 or q4_0.
//
// A warp, or two that share the keys of each step, owns one kv head and up to 8 * SETS queries (a query =
// one row of one query head of the group), in steps of 32 keys (common/attend_f16_step.cuh); a thread
// block owns a chunk of keys and some neighbouring kv heads, whose slices of the rows it streams through
// shared memory.
//
// Chunks (common/attend_walk.cuh) and steps are a function of what a row sees alone: it gets the same
// bits alone and among others, on a ring and on a flat plane, whichever block takes a chunk. The
// partial results are those of kv/attend_mma.cu, whose attend_mma_combine joins them; each of two warps
// leaves its own.
//
// A value, scale or minimum that is not finite makes NaN of the outputs that see it.
#include "common/attend_f16_step.cuh"
#include "common/bulk.cuh"
#include "common/dependent.cuh"
#include "common/pipeline.cuh"

constexpr int COPY_ASYNC = 0, COPY_BULK = 1;
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
constexpr int COPY_BEST = COPY_BULK;
#else
constexpr int COPY_BEST = COPY_ASYNC;
#endif

// Bulk copies want addresses that are multiples of 16.
template <int KF, int VF, int D, int HEADS>
__host__ __device__ constexpr bool is_whole() {
    return HEADS * (D / 32) * block_bytes<KF>() % 16 == 0 && HEADS * (D / 32) * block_bytes<VF>() % 16 == 0;
}

// Warps of a block at most, by what its shared memory feeds and the registers they need: 8 queries keep one
// warp of a head busy, or two, and more of them take a second set first, where registers hold one.
#if MEMRA_CUDA && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int WORKERS = 8;
#else
constexpr int WORKERS = 16;
#endif
template <int KF, int VF, int D, int SETS, int HEADS>
__host__ __device__ constexpr int most_warps() {
    constexpr int HALVES = halves_of<KF, VF>(), MOST_SETS = D <= (KF == BF16 ? 64 : 128) ? 2 : 1;
    if (HALVES == 1 || MOST_SETS == 1 || D * SETS > 128) return 8;
    return SETS > 1 || HALVES * HEADS > 8 ? WORKERS : 8;
}

// What a warp keeps in shared memory: the round that it is in; that of the steps it asks for, and where
// among them it is; its first query and its kv head; where in a stage its rows of K and V are, and which of
// the warps that share a step it is.
struct alignas(16) Place {
    Round round, ahead;
    Walk asked;
    int32_t query, kv_head;
    int32_t k, v, half;
};
static_assert(sizeof(Place) == 144 && sizeof(Block) == 64, "the launch counts on it");

// Leaves the sums of a warp's keys of a chunk.
template <int KF, int VF, int D, int SETS>
__device__ __forceinline__ void end_chunk(const WarpState<KF, VF, D, SETS>& state, const Partials<D>& to,
                                          const Block& block, const Place& place, int lane) {
    constexpr int HALVES = halves_of<KF, VF>();
    const int g = lane / 4, t = lane % 4, shift = (place.v & 15) / 2;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        float weight = state.weight[s];
        weight = weight + __shfl_xor_sync(FULL_MASK, weight, 1);
        weight = weight + __shfl_xor_sync(FULL_MASK, weight, 2);
        int64_t own = to.column(block, place.round, place.query + SET * s + g, place.kv_head);
        own = own < 0 ? own : HALVES * own + place.half;
        if (t == 0 && own >= 0)
            *reinterpret_cast<float2*>(to.marks + own * 2) = make_float2(state.reference[s], weight);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t column = __shfl_sync(FULL_MASK, own, 8 * t + 4 * i);
            float* const row = to.sums + column * D;
#pragma unroll
            for (int m = 0; m < fragments_of_values<VF, D>(); m++) {
                const float* const sums = state.sums[s][m];
                float x[2] = {sums[i] * unit_of<VF>(), sums[2 + i] * unit_of<VF>()};
                int channel = 16 * m + channel_of<VF>(g, 0);
                if constexpr (is_packed<VF>()) {
                    if (m >= Pieces<VF, D>::TILES) continue;
                    channel = Pieces<VF, D>::channel(m, g, shift);
                    if constexpr (VF == Q5_1) {
                        const float base =
                            __shfl_sync(FULL_MASK, state.sums[s][D / 16][i], 4 * (m / 2) + t);
                        x[0] = x[0] + base, x[1] = x[1] + base;
                    }
                }
#pragma unroll
                for (int r = 0; r < 2; r++) x[r] = fabsf(x[r]) < INF_F32 ? x[r] : NAN_F32;
                if (column < 0 || channel < 0) continue;
                constexpr int APART = is_packed<VF>() || VF == E4M3 ? 1 : 8;  // rows g and g + 8
                if constexpr (APART == 1) *reinterpret_cast<float2*>(row + channel) = make_float2(x[0], x[1]);
                else row[channel] = x[0], row[channel + APART] = x[1];
            }
        }
    }
}

// Shared memory, all of it dynamic: STAGES tiles of STEP rows of K, then of V, of the block's heads;
// fragments of q, StepTables if a format has scales, and a Place per warp; a Block; with COPY_BULK
// 2 * STAGES barriers.
//
// Grid (x: any number of blocks, which share the chunks; n_kv_heads / HEADS; query blocks),
// HEADS * teams_per_head * halves_of<KF, VF>() warps. A query block is teams_per_head * SETS * 8
// queries of all n_rows * group, or with a table of one row's group. With COPY_BULK slices of HEADS heads
// and whole rows of K and V are multiples of 16 bytes; planes and q are 16-byte aligned. n_parts: chunks that
// hold what a row sees; the same for all launches over a plane. tiled: k_map and v_map describe the
// planes, with boxes of STEP rows as wide as a stage's. settled: as in kv/attend.cu, not with a table. Other
// parameters as there.
template <int KF, int VF, int D, int SETS, int HEADS, int STAGES,
          int COPY = is_whole<KF, VF, D, HEADS>() ? COPY_BEST : COPY_ASYNC>
__global__ void __launch_bounds__(most_warps<KF, VF, D, SETS, HEADS>() * WARP_LANES, 1)
    attend_f16(const float* q, const uint8_t* NULLABLE k_plane,
               const uint8_t* NULLABLE v_plane, int32_t n_rows, int32_t n_kv_heads, int32_t group,
               int32_t capacity, int32_t window, int32_t counted, float scale, float softcap,
               const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
               const uint64_t* NULLABLE table, float* __restrict__ workspace, int32_t n_slots,
               int32_t n_parts, int32_t teams_per_head,
               const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
               int32_t tiled, int32_t settled) {
    constexpr int HEAD_K = D / 32 * block_bytes<KF>(), HEAD_V = D / 32 * block_bytes<VF>();
    constexpr int SLICE_K = HEADS * HEAD_K, SLICE_V = HEADS * HEAD_V;
    constexpr int PITCH_K = stage_pitch_k<KF>(SLICE_K), PITCH_V = stage_pitch_v<VF>(SLICE_V);
    constexpr int STAGE = STEP * (PITCH_K + PITCH_V);
    DYN_SMEM(uint8_t, shared);
    // Told to be the same for the lanes of a warp, it makes addresses cheap.
    const int warp = __shfl_sync(FULL_MASK, int(threadIdx.x) / WARP_LANES, 0);
    const int lane = kept(threadIdx.x % WARP_LANES);
    constexpr int HALVES = halves_of<KF, VF>();
    const int n_teams = HEADS * teams_per_head, n_workers = HALVES * n_teams;
    const int team = warp / HALVES, half = warp % HALVES, head = team / teams_per_head;
    typedef uint4 Fragment[WARP_LANES];
    constexpr int N_SHARED = shared_fragments<KF, D, SETS>() * SETS;  // of a warp
    Fragment* const fragments = reinterpret_cast<Fragment*>(shared + STAGES * STAGE);
    using Tables = StepTables<KF, VF, D>;
    Tables* const tables = reinterpret_cast<Tables*>(fragments + n_workers * N_SHARED);
    Place* const places = reinterpret_cast<Place*>(tables + (Tables::USED ? n_workers : 0));
    Place& place = places[warp];
    Block& block = *reinterpret_cast<Block*>(places + n_workers);
    uint64_t* const full = reinterpret_cast<uint64_t*>(&block + 1);
    uint64_t* const empty = full + STAGES;
    {
        const Queries queries(n_rows, group, teams_per_head * SETS * SET, table != nullptr);
        if (threadIdx.x == 0) {
            if (COPY == COPY_BULK && tiled) prefetch_map(k_map), prefetch_map(v_map);
            block.row_k = n_kv_heads * HEAD_K, block.row_v = n_kv_heads * HEAD_V;
            block.queries = queries, block.n_parts = n_parts;
            if constexpr (COPY == COPY_BULK) {
                for (int i = 0; i < STAGES; i++)
                    mbar_init(full + i, 1), mbar_init(empty + i, n_workers);
                mbar_publish();
            }
        }
        if (lane == 0) {
            place.asked = Walk();
            place.ahead = place.round = Round(queries);
            place.query = queries.first + (team - head * teams_per_head) * SETS * SET;
            place.kv_head = int(blockIdx.y) * HEADS + head;
            place.k = half * (STEP / HALVES) * PITCH_K + head * HEAD_K;
            place.v = STEP * PITCH_K + half * (STEP / HALVES) * PITCH_V + head * HEAD_V;
            place.half = half;
        }
        if constexpr (is_packed<VF>() && SLICE_V % 16 != 0) {
            // Rows are read across in whole pieces: what lies behind a slice should be something.
            constexpr int WORDS = (16 - SLICE_V % 16) / 4;
            for (int i = threadIdx.x; i < STAGES * STEP * WORDS; i += int(blockDim.x)) {
                const int row = i / WORDS, stage = row / STEP;
                uint8_t* const v = shared + stage * STAGE + STEP * PITCH_K + row % STEP * PITCH_V;
                *reinterpret_cast<uint32_t*>(v + SLICE_V + i % WORDS * 4) = 0u;
            }
        }
        if (!settled) await_predecessor();
        if (threadIdx.x == 0) {
            block.plane = Plane(k_plane, v_plane, len_d, base_d, table, queries.first_row, window,
                                counted, capacity);
            const int64_t base = block.plane.base;
            block.plane.k = block.plane.k + blockIdx.y * SLICE_K - base * block.row_k;
            block.plane.v = block.plane.v + blockIdx.y * SLICE_V - base * block.row_v;
        }
        __syncthreads();
    }

    // Brings the keys of the step that is STAGES - 1 ahead of the one in `slot`. With COPY_BULK one warp
    // asks, when all have left the room; with COPY_ASYNC all do. `waited`: the predecessor has ended, which
    // still writes the launch's own rows.
    const auto ask = [&](int slot, int parity, bool waited) {
        Walk ahead = place.asked;
        if (!ahead.next(place.ahead, block, lane)) return;
        if (!waited && (ahead.end - ahead.key < STEP ? ahead.end : ahead.key + STEP) >= block.plane.bound)
            await_predecessor();
        __syncwarp();  // all have read
        if (lane == 0) place.asked = ahead;
        uint8_t* const k = shared + slot * STAGE;
        uint8_t* const v = k + STEP * PITCH_K;
        if constexpr (COPY == COPY_BULK) {
            uint64_t* const bar = full + slot;
            mbar_wait(empty + slot, parity ^ 1);
            if (lane == 0)
                mbar_arrive_expecting(bar, kept(tiled) ? STAGE : STEP * (SLICE_K + SLICE_V));
            __syncwarp();
            if (!tiled) {
                const int64_t at = ahead.key_near(place.ahead, lane);
                bulk_copy(k + lane * PITCH_K, block.plane.k + at * block.row_k, SLICE_K, bar);
                bulk_copy(v + lane * PITCH_V, block.plane.v + at * block.row_v, SLICE_V, bar);
            } else if (lane == 0) {
                tile_copy(k, k_map, blockIdx.y * (SLICE_K / 8), ahead.key - block.plane.base, bar);
                tile_copy(v, v_map, blockIdx.y * (SLICE_V / 8), ahead.key - block.plane.base, bar);
            }
        } else {
            copy_rows<STEP, SLICE_K, PITCH_K>(k, kept(threadIdx.x), [&](int r) {
                return block.plane.k + int64_t(ahead.key_near(place.ahead, r)) * block.row_k;
            });
            copy_rows<STEP, SLICE_V, PITCH_V>(v, kept(threadIdx.x), [&](int r) {
                return block.plane.v + int64_t(ahead.key_near(place.ahead, r)) * block.row_v;
            });
        }
        __syncwarp();
    };
    for (int i = 0; i < STAGES - 1; i++) {
        if (COPY == COPY_ASYNC || warp == 0) ask(i, 0, !settled);
        if constexpr (COPY == COPY_ASYNC) cp_async_commit();
    }
    if (settled) await_predecessor();
    admit_successor();  // which reads counters before it waits

    WarpState<KF, VF, D, SETS> state;
    const auto own_query = [&](int s) {  // of the lane group; surplus ones repeat the last
        const int query = place.query + SET * s + lane / 4;
        return query < block.queries.behind ? query : block.queries.behind - 1;
    };
    const auto seen = [&](int s) {
        return place.round.seen(block.plane, block.queries.row_of(own_query(s)));
    };
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        const int query = own_query(s), row = block.queries.row_of(query);
        const size_t at = size_t(block.queries.first_row + row) * n_kv_heads * group +
                          place.kv_head * group + query - row * group;
        if constexpr (is_packed<KF>())
            state.q[s].load(q + at * D, lane, scale, softcap);
        else
            state.q[s].load(q + at * D, lane, scale, softcap,
                            fragments + warp * N_SHARED + s * shared_fragments<KF, D, SETS>());
    }
    Walk walk;
    int slot = 0, parity = 0;
#pragma unroll 1
    while (walk.next(place.round, block, lane)) {
        const int freed = slot == 0 ? STAGES - 1 : slot - 1;
        if constexpr (COPY == COPY_BULK) {
            if (warp == 0) ask(freed, slot == 0 ? parity : parity ^ 1, true);
            mbar_wait(full + slot, parity);
            __syncwarp();
        } else {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            ask(freed, 0, true);
            cp_async_commit();
        }
        if (walk.begins_chunk(place.round)) begin_chunk(state);
        const uint8_t* const stage = shared + slot * STAGE;
        step<PITCH_K, PITCH_V>(state, stage + place.k, stage + place.v, place.v & 15, lane,
                               fragments + warp * N_SHARED, tables[warp],
                               walk.key + warp % HALVES * (STEP / HALVES), walk.is_masked(place.round), softcap,
                               seen);
        if constexpr (COPY == COPY_BULK) {
            __syncwarp();
            if (lane == 0) mbar_arrive(empty + slot);
        }
        if (walk.ends_chunk())
            end_chunk(state, Partials<D>(workspace, n_rows, n_kv_heads * group, n_slots, HALVES), block,
                      place, lane);
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
}
