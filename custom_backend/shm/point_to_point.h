// Messages from one rank to another, with tags.
//
// Each ordered pair of ranks has a channel, a ring of packets. A message is split into packets; the
// sender stops when the ring is full, and continues when the receiver has taken a packet. Messages
// with the same tag arrive in the order in which they were sent. A message that blocks one with
// another tag is set aside in private memory ("unexpected message" in MPI).
//
// progress() moves all packets that can move, for all transfers of this rank, and never waits. A
// thread that waits for one transfer calls it again and again, and so moves all transfers.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "reduce.h"
#include "waiting.h"

namespace shm {

constexpr int kAnySource = -1;

struct Transfer {
  Transfer(Kind kind, int peer, uint32_t tag, uint8_t* data, size_t bytes, Dtype dtype)
      : kind(kind), tag(tag), data(data), bytes(bytes), dtype(dtype), peer(peer) {}

  const Kind kind;  // send or recv
  const uint32_t tag;
  uint8_t* const data;
  const size_t bytes;
  const Dtype dtype;
  std::atomic<int> peer;  // of a recv from any source: known once it is done
  std::atomic<bool> done{false};
  std::function<void(std::exception_ptr)> report;  // called once: when it is done or given up
  size_t moved = 0;
};

class PointToPoint {
 public:
  explicit PointToPoint(const Peers& peers)
      : peers_(peers),
        rank_(peers.rank),
        size_(peers.segment.size),
        outgoing_(size_),
        incoming_(size_) {}

  // Begin a transfer. Its memory must stay valid until `done` is true.
  void start(const std::shared_ptr<Transfer>& transfer) {
    change(transfer->kind, [&] {
      if (transfer->kind == Kind::send) {
        outgoing_[transfer->peer].push_back(transfer);
      } else {
        expected_.push_back(transfer);
        match_unexpected();
      }
      progress();
    });
    report_completed();
  }

  void wait(const Transfer& transfer, Clock::time_point deadline, Patience patience) {
    const auto done = [&] { return transfer.done.load(); };
    wait_until(transfer.kind, done, transfer.peer, deadline, patience, [&] {
      const bool any = transfer.peer == kAnySource;
      return "timeout: rank " + std::to_string(rank_) + " gave up waiting in " +
             name_of(transfer.kind) + (transfer.kind == Kind::send ? " to " : " from ") +
             (any ? "any rank" : peers_.where_is(transfer.peer)) + ", " +
             std::to_string(transfer.moved) + " of " + std::to_string(transfer.bytes) + " bytes, tag " +
             std::to_string(transfer.tag);
    });
  }

  // Move packets until `finished()`; waiting threads and the background thread call it.
  template <class Finished, class Explain>
  void wait_until(Kind kind, Finished finished, int awaited, Clock::time_point deadline,
                  Patience patience, Explain explain) {
    Flag& bell = peers_.segment.state(rank_).doorbell;
    while (true) {
      const uint32_t seen = bell.value.load(std::memory_order_seq_cst);
      if (finished()) return;
      change(kind, [&] { progress(); });
      report_completed();
      if (finished()) return;
      peers_.wait(
          bell, [&] { return bell.value.load(std::memory_order_seq_cst) != seen || finished(); },
          awaited, deadline, patience, explain);
    }
  }

  bool idle() {
    std::lock_guard lock(mutex_);
    return expected_.empty() &&
           std::all_of(outgoing_.begin(), outgoing_.end(), [](auto& queue) { return queue.empty(); }) &&
           std::none_of(incoming_.begin(), incoming_.end(), [](auto& one) { return one.transfer; });
  }

  // Give up all unfinished transfers: the group is broken, or ends.
  void give_up(std::exception_ptr error) {
    std::vector<std::shared_ptr<Transfer>> pending;
    {
      std::lock_guard lock(mutex_);
      pending.assign(expected_.begin(), expected_.end());
      expected_.clear();
      for (auto& queue : outgoing_) {
        pending.insert(pending.end(), queue.begin(), queue.end());
        queue.clear();
      }
      for (auto& incoming : incoming_) {
        if (incoming.transfer) pending.push_back(incoming.transfer);
        incoming = {};
      }
    }
    for (auto& transfer : pending) call_report(*transfer, error);
  }

 private:
  // A message without a matching recv so far.
  struct Unexpected {
    int from;
    uint32_t tag;
    Dtype dtype;
    std::vector<uint8_t> data;
    size_t moved = 0;
  };

  // The message that is arriving from a rank: for a recv, or set aside.
  struct Incoming {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<Unexpected> unexpected;
  };

  // Change the lists below. If that fails half-way, tell all ranks before another thread goes on
  // with them.
  template <class Action>
  void change(Kind kind, Action action) {
    std::lock_guard lock(mutex_);
    peers_.throw_if_failed();
    peers_.run(kind, action);
  }

  void progress() {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      while (put_packet(peer)) {
      }
      while (take_packet(peer)) {
      }
    }
  }

