// How the numbers of a collective move: through the slots piece by piece, or from heap to heap.
//
// A piece of a large tensor is still in the writer's cache when another core reads it. Ranks read a
// tensor in a rank's heap (heap.h) in place, without copying it to a slot.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "agreement.h"
#include "heap_view.h"
#include "rounds.h"

namespace shm {

using Heaps = std::vector<std::shared_ptr<HeapView>>;  // of all ranks, in rank order

class Staging {
 public:
  int rank() const { return rank_; }
  int size() const { return size_; }
  bool lies_in_heap = false;  // the tensor of the last operation, which other ranks may use in place

 protected:
  Staging(const Peers& peers, Heaps heaps)
      : peers_(peers),
        rank_(peers.rank),
        size_(peers.segment.size),
        heaps_(std::move(heaps)),
        rounds_(peers, [&peers](auto& mine, auto& theirs, int peer) {
          agree(peers, mine, theirs, peer);
        }) {}

  static constexpr size_t kSmall = 16 * 1024;
  static constexpr size_t kStreamed = 4 << 20;

  // A running operation, and the call that all ranks compare.
  struct Current : Rounds::Operation {
    Current(Staging& all, Kind kind, Numbers numbers, int root, const void* data, size_t bytes,
            Limits limits, const std::vector<Span>& parts = {}) {
      all.peers_.throw_if_failed();
      // An operation that was given up has missing steps, so the counters no longer match.
      if (all.peers_.gave_up) throw Error(all.peers_.where_is(all.rank_) + " ends");
      call = {kind, static_cast<uint32_t>(numbers.dtype), static_cast<uint32_t>(numbers.op), root,
              bytes, digest(parts), numbers.factor, all.number_,
              all.heaps_[all.rank_]->offset_of(data)};
      all.lies_in_heap = call.offset >= 0;
      deadline = limits.deadline;
      patience = limits.patience;
    }
  };

  // A round without data. Afterwards offsets_ has the offset of each rank's tensor in its heap.
  void announce(const Current& operation) {
    rounds_.run(
        operation, 1, [](uint32_t) {}, Rounds::kNothing,
        [&](uint32_t) {
          for (int peer = 0; peer < size_; ++peer) {
            offsets_[peer] = rounds_.slot(peer, 0).call.offset;
          }
        });
  }

  bool all_lie_in_heaps(const Current& operation) {
    announce(operation);
    return std::all_of(offsets_, offsets_ + size_, [](int64_t offset) { return offset >= 0; });
  }

  // Each rank shares bytes_of(rank) bytes with all ranks; ranks that want them copy them to
  // output(rank). `own`: where this rank copies its own input, if not null.
  template <class BytesOf, class OutputOf, class Wanted>
  void share(const Current& operation, BytesOf bytes_of, OutputOf output, Wanted wanted,
             const uint8_t* input, uint8_t* own = nullptr) {
    size_t longest = 0;
    for (int peer = 0; peer < size_; ++peer) longest = std::max<size_t>(longest, bytes_of(peer));
    const size_t piece = piece_of(longest);
    rounds_.run(
        operation, at_least_one(divide_up(longest, piece)),
        [&](uint32_t k) {
          const size_t bytes = bytes_at(bytes_of(rank_), k, piece);
          copy(my_slot(k), input + k * piece, bytes);
          if (own) copy_out(own + k * piece, input + k * piece, bytes, longest);
        },
        Rounds::kNothing,
        [&](uint32_t k) {
          for (int peer = 0; peer < size_; ++peer) {
            if (peer == rank_ || !wanted(peer)) continue;
            copy_out(output(peer) + k * piece, slot(peer, k), bytes_at(bytes_of(peer), k, piece),
                     longest);
          }
        });
  }

