// The memory of the emulated GPUs and pinned memory. Both are the CPU's.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include "order.h"

namespace emulated {
using c10::Device;
using c10::DeviceIndex;

constexpr int MOST = 64;
inline int64_t number(const char* name, int64_t otherwise) {
  auto value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}
// The GPUs that this process sees: $EMULATED_GPUS in all, or those in $CUDA_VISIBLE_DEVICES.
inline std::vector<int> visible_gpus() {
  int count = std::min<int64_t>(number("EMULATED_GPUS", 0), MOST);
  std::vector<int> found;
  if (auto chosen = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::stringstream words(chosen);
    for (std::string word; std::getline(words, word, ',') && std::atoi(word.c_str()) < count;)
      found.push_back(std::atoi(word.c_str()));
  } else {
    for (int i = 0; i < count; i++) found.push_back(i);
  }
  return found;
}
inline int device_count() { return visible_gpus().size(); }
inline int64_t total_memory() { return number("EMULATED_GPU_BYTES", int64_t(80) << 30); }

inline thread_local DeviceIndex current = 0;
inline void check_device(DeviceIndex i) {
  RULE(i >= 0 && i < device_count(), Error, "CUDA error: invalid device ordinal ", int(i),
    ", this process sees ", device_count());
}
inline DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

inline c10::CachingAllocator::Stat used[MOST];  // bytes of each GPU, now and at most

struct Block {
  void* data;
  size_t size;  // bytes; PyTorch's allocator rounds up to 512 as well
  StreamKey owner;  // the stream for which it was allocated, which may have it again
  at::Storage keep;  // of the CPU, if a CPU kernel has allocated it
  History history;
  Clock recorded;  // kernels for which the allocator waits: up to this one
};

// Memory that was freed while another stream than its owner may still use it.
struct Freed {
  size_t size;
  StreamKey owner;
  std::vector<Access> accesses;
};
inline auto& freed = *new std::vector<Freed>;

inline void release(void* context) {
  Lock lock(mutex);
  auto block = static_cast<Block*>(context);
  used[block->owner.first].decrease(block->size);
  finish([&](const Arrival& arrival) { return arrival.writes.count(block); });
  auto& accesses = block->history.accesses;
  std::erase_if(accesses, [&](auto& a) {
    return a.kernel.stream == block->owner || is_over(block->recorded, a.kernel.stream, a.kernel.tick);
  });
  if (!accesses.empty()) freed.push_back({block->size, block->owner, std::move(accesses)});
  if (block->data) std::free(block->data);
  delete block;
}

// A new block, or an error as the caching allocator raises it.
inline Block* make_block(DeviceIndex device, size_t bytes, at::Storage keep = {}) {
  Lock lock(mutex);
  size_t size = (bytes + 511) / 512 * 512;
  auto owner = current_stream(device);
  auto& clock = clocks[owner];
  join(clock, host);
  std::erase_if(freed, [&](Freed& old) {
    if (old.owner != owner) return false;
    std::erase_if(old.accesses, [&](auto& a) { return is_over(clock, a.kernel.stream, a.kernel.tick); });
    if (!old.accesses.empty() && size && size <= old.size) {
      auto kernel = old.accesses[0].kernel;
      old.accesses.clear();  // say it once
      RULE(shows_races(), Error, "CUDA race: memory was freed while ", kernel.name, " on ", text(kernel.stream),
        " may still use it, and is allocated again on ", text(owner),
        " (Tensor.record_stream, or wait before it is freed)");
    }
    return old.accesses.empty();
  });
  auto free = total_memory() - used[device].current;
  RULE(int64_t(size) <= free, OutOfMemoryError, "CUDA out of memory. Tried to allocate ", size,
    " bytes. GPU ", int(device), " has a total capacity of ", total_memory(), " bytes of which ", free, " are free.");
  used[device].increase(size);
  void* data = size && !keep ? std::aligned_alloc(512, size) : nullptr;
  return new Block{data, size, owner, keep, {}, {}};
}

inline Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

struct GPUAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    auto block = make_block(current, size);
    return {block->data, block, &release, Device(at::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is kept
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex);
    if (auto block = block_of(data)) block->recorded[{stream.device_index(), stream.id()}] = UINT64_MAX;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = used[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override { used[device].reset_accumulated(); }
  void resetPeakStats(DeviceIndex device) override { used[device].reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {total_memory() - used[device].current, total_memory()};
  }
};
inline GPUAllocator gpu_allocator;

inline auto& pinned = *new std::set<const void*>;
inline bool is_pinned(const void* data) {
  Lock lock(mutex);
  return pinned.count(data);
}
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    Lock lock(mutex);
    if (data) pinned.insert(data);
    return {data, data, &free, Device(at::kCPU)};
  }
  static void free(void* data) {
    Lock lock(mutex);
    pinned.erase(data);
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;
}  // namespace emulated
