// The membership of a rank in a group: its segment, its threads, how it joins and leaves.
#pragma once

#include <memory>
#include <vector>

#include "collectives.h"
#include "point_to_point.h"
#include "queue.h"

namespace shm {

// Map the segment of a group; the last owner unmaps it.
inline std::shared_ptr<const Segment> map_segment(int fd, int size) {
  return {new Segment{map_shared(fd, Segment::bytes(size)), size}, [](const Segment* segment) {
            munmap(segment->base, Segment::bytes(segment->size));
            delete segment;
          }};
}

// Rank 0 calls it before any other rank uses the segment.
inline void prepare(const Segment& segment) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  for (int rank = 0; rank < segment.size; ++rank) {
    pthread_mutex_init(&segment.state(rank).alive, &attributes);
  }
}

class Group {
 public:
  // heaps[r]: the heap of rank r.
  Group(std::shared_ptr<const Segment> segment, int rank, Heaps heaps, Patience patience)
      : segment_(std::move(segment)),
        peers(*segment_, rank, patience),
        collectives(peers, std::move(heaps)),
        point_to_point(peers),
        queue(
            patience, [this] { pthread_mutex_lock(&my_state().alive); },
            [this] {
              my_state().has_left.store(1);
              pthread_mutex_unlock(&my_state().alive);
            }) {}

  ~Group() { close(); }

  // Run the rest of the queue, then end the threads.
  void close() {
    closed = true;
    if (courier_.joinable()) {
      {
        std::lock_guard lock(courier_mutex_);
        stopping_ = true;
      }
      courier_wakes_.notify_all();
      ring(my_state().doorbell);
      courier_.join();
    }
    point_to_point.give_up(std::make_exception_ptr(Error("the group was destroyed")));
    queue.close();
  }

  // Begin a send or recv. The courier moves it if no thread waits for it within a millisecond or so.
  void start(const std::shared_ptr<Transfer>& transfer) {
    point_to_point.start(transfer);
    if (transfer->done) return;
    std::lock_guard lock(courier_mutex_);
    last_start_ = Clock::now();
    peers.run(transfer->kind, [&] {
      if (!courier_.joinable()) courier_ = std::thread([this] { carry(); });
    });
    if (courier_sleeps_) courier_wakes_.notify_all();
  }

  void wait(const Transfer& transfer, Clock::time_point deadline) {
    ++waiting_;
    my_state().transferring.store(static_cast<uint32_t>(transfer.kind), std::memory_order_relaxed);
    struct Leave {
      std::atomic<int>& count;
      std::atomic<uint32_t>& transferring;
      ~Leave() {
        transferring.store(0, std::memory_order_relaxed);
        --count;
      }
    } leave{waiting_, my_state().transferring};
    peers.run(transfer.kind, [&] { point_to_point.wait(transfer, deadline, peers.patience); });
  }

 private:
  State& my_state() { return segment_->state(peers.rank); }

  // The courier is a thread that moves transfers while this rank computes or waits elsewhere.
  void carry() {
    using namespace std::chrono_literals;
    try {
      std::unique_lock lock(courier_mutex_);
      while (!stopping_) {
        const bool idle = point_to_point.idle();
        if (idle && Clock::now() - last_start_ > 1s) {
          courier_sleeps_ = true;
          courier_wakes_.wait(lock, [&] { return stopping_ || !point_to_point.idle(); });
          courier_sleeps_ = false;
        }
        courier_wakes_.wait_for(lock, 1ms);
        if (stopping_ || waiting_ > 0 || point_to_point.idle()) continue;
        lock.unlock();
        const auto finished = [&] { return stopping_ || waiting_ > 0 || point_to_point.idle(); };
        peers.run(Kind::recv, [&] {
          point_to_point.wait_until(Kind::recv, finished, -1, Clock::time_point::max(),
                                    kInBackground, [] { return std::string(); });
        });
        lock.lock();
      }
    } catch (...) {
      point_to_point.give_up(std::current_exception());
    }
  }

  const std::shared_ptr<const Segment> segment_;

 public:
  std::atomic<bool> closed{false};
  Peers peers;
  Collectives collectives;
  PointToPoint point_to_point;

 private:
  std::atomic<int> waiting_{0};  // threads that wait for a transfer, and so move all of them
  std::atomic<bool> stopping_{false};
  std::mutex courier_mutex_;
  bool courier_sleeps_ = false;
  Clock::time_point last_start_{};
  std::condition_variable courier_wakes_;
  std::thread courier_;

 public:
  Queue queue;  // last member: its thread uses all other members, and ends first
};

}  // namespace shm
