// Words for an address that a kernel should not have touched: which buffer it was meant for. The
// instruction that faulted names the register it counted from; where that points into a buffer, this
// buffer is meant, however far away the address is. Else only the nearest one can be named.
#include "rt.h"

namespace memra {

namespace {

#if defined(__x86_64__)
// Registers that the memory operand of the instruction adds up (index only where it is not scaled).
std::vector<uint32_t> address_registers(const uint8_t* at) {
  while (*at == 0x66 || *at == 0x67 || *at == 0xf0 || *at == 0xf2 || *at == 0xf3 || *at == 0x2e ||
         *at == 0x36 || *at == 0x3e || *at == 0x26 || *at == 0x64 || *at == 0x65) {
    ++at;
  }
  uint32_t x = 0, b = 0;  // the fourth bits of index and base
  if (*at == 0xc5) {
    at += 2;
  } else if (*at == 0xc4 || *at == 0x62) {
    x = ~at[1] >> 6 & 1, b = ~at[1] >> 5 & 1;
    at += *at == 0xc4 ? 3 : 4;
  } else {
    if ((*at & 0xf0) == 0x40) x = *at >> 1 & 1, b = *at & 1, ++at;
    if (*at == 0xa4 || *at == 0xa5) return {6, 7};  // movs
    if (*at == 0xaa || *at == 0xab) return {7};     // stos
    if (*at == 0x0f && (at[1] == 0x38 || at[1] == 0x3a)) at += 2;
    else if (*at == 0x0f) ++at;
  }
  const uint8_t form = at[1], sib = at[2];
  std::vector<uint32_t> found;
  if (form >> 6 == 3) return found;
  if ((form & 7) == 4) {
    const uint32_t index = (sib >> 3 & 7u) | x << 3;
    if ((sib & 7) != 5 || form >> 6) found.push_back((sib & 7u) | b << 3);
    if (index != 4 && sib >> 6 == 0) found.push_back(index);
  } else if ((form & 7) != 5 || form >> 6) {
    found.push_back((form & 7u) | b << 3);
  }
  return found;
}
#else
std::vector<uint32_t> address_registers(const uint8_t* at) {
  uint32_t word;
  memcpy(&word, at, 4);
  if ((word >> 25 & 5) != 4) return {};  // no load or store
  return {word >> 5 & 31};
}
#endif

// "", or ", parameter 2" where the launch was given a pointer into the buffer.
std::string parameter_of(const Worker& w, const Allocation& a) {
  const Entry& entry = w.copy->table->entries[w.launch->function->index];
  for (uint32_t i = 0; i < entry.n_params; ++i) {
    for (uint32_t at = 0; at + 8 <= entry.param_sizes[i]; at += 8) {
      uintptr_t value;
      memcpy(&value, static_cast<const uint8_t*>(w.launch->params[i]) + at, 8);
      if (value - a.begin < a.n_bytes) return ", parameter " + std::to_string(i);
    }
  }
  return "";
}

// Whether the launch was given this buffer and no other: then it is the one that is meant.
bool only_buffer(const Worker& w, const Allocation& a) {
  const Entry& entry = w.copy->table->entries[w.launch->function->index];
  bool any = false;
  for (uint32_t i = 0; i < entry.n_params; ++i) {
    for (uint32_t at = 0; at + 8 <= entry.param_sizes[i]; at += 8) {
      uintptr_t value;
      Allocation other;
      memcpy(&value, static_cast<const uint8_t*>(w.launch->params[i]) + at, 8);
      if (!buffer_at(value, &other)) continue;
      if (other.begin != a.begin) return false;
      any = true;
    }
  }
  return any;
}

std::string describe(const Worker& w, uintptr_t at, const Allocation& a, const char* which) {
  char text[192];
  snprintf(text, sizeof text, "offset %lld of %s of %llu bytes at 0x%llx", (long long)(at - a.begin),
           which, (unsigned long long)a.n_bytes, (unsigned long long)a.begin);
  return text + parameter_of(w, a);
}

}  // namespace

// "offset 4108 of the nearest buffer, of 4096 bytes at 0x..., parameter 0".
std::string describe_address(const Worker& w, uintptr_t at) {
  char text[192];
  const uintptr_t shared_end = reinterpret_cast<uintptr_t>(w.shared_base) + w.shared_mapped;
  const uintptr_t shared = reinterpret_cast<uintptr_t>(w.context.shared);
  if (at >= shared - PAGE && at < shared_end + PAGE) {
    snprintf(text, sizeof text, "offset %lld of the dynamic shared memory of %u bytes",
             (long long)(at - shared), w.context.shared_bytes);
    return text;
  }
  if (at < (1u << 16)) {
    snprintf(text, sizeof text, "a null pointer (address 0x%llx)", (unsigned long long)at);
    return text;
  }
  Allocation a;
  if (!find_allocation(at, &a)) {
    snprintf(text, sizeof text, "address 0x%llx, which is no device memory", (unsigned long long)at);
    return text;
  }
  if (at - a.begin < a.n_bytes) return describe(w, at, a, a.freed ? "a freed buffer" : "a buffer");
  return describe(w, at, a, only_buffer(w, a) ? "a buffer" : "the nearest buffer,");
}

// The same for the address of a fault, whose instruction may say more.
std::string describe_fault_address(const Worker& w) {
  const uintptr_t pc = w.fault_pc;
  if (pc - reinterpret_cast<uintptr_t>(w.copy->base) < w.copy->n_bytes) {
    for (const uint32_t i : address_registers(reinterpret_cast<const uint8_t*>(pc))) {
      Allocation a;
      if (!buffer_at(w.fault_registers[i], &a)) continue;
      if (w.fault_address - a.begin < a.n_bytes) break;
      return describe(w, w.fault_address, a, "a buffer");
    }
  }
  return describe_address(w, w.fault_address);
}

}  // namespace memra
