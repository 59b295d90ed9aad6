// Which keys the blocks of split-KV attention on tensor cores take, and where they leave what they found.
//
// The chunks of a row are multiples of STEP keys, at absolute positions, as long as it takes for
// n_parts of them to hold what the row sees: a function of what the row sees alone. Rows of a launch
// whose chunks differ are taken one round after the other.
#pragma once
#include "common/counters.cuh"
#include "common/device.cuh"

constexpr int STEP = 32;  // keys

// Keys of a chunk of a row that sees so many: at most n_parts chunks, wherever the first begins.
__device__ __forceinline__ int32_t chunk_keys(int32_t seen, int32_t n_parts) {
    const uint32_t span = uint32_t(n_parts - 1) * STEP;
    return seen > 0 ? int32_t((uint32_t(seen) + span - 1) / span) * STEP : STEP;
}

// Most rows begin at key 0: spares them the division.
__device__ __forceinline__ int32_t chunk_of(int32_t key, int32_t chunk) {
    return key == 0 ? 0 : int32_t(uint32_t(key) / uint32_t(chunk));
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
        : window(window > 0 ? window : 0x7FFFFFFF), capacity(capacity) {
        const RowView view = row_view(k_plane, v_plane, len_d, base_d, table, row);
        k = view.k, v = view.v;
        bound = int32_t(view.slot) + 1 - counted, base = int32_t(view.base);
    }
    __device__ __forceinline__ int2 seen(int r) const {
        const int32_t behind = bound + r;
        const int32_t first = behind > window ? behind - window : 0;
        const int32_t limit = behind - base < capacity ? behind : base + capacity;
        const int32_t end = limit > base ? limit : base;
        const int32_t start = first > base ? first : base;
        return make_int2(start < end ? start : end, end);  // if there are none, in the plane still
    }
};

// The queries of a block: [first, behind) of the rows from first_row on, row by row; each row has a group.
struct Queries {
    int first_row, first, behind, group;

    // A block takes `at_once` of them; with a table they are those of one row.
    __device__ __forceinline__ Queries(int n_rows, int group, int at_once, bool table) : group(group) {
        int all = n_rows * group;
        first_row = 0, first = int(blockIdx.z) * at_once;
        if (table) {
            const int blocks_per_row = (group + at_once - 1) / at_once;
            first_row = int(blockIdx.z) / blocks_per_row;
            first = (int(blockIdx.z) - first_row * blocks_per_row) * at_once;
            all = group;
        }
        behind = all - first < at_once ? all : first + at_once;
    }
    // Spares a single row the division.
    __device__ __forceinline__ int row_of(int query) const {
        return behind <= group ? 0 : query / group;
    }
};

// What the warps of a block rarely ask for, in shared memory: registers are scarce.
struct Block {
    Plane plane;
    int32_t row_k, row_v;  // bytes of a row
    Queries queries;
    int32_t n_parts;
};

// Where a walk is, in shared memory of its warp.
struct Round {
    int row, behind_row;    // rows that no round has had yet
    int2 rows;              // of this round
    int2 span, common;      // keys that some row of it sees, and those that all see
    int32_t chunk, number;  // keys of a chunk of this round; the number of the present one
    int2 edges, clear;      // keys of that chunk that some row sees, and those that all see

