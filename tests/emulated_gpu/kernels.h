// The kernels: for each operation the CPU's kernel, on the same memory, after the checks that a GPU
// makes. An Alias is a CPU tensor in the memory of a CUDA tensor.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>
#include "memory.h"

namespace emulated {
using at::Tensor;

struct Generator final : c10::GeneratorImpl {
  at::Generator twin;  // draws the numbers
  explicit Generator(DeviceIndex i)
      : GeneratorImpl(Device(at::kCUDA, i), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        twin(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { twin.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return twin.current_seed(); }
  uint64_t seed() override { return twin.seed(); }
  void set_state(const c10::TensorImpl& state) override { twin.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return twin.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto copy = new Generator(device().index());
    copy->twin = twin.clone();
    return copy;
  }
};
inline at::Generator& default_generator(DeviceIndex i) {
  static auto all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < MOST; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(i < 0 ? current : i);
}

// message: of a send or receive. It does not wait here for those before it in their stream: a rank
// that sends a part of a tensor and receives another part would wait for ever.
inline void touch(const Kernel& kernel, const Tensor& t, bool write, bool message = false) {
  if (!t.defined() || !t.is_cuda() || t.numel() == 0) return;
  auto block = block_of(t.storage().data_ptr());
  if (!block) return;
  finish([&](const Arrival& a) {
    if (message && a.message && a.kernel.stream == kernel.stream) return false;
    return (a.writes.count(block) || (write && a.reads.count(block))) && a.is_before(clocks[kernel.stream]);
  });
  size_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  block->history.add(kernel, t.storage_offset() * t.itemsize(), (last + 1) * t.itemsize(), write);
}

inline Tensor tensor_in(const at::Storage& storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The CUDA tensors of one operation and their aliases.
struct Aliases {
  std::vector<std::pair<Tensor, Tensor>> tensors;  // CUDA, CPU
  std::map<c10::StorageImpl*, std::pair<at::Storage, at::Storage>> storages;  // of the former: both

  Tensor cpu(const Tensor& cuda) {
    for (auto& [mine, alias] : tensors)
      if (mine.is_same(cuda)) return alias;
    auto storage = cuda.storage();
    auto found = storages.find(storage.unsafeGetStorageImpl());
    if (found == storages.end()) {
      at::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
        c10::DataPtr(storage.mutable_data(), Device(at::kCPU)), c10::GetCPUAllocator(), true);
      found = storages.emplace(storage.unsafeGetStorageImpl(), std::make_pair(storage, same)).first;
    }
    auto alias = tensor_in(found->second.second, c10::DispatchKey::CPU, cuda);
    if (cuda.is_conj()) alias._set_conj(true);
    tensors.emplace_back(cuda, alias);
    return alias;
  }

  // A result of the CPU's kernel as a CUDA tensor: one of the arguments, in the storage of one, or new.
  Tensor cuda(const Tensor& cpu, DeviceIndex device) {
    if (!cpu.defined() || !cpu.is_cpu()) return cpu;
    for (auto& [mine, alias] : tensors)
      if (alias.is_same(cpu)) return mine;
    for (auto& [_, both] : storages)
      if (both.second.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl())
        return tensor_in(both.first, c10::DispatchKey::CUDA, cpu);
    auto from = cpu.storage();
    at::Storage storage(c10::Storage::use_byte_size_t(), from.nbytes(), adopt(from, device), &gpu_allocator, true);
    return tensor_in(storage, c10::DispatchKey::CUDA, cpu);
  }

  // What the CPU's kernel has resized, such as an argument named out.
  void write_back() {
    for (auto& [_, both] : storages) {
      auto& [cuda, alias] = both;
      if (alias.data() == cuda.data() && alias.nbytes() == cuda.nbytes()) continue;
      cuda.unsafeGetStorageImpl()->set_data_ptr_noswap(adopt(alias, cuda.device().index()));
      cuda.unsafeGetStorageImpl()->set_nbytes(alias.nbytes());
    }
    for (auto& [cuda, alias] : tensors)
      if (cuda.sizes() != alias.sizes() || cuda.strides() != alias.strides() || cuda.storage_offset() != alias.storage_offset())
        cuda.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }

  static c10::DataPtr adopt(const at::Storage& cpu, DeviceIndex device) {
    return {cpu.mutable_data(), make_block(device, cpu.nbytes(), cpu), &release, Device(at::kCUDA, device)};
  }
};

// Apply `change` to the tensors of an argument or a result.
template <class Change>
c10::IValue each_tensor(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> changed;
    for (const Tensor& t : value.toTensorVector()) changed.push_back(change(t));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      changed.push_back(t ? std::optional(change(*t)) : t);
    return changed;
  }
  return value;
}

// These take indices on the CPU, too.
inline const std::set<std::string> INDEXING = {"aten::index", "aten::index_put_", "aten::index_put",
  "aten::_index_put_impl_", "aten::_unsafe_index_put", "aten::_unsafe_index"};
// These and pointwise operations take a CPU tensor without dimensions, as a number. Others do not.
inline const std::set<std::string> NUMBERS = {"aten::masked_fill", "aten::masked_fill_", "aten::fill_",
  "aten::index_fill", "aten::index_fill_", "aten::floor_divide", "aten::floor_divide_", "aten::rsub", "aten::mse_loss",
  "aten::huber_loss", "aten::smooth_l1_loss", "aten::complex", "aten::polar"};
inline bool takes_numbers(const c10::OperatorHandle& op, const std::string& name) {
  return op.hasTag(at::Tag::pointwise) || NUMBERS.count(name) || INDEXING.count(name) ||
    name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_");
}
// The host must know the size of what these return.
inline const std::set<std::string> WAIT = {"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
  "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::equal"};
// Indices on the CPU are copied, and the host waits for the copy. True in a mask are counted first,
// except where one number is put there.
inline bool waits_to_index(const std::vector<c10::IValue>& args) {
  const bool number = args.size() > 2 && args[2].isTensor() && args[2].toTensor().is_cpu();
  for (std::optional<Tensor> index : args[1].toOptionalTensorList()) {
    if (!index || !index->defined()) continue;
    const bool mask = index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
    if (index->is_cpu() || (mask && !number)) return true;
  }
  return false;
}

// With $EMULATED_GPU_RACES=show: let what `now` has become be seen late, and `before` until then.
inline void show_late(const Kernel& kernel, const Tensor& cuda, Tensor now, const Tensor& before) {
  auto after = now.clone();
  now.copy_(before);
  arrives(kernel, {block_of(cuda.storage().data_ptr())}, [now, after] { Tensor(now).copy_(after); });
}

inline void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto args = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, args.size());

