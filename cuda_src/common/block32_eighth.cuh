// Writing rows of blocks with eight neighbouring threads a block, 4 elements each: for few rows, where
// the time is how long one thread works. Two threads a block (common/block32.cuh) need fewer
// instructions in all, which counts for many rows. The bytes are the same.
//
// Thread e = 0 ... 7 has elements 4e ... 4e + 3. On a GPU it asks the others for what it has not read;
// on the host, where a question costs more than the reading, it reads.
#pragma once
#include "common/block32.cuh"

constexpr int BLOCK_EIGHTHS = 8;

// What thread e stores: its codes (Q8_0) or elements; of Q5_1 and Q4_0 threads 0 ... 3 four bytes of
// nibbles, the even ones byte e / 2 of qh at fifth.
template <int F>
struct PackedEighth {
    static constexpr int WORDS = F == F32 ? 4 : F == F16 || F == BF16 ? 2 : 1;
    uint32_t words[WORDS];
    uint32_t head, fifth;
};

#if BLOCK32_LANES
template <Join JOIN>
__device__ __forceinline__ float fold_eighths(const float4& own) {
    float value = fold<JOIN>(own);
#pragma unroll
    for (int mask = 1; mask < BLOCK_EIGHTHS; mask *= 2)
        value = JOIN(value, __shfl_xor_sync(FULL_MASK, value, mask));
    return value;
}

// The same where the order of equal elements matters.
template <Join JOIN>
__device__ __forceinline__ float fold_eighths_in_order(const float4& own, int e) {
    float value = fold<JOIN>(own);
#pragma unroll
    for (int mask = 1; mask < BLOCK_EIGHTHS; mask *= 2) {
        const float other = __shfl_xor_sync(FULL_MASK, value, mask);
        value = (e & mask) == 0 ? JOIN(value, other) : JOIN(other, value);
    }
    return value;
}
#endif

// All threads of the warp call it, also those whose block is nobody's.
template <int F>
__device__ __forceinline__ BlockScale scale_of_eighths(const float* x, const float4& own, int e) {
#if BLOCK32_LANES
    if constexpr (F == Q8_0) {
        return scale_of<F>(0.0f, fold_eighths<magnitude>(own), false);
    } else if constexpr (F == Q5_1) {
        const float top = fold_eighths<maximum>(own);
        float low = fold_eighths<minimum>(own);
        if (__any_sync(FULL_MASK, low == 0.0f)) low = fold_eighths_in_order<smaller>(own, e);
        return scale_of<F>(low, top, false);
    } else {
        const float most = fold_eighths<magnitude>(own);
        return scale_of<F>(0.0f, fold_eighths_in_order<larger>(own, e), most != most);
    }
#else
    return block_scale<F>(x);
#endif
}

// Encodes eighth e of the block x[32]; `own` are its elements. Returns whether something of the block (or of
// the eighth, without a scale) is, or reads back as, no finite number.
template <int F>
__device__ __forceinline__ bool pack_eighth(const float* x, const float4& own, int e,
                                            PackedEighth<F>* p) {
    if constexpr (F == Q8_0) {
        const BlockScale s = scale_of_eighths<F>(x, own, e);
        p->words[0] = s.poison ? 0u : codes<F>(own, s);
        p->head = s.head;
        return reads_endless<F>(s);
    } else if constexpr (has_nibbles<F>()) {
        const BlockScale s = scale_of_eighths<F>(x, own, e);
        const uint32_t q = codes<F>(own, s), fifth = gather_fifth(q);
#if BLOCK32_LANES
        const uint32_t high = __shfl_xor_sync(FULL_MASK, q, 4);
        const uint32_t next = F == Q5_1 ? __shfl_xor_sync(FULL_MASK, fifth, 1) : 0u;
#else
        const float4* all = reinterpret_cast<const float4*>(x);
        const uint32_t high = codes<F>(all[e ^ 4], s);
        const uint32_t next = gather_fifth(codes<F>(all[e ^ 1], s));
#endif
        p->words[0] = s.poison ? 0u : join_nibbles(q, high);
        p->fifth = s.poison ? 0u : fifth | next << 4;
        p->head = s.head;
        return reads_endless<F>(s);
    } else {
        return pack_run<F>(own, p->words);
    }
}

template <int F>
__device__ __forceinline__ void store_eighth(const PackedEighth<F>& p, uint8_t* block, int e) {
    if constexpr (F == F32) {
        reinterpret_cast<uint4*>(block)[e] = make_uint4(p.words[0], p.words[1], p.words[2], p.words[3]);
    } else if constexpr (F == F16 || F == BF16) {
        reinterpret_cast<uint2*>(block)[e] = make_uint2(p.words[0], p.words[1]);
    } else if constexpr (F == E4M3) {
        reinterpret_cast<uint32_t*>(block)[e] = p.words[0];
    } else if constexpr (F == Q8_0) {
        if (e == 0) store_u16(block, p.head);
        store_two_u16(block + 2 + 4 * e, p.words[0]);
    } else if constexpr (F == Q5_1) {
        if (e == 0) *reinterpret_cast<uint32_t*>(block) = p.head;
        if (e % 2 == 0) block[4 + e / 2] = uint8_t(p.fifth);
        if (e < 4) *reinterpret_cast<uint32_t*>(block + 8 + 4 * e) = p.words[0];
    } else {
        if (e == 0) store_u16(block, p.head);
        if (e < 4) store_two_u16(block + 2 + 4 * e, p.words[0]);
    }
}
