// Check mode: races, uninitialised reads, exact bounds.
//
// Kernels are compiled with -fsanitize=thread, but the hooks below stand in for the sanitiser's own
// library. Every word of device and shared memory has a shadow: its last write and up to three reads
// that matter, each stamped with (block, time, thread). A word that is touched byte by byte gets one
// shadow per byte. `time` advances at every synchronisation of the block, so "before the last
// barrier" is one comparison:
//
//   same block    ordered if the stamp is older than the last barrier, or than the last __syncwarp
//                 that joined both lanes
//   other block   ordered only through atomics: a fence before an atomic publishes what happened
//                 before the fence; a fence after an atomic that read it takes that over; barriers
//                 and __syncwarp pass both on within the block
//   other launch  ordered
//
// Blocks run one after the other on one worker, so the verdict does not depend on timing.
#include <sys/mman.h>

#include <map>
#include <unordered_map>

#include "rt.h"

namespace memra {

// ---- stamps --------------------------------------------------------------------------------------
// block 24 | time 27 | thread 10 | flags 3

enum Flag : uint64_t { PLAIN = 0, ATOMIC_LOAD = 1, ATOMIC_WRITE = 2, IN_FLIGHT = 3, SPLIT = 4 };

constexpr uint32_t MAX_SEQUENCE = (1u << 24) - 1;

inline uint32_t block_of(uint64_t s) { return uint32_t(s >> 40); }
inline uint32_t time_of(uint64_t s) { return uint32_t(s >> 13) & ((1u << 27) - 1); }
inline uint32_t thread_of(uint64_t s) { return uint32_t(s >> 3) & 1023; }
inline uint64_t flags_of(uint64_t s) { return s & 7; }

// reads[0] is the newest, reads[1] one of the same block but (if possible) of another warp, reads[2]
// one of another block; `lanes` are all that read in the warp of the newest, none before
// `lanes_time`. Atomic writes are kept among the reads too: several threads may make them without
// order among each other.
struct Cell {
  uint64_t write;
  uint64_t reads[3];
  uint32_t write_pc, read_pcs[3];
  uint32_t lanes, lanes_time;
};
static_assert(sizeof(Cell) == 56);

enum Mark : uint8_t { FINE = 0, UNINITIALISED = 1, FORBIDDEN = 2 };  // one per byte of memory

// ---- what a thread knows of others through atomics ------------------------------------------------

struct Known {
  std::vector<std::pair<uint32_t, uint32_t>> upto;  // sync object, length of its log

  void add(uint32_t object, uint32_t length) {
    for (auto& [o, n] : upto) {
      if (o == object) {
        if (length > n) n = length;
        return;
      }
    }
    upto.push_back({object, length});
  }
  void add(const Known& other) {
    for (const auto& [o, n] : other.upto) add(o, n);
  }
};

typedef std::shared_ptr<const std::vector<uint32_t>> Times;

struct Fence {
  uint32_t barrier_time = 0;
  uint32_t lanes[32] = {};  // what is known of the lanes of the own warp
  Known known;
  bool device_wide = false;
};

struct Token {
  uint32_t block, thread;
  uint32_t barrier_time;
  uint32_t lanes[32];
  bool device_wide;
  Times performed;          // last fence of each thread, as of the last barrier
};

struct SyncObject {
  std::vector<Token> log;
  std::unordered_map<uint32_t, std::vector<uint32_t>> by_block;
  Known inherited;
};

struct Checker {
  Worker* w = nullptr;
  uint8_t* module = nullptr;
  size_t module_bytes = 0;
  uint32_t sequence = 0, launch_first = 1;
  uint32_t time = 1, barrier_time = 0;
  uint32_t start[MAX_THREADS];
  uint32_t warp_time[32];
  uint32_t lanes[MAX_THREADS][32];
  uint32_t split_warps = 0;           // warps whose `lanes` are in use

  std::vector<SyncObject> objects;
  std::unordered_map<uintptr_t, uint32_t> object_at;
  std::unordered_map<uint32_t, Known> known, pending;  // by thread
  Known block_known, block_pending;
  std::unordered_map<uint32_t, Fence> fences;
  std::vector<uint32_t> fence_times;
  bool fenced = false;
  Times performed;

  // Shadow of static shared memory (as much of the module as holds it) and of dynamic shared memory.
  uintptr_t static_begin = 0, dynamic_begin = 0;
  size_t static_bytes = 0, dynamic_bytes = 0;
  std::vector<Cell> static_cells, dynamic_cells;
  std::vector<uint8_t> static_marks, static_fresh, dynamic_marks;

