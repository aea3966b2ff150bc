// Let every allocation, mapping, futex and copy of custom_backend/shm fail once, on each rank.
//
//     g++ -std=c++20 -O1 -DSHM_FAILURES -I custom_backend/shm tests/workers/shm_failures.cpp
//         custom_backend/shm/reduce.cpp -o shm_failures && ./shm_failures RANKS
//
// For each call of a collective, rank and kind of site, the n-th use of the site fails, for n = 1,
// 2, ... until the call has fewer uses. The ranks are threads with a new group each time. After the
// failure every rank, the failing one too, calls again as if nothing had happened. Then:
//
//     - a call that returns has the right numbers, the second call too;
//     - if a call of the failing rank throws, the second call of every rank throws one message, which
//       names the rank, the operation and the reason;
//     - no rank waits until the timeout.

#include <sys/mman.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

#include "group.h"
#include "heap.h"

void* operator new(size_t bytes) {
  void* memory = shm::must_fail(shm::Site::allocate) ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using shm::Dtype;
using shm::Kind;
using shm::Limits;
using shm::Site;
using shm::Span;

constexpr shm::Numbers kSum = {Dtype::int32};
constexpr size_t kFew = 100, kMany = 150'000;  // one round; several rounds, which reuse slots

struct Call {
  const char* name;
  Kind kind;
  size_t count;
  bool in_heap = false, async = false;
};
constexpr Call kCalls[] = {
    {"all_reduce, zero copy", Kind::all_reduce, kMany, true},
    {"all_reduce", Kind::all_reduce, kFew},
    {"all_reduce, async", Kind::all_reduce, kFew, false, true},
    {"all_reduce, large", Kind::all_reduce, kMany},
    {"reduce", Kind::reduce, kMany},
    {"broadcast", Kind::broadcast, kMany},
    {"broadcast, zero copy", Kind::broadcast, kMany, true},
    {"all_gather", Kind::all_gather, kMany},
    {"all_gather, zero copy", Kind::all_gather, kMany, true},
    {"gather", Kind::gather, kMany},
    {"scatter", Kind::scatter, kMany},
    {"reduce_scatter", Kind::reduce_scatter, kMany},
    {"reduce_scatter, zero copy", Kind::reduce_scatter, kMany, true},
    {"all_to_all", Kind::all_to_all, kMany},
    {"barrier", Kind::barrier, 0},
    {"send and recv", Kind::send, kMany},
};

// The memory of one rank: one part per rank for input and output each, in the heap or private.
struct Memory {
  Memory(const Call& call, int rank, int size) : n(call.count), size(size) {
    void* place = call.in_heap ? shm::Heap::own().allocate(8 * n * size + 1) : nullptr;
    if (!place) privately.resize(2 * n * size + 1);
    in_heap = place != nullptr;
    in = place ? static_cast<int32_t*>(place) : privately.data();
    out = in + n * size;
    for (size_t i = 0; i < n * size; ++i) in[i] = given(rank, i), out[i] = -1;
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (in_heap) shm::Heap::own().release(in);
  }
  static int32_t given(int rank, size_t i) { return static_cast<int32_t>(i % 1000 + 1000 * rank); }
  std::vector<Span> parts(int32_t* of) const {
    std::vector<Span> all;
    for (int part = 0; part < size; ++part) {
      all.push_back({reinterpret_cast<uint8_t*>(of + part * n), n * sizeof(int32_t)});
    }
    return all;
  }
  const size_t n;
  const int size;
  std::vector<int32_t> privately;
  bool in_heap;
  int32_t *in, *out;
};

// Rank 0 sends two messages to each rank, which receives the second one first.
void send_and_recv(shm::Group& group, const Memory& memory, shm::Clock::time_point deadline) {
  const int rank = group.peers.rank;
  std::vector<std::shared_ptr<shm::Transfer>> transfers;
  const auto begin = [&](Kind kind, int peer, uint32_t tag, int32_t* data) {
    const auto plan = std::exchange(shm::plan, nullptr);  // the next allocations are not shm's
    transfers.push_back(std::make_shared<shm::Transfer>(
        kind, peer, tag, reinterpret_cast<uint8_t*>(data), memory.n * 4, Dtype::int32));
    shm::plan = plan;
    group.start(transfers.back());
  };
  if (rank == 0) {
    for (int peer = 1; peer < memory.size; ++peer) {
      begin(Kind::send, peer, 1, memory.in);
      begin(Kind::send, peer, 2, memory.in + memory.n);
    }
  } else {
    begin(Kind::recv, 0, 2, memory.out + memory.n);
    group.wait(*transfers.back(), deadline);
    begin(Kind::recv, shm::kAnySource, 1, memory.out);
  }
  for (auto& transfer : transfers) group.wait(*transfer, deadline);
}

void operate(shm::Group& group, const Call& call, const Memory& memory, Limits limits) {
  auto& all = group.collectives;
  const auto ins = memory.parts(memory.in), outs = memory.parts(memory.out);
  switch (call.kind) {
    case Kind::all_reduce: return all.all_reduce(memory.in, memory.n, kSum, limits);
    case Kind::reduce: return all.reduce_to(0, memory.in, memory.n, kSum, limits);
    case Kind::broadcast: return all.broadcast(1, ins[0], Dtype::int32, limits);
    case Kind::all_gather: return all.all_gather(ins[0], outs, Dtype::int32, limits);
    case Kind::gather: return all.gather(1, ins[0], outs, Dtype::int32, limits);
    case Kind::scatter: return all.scatter(1, ins, outs[0], Dtype::int32, limits);
    case Kind::reduce_scatter: return all.reduce_scatter(ins, memory.in, memory.out, kSum, limits);
    case Kind::all_to_all: return all.all_to_all(ins, outs, Dtype::int32, limits);
    default: return all.barrier(limits);
  }
}

bool is_right(const Call& call, const Memory& memory, int rank) {
  const int size = memory.size;
  const size_t n = memory.n;
  const auto sum = [&](size_t i) {
    int32_t total = 0;
    for (int from = 0; from < size; ++from) total += Memory::given(from, i);
    return total;
  };
  bool right = true;
  for (size_t i = 0; i < n; ++i) {
    const int32_t in = memory.in[i], out = memory.out[i];
    if (call.kind == Kind::all_reduce) right &= in == sum(i);
    if (call.kind == Kind::reduce && rank == 0) right &= in == sum(i);
    if (call.kind == Kind::broadcast) right &= in == Memory::given(1, i);
    if (call.kind == Kind::scatter) right &= out == Memory::given(1, rank * n + i);
    if (call.kind == Kind::reduce_scatter) right &= out == sum(rank * n + i);
    for (int from = 0; from < size; ++from) {
      const int32_t got = memory.out[from * n + i];
      if (call.kind == Kind::all_gather) right &= got == Memory::given(from, i);
      if (call.kind == Kind::gather && rank == 1) right &= got == Memory::given(from, i);
      if (call.kind == Kind::all_to_all) right &= got == Memory::given(from, rank * n + i);
      if (call.kind == Kind::send && rank && from < 2) right &= got == Memory::given(0, from * n + i);
    }
  }
  return right;
}

// The error that a call raises ("" if it returns). `plan` fails in the thread that runs the call.
std::string error_of(shm::Group& group, const Call& call, const Memory& memory, shm::Plan* plan) {
  const auto deadline = shm::Clock::now() + std::chrono::seconds(30);
  std::string message;
  const auto run = [&](shm::Patience patience) {
    shm::plan = plan;
    try {
      if (call.kind == Kind::send) {
        send_and_recv(group, memory, deadline);
      } else {
        const auto operation = [&] { operate(group, call, memory, {deadline, patience}); };
        group.collectives.run(call.kind, operation);
      }
      shm::plan = nullptr;
    } catch (const std::exception& error) {
      shm::plan = nullptr;
      message = error.what();
    }
  };
  if (call.kind == Kind::send) {
    run(shm::kFewCores);
  } else if (call.async) {
    group.queue.finish(*group.queue.add(run, [] {}));
  } else {
    group.queue.run_now(run);
  }
  return message;
}

struct Outcome {
  std::string first, second;
  bool right = true;  // of the calls that returned
};

// All ranks call; the n-th use of the site fails on one rank. Did it have n uses?
bool try_once(int size, const Call& call, int failing, Site site, int n) {
  constexpr Call again = {"again", Kind::all_reduce, kFew};
  const size_t bytes = shm::Segment::bytes(size);
  const int file = memfd_create("shm failures", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, bytes) != 0) std::abort();
  const auto segment = shm::map_segment(file, size);
  close(file);
  shm::prepare(*segment);
  shm::Plan plan{site, n};
  std::vector<Outcome> outcomes(size);
  std::barrier together(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      shm::Heaps heaps(size, shm::Heap::own().view());
      for (int peer = 0; peer < size; ++peer) {  // as in a process of its own: nothing is mapped yet
        if (peer != rank) heaps[peer] = std::make_shared<shm::HeapView>(dup(heaps[peer]->fd));
      }
      const Memory memory(call, rank, size), more(again, rank, size);
      shm::Group group(segment, rank, heaps, {0, 0});
      together.arrive_and_wait();
      Outcome& outcome = outcomes[rank];
      outcome.first = error_of(group, call, memory, rank == failing ? &plan : nullptr);
      if (outcome.first.empty()) outcome.right &= is_right(call, memory, rank);
      outcome.second = error_of(group, again, more, nullptr);
      if (outcome.second.empty()) outcome.right &= is_right(again, more, rank);
      together.arrive_and_wait();  // another rank may still read this memory
    });
  }
  for (auto& rank : ranks) rank.join();

  static const char* names[] = {"map", "copy", "allocate", "sleep", "wake"};
  const std::string told = outcomes[failing].second;
  bool fine = true;
  for (auto& outcome : outcomes) fine &= outcome.right && outcome.second == told;
  const bool named = told.find("rank " + std::to_string(failing) + " failed in ") == 0;
  const bool has_failed = plan.calls <= 0;
  // A lost wake-up only costs time. Every other failure is an error on all ranks.
  fine &= has_failed && site != Site::wake ? named : told.empty() && outcomes[failing].first.empty();
  if (!fine) {
    std::fprintf(stderr, "%s, %d ranks: use %d of %s failed on rank %d\n", call.name, size, n,
                 names[static_cast<int>(site)], failing);
    for (auto& outcome : outcomes) {
      std::fprintf(stderr, "  %s | first: %s | second: %s\n", outcome.right ? "right" : "WRONG",
                   outcome.first.c_str(), outcome.second.c_str());
    }
    std::_Exit(1);
  }
  return has_failed;
}

}  // namespace

int main(int, char** arguments) {
  const int size = std::atoi(arguments[1]);
  int failures[5] = {};
  for (auto& call : kCalls) {
    for (int failing = 0; failing < size; ++failing) {
      for (int site = 0; site < 5; ++site) {
        // How often a rank sleeps and wakes depends on the scheduler: try the first uses.
        const int most = Site(site) == Site::sleep || Site(site) == Site::wake ? 3 : 1000;
        for (int n = 1; n <= most && try_once(size, call, failing, Site(site), n); ++n) {
          ++failures[site];
        }
      }
    }
  }
  std::printf("failed: map %d, copy %d, allocate %d, sleep %d, wake %d\n", failures[0], failures[1],
              failures[2], failures[3], failures[4]);
}
