// A pipe from one rank to the next: a ring buffer in shared memory, one writer, one reader.
//
//     bytes    | . . . . # # # # # . . . . |      #: written, not yet read
//                        ^         ^
//                      read     written           both only grow; the position is counter % kCapacity
//
// Only the writer changes `written`, only the reader changes `read`: there is no lock. The order of
// memory makes it correct. A compiler, and a core, may exchange two memory accesses of a thread if
// this thread cannot tell. The other thread could. So what comes before a release store stays before
// it, and what comes after an acquire load stays after it:
//
//     writer: copy the bytes in,  then  written.store(n, release)
//     reader: written.load(acquire) == n,  then  copy the bytes out      they are there
//     reader: copy the bytes out, then  read.store(n, release)
//     writer: read.load(acquire) == n,     then  copy new bytes in       no reader needs the old ones
//
// An acquire load that sees the value of a release store also sees everything before that store.
//
// Rank r writes to the pipe of rank r + 1, and the last rank to that of rank 0: the ranks form a
// ring. The collectives below need no more than that. This file knows nothing of torch.
#pragma once

#include <poll.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pipe_backend {

constexpr uint64_t kCapacity = 1 << 18;  // bytes in a pipe
constexpr size_t kPiece = 1 << 14;       // a rank passes a piece on while the next one arrives
using Clock = std::chrono::steady_clock;
static_assert(std::atomic<uint64_t>::is_always_lock_free);  // a lock would not be in shared memory

// All ranks map one pipe for each rank: pipes[r] leads from rank r to the next rank. New memory is
// all zeros, and the system provides the pages that are used.
struct Pipe {
  alignas(64) std::atomic<uint64_t> written;  // each counter in a cache line of its own: a core
  alignas(64) std::atomic<uint64_t> read;     // that writes a line takes it from the other core
  alignas(64) char bytes[kCapacity];
};

class Ring {
 public:
  // The pidfds of the neighbours become readable when these processes end (man pidfd_open).
  Ring(Pipe* pipes, int rank, int size, int left_pidfd, int right_pidfd)
      : pipes_(pipes), rank_(rank), size_(size),
        left_{(rank + size - 1) % size, left_pidfd}, right_{(rank + 1) % size, right_pidfd} {}
  Ring(const Ring&) = delete;
  ~Ring() {
    close(left_.pidfd);
    close(right_.pidfd);
  }

  // ---- The pipes

  void send(const char* data, size_t count) {
    Pipe& pipe = pipes_[rank_];
    uint64_t written = pipe.written.load(std::memory_order_relaxed);  // only this thread changes it
    while (count > 0) {
      uint64_t room = 0;
      wait_for(right_, [&] {
        room = kCapacity - (written - pipe.read.load(std::memory_order_acquire));
        return room > 0;
      });
      const uint64_t at = written % kCapacity;
      const size_t n = std::min<uint64_t>({count, room, kCapacity - at});  // up to the buffer's end
      std::memcpy(pipe.bytes + at, data, n);
      written += n;
      pipe.written.store(written, std::memory_order_release);
      data += n;
      count -= n;
    }
  }

  void recv(char* data, size_t count) {
    Pipe& pipe = pipes_[left_.rank];
    uint64_t read = pipe.read.load(std::memory_order_relaxed);
    while (count > 0) {
      uint64_t ready = 0;
      wait_for(left_, [&] {
        ready = pipe.written.load(std::memory_order_acquire) - read;
        return ready > 0;
      });
      const uint64_t at = read % kCapacity;
      const size_t n = std::min<uint64_t>({count, ready, kCapacity - at});
      std::memcpy(data, pipe.bytes + at, n);
      read += n;
      pipe.read.store(read, std::memory_order_release);
      data += n;
      count -= n;
    }
  }

  // ---- The collectives

  // Begin an operation. Each rank tells the next rank what it calls, so that calls that differ are an
  // error, and not a wrong sum.
  void begin(const std::string& call, std::chrono::milliseconds timeout) {
    call_ = call;
    timeout_ = timeout;
    deadline_ = Clock::now() + timeout;
    if (size_ == 1) return;
    char mine[64] = {}, theirs[64] = {};
    call.copy(mine, sizeof(mine) - 1);
    send(mine, sizeof(mine));
    recv(theirs, sizeof(theirs));
    if (std::memcmp(mine, theirs, sizeof(mine)) == 0) return;
    fail("the calls do not match: " + name(left_.rank) + " called " + theirs + ", " + name(rank_) +
         " called " + mine);
  }

  // The tensor of `root` goes from rank to rank, in pieces, up to the rank before the root.
  void broadcast(char* data, size_t count, int root) {
    for (size_t at = 0; at < count; at += kPiece) {
      const size_t n = std::min(kPiece, count - at);
      if (rank_ != root) recv(data + at, n);
      if (right_.rank != root) send(data + at, n);
    }
  }

  // Each rank adds its numbers to the sum that arrives, and passes the sum on: 0 + 1 + 2 ..., the
  // same order in every run. The last rank then broadcasts the sum, so all ranks get the same bits.
  // No rank waits for a rank that waits for it: the pipe from the last rank to rank 0 is not used
  // before the last rank has the sum. add(mine, theirs, bytes): mine += theirs.
  template <class Add>
  void all_reduce(char* data, size_t count, Add add) {
    alignas(64) char sum[kPiece];
    for (size_t at = 0; at < count; at += kPiece) {
      const size_t n = std::min(kPiece, count - at);
      if (rank_ > 0) {
        recv(sum, n);
        add(data + at, sum, n);
      }
      if (rank_ < size_ - 1) send(data + at, n);
    }
    broadcast(data, count, size_ - 1);
  }

  std::atomic<bool> leaving{false};  // set by another thread: give up

 private:
  struct Neighbour {
    int rank, pidfd;
  };

  // ---- Waiting

  // Look, and let other threads run; after a while sleep between two looks. (shm/waiting.h sleeps
  // until it is woken. std::atomic::wait can not be used: it only wakes threads of one process.)
  template <class Ready>
  void wait_for(const Neighbour& peer, Ready ready) {
    for (int looks = 0; !ready(); ++looks) {
      if (looks < 200) {
        sched_yield();
        continue;
      }
      const timespec moment = {0, 50'000};  // ns
      nanosleep(&moment, nullptr);
      // Look once more: the process may have written the bytes, and then ended.
      if (has_ended(peer) && !ready()) {
        fail(name(peer.rank) + " has ended; " + name(rank_) + " waited for it in " + call_);
      }
      if (leaving) fail(name(rank_) + " ended in " + call_);
      if (Clock::now() > deadline_) {
        fail("timeout: " + name(rank_) + " waited " + std::to_string(timeout_.count()) +
             " ms for " + name(peer.rank) + " in " + call_);
      }
    }
  }

  static bool has_ended(const Neighbour& peer) {
    pollfd one = {peer.pidfd, POLLIN, 0};
    return poll(&one, 1, 0) > 0;
  }

  [[noreturn]] static void fail(const std::string& why) { throw std::runtime_error("pipe: " + why); }
  static std::string name(int rank) { return "rank " + std::to_string(rank); }

  Pipe* const pipes_;
  const int rank_, size_;
  const Neighbour left_, right_;
  std::string call_;
  std::chrono::milliseconds timeout_{};
  Clock::time_point deadline_;
};

}  // namespace pipe_backend
