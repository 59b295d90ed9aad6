// The life of a block: its threads are placed and ordered, run, and nothing of a failed one stays.
#include "rt.h"

namespace memra {

namespace {

void place_threads(Worker& w, const uint32_t* block) {
  if (w.placed_x == block[0] && w.placed_y == block[1] && w.placed_z == block[2]) return;
  uint32_t i = 0;
  for (uint32_t z = 0; z < block[2]; ++z) {
    for (uint32_t y = 0; y < block[1]; ++y) {
      for (uint32_t x = 0; x < block[0]; ++x, ++i) w.places[i] = {{x, y, z}, i};
    }
  }
  w.placed_x = block[0], w.placed_y = block[1], w.placed_z = block[2];
}

void order_threads(Worker& w, uint64_t block) {
  const uint32_t n = w.n_threads;
  if (w.order == ORDER_RANDOM) {
    w.random = (w.launch->seed * 0x9e3779b97f4a7c15u) ^ (block * 0xbf58476d1ce4e5b9u) ^ 0x94d049bb133111ebu;
    if (!w.random) w.random = 1;
    for (int i = 0; i < 4; ++i) next_random(w);
    for (uint32_t i = 0; i < n; ++i) w.sequence[i] = uint16_t(i);
    for (uint32_t i = n; i > 1; --i) std::swap(w.sequence[i - 1], w.sequence[next_random(w) % i]);
    w.sequence_for = 0;
    return;
  }
  const uint32_t key = n * 2 + (w.order == ORDER_REVERSE);
  if (w.sequence_for == key) return;
  for (uint32_t i = 0; i < n; ++i) {
    w.sequence[i] = uint16_t(w.order == ORDER_REVERSE ? n - 1 - i : i);
  }
  w.sequence_for = key;
}

void poison_shared(Worker& w, const ModuleCopy& copy) {
  for (const SharedArray& s : w.launch->function->shared) {
    memset(copy.base + s.offset, POISON, s.n_bytes);
  }
  if (w.context.shared_bytes) memset(w.context.shared, POISON, w.context.shared_bytes);
}

// After a failed block nothing of it may leak into the next one.
void clean_up(Worker& w) {
  w.ready.clear();
  w.at_barrier.clear();
  w.arrived = 0;
  w.n_spare = 0;
  for (uint32_t i = w.n_fibers; i-- > 0;) w.spare[w.n_spare++] = i;
  for (uint32_t i = 0; i < (w.n_threads + 31) / 32; ++i) {
    for (WarpSlot* slot : w.warps[i].slots) w.spare_slots.push_back(slot);
    w.warps[i].slots.clear();
  }
  for (uint32_t i = 0; i < w.n_threads; ++i) {
    w.async[i].pending.clear();
    w.async[i].group = 0;
  }
}

}  // namespace

bool run_block(Worker& w, const ModuleCopy& copy, uint64_t block) {
  LaunchState& launch = *w.launch;
  w.context.block_index = {uint32_t(block % launch.grid[0]),
                           uint32_t(block / launch.grid[0] % launch.grid[1]),
                           uint32_t(block / launch.grid[0] / launch.grid[1])};
  poison_shared(w, copy);
  order_threads(w, block);
  w.n_started = w.n_exited = 0;
  w.context.spin_budget = SPIN_BUDGET;
  w.idle_yields = 0;
  for (uint32_t i = 0; i < w.n_threads; ++i) w.threads[i].state = UNSTARTED;
  for (uint32_t i = 0; i < (w.n_threads + 31) / 32; ++i) w.warps[i].exited = 0;
  if (w.async_used) {
    for (uint32_t i = 0; i < w.n_threads; ++i) w.async[i].group = 0;
    w.async_used = false;
  }
  if (w.check) check_block(w, block);
  w.failure.kind = FAIL_NONE;
  w.faulted = 0;
  const uint32_t fiber = w.n_spare ? w.spare[--w.n_spare] : w.n_fibers;
#if defined(MEMRA_ASAN)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, w.stacks + fiber * w.stack_bytes, w.stack_bytes);
  memra_switch(&w.main_sp, prepare_fiber(w, fiber));
  if (w.faulted) __sanitizer_start_switch_fiber(nullptr, w.main_bottom, w.main_bytes);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  memra_switch(&w.main_sp, prepare_fiber(w, fiber));
#endif
  if (MEMRA_UNLIKELY(w.faulted)) translate_fault(w);
  if (MEMRA_UNLIKELY(w.failure.kind != FAIL_NONE)) {
    clean_up(w);
    return false;
  }
  return true;
}

void begin_launch(Worker& w, LaunchState& launch, const ModuleCopy& copy) {
  w.launch = &launch;
  w.copy = &copy;
  w.n_threads = launch.block[0] * launch.block[1] * launch.block[2];
  w.order = launch.order;
  place_threads(w, launch.block);
  w.call = copy.table->entries[launch.function->index].call;
  w.params = launch.params;
  memcpy(&w.context.block_dim, launch.block, 12);
  memcpy(&w.context.grid_dim, launch.grid, 12);
  w.context.shared_bytes = launch.shared_bytes;
  // Right-aligned against the guard page, at the alignment the kernels are promised.
  const size_t room = (launch.shared_bytes + 15) & ~size_t(15);
  w.context.shared = w.shared_base + w.shared_mapped - room;
  *copy.table->context = &w.context;
}

}  // namespace memra
