// Check mode, second part: what atomics, fences, barriers and the compiler's hooks do to the shadow.
#include "rt.h"

namespace memra {

namespace {

// ---- atomics and fences --------------------------------------------------------------------------

void synchronise(Checker& c, uintptr_t at, bool reads, bool writes) {
  const uint32_t me = c.w->current;
  auto fence = c.fences.find(me);
  const bool publishes = writes && (fence != c.fences.end() || c.performed);
  auto found = c.object_at.find(at & ~uintptr_t(3));
  if (found == c.object_at.end()) {
    if (!publishes) return;
    found = c.object_at.emplace(at & ~uintptr_t(3), uint32_t(c.objects.size())).first;
    c.objects.emplace_back();
  }
  const uint32_t id = found->second;
  SyncObject& o = c.objects[id];
  if (reads && !o.log.empty()) {
    Known& pending = c.pending[me];
    pending.add(id, uint32_t(o.log.size()));
    pending.add(o.inherited);
  }
  if (!publishes) return;
  Token t{};
  t.block = c.sequence;
  t.thread = me;
  if (fence != c.fences.end()) {
    t.barrier_time = fence->second.barrier_time;
    memcpy(t.lanes, fence->second.lanes, sizeof t.lanes);
    t.device_wide = fence->second.device_wide;
    o.inherited.add(fence->second.known);
  }
  t.performed = c.performed;
  o.inherited.add(c.block_known);
  std::vector<uint32_t>& mine = o.by_block[c.sequence];
  mine.push_back(uint32_t(o.log.size()));
  o.log.push_back(std::move(t));
}

void check_fence(Checker& c, uint32_t scope) {
  const uint32_t me = c.w->current;
  Fence& f = c.fences[me];
  auto pending = c.pending.find(me);
  if (pending != c.pending.end()) c.known[me].add(pending->second);
  if (!c.block_pending.upto.empty()) c.known[me].add(c.block_pending);
  f.barrier_time = c.barrier_time;
  for (uint32_t lane = 0; lane < 32; ++lane) f.lanes[lane] = lane_time(c, me, lane);
  c.start[me] = ++c.time;  // what follows is not covered by the fence
  f.lanes[me & 31] = c.time;
  f.device_wide = scope >= 1;
  f.known = Known();
  auto known = c.known.find(me);
  if (known != c.known.end()) f.known.add(known->second);
  f.known.add(c.block_known);
  if (scope >= 1) {
    if (c.fence_times.empty()) c.fence_times.assign(MAX_THREADS, 0);
    c.fence_times[me] = c.time;
    c.fenced = true;
  }
}

}  // namespace

// ---- called by the scheduler ---------------------------------------------------------------------

bool check_launch(Worker& w, const ModuleCopy& copy) {
  if (!enable()) return false;
  Checker& c = *the_checker;
  c.w = &w;
  c.module = copy.base;
  c.module_bytes = copy.n_bytes;
  if (c.sequence + w.launch->n_blocks >= MAX_SEQUENCE) {
    madvise(device_cells, arena_bytes / 4 * sizeof(Cell), MADV_DONTNEED);
    c.static_cells.clear();
    c.dynamic_cells.clear();
    c.sequence = 0;
  }
  c.launch_first = c.sequence + 1;
  blocks_run.clear();
  c.objects.clear();
  c.object_at.clear();
  c.split_cells.clear();
  const Function& f = *w.launch->function;
  const Module& m = *f.module;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(copy.base) + m.shared_low) & ~uintptr_t(15);
  c.static_begin = begin;
  c.static_bytes = m.shared_high
                       ? (reinterpret_cast<uintptr_t>(copy.base) + m.shared_high - begin + 15) & ~size_t(15)
                       : 0;
  c.static_cells.assign(c.static_bytes / 4, Cell{});
  c.static_fresh.assign(c.static_bytes, FORBIDDEN);
  for (const SharedArray& s : f.shared) {
    memset(c.static_fresh.data() + (reinterpret_cast<uintptr_t>(copy.base) + s.offset - begin),
           UNINITIALISED, s.n_bytes);
  }
  c.dynamic_begin = reinterpret_cast<uintptr_t>(w.context.shared);
  c.dynamic_bytes = (w.context.shared_bytes + 15) & ~15u;
  c.dynamic_cells.assign(c.dynamic_bytes / 4, Cell{});
  c.dynamic_marks.assign(c.dynamic_bytes, FORBIDDEN);
  w.check = &c;
  checking = &c;
  return true;
}

