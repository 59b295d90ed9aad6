// Where the weights of a product lie, and what multiplies them.
#pragma once
#include "common/tiles.cuh"

// Which body; a test may ask for the other one on the host.
#ifndef MEMRA_TENSOR
#define MEMRA_TENSOR (MEMRA_CUDA && __CUDA_ARCH__ >= 800)
#endif

// Where the weights of a product lie. An instruction multiplies 16 rows of weights: eight of one matrix and those
// that are multiplied with them (`lower`), which are
//   the next eight of the same matrix              OfMatrix<Tile>
//   the same eight, a block of columns further on  OfMatrix<Tile, 2>
//   the same eight of another one                  OfPair
template <class First, class Second, int LOWER_ROW, int N_BLOCKS>
struct Weights {
    typedef First Upper;   // tile of the first eight
    typedef Second Lower;  // of the others
    static constexpr int LOWER = LOWER_ROW;     // rows from the first eight to the others
    static constexpr int STEP = 8 + LOWER_ROW;  // from an instruction's rows to those of the next
    static constexpr int BLOCKS = N_BLOCKS;     // blocks of columns of an instruction
    const uint8_t* upper;                       // tiles that hold them
    const uint8_t* lower;
    unsigned row;  // of the first output, in its tile
};
template <class Tile, int BLOCKS = 1>
using OfMatrix = Weights<Tile, Tile, BLOCKS == 1 ? 8 : 0, BLOCKS>;
template <class First, class Second>
using OfPair = Weights<First, Second, 0, 1>;

// OUTS outputs of one matrix from `first` on, a multiple of OUTS: W is an OfMatrix.
template <class W>
__device__ __forceinline__ W of_matrix(const uint8_t* w, unsigned first, unsigned n_blocks) {
    const uint8_t* tile = w + size_t(first / TILE_ROWS * n_blocks) * W::Upper::BYTES;
    return {tile, tile, first % TILE_ROWS};
}
// As many outputs of each of two matrices, from `first` on, a multiple of them.
template <class First, class Second>
__device__ __forceinline__ OfPair<First, Second> of_pair(const uint8_t* a, const uint8_t* b, unsigned first,
                                                         unsigned n_blocks) {
    const size_t tile = first / TILE_ROWS * n_blocks;
    return {a + tile * First::BYTES, b + tile * Second::BYTES, first % TILE_ROWS};
}
