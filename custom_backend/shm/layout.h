// The layout of a group's shared memory. No torch in here: the core is plain C++.
//
//     Header | State of rank 0 | State of rank 1 | ... | slots of rank 0 | ... | channels
//
// Each group has one such segment. Every rank maps it at another address, so it holds offsets, no
// pointers. A new segment is all zeros, and zero is the right initial value of everything below,
// except for the robust mutexes, which rank 0 initialises.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shm {

constexpr int kMaxRanks = 64;
constexpr size_t kCacheLine = 64;

// A slot holds the data that a rank shows to all ranks in one round. Two slots, the writer's and a
// reader's, should stay in the second-level cache (often 512 KB per core).
constexpr size_t kSlotBytes = 128 * 1024;
// rounds.h explains why four.
constexpr uint32_t kDepth = 4;

// Point-to-point: one ring of packets for each ordered pair of ranks.
constexpr size_t kPacketBytes = 64 * 1024;
constexpr uint32_t kPackets = 4;

// A counter that other ranks wait for. It has its own cache line: a waiting core re-reads it all
// the time, which would slow down every write to the same line.
struct alignas(kCacheLine) Flag {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;  // how many threads sleep until the value changes
};

enum class Kind : uint32_t {
  none, all_reduce, reduce, broadcast, all_gather, reduce_scatter, gather, scatter, all_to_all,
  barrier, send, recv
};

// The operation that a rank is in. All ranks read all calls, and compare them.
struct Call {
  Kind kind;
  uint32_t dtype;   // a Dtype of reduce.h
  uint32_t op;      // an Op of reduce.h, 0 without a reduction
  int32_t root;     // -1 without a root
  uint64_t bytes;   // the size of this rank's input
  uint64_t parts;   // a digest of the sizes of the parts, if they may differ
  double factor;    // the factor of premul_sum, else 1
  uint64_t number;  // the number of the operation in the group
  int64_t offset;   // of the tensor in this rank's heap; -1: it is in private memory
};

struct alignas(kCacheLine) Slot {
  Call call;  // filled in the first round of an operation
  alignas(kCacheLine) uint8_t data[kSlotBytes];
};

// The state of one rank, which all ranks read.
struct State {
  Flag posted;    // how many steps it has done: rounds.h
  Flag doorbell;  // other ranks ring it when they put or take a packet
  alignas(kCacheLine) pthread_mutex_t alive;  // robust: the kernel marks it when its holder dies
  std::atomic<uint32_t> has_left;             // 1: it has destroyed its group in good order
  std::atomic<uint32_t> doing;                // a Kind, for the error messages of other ranks
  std::atomic<uint32_t> transferring;         // the Kind of the send or recv in which it waits
  std::atomic<uint64_t> number;               // of its operation: counts the user's calls
};

struct Header {
  std::atomic<uint32_t> failed;  // 0: no; 1: a rank is writing the message; 2: it is written
  char message[1020];
};

struct Packet {
  uint64_t total;  // bytes of the whole message
  uint32_t bytes;  // bytes in this packet
  uint32_t tag;
  uint32_t dtype;
  alignas(kCacheLine) uint8_t data[kPacketBytes];
};

// From one rank to another. Only the sender changes `put`, only the receiver changes `taken`.
struct Channel {
  alignas(kCacheLine) std::atomic<uint32_t> put;
  alignas(kCacheLine) std::atomic<uint32_t> taken;
  Packet packets[kPackets];
};

// The addresses of these structures in one process.
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
