// The block scheduler, barriers and warp operations.
#include "rt.h"

namespace memra {

namespace {

constexpr uint32_t SPIN_BUDGET = 1024;
constexpr uint32_t IDLE_LIMIT = 100000;

uint32_t next_random(Worker& w) {
  w.random ^= w.random << 13;
  w.random ^= w.random >> 7;
  w.random ^= w.random << 17;
  return uint32_t(w.random >> 32);
}

inline void become(Worker& w, uint32_t thread) {
  w.current = thread;
  memcpy(&w.context.thread_index, &w.places[thread], 16);
}

inline int pick_ready(Worker& w) {
  if (MEMRA_LIKELY(w.order == ORDER_FORWARD)) return w.ready.from((w.current + 1) % MAX_THREADS);
  if (w.order == ORDER_REVERSE) return w.ready.upto((w.current - 1) % MAX_THREADS);
  const uint32_t at = next_random(w) % w.n_threads;
  return w.ready.from(at);
}

inline bool start_another(Worker& w) {
  if (w.n_started == w.n_threads) return false;
  return w.order != ORDER_RANDOM || w.ready.empty() || (next_random(w) & 1);
}

// Leaves the running thread behind at `*save` and runs another; returns when it is switched back to.
// With `yields` it stays ready.
__attribute__((always_inline)) inline void switch_away(Worker& w, void** save, bool yields = false) {
  if (start_another(w)) {
    if (yields) w.ready.set(w.current);
    const uint32_t fiber = w.n_spare ? w.spare[--w.n_spare] : w.n_fibers;
    go_to(w, save, prepare_fiber(w, fiber), fiber);
    return;
  }
  const int next = pick_ready(w);
  if (MEMRA_UNLIKELY(next < 0)) fail_stuck(w);
  w.ready.reset(uint32_t(next));
  if (yields) w.ready.set(w.current);
  w.threads[next].state = RUNS;
  become(w, uint32_t(next));
  go_to(w, save, w.threads[next].sp, w.threads[next].fiber);
}

void release_barrier(Worker& w) {
  const uint32_t n_words = (w.n_threads + 63) / 64;
  for (uint32_t i = 0; i < n_words; ++i) {
    w.ready.words[i] |= w.at_barrier.words[i];
    w.at_barrier.words[i] = 0;
  }
  w.ready.summary |= w.at_barrier.summary;
  w.at_barrier.summary = 0;
  w.barrier_result = w.barrier_op == BARRIER_AND ? w.barrier_votes == int(w.arrived)
                     : w.barrier_op == BARRIER_OR ? w.barrier_votes != 0
                                                  : w.barrier_votes;
  w.arrived = 0;
  ++w.progress;
  if (MEMRA_UNLIKELY(w.check != nullptr)) check_barrier(w);
}

void release_warp(Worker& w, uint32_t warp, WarpSlot* slot, uint32_t took_part, uint32_t except) {
  const uint32_t others = took_part & ~except;
  w.ready.words[warp >> 1] |= uint64_t(others) << (32 * (warp & 1));
  if (others) w.ready.summary |= 1u << (warp >> 1);
  slot->took_part[slot->phase] = took_part;
  slot->unread += uint32_t(__builtin_popcount(others));
  slot->phase ^= 1;
  slot->arrived = 0;
  ++w.progress;
  // Of the operations of a warp only __syncwarp orders memory; lanes that exchange values, vote or
  // multiply together see each other's values and nothing else.
  if (MEMRA_UNLIKELY(w.check != nullptr) && slot->op == WARP_SYNC) check_warp(w, warp, took_part);
}

WarpSlot* find_slot(Worker& w, WarpState& warp, uint32_t mask) {
  for (WarpSlot* slot : warp.slots) {
    if (slot->mask == mask) return slot;
  }
  for (WarpSlot* slot : warp.slots) {
    if (!slot->arrived && !slot->unread) {
      slot->mask = mask;
      return slot;
    }
  }
  WarpSlot* slot;
  if (w.spare_slots.empty()) {
    if (w.n_slots == MAX_SLOTS) fail(w, FAIL_OTHER, nullptr, "too many masks wait at one time");
    slot = &w.slots[w.n_slots++];
  } else {
    slot = w.spare_slots.back();
    w.spare_slots.pop_back();
  }
  memset(slot, 0, offsetof(WarpSlot, cells));
  slot->mask = mask;
  warp.slots.push_back(slot);
  return slot;
}

uint32_t existing_lanes(const Worker& w, uint32_t warp) {
  const uint32_t n = w.n_threads - warp * 32;
  return n >= 32 ? ~0u : (1u << n) - 1u;
}

void thread_exits(Worker& w) {
  const uint32_t me = w.current;
  w.threads[me].state = EXITED;
  if (MEMRA_UNLIKELY(!w.async[me].pending.empty())) {
    fail(w, FAIL_RACE, &w.async[me].pending.front().site,
         "thread ended with an asynchronous copy in flight: wait for it before the kernel returns");
  }
  ++w.n_exited;
  ++w.progress;
  WarpState& warp = w.warps[me >> 5];
  warp.exited |= 1u << (me & 31);
  if (MEMRA_LIKELY(w.arrived == 0 && warp.slots.empty())) return;
  if (w.launch->strict) {
    if (w.arrived) {
      const Thread& other = w.threads[w.barrier_first];
      fail(w, FAIL_DIVERGENCE, other.site,
           "this thread returned while thread %s waits at __syncthreads; threads of a kernel must "
           "all reach the barrier (strict mode)",
           thread_name(w, w.barrier_first).c_str());
    }
    for (WarpSlot* slot : warp.slots) {
      if (slot->arrived && ((slot->mask >> (me & 31)) & 1)) {
        fail(w, FAIL_DIVERGENCE, slot->site,
             "this lane returned while other lanes of mask 0x%08x wait for it in a warp operation",
             slot->mask);
      }
    }
    return;
  }
  if (w.arrived && w.arrived == w.n_threads - w.n_exited) release_barrier(w);
  for (WarpSlot* slot : warp.slots) {
    const uint32_t wanted = slot->mask & existing_lanes(w, me >> 5) & ~warp.exited;
    if (slot->arrived && slot->arrived == wanted) {
      if (slot->combine) slot->combine(slot->cells[slot->phase], wanted);
      release_warp(w, me >> 5, slot, wanted, 0);
    }
  }
}

}  // namespace

}  // namespace memra

