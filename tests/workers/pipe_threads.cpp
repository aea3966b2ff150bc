// Run custom_backend/pipe/pipe.h under ThreadSanitizer: the ranks are threads of one process.
//
//     g++ -std=c++20 -O1 -g -fsanitize=thread -I custom_backend/pipe tests/workers/pipe_threads.cpp
//         -o pipe_threads && ./pipe_threads SEED OPERATIONS RANKS
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "pipe.h"

using pipe_backend::Pipe;
using pipe_backend::Ring;

// The number that a rank brings into an operation, at index i.
int32_t given(int operation, int rank, size_t i) {
  return static_cast<int32_t>(operation * 7919 + rank * 104729 + i);
}

void check(bool right, const char* what, int operation, int rank) {
  if (right) return;
  std::fprintf(stderr, "%s is wrong: operation %d, rank %d\n", what, operation, rank);
  std::_Exit(1);
}

void run(Pipe* pipes, int rank, int size, unsigned seed, int operations) {
  Ring ring(pipes, rank, size, -1, -1);  // poll() leaves a descriptor of -1 out: no rank ends
  std::mt19937 random(seed);              // the same calls on all ranks
  for (int operation = 0; operation < operations; ++operation) {
    const size_t count = random() % 10 ? random() % 2000 : random() % 200'000;
    const int root = static_cast<int>(random() % size);
    std::vector<int32_t> numbers(count);
    for (size_t i = 0; i < count; ++i) numbers[i] = given(operation, rank, i);
    char* data = reinterpret_cast<char*>(numbers.data());
    if (random() % 2) {
      ring.begin("sum", std::chrono::minutes(4));
      ring.all_reduce(data, 4 * count, [](char* mine, const char* theirs, size_t bytes) {
        for (size_t at = 0; at < bytes; at += 4) {
          uint32_t a, b;
          std::memcpy(&a, mine + at, 4);
          std::memcpy(&b, theirs + at, 4);
          a += b;
          std::memcpy(mine + at, &a, 4);
        }
      });
      for (size_t i = 0; i < count; ++i) {
        uint32_t sum = 0;
        for (int r = 0; r < size; ++r) sum += static_cast<uint32_t>(given(operation, r, i));
        check(numbers[i] == static_cast<int32_t>(sum), "a sum", operation, rank);
      }
    } else {
      ring.begin("broadcast", std::chrono::minutes(4));
      ring.broadcast(data, 4 * count, root);
      for (size_t i = 0; i < count; ++i) {
        check(numbers[i] == given(operation, root, i), "a broadcast", operation, rank);
      }
    }
  }
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const unsigned seed = std::atoi(argv[1]);
  const int operations = std::atoi(argv[2]), size = std::atoi(argv[3]);
  void* memory = mmap(nullptr, size * sizeof(Pipe), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 3;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back(
        [=] { run(static_cast<Pipe*>(memory), rank, size, seed, operations); });
  }
  for (auto& rank : ranks) rank.join();
  std::printf("%d operations of %d ranks\n", operations, size);
}
