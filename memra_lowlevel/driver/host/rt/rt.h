// Inside of the host runtime: workers, fibers, launches. See memra_abi.h for what kernels see.
//
// A launch runs block after block on each worker. The threads of a block are fibers, but a thread
// that never waits never costs one: a fiber runs unstarted threads one after the other, and only a
// thread that blocks leaves its stack behind. A blocked thread switches straight to the next thread
// that can run; there is no scheduler loop.
#pragma once
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "memra_abi.h"

#define MEMRA_EXPORT extern "C" __attribute__((visibility("default")))
#define MEMRA_LIKELY(x) __builtin_expect(!!(x), 1)
#define MEMRA_UNLIKELY(x) __builtin_expect(!!(x), 0)

namespace memra {

constexpr uint32_t MAX_THREADS = 1024;
constexpr uint32_t MAX_SHARED_BYTES = 227 * 1024;
constexpr size_t PAGE = 4096;
constexpr uint32_t MAX_SLOTS = 4096;  // masks that warps of a block wait under at one time
constexpr uint8_t POISON = 0xff;
constexpr int OVERDUE_SIGNAL = SIGURG;  // does nothing where nobody waits for it

enum Order : uint32_t { ORDER_FORWARD, ORDER_REVERSE, ORDER_RANDOM };

// What a failed launch says; read by Python, so plain data of fixed size.
struct Failure {
  int32_t kind;
  int32_t line;
  uint32_t block[3];
  uint32_t thread[3];
  char message[1024];
  char kernel[256];
  char file[512];
  char module[512];      // the file of machine code that `pc` and `other_pc` point into
  uint64_t pc, other_pc;  // offsets; 0 where unknown
  uint32_t other_block[3];
  uint32_t other_thread[3];
  uint64_t address;
};

struct Range {
  uint8_t* begin;
  size_t n_bytes;
};

struct ModuleCopy {
  void* library = nullptr;
  const ModuleTable* table = nullptr;
  uint8_t* base = nullptr;                    // load address
  size_t n_bytes = 0;
};

struct Module;

struct SharedArray {
  uint64_t offset, n_bytes;  // offset into the module
  std::string name;
};

struct Function {
  Module* module;
  uint32_t index;
  std::string name;
  std::vector<SharedArray> shared;  // its __shared__ arrays
  uint64_t shared_bytes = 0;
};

struct Module {
  std::string path;
  uint32_t flags = 0;
  std::vector<ModuleCopy> copies;            // one per worker
  std::vector<std::unique_ptr<Function>> functions;
  std::string device_global;                 // a writable variable at file scope, if there is one
  uint64_t shared_low = 0, shared_high = 0;  // offsets that hold every __shared__ array
};

// 1024 bits with a summary word: find-next is two or three instructions.
struct ThreadSet {
  uint64_t words[MAX_THREADS / 64];
  uint32_t summary;

  void clear() { memset(this, 0, sizeof(*this)); }
  void set(uint32_t i) {
    words[i >> 6] |= uint64_t(1) << (i & 63);
    summary |= 1u << (i >> 6);
  }
  void reset(uint32_t i) {
    uint64_t& word = words[i >> 6];
    word &= ~(uint64_t(1) << (i & 63));
    if (!word) summary &= ~(1u << (i >> 6));
  }
  bool has(uint32_t i) const { return (words[i >> 6] >> (i & 63)) & 1; }
  bool empty() const { return summary == 0; }
  int from(uint32_t i) const {  // the first member at or after i, going round
    uint32_t w = i >> 6;
    if (const uint64_t here = words[w] >> (i & 63)) return int(i + uint32_t(__builtin_ctzll(here)));
    const uint32_t after = w == 15 ? 0 : summary & ~((2u << w) - 1u);
    if (after) w = uint32_t(__builtin_ctz(after));
    else if (summary) w = uint32_t(__builtin_ctz(summary));
    else return -1;
    return int(w * 64 + uint32_t(__builtin_ctzll(words[w])));
  }
  int upto(uint32_t i) const {  // the last member at or before i, going round
    uint32_t w = i >> 6;
    const uint64_t here = words[w] << (63 - (i & 63));
    if (here) return int(i - uint32_t(__builtin_clzll(here)));
    const uint32_t before = summary & ((1u << w) - 1u);
    if (before) w = 31u - uint32_t(__builtin_clz(before));
    else if (summary) w = 31u - uint32_t(__builtin_clz(summary));
    else return -1;
    return int(w * 64 + 63 - uint32_t(__builtin_clzll(words[w])));
  }
};

enum WaitKind : uint8_t { RUNS, WAITS_BARRIER, WAITS_WARP, YIELDED, UNSTARTED, EXITED };

struct PendingCopy {
  uint8_t* dst;
  const uint8_t* src;
  uint32_t n_bytes, n_valid;
  uint32_t group;
  Site site;
};

struct Thread {
  void* sp;              // saved stack pointer while blocked
  const Site* site;      // where it waits
  uint32_t fiber;
  uint32_t warp_mask;    // the mask it waits under
  WaitKind state;
};

struct AsyncCopies {
  std::vector<PendingCopy> pending;
  uint32_t group = 0;    // the group being filled
};

struct WarpSlot {
  uint32_t mask, arrived, unread, op, phase;
  uint32_t took_part[2];
  const Site* site;
  WarpCombine combine;
  alignas(32) uint8_t cells[2][32][32];
};

struct WarpState {
  std::vector<WarpSlot*> slots;
  uint32_t exited = 0;   // lanes that are gone
};

struct Checker;
struct LaunchState;

struct Worker {
  Context context;       // first: kernels hand its address back
  LaunchState* launch = nullptr;
  const ModuleCopy* copy = nullptr;
  Checker* check = nullptr;

