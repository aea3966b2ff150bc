// Run the core of custom_backend/shm under ThreadSanitizer: the ranks are threads on one mapping.
//
//     g++ -std=c++20 -O1 -g -fsanitize=thread -I custom_backend/shm tests/workers/shm_threads.cpp
//         custom_backend/shm/reduce.cpp -o shm_threads && ./shm_threads SEED OPERATIONS RANKS
//
// It runs random operations, synchronous and asynchronous, on tensors inside and outside the heap.
// It compares each result with a plain computation. (test_custom_backend_shm_threads.py builds it.)

#include <sys/mman.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "group.h"
#include "heap.h"

namespace {

using shm::Dtype;
using shm::Kind;
using shm::Limits;
using shm::Span;

constexpr shm::Numbers kSum = {Dtype::int32};
constexpr size_t kLargest = 200'000;  // seven rounds, which reuse slots

struct Planned {
  Kind kind;
  uint32_t index;
  size_t count;
  int root, to;  // of a send: sender and receiver
  uint32_t tag;
};

// Numbers in the heap or in private memory.
struct Memory {
  Memory(size_t count, bool in_heap) : count(count), in_heap(in_heap) {
    void* place = in_heap ? shm::Heap::own().allocate(count * 4) : std::malloc(count * 4 + 1);
    numbers = static_cast<int32_t*>(place);
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (in_heap) shm::Heap::own().release(numbers);
    else std::free(numbers);
  }
  Span span(size_t from, size_t n) const {
    return {reinterpret_cast<uint8_t*>(numbers + from), n * 4};
  }
  const size_t count;
  const bool in_heap;
  int32_t* numbers;
};

// The number that `rank` sends to rank `part` (or to all) in an operation, at index i.
int32_t given(uint32_t index, int rank, int part, size_t i) {
  return static_cast<int32_t>(index * 7919 + rank * 104729 + part * 31 + i);
}

[[noreturn]] void give_up(const char* what, const Planned& plan, int rank) {
  std::fprintf(stderr, "rank %d: %s in %s, operation %u of %zu numbers\n", rank, what,
               shm::name_of(plan.kind), plan.index, plan.count);
  std::_Exit(1);
}

class Rank {
 public:
  Rank(shm::Group& group, uint32_t seed)
      : group_(group), rank_(group.peers.rank), size_(group.collectives.size()), random_(seed) {}

  void call(const Planned& plan) {
    if (plan.kind == Kind::send) return transfer(plan);
    const size_t n = plan.count;
    auto in = std::make_shared<Memory>(n * size_, coin());
    auto out = std::make_shared<Memory>(n * size_, coin());
    for (int part = 0; part < size_; ++part) {
      for (size_t i = 0; i < n; ++i) in->numbers[part * n + i] = given(plan.index, rank_, part, i);
    }
    auto run = [=, this](shm::Patience patience) {
      try {
        const auto operation = [&] { operate(plan, *in, *out, {deadline(), patience}); };
        group_.collectives.run(plan.kind, operation);
      } catch (const std::exception& error) {
        give_up(error.what(), plan, rank_);
      }
    };
    auto check = [=, this] { compare(plan, *in, *out); };
    if (coin()) {
      group_.queue.run_now(run);
      check();
    } else {
      auto job = group_.queue.add(run, [] {});
      later_.push_back([=, this] {
        group_.queue.finish(*job);
        check();
      });
    }
  }

  // Wait for the started operations, in any order.
  void finish() {
    std::shuffle(later_.begin(), later_.end(), random_);
    for (auto& wait : later_) wait();
    later_.clear();
  }

 private:
  void operate(const Planned& plan, const Memory& in, const Memory& out, Limits limits) {
    auto& all = group_.collectives;
    const size_t n = plan.count;
    std::vector<Span> ins, outs;
    for (int part = 0; part < size_; ++part) {
      ins.push_back(in.span(part * n, n));
      outs.push_back(out.span(part * n, n));
    }
    switch (plan.kind) {
      case Kind::all_reduce: return all.all_reduce(in.numbers, n, kSum, limits);
      case Kind::reduce: return all.reduce_to(plan.root, in.numbers, n, kSum, limits);
      case Kind::broadcast: return all.broadcast(plan.root, in.span(0, n), Dtype::int32, limits);
      case Kind::all_gather: return all.all_gather(ins[0], outs, Dtype::int32, limits);
      case Kind::gather: return all.gather(plan.root, ins[0], outs, Dtype::int32, limits);
      case Kind::scatter: return all.scatter(plan.root, ins, outs[0], Dtype::int32, limits);
      case Kind::reduce_scatter:
        return all.reduce_scatter(ins, in.numbers, out.numbers, kSum, limits);
      case Kind::all_to_all: return all.all_to_all(ins, outs, Dtype::int32, limits);
      default: return all.barrier(limits);
    }
  }

