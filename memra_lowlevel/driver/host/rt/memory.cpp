// Device memory: every allocation ends at a page that nobody may touch, and starts as 0xFF bytes (NaN
// in every float format). All of it lies in one reserved stretch of addresses, so that check mode
// finds its shadow by arithmetic.
#include <sys/mman.h>

#include <deque>
#include <map>
#include <mutex>

#include "rt.h"

namespace memra {

uintptr_t arena_begin = 0;
size_t arena_bytes = 0;

namespace {

std::mutex memory_mutex;
std::map<uintptr_t, Allocation> live;          // by begin
std::deque<Allocation> graveyard;              // freed, addresses not yet given out again
std::map<uintptr_t, size_t> holes;             // free address ranges
size_t graveyard_bytes = 0;
uint64_t next_serial = 1;
size_t live_bytes = 0;
size_t guard_bytes = PAGE;  // behind each allocation; wide, so that a stray index finds no neighbour

constexpr size_t GRAVEYARD_BYTES = size_t(1) << 30;
constexpr size_t GRAVEYARD_ENTRIES = 1024;

bool reserve() {
  if (arena_begin) return true;
  for (size_t n = size_t(64) << 30; n >= (size_t(1) << 30); n >>= 1) {
    void* at = mmap(nullptr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) continue;
    arena_begin = reinterpret_cast<uintptr_t>(at);
    arena_bytes = n;
    guard_bytes = n >> 16 > PAGE ? n >> 16 : PAGE;
    holes[arena_begin + PAGE] = n - PAGE;
    return true;
  }
  return false;
}

void give_back(uintptr_t begin, size_t n) {
  auto next = holes.lower_bound(begin);
  if (next != holes.end() && begin + n == next->first) {
    n += next->second;
    next = holes.erase(next);
  }
  if (next != holes.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += n;
      return;
    }
  }
  holes[begin] = n;
}

uintptr_t take(size_t n) {
  for (auto it = holes.begin(); it != holes.end(); ++it) {
    if (it->second < n) continue;
    const uintptr_t begin = it->first;
    const size_t rest = it->second - n;
    holes.erase(it);
    if (rest) holes[begin + n] = rest;
    return begin;
  }
  return 0;
}

void bury_oldest() {
  const Allocation gone = graveyard.front();
  graveyard.pop_front();
  graveyard_bytes -= gone.map_bytes;
  give_back(gone.map_begin, gone.map_bytes);
}

template <class F>
void each_allocation(F f) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (const auto& [begin, a] : live) f(a);
}

}  // namespace

// The allocation that holds `at`, else the nearest within a megabyte, freed ones included.
bool find_allocation(uintptr_t at, Allocation* found) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  constexpr uintptr_t NEAR = 1 << 20;
  for (auto it = graveyard.rbegin(); it != graveyard.rend(); ++it) {
    if (at >= it->begin && at < it->begin + it->n_bytes) {
      *found = *it;
      return true;
    }
  }
  auto next = live.upper_bound(at);
  uintptr_t best = NEAR;
  bool any = false;
  if (next != live.begin()) {
    const Allocation& before = std::prev(next)->second;
    const uintptr_t end = before.begin + before.n_bytes;
    const uintptr_t distance = at < end ? 0 : at - end;
    if (distance < best) {
      best = distance;
      *found = before;
      any = true;
    }
  }
  if (next != live.end() && next->second.begin - at < best) {
    *found = next->second;
    any = true;
  }
  return any;
}

// The live buffer that a pointer points into, or right behind.
bool buffer_at(uintptr_t at, Allocation* found) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto next = live.upper_bound(at);
  if (next == live.begin()) return false;
  *found = std::prev(next)->second;
  return at - found->begin <= found->n_bytes;
}

}  // namespace memra

using namespace memra;

// Returns 0 when addresses or memory have run out. `alignment` is a power of two up to a page; what
// it costs is slack between the last byte and the guard page, which is watched only at free.
MEMRA_EXPORT uint64_t memra_alloc(uint64_t n_bytes, uint64_t alignment) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  if (!reserve() || alignment > PAGE || n_bytes > arena_bytes) return 0;
  const size_t room = (n_bytes + alignment - 1) & ~(alignment - 1);
  const size_t data = room ? (room + PAGE - 1) & ~(PAGE - 1) : PAGE;
  uintptr_t begin = take(data + guard_bytes);
  while (!begin && !graveyard.empty()) {
    bury_oldest();
    begin = take(data + guard_bytes);
  }
  if (!begin) return 0;
  if (mprotect(reinterpret_cast<void*>(begin), data, PROT_READ | PROT_WRITE)) {
    give_back(begin, data + guard_bytes);
    return 0;
  }
  memset(reinterpret_cast<void*>(begin), POISON, data);
  Allocation a{};
  a.begin = begin + data - room;
  a.n_bytes = n_bytes;
  a.map_begin = begin;
  a.map_bytes = data + guard_bytes;
  a.serial = next_serial++;
  live[a.begin] = a;
  live_bytes += n_bytes;
  check_allocated(a.begin, n_bytes, a.map_begin, data + PAGE);
  return a.begin;
}

// 0 freed; 1 freed, but bytes around it were overwritten; -1 not an allocation.
MEMRA_EXPORT int memra_free(uint64_t ptr) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto it = live.find(ptr);
  if (it == live.end()) return -1;
  Allocation a = it->second;
  live.erase(it);
  live_bytes -= a.n_bytes;
  int damaged = 0;
  const uint8_t* at = reinterpret_cast<const uint8_t*>(a.map_begin);
  const uint8_t* begin = reinterpret_cast<const uint8_t*>(a.begin);
  const uint8_t* end = at + a.map_bytes - guard_bytes;
  for (; at < begin; ++at) damaged |= *at != POISON;
  for (at = begin + a.n_bytes; at < end; ++at) damaged |= *at != POISON;
  mmap(reinterpret_cast<void*>(a.map_begin), a.map_bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  a.freed = true;
  check_freed(a.map_begin, a.map_bytes - guard_bytes + PAGE);
  graveyard.push_back(a);
  graveyard_bytes += a.map_bytes;
  while (graveyard_bytes > GRAVEYARD_BYTES || graveyard.size() > GRAVEYARD_ENTRIES) bury_oldest();
  return damaged;
}

MEMRA_EXPORT uint64_t memra_live_bytes() {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return live_bytes;
}

// Size in bytes of the live allocation that begins at `ptr`; -1 where none does.
MEMRA_EXPORT int64_t memra_alloc_size(uint64_t ptr) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto it = live.find(ptr);
  return it == live.end() ? -1 : int64_t(it->second.n_bytes);
}
