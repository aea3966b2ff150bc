// The collectives, on raw memory, as rounds of "write my slot, read the slots of the other ranks".
//
// Small tensors take one round, in which every rank reads everything. Large ones go through the
// slots piece by piece, so that a piece is still in the writer's cache when another core reads it.
// Ranks read a tensor in a rank's heap (heap.h) in place, without copying it to a slot.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "reduce.h"
#include "rounds.h"

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

class Collectives {
 public:
  // heap_of(rank): the address of that rank's heap in this process. offset_of(address): its offset
  // in the heap of this rank, -1 if it is not in there.
  Collectives(const Peers& peers, std::function<uint8_t*(int)> heap_of,
              std::function<int64_t(const void*)> offset_of)
      : peers_(peers),
        rank_(peers.rank),
        size_(peers.segment.size),
        heap_of_(std::move(heap_of)),
        offset_of_(std::move(offset_of)),
        rounds_(peers, [this](auto& mine, auto& theirs, int peer) { agree(mine, theirs, peer); }) {}

  // Run one call of a user, which consists of one or more of the collectives below.
  template <class Operation>
  void run(Kind kind, Operation operation) {
    struct Doing {
      ~Doing() { state.doing.store(0, std::memory_order_relaxed); }
      State& state;
    } doing{peers_.segment.state(rank_)};
    doing.state.number.store(++number_, std::memory_order_relaxed);
    doing.state.doing.store(static_cast<uint32_t>(kind), std::memory_order_relaxed);
    peers_.run(kind, operation);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Each rank reduces its part of the numbers and gives the result to all ranks. In each of these
  // two steps every rank sends (n - 1) / n of the tensor.
  void all_reduce(void* data, size_t count, Numbers numbers, Limits limits) {
    auto* mine = static_cast<uint8_t*>(data);
    const size_t width = size_of(numbers.dtype), bytes = count * width;
    Current operation(*this, Kind::all_reduce, numbers, -1, data, bytes, limits);
    if (bytes <= kSmall) {
      rounds_.run(
          operation, 1, [&](uint32_t) { copy(my_slot(0), mine, bytes); },
          Rounds::kNothing, [&](uint32_t) { reduce_into(mine, mine, 0, 0, count, numbers); });
      return;
    }
    if (all_lie_in_heaps(operation)) {
      // Each rank reduces its part in place, in the memory of all ranks: no copies.
      const auto [begin, end] = part(rank_, count, kCacheLine / width);
      std::vector<const void*> sources;
      std::vector<void*> targets;
      for (int peer = 0; peer < size_; ++peer) {
        sources.push_back(in_heap(peer) + begin * width);
        targets.push_back(in_heap(peer) + begin * width);
      }
      reduce_numbers(numbers, sources.data(), targets.data(), size_, end - begin);
      rounds_.finish_together(operation);
      return;
    }
    const size_t piece = piece_of(bytes) / width;
    const auto piece_at = [&](uint32_t k) { return std::min(piece, count - k * piece); };
    rounds_.run(
        operation, divide_up(count, piece),
        [&](uint32_t k) {
          for (int peer = 0; peer < size_; ++peer) {
            const auto [begin, end] = part(peer, piece_at(k));
            if (peer == rank_) continue;
            copy(my_slot(k) + begin * width, mine + (k * piece + begin) * width,
                 (end - begin) * width);
          }
        },
        [&](uint32_t k) {
          const auto [begin, end] = part(rank_, piece_at(k));
          uint8_t* target = mine + (k * piece + begin) * width;
          reduce_into(target, target, k, begin * width, end - begin, numbers,
                      my_slot(k) + begin * width);
        },
        [&](uint32_t k) {
          for (int peer = 0; peer < size_; ++peer) {
            const auto [begin, end] = part(peer, piece_at(k));
            if (peer == rank_) continue;
            copy(mine + (k * piece + begin) * width, slot(peer, k) + begin * width,
                 (end - begin) * width);
          }
        });
  }

  void reduce_to(int root, void* data, size_t count, Numbers numbers, Limits limits) {
    auto* mine = static_cast<uint8_t*>(data);
    const size_t width = size_of(numbers.dtype), bytes = count * width;
    const size_t piece = piece_of(bytes) / width;
    Current operation(*this, Kind::reduce, numbers, root, data, bytes, limits);
    const auto piece_at = [&](uint32_t k) { return std::min(piece, count - k * piece); };
    rounds_.run(
        operation, at_least_one(divide_up(count, piece)),
        [&](uint32_t k) {
          if (rank_ != root) copy(my_slot(k), mine + k * piece * width, piece_at(k) * width);
        },
        Rounds::kNothing,
        [&](uint32_t k) {
          uint8_t* target = mine + k * piece * width;
          if (rank_ == root) reduce_into(target, target, k, 0, piece_at(k), numbers);
        });
  }

  void broadcast(int root, Span data, Dtype dtype, Limits limits) {
    Current operation(*this, Kind::broadcast, {dtype}, root, data.data, data.bytes, limits);
    if (data.bytes > kSmall) {
      announce(operation);
      if (offsets_[root] >= 0) {
        if (rank_ != root) copy(data.data, in_heap(root), data.bytes);
        return rounds_.finish_together(operation);
      }
    }
    share(
        operation, [&](int peer) { return peer == root ? data.bytes : 0; },
        [&](int) { return data.data; }, [&](int peer) { return peer == root; }, data.data);
  }

  // outputs[r]: memory for the numbers of rank r. The sizes may differ.
  void all_gather(Span input, const std::vector<Span>& outputs, Dtype dtype, Limits limits) {
    size_t longest = 0, total = 0;
    for (auto& output : outputs) longest = std::max(longest, output.bytes), total += output.bytes;
    Current operation(*this, Kind::all_gather, {dtype}, -1, input.data, total, limits, outputs);
    bool from_heap = false;
    if (longest > kSmall) {
      announce(operation);
      for (int peer = 0; peer < size_; ++peer) {
        if (offsets_[peer] < 0) continue;
        from_heap = true;
        copy(outputs[peer].data, in_heap(peer), outputs[peer].bytes);
      }
    } else {
      std::fill_n(offsets_, size_, -1);
    }
    share(
        operation, [&](int peer) { return offsets_[peer] < 0 ? outputs[peer].bytes : 0; },
        [&](int peer) { return outputs[peer].data; }, [](int) { return true; }, input.data,
        outputs[rank_].data);
    if (from_heap) rounds_.finish_together(operation);
  }

  void gather(int root, Span input, const std::vector<Span>& outputs, Dtype dtype, Limits limits) {
    Current operation(*this, Kind::gather, {dtype}, root, input.data, input.bytes, limits);
    if (rank_ == root) copy(outputs[rank_].data, input.data, input.bytes);
    share(
        operation, [&](int) { return input.bytes; },
        [&](int peer) { return rank_ == root ? outputs[peer].data : nullptr; },
        [&](int) { return rank_ == root; }, input.data);
  }

  // inputs[r]: this rank's numbers for rank r, with equal sizes on all ranks. `whole`: the
  // address of inputs if they are contiguous in memory, else null.
  void reduce_scatter(const std::vector<Span>& inputs, const void* whole, void* output,
                      Numbers numbers, Limits limits) {
    const size_t width = size_of(numbers.dtype);
    size_t total = 0, longest = 0, before = 0;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer < rank_) before += inputs[peer].bytes;
      total += inputs[peer].bytes;
      longest = std::max(longest, inputs[peer].bytes);
    }
    Current operation(*this, Kind::reduce_scatter, numbers, -1, whole, total, limits, inputs);
    auto* target = static_cast<uint8_t*>(output);
    const Span mine = inputs[rank_];
    if (total > kSmall && all_lie_in_heaps(operation)) {
      std::vector<const void*> sources;
      for (int peer = 0; peer < size_; ++peer) sources.push_back(in_heap(peer) + before);
      void* targets[] = {target};
      reduce_numbers(numbers, sources.data(), targets, 1, mine.bytes / width);
      return rounds_.finish_together(operation);
    }
    const size_t piece = block_of(longest);
    rounds_.run(
        operation, at_least_one(divide_up(longest, piece)),
        [&](uint32_t k) { write_blocks(inputs, k, piece); }, Rounds::kNothing,
        [&](uint32_t k) {
          const size_t count = bytes_at(mine.bytes, k, piece) / width;
          reduce_into(target + k * piece, mine.data + k * piece, k, rank_ * piece, count, numbers);
        });
  }

  void scatter(int root, const std::vector<Span>& inputs, Span output, Dtype dtype, Limits limits) {
    Current operation(*this, Kind::scatter, {dtype}, root, nullptr, output.bytes, limits);
    const size_t piece = block_of(output.bytes);
    if (rank_ == root) copy(output.data, inputs[rank_].data, output.bytes);
    rounds_.run(
        operation, at_least_one(divide_up(output.bytes, piece)),
        [&](uint32_t k) {
          if (rank_ == root) write_blocks(inputs, k, piece);
        },
        Rounds::kNothing,
        [&](uint32_t k) {
          if (rank_ != root) read_block(root, output, k, piece);
        });
  }

  // In the first round, all ranks announce how much they send to each rank. Then each slot carries
  // one block per rank.
  void all_to_all(const std::vector<Span>& inputs, const std::vector<Span>& outputs, Dtype dtype,
                  Limits limits) {
    Current operation(*this, Kind::all_to_all, {dtype}, -1, nullptr, 0, limits);
    size_t longest = 0;
    rounds_.run(
        operation, 1,
        [&](uint32_t) {
          for (int peer = 0; peer < size_; ++peer) sizes(rank_)[peer] = inputs[peer].bytes;
        },
        Rounds::kNothing,
        [&](uint32_t) {
          for (int peer = 0; peer < size_; ++peer) {
            if (sizes(peer)[rank_] != outputs[peer].bytes) {
              peers_.fail("all_to_all: rank " + std::to_string(peer) + " sends " +
                          std::to_string(sizes(peer)[rank_]) + " bytes to rank " +
                          std::to_string(rank_) + ", which expects " +
                          std::to_string(outputs[peer].bytes));
            }
            for (int to = 0; to < size_; ++to) longest = std::max(longest, sizes(peer)[to]);
          }
        });
    copy(outputs[rank_].data, inputs[rank_].data, inputs[rank_].bytes);
    const size_t piece = block_of(longest);
    rounds_.run(
        operation, divide_up(longest, piece),
        [&](uint32_t k) { write_blocks(inputs, k, piece); }, Rounds::kNothing,
        [&](uint32_t k) {
          for (int peer = 0; peer < size_; ++peer) {
            if (peer != rank_) read_block(peer, outputs[peer], k, piece);
          }
        });
  }

  void barrier(Limits limits) {
    Current operation(*this, Kind::barrier, {Dtype::bytes}, -1, nullptr, 0, limits);
    announce(operation);
  }

 private:
  static constexpr size_t kSmall = 16 * 1024;
  static constexpr size_t kStreamed = 4 << 20;

  // A running operation, and the call that all ranks compare.
  struct Current : Rounds::Operation {
    Current(Collectives& all, Kind kind, Numbers numbers, int root, const void* data, size_t bytes,
            Limits limits, const std::vector<Span>& parts = {}) {
      all.peers_.throw_if_failed();
      // An operation that was given up has missing steps, so the counters no longer match.
      if (all.peers_.gave_up) throw Error(all.peers_.where_is(all.rank_) + " ends");
      call = {kind, static_cast<uint32_t>(numbers.dtype), static_cast<uint32_t>(numbers.op), root,
              bytes, digest(parts), numbers.factor, all.number_, all.offset_of_(data)};
      deadline = limits.deadline;
      patience = limits.patience;
    }
    static uint64_t digest(const std::vector<Span>& parts) {
      uint64_t digest = 0;
      for (auto& part : parts) digest = digest * 0x9e3779b97f4a7c15 + part.bytes;
      return digest;
    }
  };

  // Ranks with different calls would wait forever, or mix up their numbers.
  void agree(const Call& mine, const Call& theirs, int peer) const {
    if (theirs.kind == mine.kind && theirs.dtype == mine.dtype && theirs.op == mine.op &&
        theirs.root == mine.root && theirs.bytes == mine.bytes && theirs.parts == mine.parts &&
        theirs.factor == mine.factor) {
      return;
    }
    const bool we_first = rank_ < peer;
    peers_.fail("the ranks' calls do not match: rank " + std::to_string(std::min(rank_, peer)) +
                " called " + describe(we_first ? mine : theirs) + ", rank " +
                std::to_string(std::max(rank_, peer)) + " called " +
                describe(we_first ? theirs : mine) +
                (mine.bytes == theirs.bytes && mine.parts != theirs.parts
                     ? " in parts of other sizes" : "") +
                " (operation " + std::to_string(mine.number) + " of the group)");
  }

  static std::string describe(const Call& call) {
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
  uint8_t* in_heap(int peer) const { return heap_of_(peer) + offsets_[peer]; }

  const Peers& peers_;
  const int rank_, size_;
  std::function<uint8_t*(int)> heap_of_;
  std::function<int64_t(const void*)> offset_of_;
  Rounds rounds_;
  uint64_t number_ = 0;
  int64_t offsets_[kMaxRanks] = {};
};

}  // namespace shm