void check_launch_done(Worker& w) {
  w.check = nullptr;
  checking = nullptr;
}

void check_block(Worker& w, uint64_t block) {
  Checker& c = *w.check;
  ++c.sequence;
  blocks_run.push_back(block);
  c.time = 1;
  c.barrier_time = 0;
  memset(c.start, 0, w.n_threads * sizeof c.start[0]);
  memset(c.warp_time, 0, sizeof c.warp_time);
  if (c.split_warps) memset(c.lanes, 0, sizeof c.lanes);
  c.split_warps = 0;
  c.known.clear();
  c.pending.clear();
  c.block_known = c.block_pending = Known();
  c.fences.clear();
  c.fence_times.clear();
  c.fenced = false;
  c.performed.reset();
  c.static_marks = c.static_fresh;
  if (c.dynamic_bytes) memset(c.dynamic_marks.data(), UNINITIALISED, w.context.shared_bytes);
}

void check_barrier(Worker& w) {
  Checker& c = *w.check;
  c.barrier_time = ++c.time;
  for (auto& [thread, known] : c.known) c.block_known.add(known);
  for (auto& [thread, pending] : c.pending) c.block_pending.add(pending);
  c.known.clear();
  c.pending.clear();
  if (c.fenced) {
    c.performed = std::make_shared<const std::vector<uint32_t>>(c.fence_times);
    c.fenced = false;
  }
}

void check_warp(Worker& w, uint32_t warp, uint32_t members) {
  Checker& c = *w.check;
  const uint32_t time = ++c.time, first = warp * 32;
  const uint32_t n = w.n_threads - first;
  const uint32_t all = n >= 32 ? ~0u : (1u << n) - 1u;
  for (uint32_t rest = members; rest; rest &= rest - 1) c.start[first + __builtin_ctz(rest)] = time;
  if (members == all) {
    c.warp_time[warp] = time;
  } else {
    uint32_t joined[32] = {};
    c.split_warps |= 1u << warp;
    for (uint32_t rest = members; rest; rest &= rest - 1) {
      const uint32_t* row = c.lanes[first + __builtin_ctz(rest)];
      for (int i = 0; i < 32; ++i) joined[i] = std::max(joined[i], row[i]);
    }
    for (uint32_t rest = members; rest; rest &= rest - 1) joined[__builtin_ctz(rest)] = time;
    for (uint32_t rest = members; rest; rest &= rest - 1) {
      memcpy(c.lanes[first + __builtin_ctz(rest)], joined, sizeof joined);
    }
  }
  if (c.known.empty() && c.pending.empty()) return;
  Known known, pending;
  for (uint32_t rest = members; rest; rest &= rest - 1) {
    const uint32_t thread = first + uint32_t(__builtin_ctz(rest));
    if (auto it = c.known.find(thread); it != c.known.end()) known.add(it->second);
    if (auto it = c.pending.find(thread); it != c.pending.end()) pending.add(it->second);
  }
  for (uint32_t rest = members; rest; rest &= rest - 1) {
    const uint32_t thread = first + uint32_t(__builtin_ctz(rest));
    if (!known.upto.empty()) c.known[thread].add(known);
    if (!pending.upto.empty()) c.pending[thread].add(pending);
  }
}

