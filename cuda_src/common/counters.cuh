// What the rows of a launch see of a plane: slots, bounds and chunks, from device counters.
//
// A plane keeps absolute rows [base, base + capacity) at physical rows [0, capacity); a flat plane
// is one whose base is 0 for ever. Row r of a launch is written at absolute row len + r and attends
// the keys [start, end): end = len + r + 1 - counted, start = max(0, end - window) with a window.
//
// A launch over several sequences replaces planes and counters by a table of 5 words u64 per row:
//   0: K plane   1: V plane   2: pointer to len (i32)   3: pointer to base (i32) or 0
//   4: offset (i64) that stands for r, so that rows of one sequence can share its counter
#pragma once
#include "common/device.cuh"

constexpr int TABLE_WORDS = 5;

struct RowView {
    const uint8_t* k;
    const uint8_t* v;
    int64_t slot;  // absolute row that row r of the launch is written to
    int64_t base;
};

__device__ __forceinline__ RowView row_view(const uint8_t* k, const uint8_t* v,
                                            const int32_t* len_d, const int32_t* base_d,
                                            const uint64_t* table, int r) {
    if (table != nullptr) {
        const uint64_t* row = table + size_t(r) * TABLE_WORDS;
        const int32_t* len = reinterpret_cast<const int32_t*>(row[2]);
        const int32_t* base = reinterpret_cast<const int32_t*>(row[3]);
        return {reinterpret_cast<const uint8_t*>(row[0]), reinterpret_cast<const uint8_t*>(row[1]),
                int64_t(len[0]) + int64_t(row[4]), base == nullptr ? 0 : int64_t(base[0])};
    }
    return {k, v, int64_t(len_d[0]) + r, base_d == nullptr ? 0 : int64_t(base_d[0])};
}

// Keys that a row attends, absolute, start <= end, never outside what the plane can hold.
struct KeyRange {
    int64_t start, end;
};

__device__ __forceinline__ KeyRange key_range(const RowView& view, int32_t window, int32_t counted,
                                              int32_t capacity) {
    const int64_t bound = view.slot + 1 - counted;
    const int64_t first = window > 0 && bound > window ? bound - window : 0;
    const int64_t limit = view.base + capacity;
    const int64_t behind = bound < limit ? bound : limit;
    const int64_t end = behind > view.base ? behind : view.base;
    const int64_t start = first > view.base ? first : view.base;
    return {start < end ? start : end, end};
}

// Chunks of keys: their edges are a function of the absolute position alone, so that partial results
// do not depend on the length, the window, the base, the rows of a launch or the device. They widen
// with the position, which keeps the partial results of a long context few.
//   keys [0, 8192): 128 each   [8192, 65536): 256 each   from 65536 on: 1024 each
__device__ __forceinline__ int32_t chunk_of(int64_t position) {
    const uint32_t key = uint32_t(position);  // lengths are i32
    const uint32_t shift = key < 8192 ? 7 : key < 65536 ? 8 : 10;
    const uint32_t before = key < 8192 ? 0 : key < 65536 ? 32 : 224;
    return int32_t(before + (key >> shift));
}
__device__ __forceinline__ int64_t chunk_begin(int32_t chunk) {
    const uint32_t shift = chunk < 64 ? 7 : chunk < 288 ? 8 : 10;
    const uint32_t before = chunk < 64 ? 0 : chunk < 288 ? 32 : 224;
    return int64_t((uint32_t(chunk) - before) << shift);
}

// Chunks [first, last) that hold the keys of a range.
struct ChunkRange {
    int32_t first, last;
};

__device__ __forceinline__ ChunkRange chunk_range(const KeyRange& keys) {
    const int32_t first = chunk_of(keys.start);
    return {first, keys.end > keys.start ? chunk_of(keys.end - 1) + 1 : first};
}
