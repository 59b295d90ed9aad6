// Appends rows of K and V to their planes, quantised, in one launch.
#include "common/block32_eighth.cuh"
#include "common/counters.cuh"
#include "common/dependent.cuh"

constexpr int APPEND_THREADS = 128;
constexpr int APPEND_RESIDENT = 10;  // blocks per multiprocessor: registers for that many, not more
constexpr int APPEND_WARPS = APPEND_THREADS / WARP_LANES;
constexpr int RUN_BLOCKS = WARP_LANES / 2;  // a warp's: 512 elements of a row

// Where the rows of one side go.
struct Target {
    uint8_t* plane;  // null (and no table): nothing is written, the rows are only examined
    const int32_t *len_d, *base_d;
    const uint64_t* table;  // see common/counters.cuh; null for one sequence
    int32_t capacity;
};

// A load that stays where it stands: left alone, the compiler moves it behind what waits for others.
__device__ __forceinline__ int32_t load_here(const int32_t* from) {
#if MEMRA_CUDA
    int32_t value;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
#else
    return *from;
#endif
}

// Where a row goes. All that it needs of memory is asked for when it is made, and waited for when the
// physical row is.
struct Place {
    uintptr_t plane;
    int64_t offset;
    int32_t len, base;

    __device__ __forceinline__ int64_t physical() const { return offset + len - base; }
};

__device__ __forceinline__ Place place_of(const Target& target, int side, int row) {
    Place place = {uintptr_t(target.plane), target.plane != nullptr ? row : 0, 0, 0};
    if (__builtin_expect(target.table != nullptr, 0)) {
        const RowView view = row_view(nullptr, nullptr, nullptr, nullptr, target.table, row);
        place.plane = uintptr_t(side == 0 ? view.k : view.v);
        place.offset = view.slot - view.base;
    } else {
        if (target.len_d != nullptr) place.len = load_here(target.len_d);
        if (target.base_d != nullptr) place.base = load_here(target.base_d);
    }
    return place;
}

// Keeps the first block that does not read back finite and the last row without room; see append_kv.
__device__ __forceinline__ void note_fault(int32_t* fault, bool has_room, bool is_bad, int row,
                                           int side, int widest, int block) {
    if (!has_room) {
        atomicMax(fault + 1, row + 1);
    } else if (is_bad) {
        atomicMax(fault, 0x7FFFFFFF - ((2 * row + side) * widest + block));
    }
}

// Rows of one side that a warp takes: a run of blocks of each of [first_row, end_row).
struct Part {
    int side, first_row, end_row;
    int first_block, n_blocks, widest;  // of the run; of a row; of a row of the wider side
};

// Blocks of 34, 24 and 18 bytes leave in vectors of 16 bytes, so a run is put together first, at the
// offset from a vector's edge that it has in the plane. Two runs, so that one barrier per row is enough.
constexpr int STAGE_VECTORS = RUN_BLOCKS * 34 / 16 + 1;

__device__ __forceinline__ void store_run(const uint4* stage, uintptr_t to, int n_bytes, int lane) {
    const int before = int(to % 16);
    const int end = before + n_bytes;
    for (int first = 16 * lane; first < end; first += 16 * WARP_LANES) {
        uint8_t* vector = reinterpret_cast<uint8_t*>(to - before + first);
        if (first >= before && first + 16 <= end) {
            *reinterpret_cast<uint4*>(vector) = stage[first / 16];
        } else {
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(stage);
#pragma unroll 1
            for (int i = 0; i < 16; i += 2)
                if (first + i >= before && first + i < end)
                    store_u16(vector + i, halves[(first + i) / 2]);
        }
    }
}