using namespace memra;

extern "C" __attribute__((used, visibility("hidden"))) void memra_fiber_main(Worker* worker,
                                                                              uintptr_t fiber) {
  Worker& w = *worker;
#if defined(MEMRA_ASAN)
  const void* bottom;
  size_t n_bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &n_bytes);
  if (w.n_started == 0) w.main_bottom = bottom, w.main_bytes = n_bytes;
#endif
  for (;;) {
    do {
      const uint32_t thread = w.sequence[w.n_started++];
      w.threads[thread].state = RUNS;
      w.threads[thread].fiber = uint32_t(fiber);
      become(w, thread);
      w.call(w.params);
      thread_exits(w);
    } while (start_another(w));
    w.spare[w.n_spare++] = uint32_t(fiber);
    void* unused;
    if (w.n_exited == w.n_threads) {
      go_to(w, &unused, w.main_sp, MAIN, true);
    } else {
      const int next = pick_ready(w);
      if (next < 0) fail_stuck(w);
      w.ready.reset(uint32_t(next));
      w.threads[next].state = RUNS;
      become(w, uint32_t(next));
      go_to(w, &unused, w.threads[next].sp, w.threads[next].fiber, true);
    }
  }
}

MEMRA_EXPORT int memra_sync_threads(Context* c, const Site* site, uint32_t op, int predicate) {
  Worker& w = *reinterpret_cast<Worker*>(c);
  const uint32_t me = w.current;
  if (w.arrived == 0) {
    w.barrier_site = site;
    w.barrier_op = op;
    w.barrier_votes = 0;
    w.barrier_first = me;
  } else if (MEMRA_UNLIKELY(w.barrier_site != site)) {
    fail_other_barrier(w, site);
  }
  if (MEMRA_UNLIKELY(w.n_exited && w.launch->strict)) fail_after_exit(w, site);
  w.barrier_votes += predicate;
  if (++w.arrived == w.n_threads - w.n_exited) {
    release_barrier(w);
    return w.barrier_result;
  }
  Thread& t = w.threads[me];
  t.site = site;
  t.state = WAITS_BARRIER;
  w.at_barrier.set(me);
  switch_away(w, &t.sp);
  return w.barrier_result;
}

