// The collectives, on raw memory, as rounds of "write my slot, read the slots of the other ranks".
//
// Small tensors take one round, in which every rank reads everything. Large ones go through the
// slots piece by piece, or from heap to heap: staging.h.
#pragma once

#include "staging.h"

namespace shm {

class Collectives : public Staging {
 public:
  // heaps[r]: the heap of rank r.
  Collectives(const Peers& peers, Heaps heaps) : Staging(peers, std::move(heaps)) {}

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
};

}  // namespace shm
