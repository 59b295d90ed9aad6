// Codes of q8_0 rows in shared memory, whose blocks of 34 bytes begin at even addresses, and what they are
// multiplied with: queries as whole numbers in digits of 8 bits.
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

// Digits from -128 to 127 of four numbers times `lift`, rounded, of at most 22 bits and a sign; a word a digit.
struct Digits {
    uint32_t of[3];
    __device__ __forceinline__ Digits(const float4& v, float lift) {
        uint32_t y[4] = {uint32_t(__float2int_rn(v.x * lift)), uint32_t(__float2int_rn(v.y * lift)),
                         uint32_t(__float2int_rn(v.z * lift)), uint32_t(__float2int_rn(v.w * lift))};
        // The sum carries into the next digit, the exclusion returns.
#pragma unroll
        for (int e = 0; e < 4; e++) y[e] = (y[e] + 0x00008080u) ^ 0x00008080u;
        const uint32_t low01 = __byte_perm(y[0], y[1], 0x5140), low23 = __byte_perm(y[2], y[3], 0x5140);
        const uint32_t high01 = __byte_perm(y[0], y[1], 0x0062), high23 = __byte_perm(y[2], y[3], 0x0062);
        of[0] = __byte_perm(low01, low23, 0x5410), of[1] = __byte_perm(low01, low23, 0x7632);
        of[2] = __byte_perm(high01, high23, 0x5410);
    }
};
