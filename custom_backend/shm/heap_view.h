// Map the heaps of other processes, extent by extent.
//
// A heap is a file without a name, in memory only (memfd). The process that owns it sends the
// descriptor to its peers over a socket. When the last process that holds it ends, in any way, the
// kernel frees it. So nothing can stay behind in /dev/shm, and the size of /dev/shm does not matter.
//
// The file grows by extents, and each extent is as large as all extents before it:
//
//     offset    0          16 MiB     32 MiB                64 MiB                   128 MiB ...
//     extent    |    0     |    1     |          2          |           3            |
//
// So an offset alone tells its extent, and no rank has to announce how the heap of another rank has
// grown. A tensor lies in one extent. A process maps an extent when it first uses a tensor in it.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "failures.h"

namespace shm {

inline uint8_t* map_shared(int fd, size_t bytes, size_t offset = 0) {
  void* base = MAP_FAILED;
  if (must_fail(Site::map)) {
    errno = ENOMEM;
  } else {
    base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, offset);
  }
  if (base == MAP_FAILED) {
    throw std::runtime_error("mapping " + std::to_string(bytes >> 20) +
                             " MiB of shared memory failed: " + std::strerror(errno) +
                             " (see ulimit -v)");
  }
  return static_cast<uint8_t*>(base);
}

struct Extent {
  static constexpr size_t kFirst = 16 << 20;
  static constexpr int kCount = 24;  // the last one ends at 128 TiB

  static int of(size_t offset) { return std::bit_width(offset / kFirst); }
  static size_t begin(int extent) { return extent ? kFirst << (extent - 1) : 0; }
  static size_t bytes(int extent) { return extent ? begin(extent) : kFirst; }
};

// The heap of one process, as this process sees it.
class HeapView {
 public:
  // The view takes over the descriptor of the heap.
  explicit HeapView(int fd) : fd(fd) {}
  HeapView(const HeapView&) = delete;

  ~HeapView() {
    for (int extent = 0; extent < Extent::kCount; ++extent) {
      if (bases_[extent]) munmap(bases_[extent], Extent::bytes(extent));
    }
    close(fd);
  }

  // The view of the heap behind this descriptor. All groups of this process share one view per heap:
  // else each group would need addresses and descriptors for the heaps of all its ranks.
  static std::shared_ptr<HeapView> of(int fd) {
    auto view = std::make_shared<HeapView>(fd);
    struct stat file;
    if (fstat(fd, &file) != 0) {
      throw std::runtime_error(std::string("shm: no heap: ") + std::strerror(errno));
    }
    static std::mutex mutex;
    static auto* views = new std::map<std::pair<dev_t, ino_t>, std::weak_ptr<HeapView>>;
    std::lock_guard lock(mutex);
    std::erase_if(*views, [](auto& one) { return one.second.expired(); });
    auto& known = (*views)[{file.st_dev, file.st_ino}];
    if (const auto shared = known.lock()) return shared;  // `view` closes the second descriptor
    known = view;
    return view;
  }

  // The address of a place in the heap. Throws std::runtime_error if the extent can not be mapped.
  uint8_t* address(size_t offset) {
    const int extent = Extent::of(offset);
    uint8_t* base = bases_[extent].load(std::memory_order_acquire);
    if (!base) {
      std::lock_guard lock(mutex_);  // threads of several groups may come here
      base = bases_[extent].load(std::memory_order_relaxed);
      if (!base) base = map_shared(fd, Extent::bytes(extent), Extent::begin(extent));
      bases_[extent].store(base, std::memory_order_release);
    }
    return base + (offset - Extent::begin(extent));
  }

  bool is_mapped(int extent) const { return bases_[extent].load(std::memory_order_acquire); }

  // The offset of an address in the heap; -1 if it is not in the heap.
  int64_t offset_of(const void* address) const {
    for (int extent = 0; extent < Extent::kCount; ++extent) {
      const uint8_t* base = bases_[extent].load(std::memory_order_acquire);
      const size_t offset = static_cast<const uint8_t*>(address) - base;
      if (base && offset < Extent::bytes(extent)) return Extent::begin(extent) + offset;
    }
    return -1;
  }

  const int fd;

 private:
  std::mutex mutex_;
  std::atomic<uint8_t*> bases_[Extent::kCount] = {};
};

}  // namespace shm
