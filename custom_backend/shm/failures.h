// Fault injection: a test build (-DSHM_FAILURES) makes the n-th call at a kind of site fail.
//
// Each place that can fail asks must_fail() first. In a normal build the answer is always no, and the
// compiler removes the question. tests/workers/shm_failures.cpp walks through all places.
#pragma once

#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace shm {

enum class Site {
  map,       // mmap
  copy,      // a copy or a reduction of numbers
  allocate,  // operator new, which the test replaces
  sleep,     // a futex that waits
  wake,      // a futex that wakes: if it fails, the sleeping rank wakes up 5 ms later by itself
};

#ifdef SHM_FAILURES
struct Plan {
  Site site;
  int calls;  // fail when it becomes 0
};
inline thread_local Plan* plan = nullptr;
inline bool must_fail(Site site) { return plan && plan->site == site && --plan->calls == 0; }
#else
constexpr bool must_fail(Site) { return false; }
#endif

inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (must_fail(Site::copy)) throw std::runtime_error("a copy failed");
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

}  // namespace shm