  // Fill a slot with one block of `piece` bytes per rank.
  void write_blocks(const std::vector<Span>& inputs, uint32_t k, size_t piece) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      copy(my_slot(k) + peer * piece, inputs[peer].data + k * piece,
           bytes_at(inputs[peer].bytes, k, piece));
    }
  }

  void read_block(int peer, Span output, uint32_t k, size_t piece) {
    copy(output.data + k * piece, slot(peer, k) + rank_ * piece, bytes_at(output.bytes, k, piece));
  }

  // target = the sum over all ranks of `count` numbers: `mine` on this rank, on all other ranks
  // their slots from `slot_offset` bytes on. If `second` is not null, write the result there as
  // well.
  void reduce_into(uint8_t* target, const uint8_t* mine, uint32_t k, size_t slot_offset,
                   size_t count, Numbers numbers, uint8_t* second = nullptr) {
    const void* sources[kMaxRanks];
    for (int peer = 0; peer < size_; ++peer) {
      sources[peer] = peer == rank_ ? mine : slot(peer, k) + slot_offset;
    }
    void* targets[] = {target, second};
    reduce_numbers(numbers, sources, targets, second ? 2 : 1, count);
  }

  void reduce_numbers(Numbers numbers, const void* const* sources, void* const* targets,
                      int targets_count, size_t count) {
    if (must_fail(Site::copy)) throw std::runtime_error("a reduction failed");
    reduce(numbers.dtype, numbers.op, sources, size_, targets, targets_count, count,
           numbers.factor);
  }

  struct Range {
    size_t begin, end;
  };

  // The part of `count` numbers that a rank reduces. It begins at a multiple of `step`.
  Range part(int rank, size_t count, size_t step = 1) const {
    const size_t steps = divide_up(count, step);
    return {std::min(count, steps * rank / size_ * step),
            std::min(count, steps * (rank + 1) / size_ * step)};
  }

  // Use several rounds even if the data fit into one slot, so that writing and reading overlap.
  static size_t piece_of(size_t bytes) {
    return std::clamp(aligned(divide_up(bytes, 4)), kSlotBytes / 4, kSlotBytes);
  }
  size_t block_of(size_t bytes) const {
    return std::min(std::max<size_t>(aligned(bytes), kCacheLine),
                    kSlotBytes / size_ / kCacheLine * kCacheLine);
  }
  static size_t aligned(size_t bytes) { return divide_up(bytes, kCacheLine) * kCacheLine; }
  static size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }
  static size_t at_least_one(size_t rounds) { return std::max<size_t>(rounds, 1); }
  static size_t bytes_at(size_t bytes, uint32_t k, size_t piece) {
    return k * piece >= bytes ? 0 : std::min(piece, bytes - k * piece);
  }
  static void copy(void* to, const void* from, size_t bytes) { copy_bytes(to, from, bytes); }

  // Copy a piece of an output of `total` bytes. If the output is larger than a cache, the stores
  // bypass the caches: a normal store would first read each line, only to overwrite all of it.
  static void copy_out(uint8_t* to, const uint8_t* from, size_t bytes, size_t total) {
#if defined(__SSE2__)
    if (total > kStreamed && reinterpret_cast<uintptr_t>(to) % 16 == 0 && to != from) {
      const auto whole = bytes / kCacheLine * kCacheLine;
      for (size_t i = 0; i < whole; i += kCacheLine) {
        for (size_t j = i; j < i + kCacheLine; j += 16) {
          _mm_stream_si128(reinterpret_cast<__m128i*>(to + j),
                           _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
        }
      }
      _mm_sfence();  // orders these stores before the next publish()
      return copy(to + whole, from + whole, bytes - whole);
    }
#endif
    copy(to, from, bytes);
  }

  uint8_t* my_slot(uint32_t k) const { return slot(rank_, k); }
  uint8_t* slot(int peer, uint32_t k) const { return rounds_.slot(peer, k).data; }
  size_t* sizes(int peer) const { return reinterpret_cast<size_t*>(slot(peer, 0)); }
  uint8_t* in_heap(int peer) const { return heaps_[peer]->address(offsets_[peer]); }

  const Peers& peers_;
  const int rank_, size_;
  const Heaps heaps_;
  Rounds rounds_;
  uint64_t number_ = 0;
  int64_t offsets_[kMaxRanks] = {};
};

}  // namespace shm