  std::vector<Cell> split_cells;      // four per split word
};

namespace {

Checker* checking = nullptr;          // while a checked launch runs
Checker* the_checker = nullptr;
Cell* device_cells = nullptr;
uint8_t* device_marks = nullptr;
bool marks_present = false;

void* reserve_shadow(size_t n) {
  void* at = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  madvise(at, n, MADV_NOHUGEPAGE);
  madvise(at, n, MADV_DONTDUMP);
  return at;
}

bool enable() {
  if (device_cells) return true;
  if (!reserve()) return false;
  device_marks = static_cast<uint8_t*>(reserve_shadow(arena_bytes));
  Cell* cells = static_cast<Cell*>(reserve_shadow(arena_bytes / 4 * sizeof(Cell)));
  if (!device_marks || !cells) return false;
  the_checker = new Checker();
  device_cells = cells;
  return true;
}

// ---- order ---------------------------------------------------------------------------------------

bool covers(const Token& t, uint64_t stamp, uint32_t current_block) {
  if (t.block != block_of(stamp)) return false;
  const uint32_t thread = thread_of(stamp), time = time_of(stamp);
  if ((t.device_wide || t.block == current_block)) {
    if (time < t.barrier_time) return true;
    if ((thread >> 5) == (t.thread >> 5) && time < t.lanes[thread & 31]) return true;
  }
  return t.performed && time < (*t.performed)[thread];
}

bool covers(Checker& c, const Known& known, uint64_t stamp) {
  for (const auto& [object, length] : known.upto) {
    const SyncObject& o = c.objects[object];
    auto found = o.by_block.find(block_of(stamp));
    if (found == o.by_block.end()) continue;
    for (uint32_t i : found->second) {
      if (i < length && covers(o.log[i], stamp, c.sequence)) return true;
    }
  }
  return false;
}

inline uint32_t now_of(const Checker& c, uint32_t thread) {
  return c.start[thread] > c.barrier_time ? c.start[thread] : c.barrier_time;
}

inline uint32_t lane_time(const Checker& c, uint32_t me, uint32_t lane) {
  const uint32_t warp = me >> 5;
  uint32_t time = c.warp_time[warp];
  if ((c.split_warps >> warp) & 1 && c.lanes[me][lane] > time) time = c.lanes[me][lane];
  return time;
}

template <bool SHARED>
inline bool ordered(Checker& c, uint64_t stamp, uint32_t me) {
  const uint32_t block = block_of(stamp);
  if (SHARED ? block != c.sequence : block < c.launch_first) return true;
  if (block == c.sequence) {
    const uint32_t thread = thread_of(stamp), time = time_of(stamp);
    if (thread == me || time < c.barrier_time) return true;
    if ((thread >> 5) == (me >> 5) && time < lane_time(c, me, thread & 31)) return true;
  }
  if (c.objects.empty()) return false;
  auto mine = c.known.find(me);
  return (mine != c.known.end() && covers(c, mine->second, stamp)) ||
         covers(c, c.block_known, stamp);
}

// ---- reports -------------------------------------------------------------------------------------

struct Access {
  uintptr_t at;
  uint32_t n_bytes;
  bool is_write;
  uint64_t flags;
  uintptr_t pc;
  const Site* site = nullptr;
  bool reads = !is_write;
};

void block_index(const LaunchState& launch, uint64_t block, uint32_t* out) {
  out[0] = uint32_t(block % launch.grid[0]);
  out[1] = uint32_t(block / launch.grid[0] % launch.grid[1]);
  out[2] = uint32_t(block / launch.grid[0] / launch.grid[1]);
}

std::vector<uint64_t> blocks_run;  // grid index by sequence - launch_first

std::string where(const Checker& c, uintptr_t at) {
  if (at - c.static_begin < c.static_bytes) {
    const uint64_t offset = at - reinterpret_cast<uintptr_t>(c.module);
    const SharedArray* before = nullptr;
    for (const SharedArray& s : c.w->launch->function->shared) {
      if (offset >= s.offset && (!before || s.offset > before->offset)) before = &s;
    }
    if (!before) return "static shared memory of another kernel";
    return "offset " + std::to_string(offset - before->offset) + " of the shared array " +
           before->name + " of " + std::to_string(before->n_bytes) + " bytes";
  }
  return describe_address(*c.w, at);
}

const char* verb(const Access& a) {
  switch (a.flags) {
    case ATOMIC_LOAD: return "volatile read";
    case ATOMIC_WRITE: return "atomic operation";
    case IN_FLIGHT: return "asynchronous copy";
    default: return a.is_write ? "write" : "read";
  }
}

[[noreturn]] void report(Checker& c, int kind, const Access& a, const std::string& message,
                         uint64_t other = 0, uint32_t other_pc = 0) {
  Worker& w = *c.w;
  Failure& f = w.failure;
  memset(&f, 0, sizeof f);
  snprintf(f.message, sizeof f.message, "%s", message.c_str());
  note_place(w, kind, w.current);
  f.address = a.at;
  snprintf(f.module, sizeof f.module, "%s", w.launch->function->module->path.c_str());
  if (a.site) {
    snprintf(f.file, sizeof f.file, "%s", a.site->file);
    f.line = a.site->line;
  } else if (a.pc) {
    f.pc = a.pc - reinterpret_cast<uintptr_t>(c.module) - 1;
  }
  if (other) {
    f.other_pc = other_pc ? other_pc - 1 : 0;
    memcpy(f.other_thread, &w.places[thread_of(other)].index, 12);
    block_index(*w.launch, blocks_run[block_of(other) - c.launch_first], f.other_block);
  }
  leave_block(w);
}

[[noreturn]] void report_race(Checker& c, const Access& a, uint64_t other, uint32_t other_pc,
                              bool other_is_write) {
  const uint32_t me = c.w->current;
  const bool same_block = block_of(other) == c.sequence;
  const Access theirs = {a.at, a.n_bytes, other_is_write, flags_of(other), 0, nullptr};
  uint32_t at[3];
  block_index(*c.w->launch, blocks_run[block_of(other) - c.launch_first], at);
  std::string message = "data race at " + where(c, a.at) + ": this " + verb(a) + " and an earlier " +
                        verb(theirs) + " by thread " + thread_name(*c.w, thread_of(other));
  if (!same_block) {
    char block[64];
    snprintf(block, sizeof block, " of block (%u, %u, %u)", at[0], at[1], at[2]);
    message += block;
  }
  if (flags_of(other) == IN_FLIGHT) {
    message += " that nobody waited for: wait for the copy, then a barrier";
  } else if (same_block) {
    message += " are ordered by no barrier";
  } else {
    message += " are not ordered: blocks order only through __threadfence() and an atomic";
    auto mine = c.pending.find(me);
    if ((mine != c.pending.end() && covers(c, mine->second, other)) ||
        covers(c, c.block_pending, other)) {
      message += " (here a __threadfence() after the atomic is missing)";
    }
  }
  report(c, FAIL_RACE, a, message, other, other_pc);
}

// ---- one access ----------------------------------------------------------------------------------

inline bool both_atomic(uint64_t flags, uint64_t other) {
  return (flags == ATOMIC_LOAD || flags == ATOMIC_WRITE) &&
         (flags_of(other) == ATOMIC_LOAD || flags_of(other) == ATOMIC_WRITE);
}

template <bool SHARED>
inline bool conflicts(Checker& c, uint64_t other, uint64_t flags, uint32_t me) {
  if (!other) return false;
  if (MEMRA_UNLIKELY(flags_of(other) == IN_FLIGHT)) {
    return SHARED ? block_of(other) == c.sequence : block_of(other) >= c.launch_first;
  }
  return !ordered<SHARED>(c, other, me) && !both_atomic(flags, other);
}

template <bool SHARED>
inline void add_read(Checker& c, Cell& cell, uint64_t stamp, uint32_t pc) {
  const uint64_t newest = cell.reads[0];
  const uint32_t bit = 1u << (thread_of(stamp) & 31), time = time_of(stamp);
  if (newest >> 40 == stamp >> 40 && ((newest ^ stamp) & 0x1f00) == 0 &&
      cell.lanes_time >= c.warp_time[thread_of(stamp) >> 5] && cell.lanes_time >= c.barrier_time) {
    cell.lanes |= bit;
  } else {
    cell.lanes = bit;
    cell.lanes_time = time;
  }
  constexpr uint64_t WHO = (uint64_t(MAX_SEQUENCE) << 40) | (1023u << 3);
  if (newest && (newest ^ stamp) & WHO) {
    if (block_of(newest) != block_of(stamp)) {
      if (!SHARED && block_of(newest) >= c.launch_first) {
        cell.reads[2] = newest;
        cell.read_pcs[2] = cell.read_pcs[0];
      }
      cell.reads[1] = 0;
    } else {
      const bool other_warp = ((newest ^ stamp) >> 8) & 31;
      if (other_warp || block_of(cell.reads[1]) != c.sequence ||
          time_of(cell.reads[1]) < c.barrier_time) {
        cell.reads[1] = newest;
        cell.read_pcs[1] = cell.read_pcs[0];
      }
    }
  }
  cell.reads[0] = stamp;
  cell.read_pcs[0] = pc;
}

template <bool SHARED>
inline void touch(Checker& c, Cell& cell, const Access& a, uint64_t stamp, uint32_t pc) {
  const uint32_t me = thread_of(stamp);
  if (a.is_write && cell.write == stamp && !cell.reads[0] && !a.flags) return;
  if (MEMRA_UNLIKELY(conflicts<SHARED>(c, cell.write, a.flags, me))) {
    report_race(c, a, cell.write, cell.write_pc, true);
  }
  for (int i = 0; i < 3; ++i) {
    const uint64_t other = cell.reads[i];
    if (!a.is_write && flags_of(other) != ATOMIC_WRITE) continue;
    if (MEMRA_UNLIKELY(conflicts<SHARED>(c, other, a.flags, me))) {
      report_race(c, a, other, cell.read_pcs[i], flags_of(other) == ATOMIC_WRITE);
    }
  }
  if (a.is_write && !a.flags && cell.lanes) {
    const uint64_t newest = cell.reads[0];
    if (newest >> 40 == stamp >> 40 && ((newest ^ stamp) & 0x1f00) == 0) {
      for (uint32_t rest = cell.lanes & ~(1u << (me & 31)); rest; rest &= rest - 1) {
        const uint32_t lane = uint32_t(__builtin_ctz(rest));
        if (cell.lanes_time < lane_time(c, me, lane) || cell.lanes_time < c.barrier_time) continue;
        const uint64_t other = (uint64_t(c.sequence) << 40) | (uint64_t(cell.lanes_time) << 13) |
                               (uint64_t((me & ~31u) | lane) << 3);
        if (!ordered<SHARED>(c, other, me)) report_race(c, a, other, cell.read_pcs[0], false);
      }
    }
    cell.lanes = 0;
  }
  if (!a.is_write || a.flags == ATOMIC_WRITE) add_read<SHARED>(c, cell, stamp, pc);
  if (a.is_write) {
    cell.write = stamp;
    cell.write_pc = pc;
    if (a.flags != ATOMIC_WRITE) cell.reads[0] = cell.reads[1] = cell.reads[2] = 0;
  }
}

// The four byte cells of a word; made on the first access to a part of it in this launch.
inline uint64_t split_stamp(const Checker& c, size_t index) {
  return (uint64_t(c.launch_first) << 40) | (uint64_t(index) << 3) | SPLIT;
}

inline Cell* byte_cells(Checker& c, Cell& cell, bool make) {
  if (flags_of(cell.write) == SPLIT) {
    if (block_of(cell.write) == c.launch_first) {
      return &c.split_cells[(cell.write >> 3) & ((uint64_t(1) << 37) - 1)];
    }
    memset(&cell, 0, sizeof cell);
  }
  if (!make) return nullptr;
  const size_t index = c.split_cells.size();
  for (int i = 0; i < 4; ++i) c.split_cells.push_back(cell);
  cell.write = split_stamp(c, index);
  return &c.split_cells[index];
}

template <bool SHARED>
inline void touch_range(Checker& c, Cell* cells, const Access& a, size_t offset) {
  const uint32_t me = c.w->current;
  const uint64_t stamp = (uint64_t(c.sequence) << 40) | (uint64_t(now_of(c, me)) << 13) |
                         (uint64_t(me) << 3) | a.flags;
  const uint32_t pc = a.pc ? uint32_t(a.pc - reinterpret_cast<uintptr_t>(c.module)) : 0;
  size_t at = offset;
  const size_t end = offset + a.n_bytes;
  while (at < end) {
    Cell& cell = cells[at >> 2];
    const size_t stop = std::min(end, (at | 3) + 1);
    const bool whole = stop - at == 4;
    if (Cell* bytes = byte_cells(c, cell, !whole)) {
      for (size_t i = at; i < stop; ++i) touch<SHARED>(c, bytes[i & 3], a, stamp, pc);
    } else {
      touch<SHARED>(c, cell, a, stamp, pc);
    }
    at = stop;
  }
}

// Bounds and initialisation. A write makes its bytes good.
inline void look_at_marks(Checker& c, uint8_t* marks, const Access& a) {
  if (a.n_bytes == 4) {
    uint32_t all;
    memcpy(&all, marks, 4);
    if (MEMRA_LIKELY(all == 0)) return;
  }
  for (uint32_t i = 0; i < a.n_bytes; ++i) {
    if (MEMRA_LIKELY(marks[i] == FINE)) continue;
    Access byte = a;
    byte.at += i;
    if (marks[i] == FORBIDDEN) {
      report(c, FAIL_BOUNDS, byte, std::string(verb(a)) + " out of bounds: " + where(c, byte.at));
    }
    if (a.reads) {
      report(c, FAIL_UNINITIALISED, byte,
             std::string(verb(a)) + " of memory that nobody wrote: " + where(c, byte.at));
    }
    marks[i] = FINE;
  }
}

// An allocation of which the launch was given some parts, and an access beside all of them.
void look_at_fences(Checker& c, const std::vector<LaunchPart>& parts, const Access& a) {
  const LaunchPart* nearest = nullptr;
  uint64_t distance = ~uint64_t(0);
  for (const LaunchPart& f : parts) {
    if (a.at - f.block >= f.block_bytes) continue;
    if (a.at >= f.begin && a.at + a.n_bytes <= f.end) return;
    const uint64_t away = a.at < f.begin ? f.begin - a.at : a.at + a.n_bytes - f.end;
    if (away < distance) distance = away, nearest = &f;
  }
  if (!nearest) return;
  char text[256];
  snprintf(text, sizeof text,
           " outside the view: %llu bytes %s the %llu bytes of it, parameter %llu, in a buffer of "
           "%llu bytes at 0x%llx",
           (unsigned long long)distance, a.at < nearest->begin ? "before" : "past",
           (unsigned long long)(nearest->end - nearest->begin),
           (unsigned long long)nearest->parameter, (unsigned long long)nearest->block_bytes,
           (unsigned long long)nearest->block);
  report(c, FAIL_BOUNDS, a, verb(a) + std::string(text));
}

void check_access(Checker& c, const Access& a) {
  const uintptr_t at = a.at;
  Worker& w = *c.w;
  if (MEMRA_LIKELY(at - arena_begin < arena_bytes)) {
    const size_t offset = at - arena_begin;
    if (MEMRA_UNLIKELY(offset + a.n_bytes > arena_bytes)) return;
    if (MEMRA_UNLIKELY(!w.launch->parts.empty())) look_at_fences(c, w.launch->parts, a);
    look_at_marks(c, device_marks + offset, a);
    touch_range<false>(c, device_cells, a, offset);
    return;
  }
  if (at - c.static_begin < c.static_bytes) {
    const size_t offset = at - c.static_begin;
    if (MEMRA_LIKELY(offset + a.n_bytes <= c.static_bytes)) {
      look_at_marks(c, c.static_marks.data() + offset, a);
      touch_range<true>(c, c.static_cells.data(), a, offset);
      return;
    }
  } else if (at - c.dynamic_begin < c.dynamic_bytes) {
    const size_t offset = at - c.dynamic_begin;
    if (MEMRA_LIKELY(offset + a.n_bytes <= c.dynamic_bytes)) {
      look_at_marks(c, c.dynamic_marks.data() + offset, a);
      touch_range<true>(c, c.dynamic_cells.data(), a, offset);
      return;
    }
  } else if (at - reinterpret_cast<uintptr_t>(w.stacks) < MAX_THREADS * w.stack_bytes) {
    return;  // a local variable
  } else if (at - reinterpret_cast<uintptr_t>(w.slots) < MAX_SLOTS * sizeof(WarpSlot)) {
    return;  // what lanes exchange
  } else if (at - reinterpret_cast<uintptr_t>(c.module) < c.module_bytes &&
             (!a.is_write || at - c.static_begin >= c.static_bytes)) {
    return;  // tables of constants
  }
  report(c, FAIL_BOUNDS, a, std::string(verb(a)) + " out of bounds: " + where(c, at));
}

inline void hook(uintptr_t at, uint32_t n_bytes, bool is_write, uint64_t flags, void* pc) {
  Checker* c = checking;
  if (MEMRA_UNLIKELY(!c)) return;
  check_access(*c, Access{at, n_bytes, is_write, flags, reinterpret_cast<uintptr_t>(pc)});
}

}  // namespace

}  // namespace memra