  uint32_t n_threads = 0, n_started = 0, n_exited = 0, current = 0;
  Order order = ORDER_FORWARD;
  uint64_t random = 1;
  void (*call)(void**) = nullptr;
  void** params = nullptr;

  // block barrier
  uint32_t arrived = 0;
  uint32_t barrier_op = 0;
  int barrier_votes = 0, barrier_result = 0;
  const Site* barrier_site = nullptr;
  uint32_t barrier_first = 0;
  uint64_t progress = 0, seen_progress = 0;
  uint32_t idle_yields = 0;

  ThreadSet ready;
  ThreadSet at_barrier;
  Thread threads[MAX_THREADS];
  struct alignas(16) Place {
    Index3 index;
    uint32_t linear;
  } places[MAX_THREADS];
  uint16_t sequence[MAX_THREADS];  // in which order threads start
  uint32_t sequence_for = 0;
  uint32_t placed_x = 0, placed_y = 0, placed_z = 0;
  WarpState warps[MAX_THREADS / 32];
  std::vector<WarpSlot*> spare_slots;
  WarpSlot* slots = nullptr;       // MAX_SLOTS of them, mapped as they are used
  uint32_t n_slots = 0;
  AsyncCopies async[MAX_THREADS];
  bool async_used = false;

  void* main_sp = nullptr;
  const void* main_bottom = nullptr;  // for ASan
  size_t main_bytes = 0;
  uint8_t* stacks = nullptr;       // MAX_THREADS stacks, each above its guard page
  size_t stack_bytes = 0;
  uint32_t n_fibers = 0, n_spare = 0;
  uint32_t spare[MAX_THREADS];

  uint8_t* shared_base = nullptr;  // dynamic shared memory ends at a guard page
  size_t shared_mapped = 0;

  Failure failure;
  volatile sig_atomic_t faulted = 0;  // set by the signal handler
  int fault_signal = 0;
  uintptr_t fault_registers[32];      // as the machine's instructions number them
  uintptr_t fault_address = 0, fault_pc = 0;
  uintptr_t fault_sp = 0;
  bool fault_is_write = false, fault_has_address = false;
  uint64_t failed_at = 0;
  uintptr_t fail_pc = 0;  // where the kernel called the runtime, for a failure without a site
  uint32_t ordinal = 0;
  pthread_t os_thread;                // while it runs blocks
  std::atomic<bool> runs{false};

  Worker(uint32_t ordinal);
  Worker(const Worker&) = delete;
};

// A part of an allocation that a launch was given; the rest of the allocation is closed to it.
struct LaunchPart {
  uint64_t block, block_bytes, begin, end, parameter;
};

struct LaunchState {
  Function* function;
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  void** params;
  Order order;
  uint64_t seed;
  uint64_t n_blocks;
  bool strict, check;
  double seconds;                        // limit of time; 0 is none
  std::atomic<uint64_t> next_block{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> overdue{false};
  std::vector<LaunchPart> parts;         // check mode
  uint64_t order_a = 1, order_b = 0;     // block i of the random order is (a * i + b) mod n
};

// failures.cpp
[[noreturn]] void fail(Worker& w, int kind, const Site* site, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
[[noreturn]] void leave_block(Worker& w);
void note_place(Worker& w, int kind, uint32_t thread);
std::string place_of(const Site* site);
std::string thread_name(const Worker& w, uint32_t thread);
void describe_waits(Worker& w, std::string& out);

// block.cpp
void begin_launch(Worker& w, LaunchState& launch, const ModuleCopy& copy);
bool run_block(Worker& w, const ModuleCopy& copy, uint64_t block);

// check.cpp
bool check_launch(Worker& w, const ModuleCopy& copy);
void check_block(Worker& w, uint64_t block);
void check_barrier(Worker& w);
void check_warp(Worker& w, uint32_t warp, uint32_t lanes);
void check_launch_done(Worker& w);
void check_copy_issued(Worker& w, const Site* site, void* dst, const void* src, uint32_t n_bytes,
                       uint32_t n_valid);
void check_copy_done(Worker& w, const PendingCopy& copy);
void check_allocated(uintptr_t begin, size_t n_bytes, uintptr_t map_begin, size_t map_bytes);
void check_freed(uintptr_t map_begin, size_t map_bytes);
void note_untracked_launch();

void guard_fiber(Worker& w, uint32_t fiber);

// memory.cpp
struct Allocation {
  uintptr_t begin;
  size_t n_bytes;
  uintptr_t map_begin;
  size_t map_bytes;
  uint64_t serial;
  bool freed;
};
bool find_allocation(uintptr_t at, Allocation* found);
bool buffer_at(uintptr_t at, Allocation* found);
extern uintptr_t arena_begin;
extern size_t arena_bytes;

// faults.cpp
void install_fault_handler();
void install_overdue_handler();
void enter_thread_for_faults();
void register_worker(Worker* w);
Worker* worker_of(uintptr_t sp);
void note_pc(Worker& w, uintptr_t pc);
void translate_fault(Worker& w);

// addresses.cpp
std::string describe_address(const Worker& w, uintptr_t at);
std::string describe_fault_address(const Worker& w);

// module.cpp
const ModuleCopy* copy_for_worker(Module& m, uint32_t worker, std::string* error);

}  // namespace memra
