// The reports of -fsanitize=undefined, without its library: each becomes a failure of the launch with
// the place that the compiler recorded.
#include "rt.h"

namespace memra {
namespace {

struct Location {
  const char* file;
  uint32_t line, column;
};

void undefined(const void* data, const char* what) {
  Worker* w = worker_of(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)));
  if (!w || !w->launch) return;
  const Location& at = *static_cast<const Location*>(data);
  const Site site = {at.file, int(at.line), 0};
  fail(*w, FAIL_OTHER, &site, "undefined behaviour: %s", what);
}

}  // namespace
}  // namespace memra

#define MEMRA_UNDEFINED(name, what)                                                          \
  MEMRA_EXPORT void __ubsan_handle_##name(void* data) { memra::undefined(data, what); }      \
  MEMRA_EXPORT void __ubsan_handle_##name##_abort(void* data) { memra::undefined(data, what); }

MEMRA_UNDEFINED(add_overflow, "signed addition overflows")
MEMRA_UNDEFINED(sub_overflow, "signed subtraction overflows")
MEMRA_UNDEFINED(mul_overflow, "signed multiplication overflows")
MEMRA_UNDEFINED(negate_overflow, "negation overflows")
MEMRA_UNDEFINED(divrem_overflow, "division by zero, or of the least integer by -1")
MEMRA_UNDEFINED(shift_out_of_bounds,
                "shift by a negative amount or by the width of the type or more (a GPU clamps, a CPU "
                "takes it modulo), or of a bit out of a signed value")
MEMRA_UNDEFINED(vla_bound_not_positive, "array of no positive length")
MEMRA_UNDEFINED(float_cast_overflow, "float value outside the range of the integer type")
MEMRA_UNDEFINED(load_invalid_value, "a bool or enum holds a value it cannot have")
MEMRA_UNDEFINED(invalid_builtin, "zero handed to a count of leading or trailing zeros")
MEMRA_UNDEFINED(nonnull_arg, "null for an argument that must not be null")
MEMRA_UNDEFINED(nonnull_return_v1, "null returned where that is ruled out")
MEMRA_UNDEFINED(pointer_overflow, "pointer arithmetic overflows")
MEMRA_UNDEFINED(builtin_unreachable, "unreachable code was reached")
MEMRA_UNDEFINED(missing_return, "a function that returns a value ended without one")
MEMRA_UNDEFINED(function_type_mismatch_v1, "call through a pointer of another function type")

#define MEMRA_INDEX(suffix)                                                                  \
  MEMRA_EXPORT void __ubsan_handle_out_of_bounds##suffix(void* data, uintptr_t index) {      \
    memra::Worker* w = memra::worker_of(reinterpret_cast<uintptr_t>(__builtin_frame_address(0))); \
    if (!w || !w->launch) return;                                                            \
    const auto& at = *static_cast<const memra::Location*>(data);                             \
    const memra::Site site = {at.file, int(at.line), 0};                                     \
    memra::fail(*w, memra::FAIL_BOUNDS, &site, "index %lld is outside the array",            \
                (long long)index);                                                           \
  }                                                                                          \
  MEMRA_EXPORT void __ubsan_handle_type_mismatch_v1##suffix(void* data, uintptr_t pointer) { \
    struct Mismatch {                                                                        \
      memra::Location at;                                                                    \
      const void* type;                                                                      \
      uint8_t log_alignment, kind;                                                           \
    };                                                                                       \
    memra::Worker* w = memra::worker_of(reinterpret_cast<uintptr_t>(__builtin_frame_address(0))); \
    if (!w || !w->launch) return;                                                            \
    const auto& m = *static_cast<const Mismatch*>(data);                                     \
    const memra::Site site = {m.at.file, int(m.at.line), 0};                                 \
    if (!pointer) memra::fail(*w, memra::FAIL_BOUNDS, &site, "access through a null pointer"); \
    memra::fail(*w, memra::FAIL_BOUNDS, &site,                                               \
                "address 0x%llx is not aligned to %u bytes (a GPU faults)",                  \
                (unsigned long long)pointer, 1u << m.log_alignment);                         \
  }
MEMRA_INDEX()
MEMRA_INDEX(_abort)