  bool put_packet(int to) {
    auto& queue = outgoing_[to];
    if (queue.empty()) return false;
    Channel& channel = peers_.segment.channel(rank_, to);
    const uint32_t put = channel.put.load(std::memory_order_relaxed);
    if (put - channel.taken.load(std::memory_order_acquire) == kPackets) return false;  // full
    Packet& packet = channel.packets[put % kPackets];
    Transfer& transfer = *queue.front();
    packet.total = transfer.bytes;
    packet.bytes = std::min(kPacketBytes, transfer.bytes - transfer.moved);
    packet.tag = transfer.tag;
    packet.dtype = static_cast<uint32_t>(transfer.dtype);
    copy_bytes(packet.data, transfer.data + transfer.moved, packet.bytes);
    channel.put.store(put + 1, std::memory_order_release);
    ring(peers_.segment.state(to).doorbell);
    transfer.moved += packet.bytes;
    if (transfer.moved == transfer.bytes) {
      complete(queue.front());
      queue.pop_front();
    }
    return true;
  }

  bool take_packet(int from) {
    Channel& channel = peers_.segment.channel(from, rank_);
    const uint32_t taken = channel.taken.load(std::memory_order_relaxed);
    if (channel.put.load(std::memory_order_acquire) == taken) return false;  // empty
    const Packet& packet = channel.packets[taken % kPackets];
    Incoming& incoming = incoming_[from];
    if (!incoming.transfer && !incoming.unexpected && !find_receiver(from, packet)) return false;
    size_t& moved = incoming.transfer ? incoming.transfer->moved : incoming.unexpected->moved;
    uint8_t* data = incoming.transfer ? incoming.transfer->data : incoming.unexpected->data.data();
    copy_bytes(data + moved, packet.data, packet.bytes);
    moved += packet.bytes;
    const bool last = moved == packet.total;
    channel.taken.store(taken + 1, std::memory_order_release);
    ring(peers_.segment.state(from).doorbell);
    if (last && incoming.transfer) complete(incoming.transfer);
    if (last) {
      const bool put_aside = incoming.unexpected != nullptr;
      incoming = {};
      if (put_aside) match_unexpected();
    }
    return true;
  }

  // Find the recv for the message that begins with this packet. False: it stays in the channel.
  bool find_receiver(int from, const Packet& packet) {
    bool others_wait = false;
    for (auto it = expected_.begin(); it != expected_.end(); ++it) {
      Transfer& transfer = **it;
      if (transfer.peer != kAnySource && transfer.peer != from) continue;
      others_wait = true;
      if (transfer.tag != packet.tag) continue;
      check(transfer, from, packet.total, static_cast<Dtype>(packet.dtype));
      transfer.peer = from;
      incoming_[from].transfer = *it;
      expected_.erase(it);
      return true;
    }
    if (!others_wait) return false;
    // It blocks a message that a recv waits for: set it aside.
    auto message = std::make_shared<Unexpected>();
    message->from = from;
    message->tag = packet.tag;
    message->dtype = static_cast<Dtype>(packet.dtype);
    message->data.resize(packet.total);
    incoming_[from].unexpected = message;
    unexpected_.push_back(message);
    return true;
  }

  // Give messages that were set aside to the recvs that match them by now.
  void match_unexpected() {
    for (auto it = expected_.begin(); it != expected_.end();) {
      Transfer& transfer = **it;
      const auto found =
          std::find_if(unexpected_.begin(), unexpected_.end(), [&](const auto& message) {
            return (transfer.peer == kAnySource || transfer.peer == message->from) &&
                   transfer.tag == message->tag;
          });
      if (found == unexpected_.end() || (*found)->moved < (*found)->data.size() ||
          incoming_[(*found)->from].unexpected == *found) {
        ++it;
        continue;
      }
      check(transfer, (*found)->from, (*found)->data.size(), (*found)->dtype);
      transfer.peer = (*found)->from;
      copy_bytes(transfer.data, (*found)->data.data(), transfer.bytes);
      transfer.moved = transfer.bytes;
      unexpected_.erase(found);
      complete(*it);
      it = expected_.erase(it);
    }
  }

  void check(const Transfer& recv, int from, size_t bytes, Dtype dtype) const {
    if (recv.bytes == bytes && recv.dtype == dtype) return;
    peers_.fail("send and recv do not match: rank " + std::to_string(from) + " sent " +
                std::to_string(bytes) + " bytes of " + name_of(dtype) + ", rank " +
                std::to_string(rank_) + " receives " + std::to_string(recv.bytes) + " bytes of " +
                name_of(recv.dtype) + " (tag " + std::to_string(recv.tag) + ")");
  }

  void complete(const std::shared_ptr<Transfer>& transfer) {
    transfer->done.store(true);
    completed_.push_back(transfer);
    ring(peers_.segment.state(rank_).doorbell);  // another thread of this rank may be waiting
  }

  // Call without the lock: a report may start the next transfer.
  void report_completed() {
    std::vector<std::shared_ptr<Transfer>> completed;
    {
      std::lock_guard lock(mutex_);
      completed.swap(completed_);
    }
    for (auto& transfer : completed) call_report(*transfer, nullptr);
  }

  static void call_report(Transfer& transfer, std::exception_ptr error) {
    const auto report = std::move(transfer.report);
    transfer.report = nullptr;
    if (report) report(error);
  }

  const Peers& peers_;
  const int rank_, size_;
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Transfer>>> outgoing_;  // to each rank
  std::list<std::shared_ptr<Transfer>> expected_;                // recvs without a message so far
  std::list<std::shared_ptr<Unexpected>> unexpected_;            // messages without a recv so far
  std::vector<Incoming> incoming_;                               // from each rank
  std::vector<std::shared_ptr<Transfer>> completed_;
};

}  // namespace shm
