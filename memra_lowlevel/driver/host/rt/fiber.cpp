// Fibers: the switch between stacks, and what a fresh stack holds.
#include "rt.h"

// ---- the switch ----------------------------------------------------------------------------------
// memra_switch(save, load): push what a call must preserve, swap stack pointers, pop. Rounding modes
// are left alone: kernels do not change them. It ends in a plain return: threads that meet at one
// barrier have the same chain of calls on their stacks, so the processor predicts all returns right.
#if defined(__x86_64__)
__asm__(
    ".text\n"
    ".p2align 4\n"
    ".globl memra_switch\n"
    ".hidden memra_switch\n"
    ".type memra_switch, @function\n"
    "memra_switch:\n"
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    ".globl memra_resume\n"
    ".hidden memra_resume\n"
    "memra_resume:\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n"
    ".size memra_switch, .-memra_switch\n"
    ".globl memra_fiber_start\n"
    ".hidden memra_fiber_start\n"
    ".type memra_fiber_start, @function\n"
    "memra_fiber_start:\n"
    "  .cfi_startproc\n"
    "  .cfi_undefined rip\n"
    "  movq %r12, %rdi\n"
    "  movq %r13, %rsi\n"
    "  xorl %ebp, %ebp\n"
    "  call memra_fiber_main\n"
    "  ud2\n"
    "  .cfi_endproc\n"
    ".size memra_fiber_start, .-memra_fiber_start\n");
#elif defined(__aarch64__)
__asm__(
    ".text\n"
    ".p2align 4\n"
    ".globl memra_switch\n"
    ".hidden memra_switch\n"
    ".type memra_switch, %function\n"
    "memra_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n"
    "  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n"
    "  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n"
    "  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n"
    "  str x9, [x0]\n"
    "  mov sp, x1\n"
    ".globl memra_resume\n"
    ".hidden memra_resume\n"
    "memra_resume:\n"
    "  ldp x19, x20, [sp, #0]\n"
    "  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n"
    "  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n"
    "  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n"
    ".size memra_switch, .-memra_switch\n"
    ".globl memra_fiber_start\n"
    ".hidden memra_fiber_start\n"
    ".type memra_fiber_start, %function\n"
    "memra_fiber_start:\n"
    "  .cfi_startproc\n"
    "  .cfi_undefined x30\n"
    "  mov x0, x19\n"
    "  mov x1, x20\n"
    "  mov x29, xzr\n"
    "  bl memra_fiber_main\n"
    "  brk #1\n"
    "  .cfi_endproc\n"
    ".size memra_fiber_start, .-memra_fiber_start\n");
#else
#error "the host device knows x86-64 and aarch64"
#endif

extern "C" void memra_switch(void** save, void* load);
extern "C" void memra_resume();
extern "C" void memra_fiber_start();

#if defined(MEMRA_ASAN)
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t n);
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* n);
#endif

namespace memra {

namespace {

constexpr uint32_t MAIN = ~0u;

// The switch to a fiber's stack, or to that of the launch. ASan wants to be told; `last` when the
// running fiber will not be resumed.
__attribute__((always_inline)) inline void go_to(Worker& w, void** save, void* load, uint32_t fiber,
                                                 bool last = false) {
#if defined(MEMRA_ASAN)
  void* fake = nullptr;
  if (fiber == MAIN) {
    __sanitizer_start_switch_fiber(last ? nullptr : &fake, w.main_bottom, w.main_bytes);
  } else {
    __sanitizer_start_switch_fiber(last ? nullptr : &fake, w.stacks + fiber * w.stack_bytes,
                                   w.stack_bytes);
  }
  memra_switch(save, load);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  (void)w, (void)fiber, (void)last;
  memra_switch(save, load);
#endif
}

// A fresh stack holds what memra_switch will pop. Tops are staggered, or the hot end of every stack
// would fall into the same cache set.
void* prepare_fiber(Worker& w, uint32_t fiber) {
  if (MEMRA_UNLIKELY(fiber == w.n_fibers)) guard_fiber(w, w.n_fibers++);
  uint8_t* top = w.stacks + (fiber + 1) * w.stack_bytes;
  top -= 64 + (fiber * 320u) % 4096u;
#if defined(__x86_64__)
  // Frame: r15 r14 r13 r12 rbx rbp, return address; what is left is 16-aligned where the call happens.
  void** frame = reinterpret_cast<void**>(top) - 9;
  frame[0] = frame[1] = nullptr;
  frame[2] = reinterpret_cast<void*>(uintptr_t(fiber));
  frame[3] = &w;
  frame[4] = frame[5] = nullptr;
  frame[6] = reinterpret_cast<void*>(&memra_fiber_start);
#else
  void** frame = reinterpret_cast<void**>(top) - 20;
  memset(frame, 0, 160);
  frame[0] = &w;
  frame[1] = reinterpret_cast<void*>(uintptr_t(fiber));
  frame[11] = reinterpret_cast<void*>(&memra_fiber_start);
#endif
  return frame;
}

}  // namespace

}  // namespace memra
