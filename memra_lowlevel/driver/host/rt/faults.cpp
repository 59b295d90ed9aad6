// Faults of kernels become failures of their launch. The handler only takes notes and sends the
// thread back to the stack of its launch; words are found afterwards, where everything is allowed.
// Faults of anybody else go to the handler that was there before.
#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "rt.h"

extern "C" void memra_resume();

namespace memra {

namespace {

constexpr uint32_t MAX_WORKERS = 64;
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
constexpr size_t ALT_STACK_BYTES = 64 * 1024;

std::atomic<Worker*> workers[MAX_WORKERS];
std::atomic<uint32_t> n_registered{0};
struct sigaction previous[65];
volatile sig_atomic_t passed_on[65];

}  // namespace

// By its stack: safe in a signal handler, where thread-local storage is not.
Worker* worker_of(uintptr_t sp) {
  const uint32_t n = n_registered.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < n; ++i) {
    Worker* w = workers[i].load(std::memory_order_relaxed);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(w->stacks);
    if (sp >= begin && sp < begin + MAX_THREADS * w->stack_bytes) return w;
  }
  return nullptr;
}

namespace {

// Puts the earlier handler back, so that the fault happens again and meets it natively. One that ends
// by calling the handler before itself (faulthandler does) comes back here: then it was the last.
void pass_on(int signal, const siginfo_t* info) {
  struct sigaction next = {};
  next.sa_handler = SIG_DFL;
  if (!passed_on[signal]) next = previous[signal];
  passed_on[signal] = 1;
  sigaction(signal, &next, nullptr);
  if (info->si_code <= 0) raise(signal);  // sent by somebody: nothing would happen again by itself
}

struct Machine {  // of the interrupted thread
  explicit Machine(void* raw) : context(static_cast<ucontext_t*>(raw)) {}
#if defined(__x86_64__)
  uintptr_t sp() const { return uintptr_t(context->uc_mcontext.gregs[REG_RSP]); }
  uintptr_t pc() const { return uintptr_t(context->uc_mcontext.gregs[REG_RIP]); }
  bool is_write() const { return context->uc_mcontext.gregs[REG_ERR] & 2; }
#else
  uintptr_t sp() const { return context->uc_mcontext.sp; }
  uintptr_t pc() const { return context->uc_mcontext.pc; }
  bool is_write() const { return false; }
#endif

  void copy_registers(uintptr_t* out) const {
#if defined(__x86_64__)
    constexpr int IN_ORDER[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    for (int i = 0; i < 16; ++i) out[i] = uintptr_t(context->uc_mcontext.gregs[IN_ORDER[i]]);
#else
    for (int i = 0; i < 31; ++i) out[i] = context->uc_mcontext.regs[i];
    out[31] = context->uc_mcontext.sp;
#endif
  }

  // Goes on on the stack of the launch, as if the block had ended.
  void leave(const Worker& w) {
#if defined(__x86_64__)
    greg_t* registers = context->uc_mcontext.gregs;
    registers[REG_RSP] = greg_t(reinterpret_cast<uintptr_t>(w.main_sp));
    registers[REG_RIP] = greg_t(reinterpret_cast<uintptr_t>(&memra_resume));
    registers[REG_EFL] &= ~greg_t(0x400);
#else
    context->uc_mcontext.sp = reinterpret_cast<uintptr_t>(w.main_sp);
    context->uc_mcontext.pc = reinterpret_cast<uintptr_t>(&memra_resume);
#endif
  }

  ucontext_t* context;
};

void on_fault(int signal, siginfo_t* info, void* raw) {
  Machine machine(raw);
  Worker* w = worker_of(machine.sp());
  if (!w || !w->launch || info->si_code <= 0) {
    pass_on(signal, info);
    return;
  }
  w->faulted = 1;
  w->fault_signal = signal;
  w->fault_address = info->si_code == SI_KERNEL ? 0 : reinterpret_cast<uintptr_t>(info->si_addr);
  w->fault_has_address = info->si_code != SI_KERNEL;
  w->fault_pc = machine.pc();
  w->fault_sp = machine.sp();
  w->fault_is_write = machine.is_write();
  machine.copy_registers(w->fault_registers);
  machine.leave(*w);
}

// The time of a launch is over: see watchdog.cpp.
void on_overdue(int signal, siginfo_t* info, void* raw) {
  Machine machine(raw);
  Worker* w = worker_of(machine.sp());
  if (info->si_code != SI_TKILL || info->si_pid != getpid()) {
    const struct sigaction& before = previous[signal];
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(signal, info, raw);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(signal);
    return;
  }
  if (!w || !w->launch || !w->launch->overdue.load(std::memory_order_relaxed)) return;
  if (machine.pc() - reinterpret_cast<uintptr_t>(w->copy->base) >= w->copy->n_bytes) return;
  w->faulted = 1;
  w->fault_signal = signal;
  w->fault_address = 0;
  w->fault_has_address = false;
  w->fault_pc = machine.pc();
  machine.leave(*w);
}

struct AltStack {
  void* memory = nullptr;
  ~AltStack() {
    if (!memory) return;
    stack_t now;
    if (!sigaltstack(nullptr, &now) && now.ss_sp == memory) {
      stack_t off = {};
      off.ss_flags = SS_DISABLE;
      sigaltstack(&off, nullptr);
    }
    munmap(memory, ALT_STACK_BYTES);
  }
};
thread_local AltStack alt_stack;

}  // namespace

// A fault on a full stack needs another stack to be handled on.
void enter_thread_for_faults() {
  stack_t now;
  if (sigaltstack(nullptr, &now) || !(now.ss_flags & SS_DISABLE)) return;
  if (!alt_stack.memory) {
    void* at = mmap(nullptr, ALT_STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                    -1, 0);
    if (at == MAP_FAILED) return;
    alt_stack.memory = at;
  }
  stack_t ours = {};
  ours.ss_sp = alt_stack.memory;
  ours.ss_size = ALT_STACK_BYTES;
  sigaltstack(&ours, nullptr);
}

// Asked before every launch, since somebody (faulthandler, a test runner) may have installed theirs.
void install_fault_handler() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_fault) return;
  struct sigaction ours = {};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  for (int signal : SIGNALS) {
    struct sigaction old;
    sigaction(signal, nullptr, &old);
    if ((old.sa_flags & SA_SIGINFO) && old.sa_sigaction == &on_fault) continue;
    previous[signal] = old;
    passed_on[signal] = 0;
    sigaction(signal, &ours, nullptr);
  }
}

