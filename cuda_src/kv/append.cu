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
    const int n_blocks = (side == 0 ? kv_dim_k : kv_dim_v) / BLOCK_ELEMENTS;
    if (block < n_blocks) {
        const bool writes = table != nullptr || k_plane != nullptr;
        uint8_t* plane = nullptr;
        int64_t physical = 0;
        if (writes) {
            const RowView view = row_view(k_plane, v_plane, len_d, base_d, table, row);
            plane = const_cast<uint8_t*>(side == 0 ? view.k : view.v);
            physical = view.slot - view.base;
        }
        if (physical < 0 || physical >= capacity) {
            if (fault != nullptr) atomicMax(fault + 1, row + 1);
        } else {
            const size_t index = size_t(physical) * n_blocks + block;
            bool bad;
            if (side == 0) {
                uint8_t* to = writes ? plane + index * block_bytes<KF>() : nullptr;
                bad = write_quarter<KF>(k + size_t(row) * kv_dim_k + block * 32, to, quarter);
            } else {
                uint8_t* to = writes ? plane + index * block_bytes<VF>() : nullptr;
                bad = write_quarter<VF>(v + size_t(row) * kv_dim_v + block * 32, to, quarter);
            }
            if (bad && fault != nullptr) {
                const int widest = (kv_dim_k > kv_dim_v ? kv_dim_k : kv_dim_v) / BLOCK_ELEMENTS;
                atomicMax(fault, 0x7FFFFFFF - ((2 * row + side) * widest + block));
            }
        }
    }
}