  void compare(const Planned& plan, const Memory& in, const Memory& out) {
    const size_t n = plan.count;
    const bool is_root = rank_ == plan.root;
    const auto sum = [&](int part, size_t i) {
      uint32_t total = 0;
      for (int rank = 0; rank < size_; ++rank) total += given(plan.index, rank, part, i);
      return static_cast<int32_t>(total);
    };
    const auto expect = [&](bool equal) {
      if (!equal) give_up("wrong numbers", plan, rank_);
    };
    for (size_t i = 0; i < n; ++i) {
      if (plan.kind == Kind::all_reduce) expect(in.numbers[i] == sum(0, i));
      if (plan.kind == Kind::reduce && is_root) expect(in.numbers[i] == sum(0, i));
      if (plan.kind == Kind::broadcast) expect(in.numbers[i] == given(plan.index, plan.root, 0, i));
      if (plan.kind == Kind::scatter) {
        expect(out.numbers[i] == given(plan.index, plan.root, rank_, i));
      }
      if (plan.kind == Kind::reduce_scatter) expect(out.numbers[i] == sum(rank_, i));
      for (int from = 0; from < size_; ++from) {
        const int32_t got = out.numbers[from * n + i];
        if (plan.kind == Kind::all_gather) expect(got == given(plan.index, from, 0, i));
        if (plan.kind == Kind::gather && is_root) expect(got == given(plan.index, from, 0, i));
        if (plan.kind == Kind::all_to_all) expect(got == given(plan.index, from, rank_, i));
      }
    }
  }

  void transfer(const Planned& plan) {
    if (rank_ != plan.root && rank_ != plan.to) return;
    const bool sends = rank_ == plan.root;
    auto memory = std::make_shared<Memory>(plan.count, coin());
    for (size_t i = 0; i < plan.count; ++i) {
      memory->numbers[i] = sends ? given(plan.index, rank_, 0, i) : 0;
    }
    const Span span = memory->span(0, plan.count);
    auto moves = std::make_shared<shm::Transfer>(sends ? Kind::send : Kind::recv,
                                                 sends ? plan.to : plan.root, plan.tag, span.data,
                                                 span.bytes, Dtype::int32);
    auto wait = [=, this] {
      try {
        group_.wait(*moves, deadline());
      } catch (const std::exception& error) {
        give_up(error.what(), plan, rank_);
      }
      for (size_t i = 0; i < plan.count; ++i) {
        if (memory->numbers[i] != given(plan.index, plan.root, 0, i)) {
          give_up("wrong numbers", plan, rank_);
        }
      }
    };
    group_.start(moves);
    if (coin()) wait();
    else later_.push_back(wait);
  }

  bool coin() { return random_() % 2; }
  static shm::Clock::time_point deadline() { return shm::Clock::now() + std::chrono::minutes(1); }

  shm::Group& group_;
  const int rank_, size_;
  std::minstd_rand random_;
  std::vector<std::function<void()>> later_;
};

Planned any_operation(uint32_t index, int size, std::minstd_rand& random) {
  static const Kind kinds[] = {Kind::all_reduce, Kind::all_reduce, Kind::reduce, Kind::broadcast,
                               Kind::all_gather, Kind::gather, Kind::scatter, Kind::reduce_scatter,
                               Kind::all_to_all, Kind::barrier, Kind::send, Kind::send};
  static const size_t counts[] = {0, 1, 3, 100, 5000, 20'000, kLargest};
  const Kind kind = kinds[random() % std::size(kinds)];
  const size_t count = counts[random() % std::size(counts)];
  const int root = random() % size, to = (root + 1 + random() % (size - 1)) % size;
  return {kind, index, count, root, to, static_cast<uint32_t>(random() % 3)};
}

}  // namespace

int main(int, char** arguments) {
  const uint32_t seed = std::atoi(arguments[1]), operations = std::atoi(arguments[2]);
  const int size = std::atoi(arguments[3]);
  const size_t bytes = shm::Segment::bytes(size);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  const auto segment = std::make_shared<const shm::Segment>(static_cast<uint8_t*>(base), size);
  shm::prepare(*segment);
  std::barrier entered(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      shm::Group group(segment, rank, shm::Heaps(size, shm::Heap::own().view()), shm::kFewCores);
      entered.arrive_and_wait();
      Rank me(group, 1000 * seed + rank);
      std::minstd_rand plan(seed + 1);  // equal on all ranks
      for (uint32_t index = 0; index < operations; ++index) {
        me.call(any_operation(index, size, plan));
        if (index % 10 == 9) me.finish();
      }
      me.finish();
    });
  }
  for (auto& rank : ranks) rank.join();
  std::printf("%u operations of %d ranks\n", operations, size);
}