    __device__ __forceinline__ Round(const Queries& queries) {
        row = queries.row_of(queries.first), behind_row = queries.row_of(queries.behind - 1) + 1;
        rows = span = common = edges = clear = make_int2(0, 0);
        chunk = STEP, number = 0;
    }
    // Goes to the next chunk, the first one at the beginning; false behind the last.
    __device__ __forceinline__ bool next(const Block& block) {
        number += int(gridDim.x);
        while (span.y == span.x || int64_t(number) * chunk >= span.y) {
            if (row >= behind_row) return false;
            // The rows from `row` on whose chunks have one size; their ranges ascend.
            const int2 top = block.plane.seen(row);
            chunk = chunk_keys(top.y - top.x, block.n_parts);
            int2 last = top;
            int behind = row + 1;
            for (; behind < behind_row; behind++) {
                const int2 keys = block.plane.seen(behind);
                if (chunk_keys(keys.y - keys.x, block.n_parts) != chunk) break;
                last = keys;
            }
            rows = make_int2(row, behind), row = behind;
            span = make_int2(top.x, last.y), common = make_int2(last.x, top.y);
            number = chunk_of(top.x, chunk) + int(blockIdx.x);
        }
        const int32_t begin = number * chunk;
        edges.x = begin > span.x ? begin : span.x;
        edges.y = span.y - begin < chunk ? span.y : begin + chunk;
        clear.x = edges.x > common.x ? edges.x : common.x;
        clear.y = edges.y < common.y ? edges.y : common.y;
        return true;
    }
    // The keys that a query of this row sees in this round.
    __device__ __forceinline__ int2 seen(const Plane& plane, int of_row) const {
        return of_row >= rows.x && of_row < rows.y ? plane.seen(of_row) : make_int2(0, 0);
    }
};

// The steps that a block takes, in order: of each round of rows the chunks blockIdx.x, blockIdx.x +
// gridDim.x and so on, of each chunk the keys that some row sees.
struct Walk {
    int32_t key = 0, end = 0;  // the first key of the step, and behind the last one of the chunk

    // Goes to the next step; false behind the last. All lanes of the warp take part, and meet before
    // one of them looks at the round again.
    __device__ __forceinline__ bool next(Round& kept, const Block& block, int lane) {
        key += STEP;
        if (key < end) return true;
        Round round = kept;
        if (!round.next(block)) return false;
        __syncwarp();  // all have read
        if (lane == 0) kept = round;
        key = round.edges.x / STEP * STEP, end = round.edges.y;
        return true;
    }
    __device__ __forceinline__ bool begins_chunk(const Round& round) const {
        return key <= round.edges.x;
    }
    __device__ __forceinline__ bool ends_chunk() const { return end - key <= STEP; }
    // Whether some row does not see some key of the step.
    __device__ __forceinline__ bool is_masked(const Round& round) const {
        return (key < round.clear.x) | (round.clear.y - key < STEP);  // both are read at once
    }
    // Key number i of the step, or the nearest one that some row sees.
    __device__ __forceinline__ int32_t key_near(const Round& round, int i) const {
        const int32_t at = key + i < end ? key + i : end - 1;
        return at > round.edges.x ? at : round.edges.x;
    }
};

// Where the partial results of a launch lie: f32 [n_rows, n_heads, n_slots, shares, D] weighted sums, then
// f32 [n_rows, n_heads, n_slots, shares, 2] references (as exponents of 2) and sums of weights. shares: of
// a chunk, one for each warp that leaves its own.
template <int D>
struct Partials {
    float* sums;
    float* marks;
    int32_t n_heads, n_slots;
    __device__ __forceinline__ Partials(float* workspace, int32_t n_rows, int32_t n_heads,
                                        int32_t n_slots, int32_t shares = 1)
        : sums(workspace), marks(workspace + size_t(n_rows) * n_heads * n_slots * shares * D),
          n_heads(n_heads), n_slots(n_slots) {}
    // The column of a query of the present chunk; -1 if there is no such query, or it sees no key of it.
    __device__ __forceinline__ int64_t column(const Block& block, const Round& round,
                                              int query, int kv_head) const {
        const Queries& queries = block.queries;
        const int row = queries.row_of(query);
        if (query >= queries.behind || row < round.rows.x || row >= round.rows.y) return -1;
        const int2 keys = block.plane.seen(row);
        const int32_t slot = round.number - chunk_of(keys.x, round.chunk);
        if (slot < 0 || slot >= n_slots || int64_t(round.number) * round.chunk >= keys.y) return -1;
        const int head = kv_head * queries.group + query - row * queries.group;
        return (int64_t(queries.first_row + row) * n_heads + head) * n_slots + slot;
    }
};
