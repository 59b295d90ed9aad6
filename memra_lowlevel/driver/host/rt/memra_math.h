// Integer and float intrinsics with CUDA's meaning: shifts clamp, conversions saturate, NaN loses in
// fminf and fmaxf.
#pragma once

extern "C" {
float expf(float) noexcept; float exp2f(float) noexcept; float exp10f(float) noexcept;
float expm1f(float) noexcept; float logf(float) noexcept; float log2f(float) noexcept;
float log10f(float) noexcept; float log1pf(float) noexcept; float sinf(float) noexcept;
float cosf(float) noexcept; float tanf(float) noexcept; float tanhf(float) noexcept;
float sinhf(float) noexcept; float coshf(float) noexcept; float asinf(float) noexcept;
float acosf(float) noexcept; float atanf(float) noexcept; float atan2f(float, float) noexcept;
float erff(float) noexcept; float powf(float, float) noexcept; float sqrtf(float) noexcept;
float cbrtf(float) noexcept; float floorf(float) noexcept; float ceilf(float) noexcept;
float truncf(float) noexcept; float roundf(float) noexcept; float rintf(float) noexcept;
float nearbyintf(float) noexcept; float fabsf(float) noexcept; float fmaf(float, float, float) noexcept;
float fmodf(float, float) noexcept; float fminf(float, float) noexcept; float fmaxf(float, float) noexcept;
float copysignf(float, float) noexcept; float ldexpf(float, int) noexcept;
float frexpf(float, int*) noexcept; float scalbnf(float, int) noexcept;
void sincosf(float, float*, float*) noexcept;
double exp(double) noexcept; double exp2(double) noexcept; double log(double) noexcept;
double log2(double) noexcept; double sin(double) noexcept; double cos(double) noexcept;
double tanh(double) noexcept; double pow(double, double) noexcept; double sqrt(double) noexcept;
double floor(double) noexcept; double ceil(double) noexcept; double rint(double) noexcept;
double trunc(double) noexcept; double round(double) noexcept; double fabs(double) noexcept;
double fma(double, double, double) noexcept; double fmin(double, double) noexcept;
double fmax(double, double) noexcept; double ldexp(double, int) noexcept;
int abs(int) noexcept; long long llabs(long long) noexcept;
void* memcpy(void*, const void*, size_t) noexcept; void* memset(void*, int, size_t) noexcept;
void* memmove(void*, const void*, size_t) noexcept;
int printf(const char*, ...);
}

#if defined(MEMRA_CHECK)
// Calls of the C library would pass the hooks by.
extern "C" void* __tsan_memcpy(void*, const void*, size_t);
extern "C" void* __tsan_memmove(void*, const void*, size_t);
extern "C" void* __tsan_memset(void*, int, size_t);
#define memcpy __tsan_memcpy
#define memmove __tsan_memmove
#define memset __tsan_memset
#endif

namespace memra {

template <class To, class From>
__attribute__((always_inline)) inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Conversions of a GPU: out of range saturates, NaN gives 0. C++ leaves both undefined.
template <class To>
inline To saturate(double value) {
  constexpr bool is_signed = To(-1) < To(0);
  constexpr double top = 2.0 * double(To(1) << (8 * sizeof(To) - 1 - (is_signed ? 1 : 0)));
  constexpr double bottom = is_signed ? -top : 0.0;
  if (!(value == value)) return 0;
  if (value >= top) return is_signed ? To(~(To(1) << (8 * sizeof(To) - 1))) : To(-1);
  if (value <= bottom) return is_signed ? To(To(1) << (8 * sizeof(To) - 1)) : To(0);
  return To(value);
}

inline float rsqrt(float x) { return float(1.0 / __builtin_sqrt(double(x))); }

}  // namespace memra

#define rsqrtf(x) memra::rsqrt(x)
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __sinf sinf
#define __cosf cosf
#define __powf powf
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
inline float __frsqrt_rn(float x) { return memra::rsqrt(x); }
inline float __frcp_rn(float x) { return 1.f / x; }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

#ifndef isnan
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
#endif

