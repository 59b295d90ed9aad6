// Codes of q8_0 rows in shared memory, whose blocks of 34 bytes begin at even addresses.
#pragma once
#include "common/device.cuh"

constexpr int Q8_BLOCK_BYTES = 34;

// The pitch of rows that lie 8 banks apart, four by four, as load_codes() wants them.
__host__ __device__ constexpr int k_pitch(int bytes) { return (bytes + 31) / 64 * 64 + 32; }

// 8 codes of a key from channel 8t of block B on; `own` is 8t bytes behind the head.
template <int D, int B>
__device__ __forceinline__ void load_codes(const uint8_t* own, uint32_t* codes) {
    const uint8_t* at = own + B * Q8_BLOCK_BYTES + B % 2 * 2;  // a word before or at the codes
    constexpr bool WIDE = D % 128 == 0;
    if constexpr (B % 2 == 0) {  // the codes begin in the middle of a word
        uint32_t w0, w1, w2;
        if constexpr (WIDE && B % 4 == 0) {
            const uint2 w = *reinterpret_cast<const uint2*>(at);
            w0 = w.x, w1 = w.y, w2 = *reinterpret_cast<const uint32_t*>(at + 8);
        } else if constexpr (WIDE) {
            const uint2 w = *reinterpret_cast<const uint2*>(at + 4);
            w0 = *reinterpret_cast<const uint32_t*>(at), w1 = w.x, w2 = w.y;
        } else {
            w0 = *reinterpret_cast<const uint32_t*>(at);
            w1 = *reinterpret_cast<const uint32_t*>(at + 4);
            w2 = *reinterpret_cast<const uint32_t*>(at + 8);
        }
        codes[0] = __byte_perm(w0, w1, 0x5432), codes[1] = __byte_perm(w1, w2, 0x5432);
    } else if constexpr (WIDE && B % 4 == 3) {
        const uint2 w = *reinterpret_cast<const uint2*>(at);
        codes[0] = w.x, codes[1] = w.y;
    } else {
        codes[0] = *reinterpret_cast<const uint32_t*>(at);
        codes[1] = *reinterpret_cast<const uint32_t*>(at + 4);
    }
}
