// Split-KV decode attention with integer tensor cores over K q8_0 and V q5_1, in class `exact`.
//
// A team of D / 64 warps owns one kv head and up to Q queries (a query = one row of one query head of
// the group), in steps of 32 keys (common/attend_step.cuh); a thread block owns a chunk of keys and some
// neighbouring kv heads, whose slices of the rows it streams through shared memory.
//
// The chunks of a row are multiples of 32 keys, at absolute positions, as long as it takes for
// n_parts of them to hold what the row sees. Each leaves a weighted sum, a reference and a sum of
// weights; attend_mma_combine joins them in order. Steps and chunks are a function of what the row sees
// alone: it gets the same bits alone and among others, on a ring and on a flat plane, whichever block
// takes a chunk. Rows whose chunks differ are taken one after the other.
//
// A scale or minimum that is not finite makes NaN of the outputs that see it.
#include "common/attend_step.cuh"
#include "common/bulk.cuh"
#include "common/counters.cuh"
#include "common/dependent.cuh"
#include "common/pipeline.cuh"

constexpr int N_STAGES = 3;  // tiles of STEP keys in flight or in use
constexpr int COPY_ASYNC = 0, COPY_BULK = 1;
#if MEMRA_CUDA && __CUDA_ARCH__ >= 900
constexpr int COPY_BEST = COPY_BULK;
#else
constexpr int COPY_BEST = COPY_ASYNC;
#endif
// Warps of a block at most, by what its shared memory feeds.
#if MEMRA_CUDA && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int WORKERS = 8;
#else
constexpr int WORKERS = 16;
#endif
// Bulk copies want addresses that are multiples of 16, of K too.
template <int D, int HEADS>
__host__ __device__ constexpr bool is_whole() { return HEADS * (D / 32) * K_BLOCK_BYTES % 16 == 0; }
constexpr float LN_2 = 0.6931471805599453f;

// What a warp needs now and then, in shared memory: registers are scarce.
struct alignas(16) Place {
    int4 keys;     // [x, y) of this chunk that some query sees, [z, w) that all see
    int4 queries;  // row of the first query, first query of the team and behind the block, kv head
    int4 rows;     // rows [x, y) of this round, its chunk, its keys of a chunk
    int2 span;     // keys that some query of the round sees
    Plane plane;   // its k and v are slices of the rows, as if absolute row 0 was there
};
static_assert(sizeof(Place) == 96, "the launch counts on it");

// Spares a single row the division.
__device__ __forceinline__ int row_of(int query, int group, int n_rows) {
    return n_rows == 1 ? 0 : query / group;
}

// The slot of a query of the team in the partial results; -1 if it has none of this chunk.
template <int D>
__device__ __forceinline__ int64_t column_of(const Place& place, const Partials<D>& to, int query,
                                             int group, int n_heads) {
    query += place.queries.y;
    const int row = row_of(query, group, place.queries.z <= group ? 1 : 2), chunk = place.rows.w;
    if (query >= place.queries.z || row < place.rows.x || row >= place.rows.y) return -1;
    const int2 keys = place.plane.seen(row);
    const int32_t slot = place.rows.z - chunk_of(keys.x, chunk);
    const bool there = slot >= 0 && int64_t(place.rows.z) * chunk < keys.y && slot < to.n_slots;
    const int head = place.queries.w * group + query - row * group;
    return there ? (int64_t(place.queries.x + row) * n_heads + head) * to.n_slots + slot : -1;
}