inline unsigned __float_as_uint(float x) { return memra::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return memra::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return memra::bit_cast<float>(x); }
inline float __int_as_float(int x) { return memra::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return memra::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return memra::bit_cast<double>(x); }

inline int __float2int_rn(float x) { return memra::saturate<int>(__builtin_rint(double(x))); }
inline int __float2int_rz(float x) { return memra::saturate<int>(__builtin_trunc(double(x))); }
inline int __float2int_rd(float x) { return memra::saturate<int>(__builtin_floor(double(x))); }
inline int __float2int_ru(float x) { return memra::saturate<int>(__builtin_ceil(double(x))); }
inline unsigned __float2uint_rn(float x) {
  return memra::saturate<unsigned>(__builtin_rint(double(x)));
}
inline unsigned __float2uint_rz(float x) {
  return memra::saturate<unsigned>(__builtin_trunc(double(x)));
}
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  x = __builtin_bswap32(x);
  x = ((x >> 4) & 0x0f0f0f0fu) | ((x & 0x0f0f0f0fu) << 4);
  x = ((x >> 2) & 0x33333333u) | ((x & 0x33333333u) << 2);
  return ((x >> 1) & 0x55555555u) | ((x & 0x55555555u) << 1);
}
inline int __mulhi(int a, int b) { return int((int64_t(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
  return unsigned((((uint64_t(hi) << 32) | lo) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
  return unsigned(((uint64_t(hi) << 32) | lo) >> (shift & 31));
}
// The highest bit of each pick is ignored, as NVRTC does: replicating a sign takes the PTX instruction.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = (uint64_t(y) << 32) | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = (selector >> (4 * i)) & 7;
    result |= (unsigned(bytes >> (8 * pick)) & 0xff) << (8 * i);
  }
  return result;
}
inline int __dp4a(int a, int b, int c) {
  unsigned sum = unsigned(c);
  for (int i = 0; i < 4; ++i) sum += unsigned(int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i))));
  return int(sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += ((a >> (8 * i)) & 0xff) * ((b >> (8 * i)) & 0xff);
  return c;
}
// The dp4a of mixed signs (dp4a.u32.s32 in PTX) has no CUDA intrinsic; nothing stands for it here.

inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }
inline long long abs(long long x) { return x < 0 ? -x : x; }

// CUDA gives min and max every mixture of signedness and width; templates would be ambiguous.
#define MEMRA_MINMAX(T, A, B)                                             \
  inline T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; }\
  inline T max(A a, B b) { return (T)a < (T)b ? (T)b : (T)a; }
MEMRA_MINMAX(int, int, int)
MEMRA_MINMAX(unsigned, unsigned, unsigned)
MEMRA_MINMAX(unsigned, int, unsigned)
MEMRA_MINMAX(unsigned, unsigned, int)
MEMRA_MINMAX(long, long, long)
MEMRA_MINMAX(unsigned long, unsigned long, unsigned long)
MEMRA_MINMAX(unsigned long, long, unsigned long)
MEMRA_MINMAX(unsigned long, unsigned long, long)
MEMRA_MINMAX(long long, long long, long long)
MEMRA_MINMAX(unsigned long long, unsigned long long, unsigned long long)
MEMRA_MINMAX(unsigned long long, long long, unsigned long long)
MEMRA_MINMAX(unsigned long long, unsigned long long, long long)
#undef MEMRA_MINMAX
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
inline double min(float a, double b) { return __builtin_fmin(a, b); }
inline double max(float a, double b) { return __builtin_fmax(a, b); }
inline double min(double a, float b) { return __builtin_fmin(a, b); }
inline double max(double a, float b) { return __builtin_fmax(a, b); }

template <class T>
inline T __ldg(const T* at) { return *at; }
template <class T>
inline T __ldcg(const T* at) { return *at; }
template <class T>
inline T __ldcs(const T* at) { return *at; }
template <class T>
inline T __ldca(const T* at) { return *at; }
template <class T>
inline void __stcg(T* at, T value) { *at = value; }
template <class T>
inline void __stcs(T* at, T value) { *at = value; }
