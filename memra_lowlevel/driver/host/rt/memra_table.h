// Included after a kernel file: makes the table of its kernels. `Entry<kernel>` reads the parameter
// types off the kernel itself, so sizes can never disagree with what runs.
#pragma once

// Parameters lie in memory of the launch, which is not for the hooks of check mode.
#define MEMRA_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

namespace memra {

template <auto F, uint32_t MAX_THREADS = 0>
struct Launch;

template <class... A, void (*F)(A...), uint32_t MAX_THREADS>
struct Launch<F, MAX_THREADS> {
  template <size_t... I>
  struct Pack {};
  template <size_t N, size_t... I>
  struct Make : Make<N - 1, N - 1, I...> {};
  template <size_t... I>
  struct Make<0, I...> {
    MEMRA_UNCHECKED static void call(void** params) {
      (void)params;
      F(read<A>(params[I])...);
    }
  };
  template <class T>
  MEMRA_UNCHECKED __attribute__((always_inline)) static T read(const void* at) {
    T value;
    __builtin_memcpy(&value, at, sizeof(T));
    return value;
  }
  static constexpr uint32_t sizes[sizeof...(A) + 1] = {uint32_t(sizeof(A))..., 0};
  static Entry entry(const char* name) {
    return {name, &Make<sizeof...(A)>::call, reinterpret_cast<void*>(F), sizes, uint32_t(sizeof...(A)),
            MAX_THREADS};
  }
};

}  // namespace memra

#if defined(MEMRA_CHECK)
#define MEMRA_FLAG_CHECK memra::MODULE_CHECK
#else
#define MEMRA_FLAG_CHECK 0
#endif
#if defined(__SANITIZE_ADDRESS__)
#define MEMRA_FLAG_ASAN memra::MODULE_ASAN
#else
#define MEMRA_FLAG_ASAN 0
#endif