void install_overdue_handler() {
  struct sigaction now, ours = {};
  sigaction(OVERDUE_SIGNAL, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_overdue) return;
  ours.sa_sigaction = &on_overdue;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&ours.sa_mask);
  previous[OVERDUE_SIGNAL] = now;
  sigaction(OVERDUE_SIGNAL, &ours, nullptr);
}

void register_worker(Worker* w) {
  const uint32_t i = n_registered.load(std::memory_order_relaxed);
  workers[i].store(w, std::memory_order_relaxed);
  n_registered.store(i + 1, std::memory_order_release);
}

// As an offset into the kernel file, or into the library that the kernel called.
void note_pc(Worker& w, uintptr_t pc) {
  Failure& f = w.failure;
  const uintptr_t module = reinterpret_cast<uintptr_t>(w.copy->base);
  Dl_info info;
  if (pc - module < w.copy->n_bytes) {
    snprintf(f.module, sizeof f.module, "%s", w.launch->function->module->path.c_str());
    f.pc = pc - module;
  } else if (pc && dladdr(reinterpret_cast<void*>(pc), &info) && info.dli_fname) {
    snprintf(f.module, sizeof f.module, "%s", info.dli_fname);
    f.pc = pc - reinterpret_cast<uintptr_t>(info.dli_fbase);
  }
}

void translate_fault(Worker& w) {
  Failure& f = w.failure;
  memset(&f, 0, sizeof f);
  note_place(w, FAIL_OTHER, w.current);
  f.address = w.fault_address;
  note_pc(w, w.fault_pc);
  const uintptr_t stacks = reinterpret_cast<uintptr_t>(w.stacks);
  const uintptr_t into = (w.fault_address - stacks) % w.stack_bytes;
  if (w.fault_signal == SIGFPE) {
    snprintf(f.message, sizeof f.message, "integer division by zero, or of INT_MIN by -1");
  } else if (w.fault_signal == OVERDUE_SIGNAL) {
    std::string waits;
    describe_waits(w, waits);
    f.kind = FAIL_DEADLOCK;
    snprintf(f.message, sizeof f.message,
             "the launch did not end within %g s and was given up; in this block %s. If it only needs "
             "longer, raise host_options(kernel_seconds=...)",
             w.launch->seconds, waits.c_str());
  } else if (w.fault_signal == SIGILL || w.fault_signal == SIGTRAP) {
    snprintf(f.message, sizeof f.message, "the kernel reached a trap (unreachable code)");
  } else if (w.fault_has_address && w.fault_address >= stacks &&
             w.fault_address < stacks + MAX_THREADS * w.stack_bytes && into < PAGE) {
    f.kind = FAIL_STACK;
    snprintf(f.message, sizeof f.message,
             "stack overflow: a thread has %zu KiB for its local variables", (w.stack_bytes - PAGE) / 1024);
  } else if (!w.fault_has_address) {
    f.kind = FAIL_BOUNDS;
    snprintf(f.message, sizeof f.message,
             "access to an impossible address, or a vector access that is not aligned");
  } else {
    f.kind = FAIL_BOUNDS;
    snprintf(f.message, sizeof f.message, "%s out of bounds: %s",
             w.fault_is_write ? "write" : "access", describe_fault_address(w).c_str());
  }
}

}  // namespace memra