// The source of a copy is read when it is issued and when it lands; its target belongs to nobody in
// between.
void check_copy_issued(Worker& w, const Site* site, void* dst, const void* src, uint32_t n_bytes,
                       uint32_t n_valid) {
  Checker& c = *w.check;
  if (n_valid) {
    check_access(c, {reinterpret_cast<uintptr_t>(src), n_valid, false, PLAIN, 0, site});
  }
  check_access(c, {reinterpret_cast<uintptr_t>(dst), n_bytes, true, IN_FLIGHT, 0, site});
}

void check_copy_done(Worker& w, const PendingCopy& copy) {
  Checker& c = *w.check;
  if (copy.n_valid) {
    check_access(c, {reinterpret_cast<uintptr_t>(copy.src), copy.n_valid, false, PLAIN, 0, &copy.site});
  }
  // Lift the ban, then write: by now only this thread can have touched the target.
  const uintptr_t at = reinterpret_cast<uintptr_t>(copy.dst);
  Cell* cells = at - c.static_begin < c.static_bytes     ? c.static_cells.data() + ((at - c.static_begin) >> 2)
                : at - c.dynamic_begin < c.dynamic_bytes ? c.dynamic_cells.data() + ((at - c.dynamic_begin) >> 2)
                                                         : nullptr;
  if (!cells) return;
  for (uint32_t i = 0; i < copy.n_bytes / 4; ++i) {
    if (Cell* bytes = byte_cells(c, cells[i], false)) {
      for (int j = 0; j < 4; ++j) memset(&bytes[j], 0, sizeof(Cell));
    } else {
      memset(&cells[i], 0, sizeof(Cell));
    }
  }
  check_access(c, {at, copy.n_bytes, true, PLAIN, 0, &copy.site});
}

void check_allocated(uintptr_t begin, size_t n_bytes, uintptr_t map_begin, size_t map_bytes) {
  if (!device_marks) return;
  uint8_t* marks = device_marks + (map_begin - arena_begin);
  memset(marks, FORBIDDEN, map_bytes);
  memset(device_marks + (begin - arena_begin), UNINITIALISED, n_bytes);
  marks_present = true;
}

void check_freed(uintptr_t map_begin, size_t map_bytes) {
  if (!device_marks) return;
  memset(device_marks + (map_begin - arena_begin), FORBIDDEN, map_bytes);
  if (map_bytes < (size_t(1) << 16)) return;
  const size_t first = (map_begin - arena_begin) / 4 * sizeof(Cell);
  uint8_t* cells = reinterpret_cast<uint8_t*>(device_cells) + first;
  madvise(cells, map_bytes / 4 * sizeof(Cell), MADV_DONTNEED);
}

// A launch without checks writes unseen: what lives then counts as initialised.
void note_untracked_launch() {
  if (!marks_present) return;
  each_allocation([](const Allocation& a) {
    memset(device_marks + (a.begin - arena_begin), FINE, a.n_bytes);
  });
  marks_present = false;
}

}  // namespace memra

using namespace memra;

// Makes memory that is allocated from now on known to be uninitialised. 0 where there is no room.
MEMRA_EXPORT int memra_check_enable() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return enable();
}

MEMRA_EXPORT void memra_note_write(uint64_t ptr, uint64_t n_bytes) {
  if (!device_marks || ptr - arena_begin >= arena_bytes) return;
  memset(device_marks + (ptr - arena_begin), FINE, n_bytes);
}

MEMRA_EXPORT void memra_note_copy(uint64_t dst, uint64_t src, uint64_t n_bytes) {
  if (!device_marks || dst - arena_begin >= arena_bytes) return;
  if (src - arena_begin >= arena_bytes) return memra_note_write(dst, n_bytes);
  memmove(device_marks + (dst - arena_begin), device_marks + (src - arena_begin), n_bytes);
}