template <int F>
__device__ __forceinline__ void append_part(const float* __restrict__ rows, const Target& target,
                                            const Part& part, uint4* stages, int32_t* fault) {
    const int lane = threadIdx.x % WARP_LANES;
    const int half = lane % 2;
    const int n_run = min(RUN_BLOCKS, part.n_blocks - part.first_block);
    const bool is_live = lane / 2 < n_run;  // else it packs the last block, for nobody
    const int block = min(lane / 2, n_run - 1);
    const bool writes = target.table != nullptr || target.plane != nullptr;
    const int width = part.n_blocks * BLOCK_ELEMENTS;
    const int row_bytes = part.n_blocks * block_bytes<F>();
    const float* x = rows + size_t(part.first_row) * width +
                     (part.first_block + block) * BLOCK_ELEMENTS;

    for (int row = part.first_row; row < part.end_row; row++, x += width) {
        // All that this row needs of memory is asked for before anything is waited for.
        const Half own = load_half<F>(x, half);
        const Place place = place_of(target, part.side, row);
        PackedHalf<F> packed;
        const bool is_bad = pack_half<F>(x, own, half, &packed);

        const int64_t physical = place.physical();
        const bool has_room = physical >= 0 && physical < target.capacity;
        const uintptr_t to = place.plane + uint64_t(uint32_t(physical)) * uint32_t(row_bytes) +
                             part.first_block * block_bytes<F>();

        if constexpr (block_bytes<F>() % 16 == 0) {
            uint8_t* own_block = reinterpret_cast<uint8_t*>(to) + block * block_bytes<F>();
            if (writes && has_room && is_live) store_half<F>(packed, own_block, half);
        } else {
            uint4* stage = stages + (row & 1) * STAGE_VECTORS;
            if (is_live) {
                uint8_t* staged = reinterpret_cast<uint8_t*>(stage) + to % 16;
                store_half<F>(packed, staged + block * block_bytes<F>(), half);
            }
            __syncwarp();
            if (writes && has_room) store_run(stage, to, n_run * block_bytes<F>(), lane);
        }
        if (fault != nullptr && is_live)
            note_fault(fault, has_room, is_bad, row, part.side, part.widest, part.first_block + block);
    }
}

// Grid (ceil(blocks of a row of the wider side / 16 / warps), ceil(n_rows / group), 2), whole warps, at
// most 128 threads; z chooses the side. A warp takes 16 blocks of 32 elements of each of `group` rows,
// two threads a block.
//   k, v          f32 [n_rows, kv_dim_k], [n_rows, kv_dim_v], 16-byte aligned
//   k_plane, ...  u8 [capacity, row bytes]; row r goes to physical row len + r - base
//   fault         i32[2] or null. [0] = max of 0x7FFFFFFF - (2 * row + side) * blocks - block over
//                 blocks that do not read back finite (blocks = those of the wider side), so the
//                 first of them stays; [1] = max of row + 1 over rows that found no room.
// The counter is not moved. Rows outside [0, capacity) are dropped.
template <int KF, int VF>
__global__ void __launch_bounds__(APPEND_THREADS, APPEND_RESIDENT)
    append_kv(const float* __restrict__ k, const float* __restrict__ v, uint8_t* NULLABLE k_plane,
              uint8_t* NULLABLE v_plane, int32_t n_rows, int32_t group, int32_t kv_dim_k,
              int32_t kv_dim_v, int32_t capacity, const int32_t* NULLABLE len_d,
              const int32_t* NULLABLE base_d, const uint64_t* NULLABLE table,
              int32_t* NULLABLE fault) {
    __shared__ uint4 stages[APPEND_WARPS][2 * STAGE_VECTORS];
    admit_successor();
    const int warp = threadIdx.x / WARP_LANES;
    const int side = blockIdx.z;
    const Target target = {side == 0 ? k_plane : v_plane, len_d, base_d, table, capacity};
    const Part part = {
        side,
        int(blockIdx.y) * group,
        min(int(blockIdx.y) * group + group, n_rows),
        int(blockIdx.x * (blockDim.x / WARP_LANES) + warp) * RUN_BLOCKS,
        (side == 0 ? kv_dim_k : kv_dim_v) / BLOCK_ELEMENTS,
        (kv_dim_k > kv_dim_v ? kv_dim_k : kv_dim_v) / BLOCK_ELEMENTS,
    };
    // While a thread waits, its elements come nearer.
    const int lane = threadIdx.x % WARP_LANES;
    const int block = min(part.first_block + lane / 2, part.n_blocks - 1);
    const size_t at = size_t(part.first_row) * part.n_blocks + block;
    prefetch_line((side == 0 ? k : v) + at * BLOCK_ELEMENTS + lane % 2 * (BLOCK_ELEMENTS / 2));
    await_predecessor();
    if (part.first_block < part.n_blocks) {  // the same for all threads of a warp
        if (side == 0) append_part<KF>(k, target, part, stages[warp], fault);
        else append_part<VF>(v, target, part, stages[warp], fault);
    }
}

