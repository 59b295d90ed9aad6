// What a compiled kernel file and the host runtime share: the per-worker context that kernels read,
// the table of kernels a file exports, and the entry points of the runtime. Plain data and C names,
// because both sides are built at different times; ABI_VERSION guards the layout.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace memra {

constexpr uint32_t ABI_VERSION = 2;

struct Index3 {
  uint32_t x, y, z;
};

// A place in the source that threads meet at. One object per textual occurrence, so its address is
// the identity of a barrier: two barriers on one line differ, while copies of one barrier that the
// compiler made (unrolling, jump threading) do not.
struct Site {
  const char* file;
  int line;
  int serial;
};

// One per worker (an OS thread that runs blocks). `thread_index` and `linear` are those of the
// running CUDA thread and change at every switch.
struct Context {
  Index3 thread_index;
  uint32_t linear;
  Index3 block_index;
  uint32_t spin_budget;
  Index3 block_dim;
  Index3 grid_dim;
  uint32_t shared_bytes;
  uint8_t* shared;
};

struct Entry {
  const char* name;              // the name expression, or the plain name of an extern "C" kernel
  void (*call)(void** params);   // reads the values and calls the kernel
  void* kernel;                  // address of the kernel itself: finds its symbol
  const uint32_t* param_sizes;
  uint32_t n_params;
  uint32_t max_threads;          // of a block; 0: as many as there may be
};

enum ModuleFlags : uint32_t { MODULE_CHECK = 1, MODULE_ASAN = 2, MODULE_UBSAN = 4 };

struct ModuleTable {
  uint32_t abi_version;
  uint32_t flags;
  Context** context;             // where the file keeps its pointer to the running context
  const Entry* entries;
  uint32_t n_entries;
};

// Last arrival at a warp operation: may rewrite the 32-byte cells of the lanes in `mask`.
typedef void (*WarpCombine)(uint8_t (*cells)[32], uint32_t mask);

enum WarpOp : uint32_t {
  WARP_SYNC, WARP_SHFL, WARP_SHFL_UP, WARP_SHFL_DOWN, WARP_SHFL_XOR, WARP_BALLOT, WARP_ANY,
  WARP_ALL, WARP_UNI, WARP_MATCH_ANY, WARP_MATCH_ALL, WARP_REDUCE, WARP_MMA, WARP_LDMATRIX
};

enum BarrierOp : uint32_t { BARRIER_PLAIN, BARRIER_COUNT, BARRIER_AND, BARRIER_OR };

enum FailKind : int32_t {
  FAIL_NONE = 0, FAIL_BOUNDS = 1, FAIL_RACE = 2, FAIL_DIVERGENCE = 3, FAIL_UNINITIALISED = 4,
  FAIL_DEADLOCK = 5, FAIL_OTHER = 6, FAIL_LIMIT = 7, FAIL_STACK = 8
};

}  // namespace memra

extern "C" {
int memra_sync_threads(memra::Context*, const memra::Site*, uint32_t op, int predicate);
// All lanes of `mask` leave `n` bytes; returns the 32 cells of 32 bytes each, valid until this lane
// meets the same mask twice more, and the lanes that took part in `*took_part`.
uint8_t (*memra_warp_exchange(memra::Context*, const memra::Site*, uint32_t op, uint32_t mask,
                              const void* value, uint32_t n, memra::WarpCombine combine,
                              uint32_t* took_part))[32];
[[noreturn]] void memra_fail(memra::Context*, const memra::Site*, int kind, const char* message);
void memra_yield(memra::Context*);
void memra_fence(memra::Context*, uint32_t scope);
void memra_atomic(memra::Context*, void* at, uint32_t n_bytes);  // check mode: before an atomic
void memra_copy_async(memra::Context*, const char* file, int line, void* dst, const void* src,
                      uint32_t n_bytes, uint32_t n_valid);
void memra_copy_commit(memra::Context*);
void memra_copy_wait(memra::Context*, uint32_t n_pending);
}
