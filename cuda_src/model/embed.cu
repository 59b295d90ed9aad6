// Token embedding from the table that the output layer shares, in its tiles.
#include "common/dependent.cuh"
#include "common/tiles.cuh"

// grid (ceil(n_blocks / block), n_rows): a thread decodes one block of 32 columns.
//   table  tiles of [n_vocab, 32 * n_blocks], see common/tiles.cuh
//   tok_d  u32 [n_rows]
//   h      f32 [n_rows, 32 * n_blocks]
// A token past the vocabulary gives a row of NaN, which ends as the argmax sentinel.
template <class Tile>
__global__ void embed_rows(const uint8_t* __restrict__ table, const uint32_t* __restrict__ tok_d,
                           float* __restrict__ h, int32_t n_blocks, int32_t n_vocab) {
    admit_successor();
    const int block = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y;
    if (block < n_blocks) {
        const uint32_t token = tok_d[row];
        float values[TILE_COLS];
        if (token < uint32_t(n_vocab)) {
            const size_t tile = size_t(token / TILE_ROWS) * n_blocks + block;
            Tile stored;
            stored.fetch(table + tile * Tile::BYTES, int(token % TILE_ROWS));
            stored.decode(values);
        } else {
            for (int i = 0; i < TILE_COLS; i++) values[i] = NAN_F32;
        }
        float* out = h + (size_t(row) * n_blocks + block) * TILE_COLS;
        for (int i = 0; i < TILE_COLS; i++) out[i] = values[i];
    }
}
