// The order that a program asks for: a vector clock for the host and for each stream.
//
// Kernels run at once here, in the order of the program. A GPU may run the kernels of two streams
// in any order that events allow. So each kernel notes what it reads and writes; if it touches
// memory that a kernel of another stream has touched, and nothing orders the two, it raises.
// This finds every such pair in what a program runs, in one run and without luck.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emulated {
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
using Clock = std::map<StreamKey, uint64_t>;  // of each stream, how many kernels have ended

// Leaked: memory is still freed while the process ends.
inline auto& mutex = *new std::recursive_mutex;  // of all below
inline auto& host = *new Clock;  // what the host has waited for
inline auto& clocks = *new std::map<StreamKey, Clock>;  // what the next kernel of a stream comes after
inline std::atomic<int64_t> host_waits{0};
inline thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;
using Lock = std::lock_guard<std::recursive_mutex>;

inline void join(Clock& clock, const Clock& other) {
  for (auto& [stream, tick] : other) clock[stream] = std::max(clock[stream], tick);
}
inline bool is_over(const Clock& clock, StreamKey stream, uint64_t tick) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= tick;
}
inline std::string text(StreamKey stream) {
  return c10::str("stream ", stream.second, " of cuda:", int(stream.first));
}

struct Kernel {
  std::string name;
  StreamKey stream;
  uint64_t tick;
};
inline Kernel launch(const std::string& name, StreamKey stream) {
  Lock lock(mutex);
  join(clocks[stream], host);
  return {name, stream, ++clocks[stream][stream]};
}
inline StreamKey current_stream(c10::DeviceIndex device) {
  return {device, current_streams[device]};
}

struct Access {
  Kernel kernel;
  size_t begin, end;  // bytes of the block
  bool write;
};

// The accesses to a block of memory that later ones must come after.
struct History {
  std::vector<Access> accesses;
  void add(const Kernel& kernel, size_t begin, size_t end, bool write) {
    Lock lock(mutex);
    for (auto& old : accesses) {
      bool overlap = old.begin < end && begin < old.end && (write || old.write);
      TORCH_CHECK(!overlap || is_over(clocks[kernel.stream], old.kernel.stream, old.kernel.tick),
        "CUDA race: ", kernel.name, " on ", text(kernel.stream), (write ? " writes" : " reads"),
        " what ", old.kernel.name, " on ", text(old.kernel.stream), (old.write ? " writes" : " reads"),
        ", and does not wait for it (Stream.wait_stream, Event.wait, Work.wait)");
    }
    std::erase_if(accesses, [&](auto& old) {  // those that the new one stands for
      bool inside = begin <= old.begin && old.end <= end;
      return inside && (write || (!old.write && old.kernel.stream == kernel.stream));
    });
    accesses.push_back({kernel, begin, end, write});
  }
};

// Copies that are on their way between pinned memory and the device. Each happens as late as
// it may: when the host has waited for it, or a kernel needs what it brings.
struct Copy {
  Kernel kernel;
  void* block;  // that it brings something to; nullptr: it goes to the host
  std::function<void()> happen;
};
inline auto& copies = *new std::vector<Copy>;
inline void finish(const std::function<bool(const Copy&)>& which) {
  Lock lock(mutex);
  auto rest = std::stable_partition(copies.begin(), copies.end(), which);
  std::vector<Copy> now(copies.begin(), rest);
  copies.erase(copies.begin(), rest);
  for (auto& copy : now) copy.happen();
}

inline void host_waits_for(const Clock& clock) {
  Lock lock(mutex);
  host_waits++;
  join(host, clock);
  finish([](const Copy& copy) { return is_over(host, copy.kernel.stream, copy.kernel.tick); });
}
inline void host_waits_for(StreamKey stream) {
  Lock lock(mutex);
  host_waits_for(Clock(clocks[stream]));
}
// What an operation does whose result the host needs. torch.cuda.set_sync_debug_mode counts these.
inline std::atomic<int> sync_debug_mode{0};  // 1: warn, 2: raise
inline void operation_waits_for(StreamKey stream) {
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  host_waits_for(stream);
}
inline void host_waits_for(c10::DeviceIndex device) {
  Lock lock(mutex);
  Clock all;
  for (auto& [stream, clock] : clocks)
    if (stream.first == device) join(all, clock);
  host_waits_for(all);
}
}  // namespace emulated
