#include "rt.h"
namespace memra {
uint64_t check_birth(uintptr_t, size_t) { return 0; }
void note_untracked_launch() {}
void check_launch(Worker&, const ModuleCopy&) {}
void check_launch_done(Worker&) {}
void check_block(Worker&, uint64_t) {}
void check_barrier(Worker&) {}
void check_warp(Worker&, uint32_t, uint32_t) {}
void check_copy_issued(Worker&, const Site*, void*, const void*, uint32_t, uint32_t) {}
void check_copy_done(Worker&, const PendingCopy&) {}
}
MEMRA_EXPORT void memra_fence(memra::Context*, uint32_t) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
MEMRA_EXPORT void memra_note_write(uint64_t, uint64_t) {}
MEMRA_EXPORT void memra_note_copy(uint64_t, uint64_t, uint64_t) {}
