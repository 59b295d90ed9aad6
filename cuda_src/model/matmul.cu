// Products of a weight matrix with a few rows of activations: out[r] = W x[r].
//
// One thread owns one output row, for all activation rows, so each weight is read once, nothing is
// exchanged between threads and there is no barrier. Columns are cut into chunks at fixed places
// (a plan constant of the matrix, never of the number of rows or of the device); each chunk leaves
// its own partial sum and the kernel that reads the product adds them in order.
//
// Row r gets the same operations in the same order whatever n_rows is.
#include "common/tiles.cuh"

// grid (ceil(n_out / block), n_chunks), block a multiple of 32, at most 128.
//   w      tiles of [n_out, 32 * n_blocks], see common/tiles.cuh
//   x      f32 [n_rows, 32 * n_blocks]
//   parts  f32 [n_chunks, n_rows, parts_width]; column `row` of them is written
// R rows are taken at a time: R = 1 for one row, R = 17 for a draft of 16 and its pending token.
//
// The bound on registers keeps the compiler from fetching the activations of all rows at once, which
// spilled.
template <class Tile, int R>
__global__ void __launch_bounds__(128, R == 1 ? 3 : 4)
    matmul_rows(const uint8_t* __restrict__ w, const float* __restrict__ x,
                float* __restrict__ parts, int32_t n_rows, int32_t n_out, int32_t n_blocks,
                int32_t chunk_blocks, int32_t parts_width) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const int chunk = blockIdx.y;
    if (row < n_out) {
        const uint8_t* tile = w + size_t(row / TILE_ROWS) * n_blocks * Tile::BYTES;
        const int lane = row % TILE_ROWS;
        const int first = chunk * chunk_blocks;
        const int last = min(first + chunk_blocks, n_blocks);
        for (int r0 = 0; r0 < n_rows; r0 += R) {
            float sum[R];
#pragma unroll
            for (int r = 0; r < R; r++) sum[r] = 0.0f;
            for (int b = first; b < last; b++) {
                float weights[TILE_COLS];
                Tile::load(tile + size_t(b) * Tile::BYTES, lane, weights);
                const size_t row_step = size_t(n_blocks) * TILE_COLS;
                const float* block_x = x + (size_t(r0) * n_blocks + b) * TILE_COLS;
#pragma unroll
                for (int r = 0; r < R; r++)
                    if (R == 1 || r0 + r < n_rows)
                        sum[r] = sum[r] + dot32(weights, Activations(block_x + r * row_step));
            }
#pragma unroll
            for (int r = 0; r < R; r++)
                if (R == 1 || r0 + r < n_rows)
                    parts[(size_t(chunk) * n_rows + r0 + r) * parts_width + row] = sum[r];
        }
    }
}
