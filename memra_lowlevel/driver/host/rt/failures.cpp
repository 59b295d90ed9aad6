// Words for what went wrong in a block, and the way out of it.
#include "rt.h"

namespace memra {

std::string thread_name(const Worker& w, uint32_t thread) {
  char text[64];
  const Index3& at = w.places[thread].index;
  snprintf(text, sizeof text, "(%u, %u, %u)", at.x, at.y, at.z);
  return text;
}

std::string place_of(const Site* site) {
  if (!site) return "?";
  return std::string(site->file) + ":" + std::to_string(site->line);
}

// Groups of threads that wait at the same place: "threads 0-31, 64 wait at x.cu:12 (__syncthreads)".
void describe_waits(Worker& w, std::string& out) {
  struct Group {
    const Site* site;
    WaitKind state;
    std::vector<uint32_t> members;
  };
  std::vector<Group> groups;
  for (uint32_t i = 0; i < w.n_threads; ++i) {
    const Thread& t = w.threads[i];
    const WaitKind state = i == w.current && t.state == RUNS ? RUNS : t.state;
    const Site* site = state == WAITS_BARRIER || state == WAITS_WARP ? t.site : nullptr;
    Group* found = nullptr;
    for (Group& g : groups) {
      if (g.site == site && g.state == state) found = &g;
    }
    if (!found) {
      groups.push_back({site, state, {}});
      found = &groups.back();
    }
    found->members.push_back(i);
  }
  for (const Group& g : groups) {
    if (!out.empty()) out += "; ";
    out += g.members.size() == 1 ? "thread " : "threads ";
    size_t written = 0;
    for (size_t i = 0; i < g.members.size();) {
      size_t j = i;
      while (j + 1 < g.members.size() && g.members[j + 1] == g.members[j] + 1) ++j;
      if (written++) out += ", ";
      if (written > 4) {
        out += "...";
        break;
      }
      out += std::to_string(g.members[i]);
      if (j > i) out += "-" + std::to_string(g.members[j]);
      i = j + 1;
    }
    switch (g.state) {
      case WAITS_BARRIER: out += " at __syncthreads, " + place_of(g.site); break;
      case WAITS_WARP: out += " in a warp operation, " + place_of(g.site); break;
      case YIELDED: out += " spin"; break;
      case EXITED: out += " returned"; break;
      case UNSTARTED: out += " not started"; break;
      case RUNS: out += g.members.size() == 1 ? " runs" : " run"; break;
    }
  }
}

namespace {

[[noreturn]] __attribute__((noinline, cold)) void fail_stuck(Worker& w) {
  std::string waits;
  describe_waits(w, waits);
  fail(w, FAIL_DIVERGENCE, w.threads[w.current].site,
       "no thread of the block can go on: %s. All threads must meet the same barrier, and all lanes "
       "of a mask the same warp operation",
       waits.c_str());
}

[[noreturn]] __attribute__((noinline, cold)) void fail_other_barrier(Worker& w, const Site* site) {
  fail(w, FAIL_DIVERGENCE, site,
       "this thread is at the __syncthreads of %s, thread %s waits at the one of %s: all threads of a "
       "block must meet the same barrier",
       place_of(site).c_str(), thread_name(w, w.barrier_first).c_str(),
       place_of(w.barrier_site).c_str());
}

[[noreturn]] __attribute__((noinline, cold)) void fail_after_exit(Worker& w, const Site* site) {
  uint32_t gone = 0;
  while (w.threads[gone].state != EXITED) ++gone;
  fail(w, FAIL_DIVERGENCE, site,
       "thread %s already returned from the kernel while this thread is at __syncthreads: never return "
       "before a barrier (strict mode)",
       thread_name(w, gone).c_str());
}

[[noreturn]] __attribute__((noinline, cold)) void fail_other_operation(Worker& w, const Site* site,
                                                                      const WarpSlot* slot) {
  fail(w, FAIL_DIVERGENCE, site,
       "lanes of mask 0x%08x met different warp operations: this one at %s, lane %d at %s", slot->mask,
       place_of(site).c_str(), __builtin_ctz(slot->arrived), place_of(slot->site).c_str());
}

}  // namespace

void leave_block(Worker& w) {
  void* unused;
  go_to(w, &unused, w.main_sp, MAIN, true);
  __builtin_unreachable();
}

void fail(Worker& w, int kind, const Site* site, const char* format, ...) {
  Failure& f = w.failure;
  memset(&f, 0, sizeof f);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(f.message, sizeof f.message, format, arguments);
  va_end(arguments);
  note_place(w, kind, w.current);
  if (site) {
    snprintf(f.file, sizeof f.file, "%s", site->file);
    f.line = site->line;
  } else if (w.fail_pc) {
    note_pc(w, w.fail_pc);
  }
  w.fail_pc = 0;
  leave_block(w);
}

void note_place(Worker& w, int kind, uint32_t thread) {
  Failure& f = w.failure;
  f.kind = kind;
  memcpy(f.block, &w.context.block_index, 12);
  memcpy(f.thread, &w.places[thread].index, 12);
  snprintf(f.kernel, sizeof f.kernel, "%s", w.launch->function->name.c_str());
}

}  // namespace memra
