// Barriers, warp operations, atomics. Every operation that waits is a macro, so that its place in the
// source travels with it: that is what tells two barriers apart and what a message points to.
#pragma once

namespace memra {

inline uint32_t lane_of(Context* c) { return raw_load(&c->linear) & 31u; }

template <class T>
struct Shuffled {
  static_assert(sizeof(T) <= 32, "a shuffle moves at most 32 bytes per lane");
  static T take(Context* c, const Site* site, uint8_t (*cells)[32], uint32_t took_part,
                uint32_t source) {
    if (__builtin_expect(!((took_part >> source) & 1u), 0)) {
      memra_fail(c, site, FAIL_DIVERGENCE,
                 "a shuffle reads a lane that does not take part: its value is undefined");
    }
    // The cells belong to the runtime, so check mode must not see them read.
    uint32_t words[(sizeof(T) + 3) / 4];
    for (uint32_t i = 0; i < (sizeof(T) + 3) / 4; ++i) {
      words[i] = raw_load(reinterpret_cast<const uint32_t*>(cells[source]) + i);
    }
    T value;
    __builtin_memcpy(&value, words, sizeof(T));
    return value;
  }
};

template <class T>
inline T shfl(const Site* site, unsigned mask, T value, int source, int width = 32) {
  Context* c = context();
  uint32_t took_part;
  auto cells =
      memra_warp_exchange(c, site, WARP_SHFL, mask, &value, sizeof(T), nullptr, &took_part);
  const uint32_t lane = lane_of(c);
  return Shuffled<T>::take(c, site, cells, took_part,
                           (lane & ~uint32_t(width - 1)) | (uint32_t(source) & uint32_t(width - 1)));
}

template <class T>
inline T shfl_up(const Site* site, unsigned mask, T value, unsigned delta, int width = 32) {
  Context* c = context();
  uint32_t took_part;
  auto cells =
      memra_warp_exchange(c, site, WARP_SHFL_UP, mask, &value, sizeof(T), nullptr, &took_part);
  const uint32_t lane = lane_of(c);
  const int source = int(lane) - int(delta);
  const int first = int(lane & ~uint32_t(width - 1));
  return Shuffled<T>::take(c, site, cells, took_part, source < first ? lane : uint32_t(source));
}

template <class T>
inline T shfl_down(const Site* site, unsigned mask, T value, unsigned delta, int width = 32) {
  Context* c = context();
  uint32_t took_part;
  auto cells =
      memra_warp_exchange(c, site, WARP_SHFL_DOWN, mask, &value, sizeof(T), nullptr, &took_part);
  const uint32_t lane = lane_of(c);
  const uint32_t source = lane + delta;
  const uint32_t last = lane | uint32_t(width - 1);
  return Shuffled<T>::take(c, site, cells, took_part, source > last ? lane : source);
}

template <class T>
inline T shfl_xor(const Site* site, unsigned mask, T value, int lane_mask, int width = 32) {
  Context* c = context();
  uint32_t took_part;
  auto cells =
      memra_warp_exchange(c, site, WARP_SHFL_XOR, mask, &value, sizeof(T), nullptr, &took_part);
  const uint32_t lane = lane_of(c);
  const uint32_t source = lane ^ uint32_t(lane_mask);
  const uint32_t last = lane | uint32_t(width - 1);
  return Shuffled<T>::take(c, site, cells, took_part, source > last ? lane : source);
}

inline void combine_ballot(uint8_t (*cells)[32], uint32_t mask) {
  uint32_t votes = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((mask >> lane) & 1u) votes |= uint32_t(cells[lane][0] & 1) << lane;
  }
  for (uint32_t lane = 0; lane < 32; ++lane) __builtin_memcpy(cells[lane] + 4, &votes, 4);
}

inline uint32_t vote(const Site* site, uint32_t op, unsigned mask, bool predicate,
                     uint32_t* took_part) {
  Context* c = context();
  const uint8_t bit = predicate ? 1 : 0;
  auto cells = memra_warp_exchange(c, site, op, mask, &bit, 1, combine_ballot, took_part);
  uint32_t votes;
  __builtin_memcpy(&votes, cells[lane_of(c)] + 4, 4);
  return votes;
}

