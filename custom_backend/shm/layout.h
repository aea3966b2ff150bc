// What lies in the shared memory of a group, and where. No torch in here: the core is plain C++17.
//
//     Header | State of rank 0 | State of rank 1 | ... | slots of rank 0 | ... | channels
//
// One such segment belongs to each group. All ranks map it, each at an address of its own, so there
// are no pointers inside, only offsets. A new segment is all zeros, and everything below is made so
// that zeros are its right beginning (but the robust mutexes, which rank 0 initialises).
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shm {

constexpr int kMaxRanks = 64;
constexpr size_t kCacheLine = 64;

// A slot is what a rank shows to the others in one round. Two of them, the writer's and a reader's,
// should stay in the second-level cache (often 512 KB a core).
constexpr size_t kSlotBytes = 128 * 1024;
// Why four: see rounds.h.
constexpr uint32_t kDepth = 4;

// Point to point: a ring of packets for each ordered pair of ranks.
constexpr size_t kPacketBytes = 64 * 1024;
constexpr uint32_t kPackets = 4;

// A counter that others wait for. It has a cache line to itself: a waiting core re-reads it all the
// time, and would slow down whoever writes to a neighbour.
struct alignas(kCacheLine) Flag {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;  // how many sleep until the value changes
};

enum class Kind : uint32_t {
  none, all_reduce, reduce, broadcast, all_gather, reduce_scatter, gather, scatter, all_to_all,
  barrier, send, recv
};

// What a rank says of the operation that it is in. All ranks read all calls, and compare.
struct Call {
  Kind kind;
  uint32_t dtype;   // as reduce.h numbers them
  uint32_t op;      // the ReduceOp, 0 where nothing is reduced
  int32_t root;     // -1 where there is none
  uint64_t bytes;   // of this rank's input
  uint64_t parts;   // a digest of the parts' sizes, where they may differ
  double factor;    // of premul_sum, else 1
  uint64_t number;  // counts the operations of the group
  int64_t offset;   // where the tensor lies in this rank's heap; -1: in private memory
};

struct alignas(kCacheLine) Slot {
  Call call;  // filled in the first round of an operation
  alignas(kCacheLine) uint8_t data[kSlotBytes];
};

// What one rank tells all others.
struct State {
  Flag posted;    // how many rounds' steps it has done: rounds.h
  Flag doorbell;  // rung by others when a packet was put or taken: point_to_point.h
  alignas(kCacheLine) pthread_mutex_t alive;  // robust: the kernel marks it when its holder dies
  std::atomic<uint32_t> has_left;             // it has destroyed its group in good order
  std::atomic<uint32_t> doing;                // a Kind, for the others' error messages
  std::atomic<uint32_t> transferring;         // send or recv, while it waits in one
  std::atomic<uint64_t> number;               // and which operation that is
};

struct Header {
  std::atomic<uint32_t> failed;  // 0: no; 1: somebody writes the message; 2: it can be read
  char message[1020];
};

struct Packet {
  uint64_t total;  // bytes of the whole message
  uint32_t bytes;  // bytes in this packet
  uint32_t tag;
  uint32_t dtype;
  alignas(kCacheLine) uint8_t data[kPacketBytes];
};

// From one rank to one other. Only the sender changes `put`, only the receiver `taken`.
struct Channel {
  alignas(kCacheLine) std::atomic<uint32_t> put;
  alignas(kCacheLine) std::atomic<uint32_t> taken;
  Packet packets[kPackets];
};

// The addresses of all this in one process.
struct Segment {
  uint8_t* base = nullptr;
  int size = 0;

  static constexpr size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
  static size_t states_at() { return aligned(sizeof(Header)); }
  static size_t slots_at(int size) { return aligned(states_at() + size * sizeof(State)); }
  static size_t channels_at(int size) {
    return aligned(slots_at(size) + size * kDepth * sizeof(Slot));
  }
  static size_t bytes(int size) { return aligned(channels_at(size) + size * size * sizeof(Channel)); }

  Header& header() const { return *reinterpret_cast<Header*>(base); }
  State& state(int rank) const { return reinterpret_cast<State*>(base + states_at())[rank]; }
  Slot& slot(int rank, uint32_t round) const {
    return reinterpret_cast<Slot*>(base + slots_at(size))[rank * kDepth + round % kDepth];
  }
  Channel& channel(int from, int to) const {
    return reinterpret_cast<Channel*>(base + channels_at(size))[from * size + to];
  }
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a lock would lie in one process only");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would lie in one process only");

}  // namespace shm
