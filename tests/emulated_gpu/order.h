// The order that a program asks for: a vector clock for the host and for each stream.
//
// Kernels run at once here, in the order of the program. A GPU may run kernels of two streams in any
// order that events allow. So each kernel notes which bytes it reads and writes. It raises if another
// kernel has touched some of them, one of the two writes, and the program orders them in no way.
//
// This finds every such pair of kernels that this process has launched, in one run and without luck.
// It does not see
// - kernels that this run did not launch: another branch, another number of steps;
// - the parts of one kernel, such as two transfers of one coalesced group in the same memory;
// - the host: where it writes to pinned memory too early, the copy brings a wrong number instead;
// - memory between the first and the last byte of a view that the view leaves out: two kernels on
//   two columns of one matrix count as a pair, a false alarm.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <list>
#include <map>
#include <memory>
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

// A rule of GPUs. The tests switch off each that a program breaks: the program must then go through.
inline std::string broken, off;  // the rule that was broken last, and the one that is off: FILE:LINE
inline bool is_off(const std::string& file, int line) {
  broken = c10::str(file.substr(file.rfind('/') + 1), ":", line);
  return broken == off;
}
#define RULE(ok, Kind, ...) \
  TORCH_CHECK_WITH(Kind, (ok) || emulated::is_off(__FILE__, __LINE__), __VA_ARGS__)

// $EMULATED_GPU_RACES=show: no error. What a kernel writes arrives as late as it may, so that a
// kernel that does not wait for it reads what was there before.
inline bool shows_races() {
  static const bool asked = [] {
    auto value = std::getenv("EMULATED_GPU_RACES");
    return value && value == std::string("show");
  }();
  return asked;
}

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
      RULE(shows_races() || !overlap || is_over(clocks[kernel.stream], old.kernel.stream, old.kernel.tick), Error,
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

// What is on its way: a copy between pinned memory and the device, or a message. It arrives as late
// as it may: when the host has waited for it, or when a kernel that comes after it needs it.
struct Arrival {
  Kernel kernel;
  std::set<const void*> writes, reads;  // blocks of memory
  std::function<void()> happen;
  std::function<bool()> can_happen;  // at once; none: always, or the host waits here
  std::chrono::milliseconds timeout{0};  // for that; 0: as long as the message may take
  std::once_flag once;
  bool message = false;  // a send or receive
  bool is_before(const Clock& clock) const { return is_over(clock, kernel.stream, kernel.tick); }
};
using ArrivalPtr = std::shared_ptr<Arrival>;
inline auto& arrivals = *new std::list<ArrivalPtr>;

inline ArrivalPtr arrives(Kernel kernel, std::set<const void*> writes, std::function<void()> happen) {
  Lock lock(mutex);
  auto made = std::make_shared<Arrival>();
  made->kernel = kernel;
  made->writes = writes;
  made->happen = happen;
  return arrivals.emplace_back(made);
}
inline void finish(const ArrivalPtr& arrival) {  // without the lock: a message may wait for other ranks
  auto forget = [&](void*) {  // also after an error, which is raised once
    Lock lock(mutex);
    arrivals.remove(arrival);
  };
  std::unique_ptr<void, decltype(forget)> at_end(&forget, forget);
  std::call_once(arrival->once, [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    arrival->happen();
    arrival->happen = nullptr;
  });
}
inline void finish(const std::function<bool(const Arrival&)>& which) {
  std::vector<ArrivalPtr> now;
  {
    Lock lock(mutex);
    for (auto& arrival : arrivals)
      if (which(*arrival)) now.push_back(arrival);
  }
  for (auto& arrival : now) finish(arrival);
}

inline void host_knows(const Clock& clock) {  // that all of this is over
  {
    Lock lock(mutex);
    join(host, clock);
  }
  finish([](const Arrival& arrival) { return arrival.is_before(host); });
}
inline bool is_done(const Clock& clock) {  // as cudaEventQuery
  {
    Lock lock(mutex);
    for (auto& arrival : arrivals)
      if (arrival->is_before(clock) && arrival->can_happen && !arrival->can_happen()) return false;
  }
  host_knows(clock);
  return true;
}
inline Clock clock_of(StreamKey stream) {
  Lock lock(mutex);
  return clocks[stream];
}
inline void stream_waits_for(StreamKey stream, const Clock& clock) {
  Lock lock(mutex);
  join(clocks[stream], clock);
}
inline void host_waits_for(const Clock& clock) {
  host_waits++;
  host_knows(clock);
}
// What an operation does whose result the host needs. torch.cuda.set_sync_debug_mode counts these.
inline std::atomic<int> sync_debug_mode{0};  // 1: warn, 2: raise
inline void operation_waits_for(StreamKey stream) {
  RULE(sync_debug_mode != 2, Error, "called a synchronizing CUDA operation");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  host_waits_for(clock_of(stream));
}
inline Clock clock_of(c10::DeviceIndex device) {
  Lock lock(mutex);
  Clock all;
  for (auto& [stream, clock] : clocks)
    if (stream.first == device) join(all, clock);
  return all;
}
}  // namespace emulated