  std::optional<DeviceIndex> device;
  for (auto& arg : args)
    each_tensor(arg, [&](const Tensor& t) {
      if (t.defined() && t.is_cuda()) {
        RULE(!device || *device == t.device().index(), Error, name, ": Expected all tensors to be on the same "
          "device, but found at least two devices, cuda:", int(*device), " and ", t.device(), "!");
        device = t.device().index();
      }
      return t;
    });
  for (auto& arg : args)
    if (!device && arg.isDevice()) device = index_of(arg.toDevice());
  const bool any_on_gpu = device.has_value(), indexing = INDEXING.count(name);
  RULE(!indexing || args[0].toTensor().is_cuda(), Error, name, ": indices should be either on cpu or on the same device "
    "as the indexed tensor (cpu)");
  const bool waits = WAIT.count(name) || (indexing && waits_to_index(args));
  if (!device) device = current;

  Aliases aliases;
  auto kernel = launch(name, current_stream(*device));
  std::vector<std::pair<Tensor, Tensor>> before;  // what is written, and a copy of it
  for (size_t i = 0; i < args.size(); i++) {
    const bool index = indexing && i == 1, list = args[i].isTensorList() && !name.starts_with("aten::_foreach_");
    auto alias = schema.arguments()[i].alias_info();
    const bool write = alias && alias->isWrite(), view = alias && !write;
    args[i] = each_tensor(args[i], [&](const Tensor& t) {
      if (!t.defined()) return t;
      const bool number = t.dim() == 0 && !write && !list && takes_numbers(op, name);
      RULE(!t.is_cpu() || !any_on_gpu || index || number, Error, name, ": Expected all tensors to be on "
        "the same device, but found at least two devices, cuda:", int(*device), " and cpu!");
      if (!view) touch(kernel, t, write);
      if (shows_races() && write && t.is_cuda()) before.emplace_back(t, aliases.cpu(t).clone());
      return t.is_cuda() ? aliases.cpu(t) : t;
    });
    if (args[i].isDevice()) args[i] = Device(at::kCPU);
    if (args[i].isGenerator() || (args[i].isNone() && schema.arguments()[i].type()->str().find("Generator") != std::string::npos)) {
      auto generator = args[i].isNone() ? default_generator(*device) : args[i].toGenerator();
      RULE(generator.device().is_cuda(), Error, name, ": Expected a 'cuda' device type for generator but found 'cpu'");
      if (generator.device().is_cuda()) args[i] = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->twin;
    }
    stack->push_back(args[i]);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  aliases.write_back();
  for (auto& [cuda, old] : before) {
    auto now = aliases.cpu(cuda);
    if (now.sizes() == old.sizes() && now.data_ptr() == cuda.data_ptr()) show_late(kernel, cuda, now, old);
  }

  auto results = torch::jit::last(*stack, schema.returns().size()).vec();
  torch::jit::drop(*stack, results.size());
  for (size_t i = 0; i < results.size(); i++) {
    const bool fresh = !schema.returns()[i].alias_info();
    stack->push_back(each_tensor(results[i], [&](const Tensor& t) {
      auto made = aliases.cuda(t, *device);
      if (fresh) touch(kernel, made, true);
      if (fresh && shows_races() && t.defined() && t.is_cpu()) {
        auto nothing = at::zeros_like(t);
        show_late(kernel, made, t, t.is_floating_point() ? nothing.fill_(std::nan("")) : nothing);
      }
      return made;
    }));
  }
  if (waits) operation_waits_for(kernel.stream);
}

inline Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  RULE(!pin.value_or(false), Error, "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &gpu_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
    c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  RULE(!pin.value_or(false), Error, "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &gpu_allocator,
    c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// Between the host and a GPU, or between GPUs. As cudaMemcpyAsync, a copy is asynchronous if the
// caller says non_blocking and the host's memory is pinned; it then happens as late as it may.
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  auto& on_gpu = source.is_cuda() ? source : self;
  auto& on_host = self.is_cuda() ? source : self;
  auto stream = current_stream(on_gpu.device().index());
  const bool peers = self.is_cuda() && source.is_cuda() && self.device() != source.device();
  auto other = current_stream(self.is_cuda() ? self.device().index() : stream.first);
  if (peers) stream_waits_for(stream, clock_of(other));  // a copy to another GPU waits for both
  auto kernel = launch("aten::copy_", stream);
  if (peers) stream_waits_for(other, clock_of(stream));  // and both go on after it
  touch(kernel, source, false);
  touch(kernel, self, true);
  Aliases aliases;
  at::AutoDispatchBelowADInplaceOrView below;
  auto to = self.is_cuda() ? aliases.cpu(self) : self.alias();  // not self, which may get other memory
  auto from = source.is_cuda() ? aliases.cpu(source) : source.alias();
  const bool later = non_blocking && on_host.is_cpu() && is_pinned(on_host.storage().data());
  auto block = self.is_cuda() ? block_of(self.storage().data_ptr()) : nullptr;
  if (later && self.is_cuda() && to.scalar_type() == from.scalar_type()) {
    arrives(kernel, {block}, [to, from] { Tensor(to).copy_(from); });
  } else if (later && self.is_cpu()) {
    auto value = from.to(to.scalar_type(), false, true).expand_as(to);
    to.is_floating_point() ? to.fill_(std::nan("")) : to.zero_();  // what an early reader gets
    arrives(kernel, {}, [to, value] { Tensor(to).copy_(value); });
  } else {
    auto before = shows_races() && self.is_cuda() ? to.clone() : Tensor();
    to.copy_(from);
    if (before.defined()) show_late(kernel, self, to, before);
    if (on_host.is_cpu() && !non_blocking) operation_waits_for(stream);
    else if (self.is_cpu()) host_waits_for(clock_of(stream));  // from the GPU to memory that is not pinned
    else if (on_host.is_cpu()) host_waits++;  // and from there: until the driver has read it
  }
  return self;
}
inline at::Scalar item(const Tensor& self) {
  auto kernel = launch("aten::item", current_stream(self.device().index()));
  touch(kernel, self, false);
  operation_waits_for(kernel.stream);
  Aliases aliases;
  return aliases.cpu(self).item();
}

inline Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  RULE(source.device().is_cuda(), Error, "set_: a CUDA tensor and a storage on ", source.device());
  auto tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(source);
  tensor->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) tensor->set_sizes_contiguous(size);
  else tensor->set_sizes_and_strides(size, stride, offset);
  return self;
}
inline Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  return set_storage(self, source, 0, {int64_t(source.nbytes() / self.dtype().itemsize())}, {1});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_nothing(Tensor& self) {
  return set_tensor(self, empty({0}, self.scalar_type(), {}, self.device(), {}, {}));
}
inline void record_stream(Tensor& self, c10::Stream stream) {
  gpu_allocator.recordStream(self.storage().data_ptr(), stream);
}
inline int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // SDPBackend::math: there are no fused kernels
}
}  // namespace emulated
