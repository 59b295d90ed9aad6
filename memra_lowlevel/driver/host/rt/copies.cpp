// cp.async: a copy that is issued happens only when it is waited for. Until then its target holds
// poison, so a kernel that forgets the wait reads NaN; in check mode touching the target is a race.
#include "rt.h"

using namespace memra;

MEMRA_EXPORT void memra_copy_async(Context* c, const char* file, int line, void* dst,
                                   const void* src, uint32_t n_bytes, uint32_t n_valid) {
  const Site here = {file, line, 0};
  Worker& w = *reinterpret_cast<Worker*>(c);
  AsyncCopies& copies = w.async[w.current];
  w.async_used = true;
  if ((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) & (n_bytes - 1)) {
    fail(w, FAIL_BOUNDS, &here, "an asynchronous copy of %u bytes needs %u-byte aligned addresses",
         n_bytes, n_bytes);
  }
  if (w.check) check_copy_issued(w, &here, dst, src, n_bytes, n_valid);
  copies.pending.push_back({static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), n_bytes,
                            n_valid, copies.group, here});
  memset(dst, POISON, n_bytes);
}

MEMRA_EXPORT void memra_copy_commit(Context* c) {
  Worker& w = *reinterpret_cast<Worker*>(c);
  ++w.async[w.current].group;
}

// Until at most `n_pending` of the newest committed groups are in flight; ~0u waits for everything,
// uncommitted copies included.
MEMRA_EXPORT void memra_copy_wait(Context* c, uint32_t n_pending) {
  Worker& w = *reinterpret_cast<Worker*>(c);
  AsyncCopies& copies = w.async[w.current];
  const bool everything = n_pending == ~0u;
  if (!everything && copies.group < n_pending) return;
  const uint32_t below = everything ? ~0u : copies.group - n_pending;
  size_t kept = 0;
  for (size_t i = 0; i < copies.pending.size(); ++i) {
    const PendingCopy copy = copies.pending[i];
    if (!everything && copy.group >= below) {
      copies.pending[kept++] = copy;
      continue;
    }
    if (w.check) check_copy_done(w, copy);
    memcpy(copy.dst, copy.src, copy.n_valid);
    memset(copy.dst + copy.n_valid, 0, copy.n_bytes - copy.n_valid);
  }
  copies.pending.resize(kept);
}