// Leaves the sums of a chunk. `exchange`: that of the step to come.
template <int D, int Q>
__device__ __forceinline__ void end_chunk(const WarpState<D, Q>& state, const WarpTables<D, Q>& tables,
                                          Exchange<D, Q>& exchange, const Partials<D>& to, int team,
                                          int member) {
    const int lane = kept(threadIdx.x % WARP_LANES), g = lane / 4, t = lane % 4;
    using Own = Share<D, Q>;
#pragma unroll
    for (int h = 0; h < Own::HALVES; h++)
#pragma unroll
        for (int c = 0; c < Own::COLUMNS; c++) {
            float weight = state.weight[h][c];
#pragma unroll
            for (int apart = 4; apart < WARP_LANES; apart *= 2)
                weight = weight + __shfl_xor_sync(FULL_MASK, weight, apart);
            if (g == 0)
                exchange.totals[Own::half(member) + h]
                               [Own::first_query(member) + query_of_column<Own::QUERIES>(t, c)] = weight;
        }
    team_barrier<Own::TEAM>(team);
    if (member == 0 && lane < Q) {
        const int64_t own = tables.column[lane];
        if (own >= 0)
            *reinterpret_cast<float2*>(to.marks + own * 2) = make_float2(
                tables.reference[lane], exchange.totals[0][lane] + exchange.totals[1][lane]);
    }
    constexpr int COLUMNS = Q == 8 ? 2 : 1;
    int64_t column[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) column[i] = tables.column[query_of_column<Q>(t, i)];
#pragma unroll
    for (int b = 0; b < 2; b++) {
        float minima = state.minima[Q == 8 ? b : 0];
        minima = minima + __shfl_xor_sync(FULL_MASK, minima, 1);
        minima = minima + __shfl_xor_sync(FULL_MASK, minima, 2);
        const int channel = CHANNELS * member + 32 * b + 2 * half_word(b, g);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const float base = __shfl_sync(FULL_MASK, minima, 8 * t + 4 * (Q == 8 ? i : b));
            float x[2][2];  // [half of the block][channel]
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const auto& sums = state.sums;
                    constexpr int LAST = WarpState<D, Q>::DIGITS - 1;
                    const int at = Q == 8 ? 2 * r + i : 2 * r;
                    const float digit0 = float(sums[0][2 * b + m][at]);
                    const float digit1 = float(Q == 8 ? sums[1][2 * b + m][at] : sums[0][2 * b + m][at + 1]);
                    const float digit2 = float(sums[LAST][2 * b + m][at]);
                    const float total = fmaf(fmaf(digit2, 256.0f, digit1), 256.0f, digit0);
                    x[r][m] = fmaf(total, m ? 0.5f : 1.0f, base);
                }
            if (column[i] >= 0) {
                float* row = to.sums + column[i] * D + channel;
                *reinterpret_cast<float2*>(row) = make_float2(x[0][0], x[0][1]);
                *reinterpret_cast<float2*>(row + 16) = make_float2(x[1][0], x[1][1]);
            }
        }
    }
}

