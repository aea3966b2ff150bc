// A CUDA device for a CPU-only PyTorch, which has nothing registered for CUDA: this library does.
// order.h: streams and their order; memory.h; kernels.h: operations; nccl.h: communication.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <chrono>
#include "nccl.h"

namespace emulated {
using c10::Stream;

struct Event {
  Clock clock;
  double milliseconds;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = at::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return at::kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  Device getDevice() const override { return {at::kCUDA, current}; }
  void setDevice(Device d) const override { check_device(d.index()); current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }

  static Stream stream(Device d, c10::StreamId id) { return Stream(Stream::UNSAFE, Device(at::kCUDA, index_of(d)), id); }
  static StreamKey key(const Stream& s) { return {s.device_index(), s.id()}; }
  Stream getStream(Device d) const noexcept override { return stream(d, current_streams[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override {  // as CUDA's: 32, used in turn
    static std::atomic<c10::StreamId> next{0};
    return stream(d, -1 - next++ % 32);
  }
  Stream getNewStream(Device d, int) const override { return stream(d, next_stream++); }
  Stream exchangeStream(Stream s) const noexcept override {
    auto before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const Stream& s) const override { return is_done(clock_of(key(s))); }
  void synchronizeStream(const Stream& s) const override { host_waits_for(clock_of(key(s))); }
  void synchronizeDevice(const DeviceIndex i) const override { host_waits_for(clock_of(i)); }

  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    Lock lock(mutex);
    *static_cast<Event*>(*event) = {clocks[key(s)], std::chrono::duration<double, std::milli>(now).count()};
  }
  void block(void* event, const Stream& s) const override {
    if (event) stream_waits_for(key(s), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override { return !event || is_done(static_cast<Event*>(event)->clock); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits_for(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return static_cast<Event*>(to)->milliseconds - static_cast<Event*>(from)->milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    gpu_allocator.recordStream(data, s);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex i) const override { check_device(i); current = i; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    auto before = current;
    if (i >= 0) setCurrentDevice(i);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  void deviceSynchronize(DeviceIndex i) const override { host_waits_for(clock_of(i)); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? current : i); }
  Device getDeviceFromPtr(void*) const override { return {at::kCUDA, current}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &gpu_allocator; }
};
using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
}

// Gloo with CUDA tensors: it copies them to the host and back, but its send and recv hand the address to
// the socket. (Its all_reduce of CUDA tensors is in a library that a CPU-only PyTorch does not have.)
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Reduction = c10::intrusive_ptr<c10d::ReduceOp>;
BackendPtr backend_of(const Group& group) { return group->getBackend(at::kCUDA); }
bool is_gloo(const Group& group) { return backend_of(group)->getBackendName() == "gloo"; }
void refuse_gloo(const Group& group, const char* call) {
  RULE(!is_gloo(group), Error, call, ": Bad address (Gloo sends and receives no CUDA tensors)");
}
WorkPtr send(at::TensorList tensors, const Group& group, int64_t to, int64_t tag) {
  refuse_gloo(group, "writev");
  auto all = tensors.vec();
  return backend_of(group)->send(all, to, tag);
}
WorkPtr recv_(at::TensorList tensors, const Group& group, int64_t from, int64_t tag) {
  refuse_gloo(group, "readv");
  auto all = tensors.vec();
  return backend_of(group)->recv(all, from, tag);
}
WorkPtr recv_any_source_(at::TensorList tensors, const Group& group, int64_t tag) {
  refuse_gloo(group, "readv");
  auto all = tensors.vec();
  return backend_of(group)->recvAnysource(all, tag);
}
struct Over final : c10d::Work {
  Over() { finish(); }
};
Tensors on_host(const Tensors& tensors) {
  Tensors copies;
  for (auto& t : tensors) copies.push_back(t.cpu());
  return copies;
}
template <class Options>
Options options_of(const Reduction& op, bool async, int64_t timeout) {
  Options options;
  options.reduceOp = *op;
  options.timeout = std::chrono::milliseconds(timeout);
  options.asyncOp = async;
  return options;
}
std::tuple<Tensors, WorkPtr> allreduce_(at::TensorList tensors, const Group& group, const Reduction& op,
    const std::optional<Tensor>&, bool async, int64_t timeout) {
  auto all = tensors.vec();
  auto options = options_of<c10d::AllreduceOptions>(op, async, timeout);
  if (!is_gloo(group)) return {all, backend_of(group)->allreduce(all, options)};
  auto copies = on_host(all);
  backend_of(group)->allreduce(copies, options)->wait();
  for (size_t i = 0; i < all.size(); i++) all[i].copy_(copies[i]);
  return {all, c10::make_intrusive<Over>()};
}
std::tuple<Tensors, WorkPtr> reduce_scatter_(const at::TensorList& to, const Lists& from, const Group& group,
    const Reduction& op, bool async, int64_t timeout) {
  auto out = to.vec();
  auto in = from;
  auto options = options_of<c10d::ReduceScatterOptions>(op, async, timeout);
  if (!is_gloo(group)) return {out, backend_of(group)->reduce_scatter(out, in, options)};
  for (auto& list : in) list = on_host(list);
  auto copies = on_host(out);
  backend_of(group)->reduce_scatter(copies, in, options)->wait();
  for (size_t i = 0; i < out.size(); i++) out[i].copy_(copies[i]);
  return {out, c10::make_intrusive<Over>()};
}
std::tuple<Tensor, WorkPtr> reduce_scatter_base_(Tensor& to, Tensor& from, const Group& group, const Reduction& op,
    bool async, int64_t timeout) {
  auto options = options_of<c10d::ReduceScatterOptions>(op, async, timeout);
  if (!is_gloo(group)) return {to, backend_of(group)->_reduce_scatter_base(to, from, options)};
  auto out = to.cpu(), in = from.cpu();
  backend_of(group)->_reduce_scatter_base(out, in, options)->wait();
  to.copy_(out);
  return {to, c10::make_intrusive<Over>()};
}
void replace_sending() {
  struct : c10::WarningHandler {  // PyTorch warns of the replacement
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library c10d(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  c10d.impl("send", send);
  c10d.impl("recv_", recv_);
  c10d.impl("recv_any_source_", recv_any_source_);
  c10d.impl("allreduce_", allreduce_);
  c10d.impl("reduce_scatter_", reduce_scatter_);
  c10d.impl("_reduce_scatter_base_", reduce_scatter_base_);
}

// What the CPU has a kernel for is one kernel here, too: not several of PyTorch's general form.
void register_kernels() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    const bool ours = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (name.name.starts_with("aten::") && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !ours)
      aten.impl(toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&any_operation>());
  }
}

// UntypedStorage.resize_, by which FSDP frees and allocates unsharded parameters.
void resize_storage(at::Storage storage, int64_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto data = gpu_allocator.allocate(bytes);
  if (bytes && storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min<size_t>(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}
}  // namespace emulated

namespace c10d {  // DDP takes times of forward and backward
struct EmulatedTimer final : Timer {
  explicit EmulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event from, Event to) override {
    auto a = getTimeRef(from), b = getTimeRef(to);
    return a == kUnsetTime || b == kUnsetTime ? std::nullopt : std::optional<int64_t>(b - a);
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, EmulatedTimer)
}  // namespace c10d

PYBIND11_MODULE(emulated_cuda, m) {
  using namespace emulated;
  c10::SetAllocator(at::kCUDA, &gpu_allocator, 100);
  at::setHostAllocator(at::kCUDA, &pinned_allocator, 100);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention);

  register_kernels();
  replace_sending();
  m.def("visible_gpus", &visible_gpus);
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int i) { check_device(i); current = i; });
  m.def("default_generator", [](int i) { return default_generator(i); });
  m.def("resize_storage", &resize_storage);
  m.def("synchronize", [](int i) { host_waits_for(clock_of(DeviceIndex(i))); });
  m.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  m.def("get_sync_debug_mode", [] { return sync_debug_mode.load(); });
  m.def("host_waits", [] { return host_waits.load(); });
  m.def("total_memory", &total_memory);
  m.def("switch_off", [](std::string rule) { off = rule, broken.clear(); });
  m.def("broken_rule", [] { return broken; });

  py::module_::import("torch.distributed");  // registers Backend
  py::class_<NCCLOptions, c10d::Backend::Options, c10::intrusive_ptr<NCCLOptions>> options(m, "NCCLOptions", py::dynamic_attr());
  options.def(py::init<>())
    .def("__deepcopy__", [](const NCCLOptions& o, py::dict) { return c10::make_intrusive<NCCLOptions>(o.timeout); });
  py::class_<ProcessGroupNCCL, c10d::Backend, c10::intrusive_ptr<ProcessGroupNCCL>>(m, "ProcessGroupNCCL")
    .def(py::init([](py::object store, int rank, int size, py::object options) {
      auto gloo = py::module_::import("emulated_gpu.cuda").attr("connect")(store, rank, size, options);
      return c10::make_intrusive<ProcessGroupNCCL>(gloo.cast<BackendPtr>());
    }))
    .def_property_readonly("options", [](ProcessGroupNCCL&) { return c10::make_intrusive<NCCLOptions>(); })
    .def("perform_nocolor_split", [](ProcessGroupNCCL&, py::object) {});  // for the ranks outside a new group
}
