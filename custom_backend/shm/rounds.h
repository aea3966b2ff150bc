// The protocol below all collectives: rounds.
//
// In a round, every rank may write one slot, raises its counter `posted`, waits for the counters of
// the other ranks, and reads their slots. A large tensor takes many rounds, one slot per round. All
// ranks do the same steps in the same order, so a counter alone tells how far its rank is.
//
// A collective passes up to three functions, which get the number of the round:
//
//     write(k)    write to my slot                              (then: posted + 1)
//     combine(k)  all have written: read slots, write mine      (then: posted + 1; optional)
//     collect(k)  all have combined (or written): read slots
//
// Rounds overlap: a rank writes round k + 1 before it waits for round k, so a rank that is slightly
// late delays no other rank:
//
//     write 0 | write 1, combine 0 | write 2, combine 1, collect 0 | write 3, combine 2, collect 1
//
// When may a rank write a slot again? When all ranks have read it. No counter says so directly, but
// the next step of each rank does: a rank whose counter is above p has finished everything before
// step p + 1, including its reads. So after the last read of a slot, this rank records p + 1 for
// it, and waits until all counters have reached p + 1 before it writes to this slot again.
//
// Why four slots: write(k) waits for the read of round k - 4, which the slowest rank does in its
// iteration k - 2, and for that rank's next step, write(k - 1). That step needs only steps of this
// rank that are already done. With three slots, the next step would be write(k), which may wait for
// write(k) of this rank: a deadlock. (tests/test_custom_backend_shm_model.py tries all orders in
// which two and three ranks can take their steps, and finds this deadlock and no other.)
#pragma once

#include <functional>
#include <type_traits>

#include "waiting.h"

namespace shm {

class Rounds {
 public:
  // run() calls `agree(my call, another rank's call, that rank)` once per rank and operation,
  // before it combines anything. It throws if the two calls do not match.
  using Agree = std::function<void(const Call&, const Call&, int)>;

  Rounds(const Peers& peers, Agree agree) : peers_(peers), agree_(std::move(agree)) {}

  // What run() needs to know about the operation.
  struct Operation {
    Call call;
    Clock::time_point deadline;
    Patience patience;
  };

  static constexpr std::nullptr_t kNothing = nullptr;  // for a collective without this step

  template <class Write, class Combine, class Collect>
  void run(const Operation& operation, uint32_t rounds, Write write, Combine combine,
           Collect collect) {
    constexpr bool has_combine = !std::is_same_v<Combine, std::nullptr_t>;
    constexpr uint32_t lag = has_combine ? 2 : 1;
    bool agreed = false;
    for (uint32_t i = 0; i < rounds + lag; ++i) {
      if (i < rounds) {
        wait_for_all(free_after(i), operation);
        if (i == 0) slot(peers_.rank, 0).call = operation.call;
        write(i);
        written(i) = post();
      }
      if (i >= 1 && !agreed) {
        wait_for_all(written(0), operation);
        for (int peer = 0; peer < peers_.segment.size; ++peer) {
          if (peer != peers_.rank) agree_(operation.call, slot(peer, 0).call, peer);
        }
        agreed = true;
      }
      if constexpr (has_combine) {
        if (i >= 1 && i - 1 < rounds) {
          wait_for_all(written(i - 1), operation);
          combine(i - 1);
          combined(i - 1) = post();
        }
      }
      if (i >= lag) {
        const uint32_t k = i - lag;
        wait_for_all(has_combine ? combined(k) : written(k), operation);
        collect(k);
        free_after(k) = posted_ + 1;
      }
    }
    first_ += rounds;
  }

  // Return when all ranks have come here: no rank still reads my memory.
  void finish_together(const Operation& operation) { wait_for_all(post(), operation); }

  // The slot of a rank in round k of the current operation.
  Slot& slot(int rank, uint32_t k) const { return peers_.segment.slot(rank, first_ + k); }

 private:
  uint32_t post() {
    publish(peers_.segment.state(peers_.rank).posted, ++posted_);
    return posted_;
  }

  void wait_for_all(uint32_t count, const Operation& operation) const {
    for (int peer = 0; peer < peers_.segment.size; ++peer) {
      if (peer == peers_.rank) continue;
      Flag& flag = peers_.segment.state(peer).posted;
      peers_.wait(
          flag, [&] { return has_reached(flag, count); }, peer, operation.deadline,
          operation.patience, [&] { return late(count); });
    }
  }

  // "rank 0 (in all_reduce, its operation 7) gave up waiting for rank 2 (in no operation, ...)"
  std::string late(uint32_t count) const {
    std::string missing;
    for (int peer = 0; peer < peers_.segment.size; ++peer) {
      if (peer == peers_.rank || has_reached(peers_.segment.state(peer).posted, count)) continue;
      missing += (missing.empty() ? "" : ", ") + peers_.where_is(peer);
    }
    return "timeout: " + peers_.where_is(peers_.rank) + " gave up waiting for " + missing;
  }

  uint32_t& free_after(uint32_t k) { return free_after_[(first_ + k) % kDepth]; }
  uint32_t& written(uint32_t k) { return written_[(first_ + k) % kDepth]; }
  uint32_t& combined(uint32_t k) { return combined_[(first_ + k) % kDepth]; }

  const Peers& peers_;
  const Agree agree_;
  uint32_t posted_ = 0;  // steps of this rank; every other rank does the same steps
  uint32_t first_ = 0;   // all operations use the slots in turn
  uint32_t free_after_[kDepth] = {}, written_[kDepth] = {}, combined_[kDepth] = {};
};

}  // namespace shm