MEMRA_EXPORT void memra_fence(Context*, uint32_t scope) {
  if (MEMRA_UNLIKELY(checking != nullptr)) return check_fence(*checking, scope);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

MEMRA_EXPORT void memra_atomic(Context* context, void* at, uint32_t n_bytes) {
  Checker* c = checking;
  if (!c || c->w != reinterpret_cast<Worker*>(context)) return;
  check_access(*c, {reinterpret_cast<uintptr_t>(at), n_bytes, true, ATOMIC_WRITE,
                    reinterpret_cast<uintptr_t>(__builtin_return_address(0)), nullptr, true});
  synchronise(*c, reinterpret_cast<uintptr_t>(at), true, true);
}

#define MEMRA_HOOK(name, n_bytes, is_write, flags)                                 \
  MEMRA_EXPORT void __tsan_##name(void* at) {                                      \
    hook(uintptr_t(at), n_bytes, is_write, flags, __builtin_return_address(0));    \
  }
#define MEMRA_HOOKS(n)                                                             \
  MEMRA_HOOK(read##n, n, false, PLAIN)                                             \
  MEMRA_HOOK(write##n, n, true, PLAIN)                                             \
  MEMRA_HOOK(unaligned_read##n, n, false, PLAIN)                                   \
  MEMRA_HOOK(unaligned_write##n, n, true, PLAIN)                                   \
  MEMRA_EXPORT void __tsan_volatile_read##n(void* at) {                            \
    hook(uintptr_t(at), n, false, ATOMIC_LOAD, __builtin_return_address(0));       \
    if (checking) synchronise(*checking, uintptr_t(at), true, false);              \
  }                                                                                \
  MEMRA_EXPORT void __tsan_volatile_write##n(void* at) {                           \
    hook(uintptr_t(at), n, true, ATOMIC_WRITE, __builtin_return_address(0));       \
    if (checking) synchronise(*checking, uintptr_t(at), false, true);              \
  }                                                                                \
  MEMRA_EXPORT void __tsan_unaligned_volatile_read##n(void* at) {                  \
    hook(uintptr_t(at), n, false, ATOMIC_LOAD, __builtin_return_address(0));       \
  }                                                                                \
  MEMRA_EXPORT void __tsan_unaligned_volatile_write##n(void* at) {                 \
    hook(uintptr_t(at), n, true, ATOMIC_WRITE, __builtin_return_address(0));       \
  }
MEMRA_HOOKS(1)
MEMRA_HOOKS(2)
MEMRA_HOOKS(4)
MEMRA_HOOKS(8)
MEMRA_HOOKS(16)

MEMRA_EXPORT void __tsan_read_range(void* at, size_t n) {
  hook(uintptr_t(at), uint32_t(n), false, PLAIN, __builtin_return_address(0));
}
MEMRA_EXPORT void __tsan_write_range(void* at, size_t n) {
  hook(uintptr_t(at), uint32_t(n), true, PLAIN, __builtin_return_address(0));
}
MEMRA_EXPORT void* __tsan_memcpy(void* to, const void* from, size_t n) {
  hook(uintptr_t(from), uint32_t(n), false, PLAIN, __builtin_return_address(0));
  hook(uintptr_t(to), uint32_t(n), true, PLAIN, __builtin_return_address(0));
  return memcpy(to, from, n);
}
MEMRA_EXPORT void* __tsan_memmove(void* to, const void* from, size_t n) {
  hook(uintptr_t(from), uint32_t(n), false, PLAIN, __builtin_return_address(0));
  hook(uintptr_t(to), uint32_t(n), true, PLAIN, __builtin_return_address(0));
  return memmove(to, from, n);
}
MEMRA_EXPORT void* __tsan_memset(void* to, int byte, size_t n) {
  hook(uintptr_t(to), uint32_t(n), true, PLAIN, __builtin_return_address(0));
  return memset(to, byte, n);
}
MEMRA_EXPORT void __tsan_init() {}
MEMRA_EXPORT void __tsan_func_entry(void*) {}
MEMRA_EXPORT void __tsan_func_exit() {}
MEMRA_EXPORT void __tsan_vptr_update(void*, void*) {}
MEMRA_EXPORT void __tsan_vptr_read(void*) {}