extern "C" __attribute__((visibility("default"))) uint8_t (*memra_warp_exchange(
    Context* c, const Site* site, uint32_t op, uint32_t mask, const void* value, uint32_t n,
    WarpCombine combine, uint32_t* took_part))[32] {
  Worker& w = *reinterpret_cast<Worker*>(c);
  const uint32_t me = w.current, warp = me >> 5, bit = 1u << (me & 31);
  WarpState& state = w.warps[warp];
  if (MEMRA_UNLIKELY(!(mask & bit))) {
    fail(w, FAIL_DIVERGENCE, site, "lane %u calls a warp operation with mask 0x%08x, which lacks it",
         me & 31, mask);
  }
  uint32_t wanted = mask & existing_lanes(w, warp);
  if (MEMRA_UNLIKELY(wanted & state.exited)) {
    if (w.launch->strict) {
      fail(w, FAIL_DIVERGENCE, site,
           "mask 0x%08x names lane %d, which already returned from the kernel (strict mode)", mask,
           __builtin_ctz(wanted & state.exited));
    }
    wanted &= ~state.exited;
  }
  WarpSlot* slot = MEMRA_LIKELY(!state.slots.empty() && state.slots[0]->mask == mask)
                       ? state.slots[0]
                       : find_slot(w, state, mask);
  if (slot->arrived == 0) {
    slot->op = op;
    slot->site = site;
    slot->combine = combine;
  } else if (MEMRA_UNLIKELY(slot->site != site || slot->op != op)) {
    fail_other_operation(w, site, slot);
  }
  auto cells = slot->cells[slot->phase];
  if (MEMRA_LIKELY(n == 4)) memcpy(cells[me & 31], value, 4);
  else memcpy(cells[me & 31], value, n);
  slot->arrived |= bit;
  if (slot->arrived == wanted) {
    if (combine) combine(cells, wanted);
    release_warp(w, warp, slot, wanted, bit);
    *took_part = wanted;
    return cells;
  }
  Thread& t = w.threads[me];
  t.site = site;
  t.state = WAITS_WARP;
  const uint32_t phase = slot->phase;
  switch_away(w, &t.sp);
  --slot->unread;
  *took_part = slot->took_part[phase];
  return cells;
}

MEMRA_EXPORT void memra_yield(Context* c) {
  Worker& w = *reinterpret_cast<Worker*>(c);
  c->spin_budget = SPIN_BUDGET;
  if (w.progress != w.seen_progress) {
    w.seen_progress = w.progress;
    w.idle_yields = 0;
  } else if (++w.idle_yields > IDLE_LIMIT) {
    w.threads[w.current].state = YIELDED;
    w.fail_pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) - 1;
    std::string waits;
    describe_waits(w, waits);
    fail(w, FAIL_DEADLOCK, nullptr,
         "the block spins without progress: %s. Blocks of the host device run one after the other, "
         "so a block must not wait for another",
         waits.c_str());
  }
  Thread& t = w.threads[w.current];
  if (w.ready.empty() && w.n_started == w.n_threads) return;
  t.state = YIELDED;
  switch_away(w, &t.sp, true);
}

MEMRA_EXPORT void memra_fail(Context* c, const Site* site, int kind, const char* message) {
  fail(*reinterpret_cast<Worker*>(c), kind, site, "%s", message);
}
