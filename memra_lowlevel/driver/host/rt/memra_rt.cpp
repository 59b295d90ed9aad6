// The host runtime as one translation unit: launches, the worker pool, and the parts it includes.
#include "rt.h"

#include <sys/mman.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "memory.cpp"
#include "addresses.cpp"
#include "faults.cpp"
#include "fiber.cpp"
#include "failures.cpp"
#include "scheduler.cpp"
#include "block.cpp"
#include "copies.cpp"
#include "shadow.cpp"
#include "check.cpp"
#include "module.cpp"
#include "undefined.cpp"
#include "watchdog.cpp"

namespace memra {

namespace {
size_t stack_bytes_wanted = 128 * 1024;
}

Worker::Worker(uint32_t ordinal_) : ordinal(ordinal_) {
  memset(static_cast<void*>(&context), 0, sizeof context);
  memset(&failure, 0, sizeof failure);
  ready.clear();
  at_barrier.clear();
  stack_bytes = stack_bytes_wanted;
  stacks = static_cast<uint8_t*>(mmap(nullptr, MAX_THREADS * stack_bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0));
  slots = static_cast<WarpSlot*>(mmap(nullptr, MAX_SLOTS * sizeof(WarpSlot), PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  shared_mapped = (MAX_SHARED_BYTES + PAGE - 1) & ~(PAGE - 1);
  uint8_t* at = static_cast<uint8_t*>(mmap(nullptr, shared_mapped + 2 * PAGE, PROT_NONE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED || mprotect(at + PAGE, shared_mapped, PROT_READ | PROT_WRITE)) return;
  shared_base = at + PAGE;
}

void guard_fiber(Worker& w, uint32_t fiber) {
  mprotect(w.stacks + fiber * w.stack_bytes, PAGE, PROT_NONE);
}

namespace {

std::mutex run_mutex;  // one launch at a time: the pool and the copies of a module are shared
std::vector<std::unique_ptr<Worker>> all_workers;

Worker* worker(uint32_t i) {
  while (all_workers.size() <= i) {
    auto w = std::make_unique<Worker>(uint32_t(all_workers.size()));
    if (w->stacks == MAP_FAILED || w->slots == MAP_FAILED || !w->shared_base) return nullptr;
    register_worker(w.get());
    all_workers.push_back(std::move(w));
  }
  return all_workers[i].get();
}

uint64_t nth_block(const LaunchState& launch, uint64_t i) {
  switch (launch.order) {
    case ORDER_REVERSE: return launch.n_blocks - 1 - i;
    case ORDER_RANDOM:
      return uint64_t((static_cast<unsigned __int128>(launch.order_a) * i + launch.order_b) %
                      launch.n_blocks);
    default: return i;
  }
}

void run_blocks(Worker& w, LaunchState& launch, const ModuleCopy& copy) {
  begin_launch(w, launch, copy);
  w.os_thread = pthread_self();
  w.runs.store(true);
  w.failure.kind = FAIL_NONE;
  if (launch.check && !check_launch(w, copy)) {
    w.failure.kind = FAIL_LIMIT;
    snprintf(w.failure.message, sizeof w.failure.message,
             "no address space for the shadow of check mode (is there a limit on virtual memory?)");
    launch.stop.store(true);
  }
  while (!launch.stop.load(std::memory_order_relaxed)) {
    const uint64_t i = launch.next_block.fetch_add(1, std::memory_order_relaxed);
    if (i >= launch.n_blocks) break;
    if (!run_block(w, copy, nth_block(launch, i))) {
      launch.stop.store(true, std::memory_order_relaxed);
      w.failed_at = i;
      break;
    }
  }
  if (launch.check) check_launch_done(w);
  w.runs.store(false);
  w.launch = nullptr;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}

// Threads 1 ... n-1 of a launch; the caller is thread 0. Kept between launches. Both sides look for
// each other a little while before they sleep: launches follow each other closely.
class Pool {
 public:
  void run(uint32_t n, const std::function<void(uint32_t)>& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (threads_ < n - 1) {
      const uint32_t index = ++threads_;
      std::thread([this, index] { serve(index); }).detach();
    }
    job_ = &job;
    wanted_ = n;
    pending_.store(n - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    lock.unlock();
    wake_.notify_all();
    job(0);
    if (spin([this] { return pending_.load(std::memory_order_acquire) == 0; })) return;
    lock.lock();
    done_.wait(lock, [this] { return pending_.load(std::memory_order_acquire) == 0; });
  }

 private:
  template <class F>
  static bool spin(F ready) {
    for (int i = 0; i < 300; ++i) {
      if (ready()) return true;
      pause();
    }
    return false;
  }

  void serve(uint32_t index) {
    sigset_t all;
    sigfillset(&all);
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, OVERDUE_SIGNAL}) {
      sigdelset(&all, signal);
    }
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    enter_thread_for_faults();
    uint64_t seen = 0;
    for (;;) {
      const auto news = [&] { return round_.load(std::memory_order_acquire) != seen; };
      spin(news);
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, news);
      seen = round_.load(std::memory_order_relaxed);
      if (index >= wanted_) continue;
      const auto* job = job_;
      lock.unlock();
      (*job)(index);
      lock.lock();
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(uint32_t)>* job_ = nullptr;
  uint32_t threads_ = 0, wanted_ = 0;
  std::atomic<uint32_t> pending_{0};
  std::atomic<uint64_t> round_{0};
};

Pool* pool = new Pool();

// A forked child has no pool threads, and must not inherit a lock that is held.
void before_fork() {
  run_mutex.lock();
  module_mutex.lock();
  memory_mutex.lock();
}
void after_fork_parent() {
  memory_mutex.unlock();
  module_mutex.unlock();
  run_mutex.unlock();
}
void after_fork_child() {
  pool = new Pool();
  watchdog = new Watchdog();
  after_fork_parent();
}
const int fork_hooks = pthread_atfork(before_fork, after_fork_parent, after_fork_child);

int refuse(Failure* out, const LaunchState& launch, const std::string& message) {
  memset(out, 0, sizeof *out);
  out->kind = FAIL_LIMIT;
  snprintf(out->message, sizeof out->message, "%s", message.c_str());
  snprintf(out->kernel, sizeof out->kernel, "%s", launch.function->name.c_str());
  return out->kind;
}

}  // namespace

}  // namespace memra

struct MemraRunOptions {
  uint32_t order, n_workers;
  uint64_t seed;
  uint32_t strict, check;
  double seconds;
  uint64_t n_parts;
  const LaunchPart* parts;
};

// Runs a launch to its end. 0, or the kind of failure with `out` filled.
MEMRA_EXPORT int memra_run(Function* f, const uint32_t* grid, const uint32_t* block,
                           uint32_t shared_bytes, void** params, const MemraRunOptions* options,
                           Failure* out) {
  LaunchState launch;
  launch.function = f;
  memcpy(launch.grid, grid, 12);
  memcpy(launch.block, block, 12);
  launch.shared_bytes = shared_bytes;
  launch.params = params;
  launch.order = Order(options->order);
  launch.seed = options->seed;
  launch.strict = options->strict;
  launch.check = options->check;
  launch.seconds = options->seconds;
  launch.parts.assign(options->parts, options->parts + options->n_parts);
  launch.n_blocks = uint64_t(grid[0]) * grid[1] * grid[2];
  const uint64_t n_threads = uint64_t(block[0]) * block[1] * block[2];
  if (!launch.n_blocks || !n_threads) return refuse(out, launch, "a dimension of the launch is 0");
  if (n_threads > MAX_THREADS) {
    return refuse(out, launch, "a block of " + std::to_string(n_threads) + " threads; at most 1024");
  }
  if (shared_bytes > MAX_SHARED_BYTES) {
    return refuse(out, launch, std::to_string(shared_bytes) + " bytes of dynamic shared memory; at most " +
                                   std::to_string(MAX_SHARED_BYTES));
  }
  uint32_t n_workers = options->n_workers ? options->n_workers : 1;
  if (launch.check || (f->module->flags & MODULE_ASAN)) n_workers = 1;
  if (n_workers > launch.n_blocks) n_workers = uint32_t(launch.n_blocks);
  if (n_workers > 64) n_workers = 64;
  if (n_workers > 1 && !f->module->device_global.empty()) {
    return refuse(out, launch, "the file has a writable variable at file scope (" +
                                   f->module->device_global +
                                   "): each worker would see its own copy. Keep it in device memory, "
                                   "or use one worker");
  }
  if (launch.order == ORDER_RANDOM) {
    uint64_t x = launch.seed + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    launch.order_b = (x >> 7) % launch.n_blocks;
    launch.order_a = (x >> 33) % launch.n_blocks;
    while (std::gcd(launch.order_a, launch.n_blocks) != 1) ++launch.order_a;
  }
  std::lock_guard<std::mutex> lock(run_mutex);
  install_fault_handler();
  if (launch.seconds > 0) install_overdue_handler();
  enter_thread_for_faults();
  std::string error;
  for (uint32_t i = 0; i < n_workers; ++i) {
    if (!worker(i)) return refuse(out, launch, "no memory for the stacks of a worker");
    if (!copy_for_worker(*f->module, i, &error)) return refuse(out, launch, error);
  }
  if (!launch.check) note_untracked_launch();
  Worker* taking_part[64];
  for (uint32_t i = 0; i < n_workers; ++i) taking_part[i] = all_workers[i].get();
  TimeLimit limit(launch, taking_part, n_workers);
  if (n_workers == 1) {
    run_blocks(*all_workers[0], launch, f->module->copies[0]);
  } else {
    pool->run(n_workers, [&](uint32_t i) { run_blocks(*all_workers[i], launch, f->module->copies[i]); });
  }
  if (!launch.stop.load()) return 0;
  const Worker* first = nullptr;
  for (uint32_t i = 0; i < n_workers; ++i) {
    const Worker* w = all_workers[i].get();
    if (w->failure.kind != FAIL_NONE && (!first || w->failed_at < first->failed_at)) first = w;
  }
  *out = first->failure;
  return out->kind;
}

MEMRA_EXPORT uint32_t memra_abi_version() { return ABI_VERSION; }
