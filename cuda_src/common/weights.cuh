// Where the weights of a product lie, and what multiplies them.
#pragma once
#include "common/tiles.cuh"

// Which body; a test may ask for the other one on the host.
#ifndef MEMRA_TENSOR
#define MEMRA_TENSOR (MEMRA_CUDA && __CUDA_ARCH__ >= 800)
#endif

// Where the weights of a product lie: each 16 outputs are 8 rows of one matrix and 8 of another, or of the same.
template <class First, class Second>
struct Weights {
    typedef First Upper;   // tile of the first 8 of 16 outputs
    typedef Second Lower;  // of the others
    const uint8_t* upper;  // tiles that hold them
    const uint8_t* lower;
    int upper_row, lower_row;  // of the first output, in its tile
    int step;                  // rows from 16 outputs to the next
};

// OUTS outputs of one matrix from `first` on, a multiple of OUTS.
template <class Tile>
__device__ __forceinline__ Weights<Tile, Tile> of_matrix(const uint8_t* w, int first, int n_blocks) {
    const uint8_t* tile = w + size_t(first / TILE_ROWS) * n_blocks * Tile::BYTES;
    return {tile, tile, first % TILE_ROWS, first % TILE_ROWS + 8, 16};
}
// As many outputs of each of two matrices, from `first` on, a multiple of them.
template <class First, class Second>
__device__ __forceinline__ Weights<First, Second> of_pair(const uint8_t* a, const uint8_t* b, int first,
                                                          int n_blocks) {
    const size_t tile = size_t(first / TILE_ROWS) * n_blocks;
    return {a + tile * First::BYTES, b + tile * Second::BYTES, first % TILE_ROWS, first % TILE_ROWS, 8};
}
