// Memory for tensors that other ranks read in place: one heap per process.
//
// heap_view.h explains the file that holds it. Here its owner allocates and frees blocks of it: the
// file is empty at first, and grows by an extent when no free block is large enough.
#pragma once

#include <fcntl.h>
#include <pthread.h>

#include <algorithm>

#include "heap_view.h"

namespace shm {

class Heap {
 public:
  // The heap of this process.
  static Heap& own() {
    static Heap* heap = new Heap;  // never destroyed: tensors may outlive everything
    return *heap;
  }

  // For all ranks of this process, and for its peers.
  const std::shared_ptr<HeapView>& view() const {
    throw_if_forked();
    return view_;
  }
  int64_t offset_of(const void* address) const { return view_->offset_of(address); }

  // Throws std::runtime_error if the machine has not that much memory, or the process not that many
  // addresses.
  void* allocate(size_t wanted) {
    throw_if_forked();
    std::lock_guard lock(mutex_);
    if (wanted > memory_of_machine() - used_bytes_) {
      throw std::runtime_error("shm: the heap is full: " + std::to_string(used_bytes_ >> 20) +
                               " MiB are in use, and " + std::to_string(wanted >> 20) +
                               " MiB more would exceed the memory of this machine");
    }
    const size_t bytes = std::max<size_t>(1, (wanted + kPage - 1) / kPage) * kPage;
    auto it = std::find_if(free_.begin(), free_.end(),  // first fit
                           [&](auto& block) { return block.second >= bytes; });
    if (it == free_.end()) it = grow(bytes);
    const auto [offset, size] = *it;
    used_[offset] = bytes;  // the last line that may throw: nothing has changed yet
    used_bytes_ += bytes;
    auto rest = free_.extract(it);
    if (size > bytes) {
      rest.key() = offset + bytes;
      rest.mapped() = size - bytes;
      free_.insert(std::move(rest));
    }
    return view_->address(offset);
  }

  void release(void* address) {
    if (forked()) return;  // it belongs to the parent
    std::lock_guard lock(mutex_);
    auto block = used_.extract(offset_of(address));
    used_bytes_ -= block.mapped();
    give_back(join(std::move(block)));
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
  using Blocks = std::map<size_t, size_t>;  // offset -> bytes

  static constexpr size_t kPage = 4096;
  // The heap holds at most this much memory more than its tensors need. New pages cost time: the
  // kernel fills them with zeros. So a training step should find the memory of the step before.
  // (malloc, which holds torch's other tensors, keeps no block above 32 MiB.)
  static constexpr size_t kKept = 64 << 20;

  Heap() {
    const int fd = memfd_create("torch shm heap", MFD_CLOEXEC);
    if (fd < 0) throw std::runtime_error(std::string("shm: no memory file: ") + std::strerror(errno));
    view_ = HeapView::of(fd);
    pthread_atfork(nullptr, nullptr, [] { forked_flag() = true; });
  }

  static size_t memory_of_machine() {
    return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  }

  // Add the smallest new extent that can hold the block.
  Blocks::iterator grow(size_t bytes) {
    int extent = 0;
    while (view_->is_mapped(extent) || Extent::bytes(extent) < bytes) ++extent;
    const size_t begin = Extent::begin(extent), size = Extent::bytes(extent);
    const auto it = free_.emplace(begin, size).first;
    try {
      struct stat file;
      if (fstat(view_->fd, &file) != 0 ||
          (static_cast<size_t>(file.st_size) < begin + size &&
           ftruncate(view_->fd, begin + size) != 0)) {
        throw std::runtime_error(std::string("shm: the heap can not grow: ") + std::strerror(errno));
      }
      view_->address(begin);
    } catch (...) {
      free_.erase(it);
      throw;
    }
    return it;
  }

  // Put a block into the list of free blocks, joined with its free neighbours in the same extent.
  // Allocates nothing, so it can not throw.
  Blocks::iterator join(Blocks::node_type block) {
    const size_t offset = block.key();
    size_t& bytes = block.mapped();
    auto next = free_.lower_bound(offset);
    const auto touch = [](size_t end, size_t begin, size_t before) {
      return end == begin && Extent::of(before) == Extent::of(begin);
    };
    if (next != free_.end() && touch(offset + bytes, next->first, offset)) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto last = std::prev(next);
      if (touch(last->first + last->second, offset, last->first)) {
        last->second += bytes;
        return last;
      }
    }
    return free_.insert(std::move(block)).position;
  }

  // Give the memory of free blocks back to the system, beginning with this one, until the heap holds
  // no more than it may. The addresses stay: at the next use the kernel supplies new pages.
  void give_back(Blocks::iterator first) {
    auto it = first;
    do {
      struct stat file;
      if (fstat(view_->fd, &file) != 0) return;
      const size_t held = file.st_blocks * size_t{512};
      if (held <= used_bytes_ + kKept) return;
      // If the kernel refuses, the memory stays in the heap, for the next tensor.
      fallocate(view_->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, it->first, it->second);
      if (++it == free_.end()) it = free_.begin();
    } while (it != first);
  }

  static bool& forked_flag() {
    static bool flag = false;
    return flag;
  }

  std::shared_ptr<HeapView> view_;
  std::mutex mutex_;
  Blocks free_, used_;
  size_t used_bytes_ = 0;
};

}  // namespace shm