template <int F>
__device__ __forceinline__ void append_eighth(const float* __restrict__ rows, const Target& target,
                                              int side, int row, uint32_t n_blocks, int widest,
                                              uint32_t block, uint32_t e, int32_t* fault) {
    const bool is_live = block < n_blocks;  // else it packs the last block, for nobody
    const float* x = rows + size_t(row * n_blocks + min(block, n_blocks - 1)) * BLOCK_ELEMENTS;
    const float4 own = reinterpret_cast<const float4*>(x)[e];
    const Place place = place_of(target, side, row);
    PackedEighth<F> packed;
    const bool is_bad = pack_eighth<F>(x, own, e, &packed);
    const int64_t physical = place.physical();
    const bool has_room = physical >= 0 && physical < target.capacity;
    const bool writes = target.table != nullptr || target.plane != nullptr;
    const uintptr_t to = place.plane + uint64_t(uint32_t(physical)) *
                                           uint32_t(n_blocks * block_bytes<F>()) +
                         block * block_bytes<F>();
    if (writes && has_room && is_live) store_eighth<F>(packed, reinterpret_cast<uint8_t*>(to), e);
    if (fault != nullptr && is_live)
        note_fault(fault, has_room, is_bad, row, side, widest, block);
}

// The same for few rows, eight threads a block. Grid (ceil(blocks of a row of the wider side * 8 / threads),
// n_rows, 2), whole warps, at most 256 threads; z chooses the side. Parameters are those of append_kv.
template <int KF, int VF>
__global__ void __launch_bounds__(2 * APPEND_THREADS)
    append_few(const float* __restrict__ k, const float* __restrict__ v, uint8_t* NULLABLE k_plane,
               uint8_t* NULLABLE v_plane, int32_t kv_dim_k, int32_t kv_dim_v, int32_t capacity,
               const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
               const uint64_t* NULLABLE table, int32_t* NULLABLE fault) {
    admit_successor();
    const int side = blockIdx.z, row = blockIdx.y;
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t block = thread / BLOCK_EIGHTHS, e = thread % BLOCK_EIGHTHS;
    const uint32_t n_blocks = uint32_t(side == 0 ? kv_dim_k : kv_dim_v) / BLOCK_ELEMENTS;
    const int widest = (kv_dim_k > kv_dim_v ? kv_dim_k : kv_dim_v) / BLOCK_ELEMENTS;
    const Target target = {side == 0 ? k_plane : v_plane, len_d, base_d, table, capacity};
    // While a thread waits, its elements come nearer.
    const size_t at = row * n_blocks + min(block, n_blocks - 1);
    prefetch_line((side == 0 ? k : v) + at * BLOCK_ELEMENTS);
    await_predecessor();
    if (side == 0) append_eighth<KF>(k, target, side, row, n_blocks, widest, block, e, fault);
    else append_eighth<VF>(v, target, side, row, n_blocks, widest, block, e, fault);
}