inline unsigned ballot(const Site* site, unsigned mask, int predicate) {
  uint32_t took_part;
  return vote(site, WARP_BALLOT, mask, predicate != 0, &took_part);
}
inline int any(const Site* site, unsigned mask, int predicate) {
  uint32_t took_part;
  return vote(site, WARP_ANY, mask, predicate != 0, &took_part) != 0;
}
inline int all(const Site* site, unsigned mask, int predicate) {
  uint32_t took_part;
  const uint32_t votes = vote(site, WARP_ALL, mask, predicate != 0, &took_part);
  return votes == took_part;
}

template <class T>
inline unsigned match_any(const Site* site, unsigned mask, T value) {
  Context* c = context();
  uint32_t took_part, same = 0;
  auto cells =
      memra_warp_exchange(c, site, WARP_MATCH_ANY, mask, &value, sizeof(T), nullptr, &took_part);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (((took_part >> lane) & 1u) && !__builtin_memcmp(cells[lane], &value, sizeof(T))) {
      same |= 1u << lane;
    }
  }
  return same;
}

template <class T>
inline unsigned match_all(const Site* site, unsigned mask, T value, int* predicate) {
  Context* c = context();
  uint32_t took_part;
  auto cells =
      memra_warp_exchange(c, site, WARP_MATCH_ALL, mask, &value, sizeof(T), nullptr, &took_part);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (((took_part >> lane) & 1u) && __builtin_memcmp(cells[lane], &value, sizeof(T))) {
      *predicate = 0;
      return 0;
    }
  }
  *predicate = 1;
  return took_part;
}

template <class T, class F>
inline T reduce(const Site* site, unsigned mask, T value, F fold) {
  Context* c = context();
  uint32_t took_part;
  auto cells =
      memra_warp_exchange(c, site, WARP_REDUCE, mask, &value, sizeof(T), nullptr, &took_part);
  T result{};
  bool first = true;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!((took_part >> lane) & 1u)) continue;
    T other;
    __builtin_memcpy(&other, cells[lane], sizeof(T));
    result = first ? other : fold(result, other);
    first = false;
  }
  return result;
}

inline void sync_warp(const Site* site, unsigned mask = 0xffffffffu) {
  Context* c = context();
  uint32_t took_part;
  memra_warp_exchange(c, site, WARP_SYNC, mask, nullptr, 0, nullptr, &took_part);
}

inline void spin(Context* c) {
  // A loop of atomics that never ends must let the threads it waits for run.
#if defined(MEMRA_CHECK)
  const uint32_t left = raw_load(&c->spin_budget);
  raw_store(&c->spin_budget, left - 1);
#else
  const uint32_t left = c->spin_budget--;
#endif
  if (__builtin_expect(left == 0, 0)) memra_yield(c);
}

template <class T>
struct Same {
  typedef T type;
};
// Values convert to the type that the pointer names, as with CUDA's overloads.
template <class T>
using same_t = typename Same<T>::type;

template <size_t N>
struct Bits;
template <>
struct Bits<2> {
  typedef uint16_t type;
};
template <>
struct Bits<4> {
  typedef uint32_t type;
};
template <>
struct Bits<8> {
  typedef uint64_t type;
};

template <class T, class F>
inline T atomic_update(T* at, F next) {
  typedef typename Bits<sizeof(T)>::type B;
  spin(context());
  B* bits = reinterpret_cast<B*>(at);
#if defined(MEMRA_CHECK)
  // One worker, and no switch in between: plain steps are atomic.
  memra_atomic(context(), at, sizeof(T));
  const T before = bit_cast<T>(raw_load(bits));
  raw_store(bits, bit_cast<B>(T(next(before))));
  return before;
#else
  B old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    const B fresh = bit_cast<B>(T(next(bit_cast<T>(old))));
    if (__atomic_compare_exchange_n(bits, &old, fresh, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      return bit_cast<T>(old);
    }
  }
#endif
}

}  // namespace memra

#define __syncthreads() \
  ((void)memra_sync_threads(memra::context(), MEMRA_SITE, memra::BARRIER_PLAIN, 0))
#define __syncthreads_count(p) \
  memra_sync_threads(memra::context(), MEMRA_SITE, memra::BARRIER_COUNT, (p) != 0)
#define __syncthreads_and(p) \
  memra_sync_threads(memra::context(), MEMRA_SITE, memra::BARRIER_AND, (p) != 0)
#define __syncthreads_or(p) \
  memra_sync_threads(memra::context(), MEMRA_SITE, memra::BARRIER_OR, (p) != 0)