// Shared memory, all of it dynamic: N_STAGES tiles of STEP rows of K, then of V, of the block's heads;
// per warp WarpTables; per team its Exchange, twice, and QueryTables; per warp its Place;
// LaneOffsets; with COPY_BULK 2 * N_STAGES barriers.
//
// Grid (x: any number of blocks, which share the chunks; n_kv_heads / HEADS; query blocks),
// HEADS * teams_per_head * D / 64 warps. A query block is teams_per_head * Q queries of all n_rows *
// group, or with a table of one row's group. With COPY_BULK slices of HEADS heads and whole rows of K are
// multiples of 16 bytes; planes and q are 16-byte aligned. n_parts: chunks that hold what a row sees; the same for
// all launches over a plane. A chunk of more than 2^17 keys could overflow its sums. tiled: k_map and
// v_map describe the planes, with boxes of STEP rows as wide as a stage's. settled: as in kv/attend.cu,
// not with a table. Other parameters as there.
template <int D, int Q, int HEADS, int COPY = is_whole<D, HEADS>() ? COPY_BEST : COPY_ASYNC>
__global__ void __launch_bounds__(WORKERS * WARP_LANES, 1)
    attend_mma(const float* q, const uint8_t* NULLABLE k_plane,
               const uint8_t* NULLABLE v_plane, int32_t n_rows, int32_t n_kv_heads, int32_t group,
               int32_t capacity, int32_t window, int32_t counted, float scale, float softcap,
               const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
               const uint64_t* NULLABLE table, float* __restrict__ workspace, int32_t n_slots,
               int32_t n_parts, int32_t teams_per_head,
               const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
               int32_t tiled, int32_t settled) {
    constexpr int TEAM = team_size<D>();
    constexpr int K_HEAD = D / 32 * K_BLOCK_BYTES, V_HEAD = D / 32 * V_BLOCK_BYTES;
    constexpr int slice_k = HEADS * K_HEAD, slice_v = HEADS * V_HEAD;
    constexpr int pitch_k = k_pitch(slice_k), pitch_v = v_pitch(slice_v);
    constexpr int stage_bytes = STEP * (pitch_k + pitch_v);
    DYN_SMEM(uint8_t, shared);
    // Told to be the same for the lanes of a warp, it makes addresses cheap.
    const int warp = __shfl_sync(FULL_MASK, int(threadIdx.x) / WARP_LANES, 0);
    const int lane = kept(threadIdx.x % WARP_LANES);
    const int n_teams = HEADS * teams_per_head, n_workers = n_teams * TEAM;
    WarpTables<D, Q>* const tables = reinterpret_cast<WarpTables<D, Q>*>(shared + N_STAGES * stage_bytes);
    Exchange<D, Q>* const exchanges = reinterpret_cast<Exchange<D, Q>*>(tables + n_workers);
    QueryTables<D, Q>* const query_tables =
        reinterpret_cast<QueryTables<D, Q>*>(exchanges + 2 * n_teams);
    Place* const places = reinterpret_cast<Place*>(query_tables + n_teams);
    LaneOffsets& offsets = *reinterpret_cast<LaneOffsets*>(places + n_workers);
    uint64_t* const full = reinterpret_cast<uint64_t*>(&offsets + 1);
    uint64_t* const empty = full + N_STAGES;
    if (warp == 0) {
        offsets.set<D, Q, pitch_k, pitch_v>(lane);
        if (COPY == COPY_BULK && lane == 0) {
            for (int i = 0; i < N_STAGES; i++)
                mbar_init(full + i, 1), mbar_init(empty + i, n_workers);
            mbar_publish();
            if (tiled) prefetch_map(k_map), prefetch_map(v_map);
        }
    }
    if constexpr (COPY == COPY_BULK) {
        __syncthreads();
    }
    if (!settled) await_predecessor();
    // Queries [first_query, first_query + n_queries) of the rows from first_row on.
    const int n_heads = n_kv_heads * group, queries = teams_per_head * Q;
    int first_row = 0, first_query = blockIdx.z * queries, all_queries = n_rows * group;
    if (table != nullptr) {
        const int blocks_per_row = (group + queries - 1) / queries;
        first_row = blockIdx.z / blocks_per_row;
        first_query = (int(blockIdx.z) - first_row * blocks_per_row) * queries;
        all_queries = group;
    }
    const int behind_query =
        all_queries - first_query < queries ? all_queries : first_query + queries;
    const int behind_row = (behind_query - 1) / group + 1;
    const int64_t row_k = int64_t(n_kv_heads) * K_HEAD, row_v = int64_t(n_kv_heads) * V_HEAD;
    const int team = warp / TEAM, member = warp % TEAM;
    const int head = team / teams_per_head;
    Place& place = places[warp];
    const int team_query = first_query + (team - head * teams_per_head) * Q;
    const int kv_head = int(blockIdx.y) * HEADS + head;
    WarpState<D, Q> state;
    RawQuery<D> raw;
    // The row of a query of the team; surplus ones repeat the last.
    const auto query_at = [&](int i) {
        return team_query + i < behind_query ? team_query + i : behind_query - 1;
    };
    const int own_row = row_of(query_at(lane % Q), group, n_rows);
    const auto begin = [&] {
        admit_successor();  // which reads counters before it waits
        const int query =
            query_at(Share<D, Q>::first_query(member) + query_of_group<Share<D, Q>::QUERIES>(lane / 4));
        const int r = row_of(query, group, n_rows);
        raw.load(q + (size_t(first_row + r) * n_heads + kv_head * group + query - r * group) * D);
    };
    {
        const Plane plane(k_plane, v_plane, len_d, base_d, table, first_row, window, counted, capacity);
        if (!settled) begin();
        if (lane == 0) {
            place.plane = plane;
            place.plane.k = plane.k + blockIdx.y * slice_k - plane.base * row_k;
            place.plane.v = plane.v + blockIdx.y * slice_v - plane.base * row_v;
            place.queries = make_int4(first_row, team_query, behind_query, kv_head);
        }
        __syncwarp();
    }
    // Whether a block asks for its next chunk while it works on the present one: in instances for several
    // teams a head, which have as few heads as a bulk copy takes. With one team a block mostly has one chunk,
    // and 256 channels leave no registers for it.
    constexpr bool BEYOND = Q == 8 && D <= 128 && HEADS == 256 / D;
    // Brings STEP keys. Rows outside the chunk, or the round, ask for the nearest one inside: their keys are masked.
    // With COPY_BULK one warp asks, when all have left the room; with COPY_ASYNC all do.
    const auto ask = [&](int32_t key, int slot, int parity) {
        uint8_t* const k = shared + slot * stage_bytes;
        uint8_t* const v = k + STEP * pitch_k;
        const int32_t low = BEYOND ? place.span.x : place.keys.x;
        const int32_t last = (BEYOND ? place.span.y : place.keys.y) - 1;
        if constexpr (COPY == COPY_BULK) {
            mbar_wait(empty + slot, parity ^ 1);
            if (tiled) {
                if (lane == 0) {
                    const int row = key - place.plane.base;
                    mbar_arrive_expecting(full + slot, stage_bytes);
                    tile_copy(k, k_map, blockIdx.y * (slice_k / 8), row, full + slot);
                    tile_copy(v, v_map, blockIdx.y * (slice_v / 8), row, full + slot);
                }
                __syncwarp();
                return;
            }
            if (lane == 0) mbar_arrive_expecting(full + slot, STEP * (slice_k + slice_v));
            __syncwarp();
            int32_t at = key + lane < last ? key + lane : last;
            at = at > low ? at : low;
            bulk_copy(k + lane * pitch_k, place.plane.k + at * row_k, slice_k, full + slot);
            bulk_copy(v + lane * pitch_v, place.plane.v + at * row_v, slice_v, full + slot);
        } else {
            const auto near = [&](int r) {
                const int32_t at = key + r < last ? key + r : last;
                return at > low ? at : low;
            };
            copy_rows<STEP, slice_k, pitch_k>(k, kept(threadIdx.x), [&](int r) {
                return place.plane.k + near(r) * row_k;
            });
            copy_rows<STEP, slice_v, pitch_v>(v, kept(threadIdx.x), [&](int r) {
                return place.plane.v + near(r) * row_v;
            });
        }
    };

    // What comes `key - high` keys behind the present chunk, which ends at `high`, in the chunks of this round
    // that are the block's: its first tiles are asked for while this one is worked on. -1 behind the last.
    const auto beyond = [&](int32_t key) {
        const int32_t chunk = place.rows.w, end = (place.rows.z + 1) * chunk;
        int32_t behind = key - end;
        if (behind < 0) return -1;  // the round ends in this chunk
        int64_t number = int64_t(place.rows.z) + gridDim.x;
        if (behind >= chunk) number += gridDim.x, behind -= chunk;
        const int64_t at = number * chunk + behind;
        return at < place.span.y ? int32_t(at) : -1;
    };

    int slot = 0, parity = 0, turn = 0;
    int row = table == nullptr ? first_query / group : 0;
    int32_t c = 0, behind_key = 0;
    // Goes to the next chunk of this block, of a new round with its first keys asked for; false behind the
    // last. `waited`: the predecessor has ended, which still writes the launch's own rows.
    const auto advance = [&](bool waited) {
        bool begins = false;
        c += gridDim.x;
        while (behind_key == 0 || int64_t(c) * place.rows.w >= behind_key) {
            if (row >= behind_row) return false;
            // The rows from `row` on whose chunks have one size; their ranges ascend.
            const Plane plane = place.plane;
            const int2 top_keys = plane.seen(row);
            const int32_t chunk = chunk_keys(top_keys.y - top_keys.x, n_parts);
            int2 last_keys = top_keys;
            int behind = row + 1;
            for (; behind < behind_row; behind++) {
                const int2 keys = plane.seen(behind);
                if (chunk_keys(keys.y - keys.x, n_parts) != chunk) break;
                last_keys = keys;
            }
            const int2 keys = plane.seen(own_row);
            const bool there = own_row >= row && own_row < behind;
            __syncwarp();
            if (lane < Q) tables[warp].seen[lane] = there ? keys : make_int2(0, 0);
            if (lane == 0) {
                place.rows = make_int4(row, behind, 0, chunk);
                place.keys = make_int4(top_keys.x, last_keys.y, last_keys.x, top_keys.y);
                place.span = make_int2(top_keys.x, last_keys.y);
            }
            __syncwarp();
            c = chunk_of(top_keys.x, chunk) + int(blockIdx.x);
            behind_key = last_keys.y > top_keys.x ? last_keys.y : 0;
            row = behind, begins = true;
        }
        const int32_t chunk = place.rows.w, begin = c * chunk;
        const int2 span = place.span;
        const int32_t low = begin > span.x ? begin : span.x;
        const int32_t high = span.y - begin < chunk ? span.y : begin + chunk;
        if (lane == 0) place.rows.z = c, place.keys.x = low, place.keys.y = high;
        __syncwarp();
        const int32_t first = low / STEP * STEP, behind = first + (N_STAGES - 1) * STEP;
        if (!waited && (behind < high ? behind : BEYOND ? span.y : high) >= place.plane.bound) await_predecessor();
        for (int i = 0; i < (begins || !BEYOND ? N_STAGES - 1 : 0); i++) {
            const int wraps = slot + i >= N_STAGES;
            const int32_t after = first + i * STEP;
            const int32_t key = !BEYOND || after < high ? after : beyond(after);
            const bool there = BEYOND ? key >= 0 : after < high;
            if (there && (COPY == COPY_ASYNC || warp == 0))
                ask(key, slot + i - wraps * N_STAGES, parity ^ wraps);
            if constexpr (COPY == COPY_ASYNC) cp_async_commit();
        }
        return true;
    };
    const Partials<D> partials(workspace, n_rows, n_heads, n_slots);
    bool more = advance(!settled);
    if (settled) await_predecessor(), begin();
    take_query<D, Q>(state, query_tables[team], tables[warp], raw, member, scale, softcap);
    if constexpr (COPY == COPY_BULK) {
        if constexpr (QueryTables<D, Q>::THREE || QueryTables<D, Q>::REST > 0) __syncthreads();
    }
    while (more) {
        begin_chunk(state, tables[warp]);
        // While the first keys are on their way.
        if (lane < Q) tables[warp].column[lane] = int32_t(column_of(place, partials, lane, group, n_heads));
        const int32_t high = place.keys.y;
#pragma unroll 1
        for (int32_t key = place.keys.x / STEP * STEP; key < high; key += STEP) {
            int32_t next = key + (N_STAGES - 1) * STEP;
            const int next_slot = slot == 0 ? N_STAGES - 1 : slot - 1;
            static_assert(N_STAGES == 3, "beyond() looks two chunks ahead");
            const auto has_next = [&] {
                if constexpr (BEYOND) return (next = next < high ? next : beyond(next)) >= 0;
                else return next < high;
            };
            if constexpr (COPY == COPY_ASYNC) {
                cp_async_wait<N_STAGES - 2>();
                __syncthreads();
                if (has_next()) ask(next, next_slot, 0);
                cp_async_commit();
            }
            const uint8_t* const k = shared + slot * stage_bytes;
            if constexpr (COPY == COPY_BULK) {
                mbar_wait(full + slot, parity);
                __syncwarp();
            }
            step<D, Q, pitch_k, pitch_v>(
                state, query_tables[team], tables[warp], exchanges[team * 2 + turn], offsets, lane,
                k + head * K_HEAD, k + STEP * pitch_k + head * V_HEAD, team, member, key, place.keys,
                softcap, [&]() {
                    if (COPY == COPY_BULK && warp == 0 && has_next())
                        ask(next, next_slot, slot == 0 ? parity : parity ^ 1);
                });
            turn ^= 1;
            if constexpr (COPY == COPY_BULK) {
                __syncwarp();
                if (lane == 0) mbar_arrive(empty + slot);
            }
            if (++slot == N_STAGES) slot = 0, parity ^= 1;
        }
        end_chunk<D, Q>(state, tables[warp], exchanges[team * 2 + turn], partials, team, member);
        more = advance(true);
    }
}

