// Wait for another process: spin, then yield, then sleep in the kernel; never wait for a dead one.
//
// A message of a few bytes passes between two cores in a tenth of a microsecond. Sleeping and
// waking up costs a hundred times that, so a waiting rank first polls the counter. With more ranks
// than cores, polling would keep the awaited rank off its core, so the rank then hardly spins, and
// yields its core. After that it sleeps in a futex, which uses no core at all.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <stdexcept>
#include <string>
#include <system_error>

#include "failures.h"
#include "layout.h"

namespace shm {

using Clock = std::chrono::steady_clock;

struct Patience {
  double spin_us;  // poll for this many microseconds
  int yields;      // then yield the core and poll again, this many times
};
constexpr Patience kCorePerRank = {50, 4};
constexpr Patience kFewCores = {2, 64};
constexpr Patience kInBackground = {0, 0};  // for a background thread, which leaves the cores free

inline const char* name_of(Kind kind) {
  static const char* names[] = {"nothing", "all_reduce", "reduce", "broadcast", "all_gather",
                                "reduce_scatter", "gather", "scatter", "all_to_all", "barrier",
                                "send", "recv"};
  return names[static_cast<uint32_t>(kind)];
}

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Wake the threads that sleep on the counter. If the kernel refuses, they wake up by themselves 5 ms
// later (Peers::wait), so an error here costs time only.
inline void wake(Flag& flag) {
  if (must_fail(Site::wake)) return;
  syscall(SYS_futex, &flag.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Sleep for at most 5 ms, and only while the counter has the value `seen`.
inline void sleep_on(Flag& flag, uint32_t seen) {
  const timespec moment = {0, 5'000'000};
  const bool failed = must_fail(Site::sleep);
  if (failed) errno = EPERM;
  if (!failed && syscall(SYS_futex, &flag.value, FUTEX_WAIT, seen, &moment, nullptr, 0) == 0) return;
  if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return;
  throw std::system_error(errno, std::generic_category(), "the kernel refused to wait (futex)");
}

// Set the counter, and wake the threads that sleep on it. A thread that sees the new value also
// sees everything that was written before it.
//
// No wake-up is lost: either this thread sees that the other one has announced to sleep, or the
// other one sees the new value before it sleeps. That needs one order for all threads: seq_cst.
inline void publish(Flag& flag, uint32_t value) {
  flag.value.store(value, std::memory_order_seq_cst);
  if (flag.sleepers.load(std::memory_order_seq_cst)) wake(flag);
}

inline void ring(Flag& flag) {
  flag.value.fetch_add(1, std::memory_order_seq_cst);
  if (flag.sleepers.load(std::memory_order_seq_cst)) wake(flag);
}

// Counters overflow after 2^32 steps; their differences stay correct.
inline bool has_reached(const Flag& flag, uint32_t value) {
  return static_cast<int32_t>(flag.value.load(std::memory_order_acquire) - value) >= 0;
}

// This rank and its peers: wait for them, detect the dead, and report a failure to all of them.
class Peers {
 public:
  Peers(Segment segment, int rank, Patience patience)
      : segment(segment), rank(rank), patience(patience) {}

  const Segment segment;
  const int rank;
  const Patience patience;
  std::atomic<bool> leaving{false};  // the process ends: operations give up
  mutable std::atomic<bool> gave_up{false};  // ... and one was given up: no later operation can run

  // Wait until ready() is true, which changes only when `flag` does. `awaited` is the rank that
  // must act, -1 if several may; after a timeout, explain() names the missing ranks. Throws Error
  // if ready() can not become true any more.
  template <class Ready, class Explain>
  void wait(Flag& flag, Ready ready, int awaited, Clock::time_point deadline, Patience patience,
            Explain explain) const {
    if (ready()) return;
    const auto begin = Clock::now();
    while (patience.spin_us > 0) {
      for (int i = 0; i < 32; ++i) {
        if (ready()) return;
        pause_briefly();
      }
      if (Clock::now() - begin > std::chrono::duration<double, std::micro>(patience.spin_us)) break;
    }
    for (int i = 0; i < patience.yields; ++i) {
      if (ready()) return;
      sched_yield();
    }
    Sleeper announced(flag);
    while (true) {
      const uint32_t seen = flag.value.load(std::memory_order_seq_cst);
      if (ready()) return;
      sleep_on(flag, seen);  // returns after 5 ms at the latest, to look for dead ranks
      if (ready()) return;
      throw_if_failed();
      if (leaving) {
        gave_up = true;
        throw Error(where_is(rank) + " ends, and waits no longer");
      }
      throw_if_somebody_died();
      if (awaited >= 0 && segment.state(awaited).has_left.load() && !ready()) {
        fail(where_is(rank) + " waits for " + where_is(awaited));
      }
      if (awaited < 0 && all_others_have_left() && !ready()) {
        fail(where_is(rank) + " waits for a message from any rank, but all other ranks have left");
      }
      if (Clock::now() > deadline) fail(explain());
    }
  }

  // Throw the error that a rank has reported. Cheap: each operation calls it first.
  void throw_if_failed() const {
    auto& failed = segment.header().failed;
    if (failed.load(std::memory_order_acquire) == 0) return;
    const auto begin = Clock::now();
    while (failed.load(std::memory_order_acquire) == 1) {
      if (Clock::now() - begin > std::chrono::seconds(1)) {
        throw Error("a rank found an error, and died before it had said which");
      }
      sched_yield();
    }
    throw Error(segment.header().message);
  }

  // Run `action`. An exception that leaves it is known to this rank only, which may go on: then the
  // other ranks would take its next steps for the missing ones, and return wrong numbers. So tell
  // all ranks. (An Error is known to all ranks already.)
  template <class Action>
  void run(Kind kind, Action action) const {
    try {
      action();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      fail_in(kind, error.what());
    } catch (...) {
      fail_in(kind, "an unknown exception");
    }
  }

  // Tell all ranks that the group is broken, and why. The first reason counts; throw it.
  [[noreturn]] void fail(const std::string& why) const { fail(why.c_str()); }
  [[noreturn]] void fail(const char* why) const {
    uint32_t nobody = 0;
    if (segment.header().failed.compare_exchange_strong(nobody, 1)) {
      snprintf(segment.header().message, sizeof(Header::message), "%s", why);
      segment.header().failed.store(2, std::memory_order_release);
      for (int peer = 0; peer < segment.size; ++peer) {  // wake them up
        wake(segment.state(peer).posted);
        wake(segment.state(peer).doorbell);
      }
    }
    throw_if_failed();
    throw Error(why);
  }

  // "rank 2 (in broadcast, its operation 7)"
  std::string where_is(int peer) const {
    const auto& state = segment.state(peer);
    const auto kind = static_cast<Kind>(state.doing.load(std::memory_order_relaxed));
    const auto number = std::to_string(state.number.load(std::memory_order_relaxed));
    std::string text = "rank " + std::to_string(peer);
    if (state.has_left.load(std::memory_order_relaxed)) return text + " (has left the group)";
    if (kind == Kind::none) {
      const auto transfer = static_cast<Kind>(state.transferring.load(std::memory_order_relaxed));
      const auto where = transfer == Kind::none ? "no operation" : name_of(transfer);
      return text + " (in " + where + ", after its operation " + number + ")";
    }
    return text + " (in " + name_of(kind) + ", its operation " + number + ")";
  }

 private:
  struct Sleeper {
    explicit Sleeper(Flag& flag) : flag(flag) { flag.sleepers.fetch_add(1); }
    ~Sleeper() { flag.sleepers.fetch_sub(1); }
    Flag& flag;
  };

  // "rank 1 failed in all_reduce (its operation 7): ..."; allocates nothing, since memory may be short
  [[noreturn]] void fail_in(Kind kind, const char* reason) const {
    const bool transfers = kind == Kind::send || kind == Kind::recv;
    char why[sizeof(Header::message)];
    snprintf(why, sizeof(why), "rank %d failed in %s (%sits operation %llu): %s", rank,
             name_of(kind), transfers ? "after " : "",
             static_cast<unsigned long long>(segment.state(rank).number.load()), reason);
    fail(why);
  }

  bool all_others_have_left() const {
    for (int peer = 0; peer < segment.size; ++peer) {
      if (peer != rank && !segment.state(peer).has_left.load()) return false;
    }
    return true;
  }

  // A living rank holds its own mutex. When it dies in any way, the kernel marks the mutex before
  // it unmaps the memory, and the next rank that tries to lock it gets an error.
  void throw_if_somebody_died() const {
    for (int peer = 0; peer < segment.size; ++peer) {
      if (peer == rank) continue;
      auto& state = segment.state(peer);
      const int got = pthread_mutex_trylock(&state.alive);
      if (got == EBUSY) continue;  // locked: it is alive
      if (got != ENOTRECOVERABLE) pthread_mutex_unlock(&state.alive);
      if (got == 0) continue;  // unlocked: it has left in good order
      fail(where_is(peer) + " has died; " + where_is(rank) + " noticed it");
    }
  }
};

}  // namespace shm
