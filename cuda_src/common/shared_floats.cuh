// Floats of shared memory by their number. Where they begin is known from the start: a compiler that has only the
// pointer asks for it anew wherever it is used, behind a barrier too, where every instruction counts.
#pragma once
#include "common/settle.cuh"

class SharedFloats {
  public:
#if MEMRA_CUDA
    __device__ __forceinline__ explicit SharedFloats(float* p)
        : at_(static_cast<unsigned>(__cvta_generic_to_shared(p))) {
        settle(at_);
    }
    // Those from number i on.
    __device__ __forceinline__ SharedFloats from(unsigned i) const {
        SharedFloats other = *this;
        other.at_ += 4 * i;
        settle(other.at_);
        return other;
    }
    __device__ __forceinline__ float get(unsigned i) const {
        float v;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at_ + 4 * i) : "memory");
        return v;
    }
    // Numbers i and i + 1, of which the first lies at a multiple of eight bytes.
    __device__ __forceinline__ float2 pair(unsigned i) const {
        float2 v;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at_ + 4 * i) : "memory");
        return v;
    }
    __device__ __forceinline__ void put(unsigned i, float v) const {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at_ + 4 * i), "f"(v) : "memory");
    }

  private:
    uint32_t at_;
#else
    explicit SharedFloats(float* p) : p_(p) {}
    SharedFloats from(unsigned i) const { return SharedFloats(p_ + i); }
    float get(unsigned i) const { return p_[i]; }
    float2 pair(unsigned i) const { return make_float2(p_[i], p_[i + 1]); }
    void put(unsigned i, float v) const { p_[i] = v; }

  private:
    float* p_;
#endif
};
