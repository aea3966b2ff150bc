// The calls of all ranks must match: ranks with different calls would wait forever, or mix up their
// numbers. Each rank compares its own call with that of every other rank, and names the difference.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "reduce.h"
#include "waiting.h"

namespace shm {

struct Span {
  uint8_t* data;
  size_t bytes;
};

// The type of the numbers, and how to reduce them.
struct Numbers {
  Dtype dtype;
  Op op = Op::sum;
  double factor = 1;  // for premul_sum
};

struct Limits {
  Clock::time_point deadline;
  Patience patience;
};

inline std::string describe(const Call& call) {
  std::string text = name_of(call.kind);
  text += "(" + std::string(name_of(static_cast<Dtype>(call.dtype)));
  text += ", " + std::to_string(call.bytes) + " bytes";
  if (call.kind == Kind::all_reduce || call.kind == Kind::reduce ||
      call.kind == Kind::reduce_scatter) {
    text += ", " + std::string(name_of(static_cast<Op>(call.op)));
    if (static_cast<Op>(call.op) == Op::premul_sum) text += " by " + std::to_string(call.factor);
  }
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  return text + ")";
}

// A digest of the sizes of the parts.
inline uint64_t digest(const std::vector<Span>& parts) {
  uint64_t digest = 0;
  for (auto& part : parts) digest = digest * 0x9e3779b97f4a7c15 + part.bytes;
  return digest;
}

inline void agree(const Peers& peers, const Call& mine, const Call& theirs, int peer) {
  if (theirs.kind == mine.kind && theirs.dtype == mine.dtype && theirs.op == mine.op &&
      theirs.root == mine.root && theirs.bytes == mine.bytes && theirs.parts == mine.parts &&
      theirs.factor == mine.factor) {
    return;
  }
  const bool we_first = peers.rank < peer;
  peers.fail("the ranks' calls do not match: rank " + std::to_string(std::min(peers.rank, peer)) +
             " called " + describe(we_first ? mine : theirs) + ", rank " +
             std::to_string(std::max(peers.rank, peer)) + " called " +
             describe(we_first ? theirs : mine) +
             (mine.bytes == theirs.bytes && mine.parts != theirs.parts ? " in parts of other sizes"
                                                                       : "") +
             " (operation " + std::to_string(mine.number) + " of the group)");
}

}  // namespace shm
