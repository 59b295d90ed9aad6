// Appends rows of K and V to their planes, quantised, in one launch.
#include "common/block32.cuh"
#include "common/counters.cuh"

constexpr int APPEND_THREADS = 128;

// Grid (ceil(4 * max(kv_dim_k, kv_dim_v) / 32 / blockDim.x), n_rows, 2), at most 128 threads; z
// chooses the side, four threads share a block of 32 elements.
//   k, v          f32 [n_rows, kv_dim_k], [n_rows, kv_dim_v], 16-byte aligned
//   k_plane, ...  u8 [capacity, row bytes]; row r goes to physical row len + r - base. Both null
//                 (and no table): nothing is written, the rows are only examined.
//   table         see common/counters.cuh; null for one sequence
//   fault         i32[2] or null. [0] = max of 0x7FFFFFFF - (2 * row + side) * blocks - block over
//                 blocks that do not read back finite (blocks = those of the wider side), so the
//                 first of them stays; [1] = max of row + 1 over rows that found no room.
// The counter is not moved. Rows outside [0, capacity) are dropped.
template <int F>
__device__ __forceinline__ bool append_quarter(const float* x, uint8_t* plane, int64_t physical,
                                               bool has_room, int n_blocks, int block,
                                               int quarter) {
    // All loads of x are under way before the slot is needed, which waits for the counter.
    Packed<F> packed;
    const bool bad = pack_quarter<F>(x, quarter, &packed);
    if (has_room && plane != nullptr) {
        uint8_t* to = plane + (size_t(physical) * n_blocks + block) * block_bytes<F>();
        store_quarter<F>(packed, to, quarter);
    }
    return bad;
}

template <int KF, int VF>
__global__ void __launch_bounds__(APPEND_THREADS)
    append_kv(const float* __restrict__ k, const float* __restrict__ v, uint8_t* NULLABLE k_plane,
              uint8_t* NULLABLE v_plane, int32_t kv_dim_k, int32_t kv_dim_v, int32_t capacity,
              const int32_t* NULLABLE len_d, const int32_t* NULLABLE base_d,
              const uint64_t* NULLABLE table, int32_t* NULLABLE fault) {
    const int unit = blockIdx.x * blockDim.x + threadIdx.x;
    const int block = unit / BLOCK_QUARTERS;
    const int quarter = unit % BLOCK_QUARTERS;
    const int row = blockIdx.y;
    const int side = blockIdx.z;
    const int width = side == 0 ? kv_dim_k : kv_dim_v;
    const int n_blocks = width / BLOCK_ELEMENTS;
    if (block < n_blocks) {
        uint8_t* plane = nullptr;
        int64_t physical = 0;
        if (table != nullptr || k_plane != nullptr) {
            const RowView view = row_view(k_plane, v_plane, len_d, base_d, table, row);
            plane = const_cast<uint8_t*>(side == 0 ? view.k : view.v);
            physical = view.slot - view.base;
        }
        const bool has_room = physical >= 0 && physical < capacity;
        const float* x = (side == 0 ? k : v) + size_t(row) * width + block * BLOCK_ELEMENTS;
        const bool bad =
            side == 0 ? append_quarter<KF>(x, plane, physical, has_room, n_blocks, block, quarter)
                      : append_quarter<VF>(x, plane, physical, has_room, n_blocks, block, quarter);
        if (fault != nullptr) {
            if (!has_room) {
                atomicMax(fault + 1, row + 1);
            } else if (bad) {
                const int widest = (kv_dim_k > kv_dim_v ? kv_dim_k : kv_dim_v) / BLOCK_ELEMENTS;
                atomicMax(fault, 0x7FFFFFFF - ((2 * row + side) * widest + block));
            }
        }
    }
}