// Joins the chunks of each row and head. Grid (n_heads, n_rows, D / 32), 256 threads; shares: see Partials;
// other parameters, sinks, out and lse as in kv/attend.cu.
template <int D>
__global__ void __launch_bounds__(256)
    attend_mma_combine(float* __restrict__ workspace, const float* NULLABLE sinks,
                       float* __restrict__ out, float* NULLABLE lse, int32_t n_rows,
                       int32_t capacity, int32_t window, int32_t counted,
                       const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
                       const uint64_t* NULLABLE table, int32_t n_slots, int32_t n_parts,
                       int32_t shares) {
    constexpr int QUADS = 8, SPLITS = 32;  // partial result i belongs to split i % 32
    constexpr int WARPS = 8;
    __shared__ float4 rows[WARPS][QUADS];
    __shared__ float pivots[WARPS], weights[WARPS];
    float(*const sums)[4 * QUADS] = reinterpret_cast<float(*)[4 * QUADS]>(rows);
    admit_successor();
    const int thread = threadIdx.x, quad = thread % QUADS, split = thread / QUADS;
    const int head = blockIdx.x, row = blockIdx.y, n_heads = gridDim.x;
    // A row of a table is its own first row.
    const Plane plane(nullptr, nullptr, len_d, base_d, table, row, window, counted, capacity);
    const int2 keys = plane.seen(0);
    const int32_t chunk = chunk_keys(keys.y - keys.x, n_parts);
    const int32_t n_chunks = keys.y > keys.x ? (keys.y - 1) / chunk + 1 - keys.x / chunk : 0;
    const bool fits = n_chunks <= n_slots;
    const int32_t last = fits ? n_chunks * shares : 0;
    const Partials<D> partials(workspace, n_rows, n_heads, n_slots, shares);
    const size_t column = (size_t(row) * n_heads + head) * n_slots * shares;
    const float* marks = partials.marks + column * 2;
    const float* values = partials.sums + column * D + blockIdx.z * 32 + quad * 4;

    // The kernel before has let this one start when whatever writes counters had ended.
    await_predecessor();
    JoinedChunks own;
    own.add<D>(marks, values, split, last, SPLITS);
    // The four splits of a warp, then the eight warps.
    float high = fmaxf(own.pivot, __shfl_xor_sync(FULL_MASK, own.pivot, 8));
    high = fmaxf(high, __shfl_xor_sync(FULL_MASK, high, 16));
    const float by = exp2_whole(own.pivot - high);
    float part[5] = {own.sum.x * by, own.sum.y * by, own.sum.z * by, own.sum.w * by, own.weight * by};
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
