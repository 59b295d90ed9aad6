// Vector types, built-in variables.
#pragma once

#define MEMRA_VECTOR(T, name, alignment1, alignment2, alignment3, alignment4)                    \
  struct alignas(alignment1) name##1 { T x; };                                                   \
  struct alignas(alignment2) name##2 { T x, y; };                                                \
  struct alignas(alignment3) name##3 { T x, y, z; };                                             \
  struct alignas(alignment4) name##4 { T x, y, z, w; };                                          \
  inline name##1 make_##name##1(T x) { return {x}; }                                             \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                     \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                             \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

MEMRA_VECTOR(signed char, char, 1, 2, 1, 4)
MEMRA_VECTOR(unsigned char, uchar, 1, 2, 1, 4)
MEMRA_VECTOR(short, short, 2, 4, 2, 8)
MEMRA_VECTOR(unsigned short, ushort, 2, 4, 2, 8)
MEMRA_VECTOR(int, int, 4, 8, 4, 16)
MEMRA_VECTOR(unsigned int, uint, 4, 8, 4, 16)
MEMRA_VECTOR(float, float, 4, 8, 4, 16)
MEMRA_VECTOR(long long, longlong, 8, 16, 8, 16)
MEMRA_VECTOR(unsigned long long, ulonglong, 8, 16, 8, 16)
MEMRA_VECTOR(double, double, 8, 16, 8, 16)
#undef MEMRA_VECTOR

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
      : x(x_), y(y_), z(z_) {}
};

namespace memra {
__attribute__((always_inline)) inline uint3 load3(const Index3* at) {
  return {raw_load(&at->x), raw_load(&at->y), raw_load(&at->z)};
}
}  // namespace memra

#define threadIdx (memra::load3(&memra::context()->thread_index))
#define blockIdx (memra::load3(&memra::context()->block_index))
#define blockDim (memra::load3(&memra::context()->block_dim))
#define gridDim (memra::load3(&memra::context()->grid_dim))
#define warpSize 32
