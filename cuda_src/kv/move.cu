// Moves rows of K and V to the front of their planes in one launch: the rebase of a ring.
#include "common/device.cuh"

constexpr int MOVE_THREADS = 256;

// What moves by `shift` units also overwrites by `shift` units: unit i goes to i - shift, which unit
// i - shift must have left. One thread owns all units that are equal modulo the shift and takes them
// in ascending order, so source and destination may overlap without any ordering between threads. Of
// such chains it takes several at a time, so that their loads are under way together.
constexpr int MOVE_CHAINS = 4;

template <class Unit>
__device__ __forceinline__ void move_units(uint8_t* plane, int64_t shift_bytes, int64_t n_bytes) {
    Unit* to = reinterpret_cast<Unit*>(plane);
    const int64_t shift = shift_bytes / int64_t(sizeof(Unit));
    const int64_t n = n_bytes / int64_t(sizeof(Unit));
    const int64_t chains = shift < n ? shift : n;
    const int64_t step = int64_t(gridDim.x) * MOVE_THREADS;
    const int64_t first = int64_t(blockIdx.x) * MOVE_THREADS + threadIdx.x;
    for (int64_t c = first; c < chains; c += MOVE_CHAINS * step) {
        for (int64_t i = c; i < n; i += shift) {
            Unit units[MOVE_CHAINS];
            bool moves[MOVE_CHAINS];
#pragma unroll
            for (int j = 0; j < MOVE_CHAINS; j++) {
                moves[j] = c + j * step < chains && i + j * step < n;
                if (moves[j]) units[j] = to[i + j * step + shift];
            }
#pragma unroll
            for (int j = 0; j < MOVE_CHAINS; j++)
                if (moves[j]) to[i + j * step] = units[j];
        }
    }
}

// Grid (any, 2), 256 threads; y chooses the side.
//   k_plane, v_plane  u8, 16-byte aligned; bytes [shift, shift + n) go to [0, n)
//   k_shift, k_bytes  multiples of the row size, which is a multiple of 2; shift > 0
KERNEL void __launch_bounds__(MOVE_THREADS)
    move_rows(uint8_t* k_plane, int64_t k_shift, int64_t k_bytes, uint8_t* v_plane, int64_t v_shift,
              int64_t v_bytes) {
    uint8_t* plane = blockIdx.y == 0 ? k_plane : v_plane;
    const int64_t shift = blockIdx.y == 0 ? k_shift : v_shift;
    const int64_t n_bytes = blockIdx.y == 0 ? k_bytes : v_bytes;
    const int64_t both = shift | n_bytes;
    if (both % 16 == 0) {
        move_units<uint4>(plane, shift, n_bytes);
    } else if (both % 4 == 0) {
        move_units<uint32_t>(plane, shift, n_bytes);
    } else {
        move_units<uint16_t>(plane, shift, n_bytes);
    }
}
