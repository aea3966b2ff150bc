// Memory for tensors that other ranks read in place: one heap per process.
//
// The heap is a file without a name, in memory only (memfd). The process sends its descriptor to
// its peers over a socket. When the last process that holds it ends, in any way, the kernel frees
// it. So nothing can stay behind in /dev/shm, and the size of /dev/shm does not matter.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "failures.h"

namespace shm {

inline uint8_t* map_shared(int fd, size_t bytes) {
  void* base = MAP_FAILED;
  if (must_fail(Site::map)) {
    errno = ENOMEM;
  } else {
    base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  }
  if (base == MAP_FAILED) {
    throw std::runtime_error("mapping " + std::to_string(bytes >> 20) +
                             " MiB of shared memory failed: " + std::strerror(errno) +
                             " (see ulimit -v)");
  }
  return static_cast<uint8_t*>(base);
}

class Heap {
 public:
  // The heap of this process. It reserves as many addresses as the machine has memory; a page takes
  // memory when it is first written.
  static Heap& own() {
    static Heap* heap = new Heap;  // never destroyed: tensors may outlive everything
    return *heap;
  }

  int fd() const {
    throw_if_forked();
    return fd_;
  }
  uint8_t* base() const { return base_; }
  size_t bytes() const { return bytes_; }

  void* allocate(size_t wanted) {
    std::lock_guard lock(mutex_);
    throw_if_forked();
    const size_t bytes = (wanted + kAlignment - 1) / kAlignment * kAlignment + (wanted == 0) * kAlignment;
    for (auto it = free_.begin(); it != free_.end(); ++it) {  // first fit
      if (it->second < bytes) continue;
      const auto [offset, size] = *it;
      used_[offset] = bytes;  // the only line that may throw: nothing has changed yet
      auto rest = free_.extract(it);
      if (size > bytes) {
        rest.key() = offset + bytes;
        rest.mapped() = size - bytes;
        free_.insert(std::move(rest));
      }
      return base_ + offset;
    }
    throw std::runtime_error("shm: the heap of " + std::to_string(bytes_ >> 20) + " MiB is full");
  }

  void release(void* address) {
    std::lock_guard lock(mutex_);
    if (forked()) return;  // it belongs to the parent
    auto block = used_.extract(static_cast<uint8_t*>(address) - base_);
    const size_t offset = block.key();
    size_t& bytes = block.mapped();
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + bytes == next->first) {  // join with free neighbours
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == offset) {
      std::prev(next)->second += bytes;
    } else {
      free_.insert(std::move(block));  // allocates nothing, so it can not throw
    }
  }

  // The offset of an address in the heap; -1 if it is not in the heap.
  int64_t offset_of(const void* address) const {
    const auto offset = static_cast<const uint8_t*>(address) - base_;
    return offset >= 0 && static_cast<size_t>(offset) < bytes_ ? offset : -1;
  }

  // Was this process forked after the heap was made? A forked child shares the pages.
  static bool forked() { return forked_flag(); }
  static void throw_if_forked() {
    if (!forked()) return;
    throw std::runtime_error(
        "shm: this process was forked from one that uses shm, and can not use it: its threads and "
        "its memory are the parent's. Start it with spawn or forkserver");
  }

 private:
  static constexpr size_t kAlignment = 4096;

  Heap() {
    bytes_ = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    fd_ = memfd_create("torch shm heap", MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, bytes_) != 0) {
      throw std::runtime_error(std::string("shm: no memory file: ") + std::strerror(errno));
    }
    base_ = map_shared(fd_, bytes_);
    free_[0] = bytes_;
    pthread_atfork(nullptr, nullptr, [] { forked_flag() = true; });
  }

  static bool& forked_flag() {
    static bool flag = false;
    return flag;
  }

  int fd_ = -1;
  size_t bytes_ = 0;
  uint8_t* base_ = nullptr;
  std::mutex mutex_;
  std::map<size_t, size_t> free_, used_;  // offset -> bytes
};

}  // namespace shm