#define __syncwarp(...) memra::sync_warp(MEMRA_SITE __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) memra::shfl(MEMRA_SITE, __VA_ARGS__)
#define __shfl_up_sync(...) memra::shfl_up(MEMRA_SITE, __VA_ARGS__)
#define __shfl_down_sync(...) memra::shfl_down(MEMRA_SITE, __VA_ARGS__)
#define __shfl_xor_sync(...) memra::shfl_xor(MEMRA_SITE, __VA_ARGS__)
#define __ballot_sync(mask, p) memra::ballot(MEMRA_SITE, mask, p)
#define __any_sync(mask, p) memra::any(MEMRA_SITE, mask, p)
#define __all_sync(mask, p) memra::all(MEMRA_SITE, mask, p)
#define __match_any_sync(mask, v) memra::match_any(MEMRA_SITE, mask, v)
#define __match_all_sync(mask, v, p) memra::match_all(MEMRA_SITE, mask, v, p)
#define MEMRA_REDUCE(mask, v, expression) \
  memra::reduce(MEMRA_SITE, mask, v, [](auto a, auto b) { return expression; })
#define __reduce_add_sync(mask, v) MEMRA_REDUCE(mask, v, a + b)
#define __reduce_min_sync(mask, v) MEMRA_REDUCE(mask, v, a < b ? a : b)
#define __reduce_max_sync(mask, v) MEMRA_REDUCE(mask, v, a < b ? b : a)
#define __reduce_and_sync(mask, v) MEMRA_REDUCE(mask, v, a & b)
#define __reduce_or_sync(mask, v) MEMRA_REDUCE(mask, v, a | b)
#define __reduce_xor_sync(mask, v) MEMRA_REDUCE(mask, v, a ^ b)
// Only the own lane is known to be active: threads run one after the other.
#define __activemask() (1u << memra::lane_of(memra::context()))
#define __threadfence() memra_fence(memra::context(), 1)
#define __threadfence_block() memra_fence(memra::context(), 0)
#define __threadfence_system() memra_fence(memra::context(), 2)
#define __nanosleep(ns) ((void)(ns), memra_yield(memra::context()))
#define __trap() \
  memra_fail(memra::context(), MEMRA_SITE, memra::FAIL_OTHER, "the kernel called __trap()")
#undef assert
#define assert(condition)                                                                      \
  ((condition) ? (void)0                                                                       \
               : memra_fail(memra::context(), MEMRA_SITE, memra::FAIL_OTHER,                   \
                            "the assertion does not hold: " #condition))

template <class T>
inline T atomicAdd(T* at, memra::same_t<T> v) {
  return memra::atomic_update(at, [v](T old) { return T(old + v); });
}
template <class T>
inline T atomicSub(T* at, memra::same_t<T> v) {
  return memra::atomic_update(at, [v](T old) { return T(old - v); });
}
template <class T>
inline T atomicMax(T* at, memra::same_t<T> v) {
  return memra::atomic_update(at, [v](T old) { return old < v ? v : old; });
}
template <class T>
inline T atomicMin(T* at, memra::same_t<T> v) {
  return memra::atomic_update(at, [v](T old) { return v < old ? v : old; });
}
template <class T>
inline T atomicAnd(T* at, memra::same_t<T> v) {
  return memra::atomic_update(at, [v](T old) { return T(old & v); });
}
template <class T>
inline T atomicOr(T* at, memra::same_t<T> v) {
  return memra::atomic_update(at, [v](T old) { return T(old | v); });
}
template <class T>
inline T atomicXor(T* at, memra::same_t<T> v) {
  return memra::atomic_update(at, [v](T old) { return T(old ^ v); });
}
template <class T>
inline T atomicExch(T* at, memra::same_t<T> v) {
  return memra::atomic_update(at, [v](T) { return v; });
}
template <class T>
inline T atomicCAS(T* at, memra::same_t<T> expected, memra::same_t<T> v) {
  return memra::atomic_update(at, [expected, v](T old) { return old == expected ? v : old; });
}
inline unsigned atomicInc(unsigned* at, unsigned limit) {
  return memra::atomic_update(at, [limit](unsigned old) { return old >= limit ? 0u : old + 1u; });
}
inline unsigned atomicDec(unsigned* at, unsigned limit) {
  return memra::atomic_update(
      at, [limit](unsigned old) { return old == 0u || old > limit ? limit : old - 1u; });
}
