// The protocol below all collectives: rounds.
//
// In a round every rank may write one slot, says so by raising its counter `posted`, waits for the
// counters of the others, and reads their slots. A large tensor takes many rounds, a slot at a time.
// All ranks do the same steps in the same order, so a counter alone tells how far its rank is.
//
// A collective gives up to three functions, each of which gets the number of the round:
//
//     write(k)    put something into my slot                    (then: posted + 1)
//     combine(k)  all have written: read slots, write mine      (then: posted + 1; may be missing)
//     collect(k)  all have combined (or written): read slots
//
// Rounds overlap: a rank writes round k + 1 before it waits for round k, so that a rank which is a
// little late delays nobody:
//
//     write 0 | write 1, combine 0 | write 2, combine 1, collect 0 | write 3, combine 2, collect 1
//
// When may a slot be written again? When the others have read it; but they do not say so. They say
// it by their next step: a rank whose counter is above p has done all that it does before step
// p + 1, reading included. So after the last read of a slot, this rank notes p + 1 for it, and waits
// until all counters have come so far before it writes to this slot again.
//
// Why four slots: write(k) waits for the read of round k - 4, which the slowest rank does in its
// iteration k - 2, and for that rank's next step, write(k - 1). To make that one, it needs nothing
// of ours that we have not done. With three slots it would have to make write(k), which may wait
// for our write(k): a deadlock. (tests/test_custom_backend_shm_model.py walks through all orders in
// which two and three ranks can take their steps, and finds that one, and no other.)
#pragma once

#include <functional>
#include <type_traits>

#include "waiting.h"

namespace shm {

class Rounds {
 public:
  // `agree(my call, another rank's call, that rank)` is asked once for each rank and operation,
  // before anything is combined, and throws where the two do not fit.
  using Agree = std::function<void(const Call&, const Call&, int)>;

  Rounds(const Peers& peers, Agree agree) : peers_(peers), agree_(std::move(agree)) {}

  // What `run` needs to know about the operation.
  struct Operation {
    Call call;
    Clock::time_point deadline;
    Patience patience;
  };

  static constexpr std::nullptr_t kNothing = nullptr;  // a collective without this step

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

  // Return when all ranks have come here: nobody reads any longer what lies in my memory.
  void finish_together(const Operation& operation) { wait_for_all(post(), operation); }

  // The slot of a rank in round k of the present operation.
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

  // "rank 0 (in all_reduce, its operation 7) waited in vain for rank 2 (in no operation, ...)"
  std::string late(uint32_t count) const {
    std::string missing;
    for (int peer = 0; peer < peers_.segment.size; ++peer) {
      if (peer == peers_.rank || has_reached(peers_.segment.state(peer).posted, count)) continue;
      missing += (missing.empty() ? "" : ", ") + peers_.where_is(peer);
    }
    return "time-out: " + peers_.where_is(peers_.rank) + " waited in vain for " + missing;
  }

  uint32_t& free_after(uint32_t k) { return free_after_[(first_ + k) % kDepth]; }
  uint32_t& written(uint32_t k) { return written_[(first_ + k) % kDepth]; }
  uint32_t& combined(uint32_t k) { return combined_[(first_ + k) % kDepth]; }

  const Peers& peers_;
  const Agree agree_;
  uint32_t posted_ = 0;  // steps of this rank, and of every other when it comes here
  uint32_t first_ = 0;   // slots are taken in turn through all operations
  uint32_t free_after_[kDepth] = {}, written_[kDepth] = {}, combined_[kDepth] = {};
};

}  // namespace shm
