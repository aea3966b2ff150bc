// NCCL's rules, over Gloo: a backend for CUDA tensors only, contiguous, on this rank's GPU, one GPU per rank.
// Its kernels run on a stream of their own, as NCCL's do.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include "kernels.h"

namespace emulated {
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct NCCLOptions final : c10d::Backend::Options {
  explicit NCCLOptions(std::chrono::milliseconds timeout = std::chrono::minutes(10)) : Options("nccl", timeout) {}
};

struct NCCLWork final : c10d::Work {
  std::vector<WorkPtr> parts;  // of Gloo
  std::function<void()> after;  // what Gloo has not done, such as to divide a sum
  Tensors outputs;
  StreamKey stream;
  Clock end;
  std::shared_ptr<Aliases> aliases;  // keep the memory
  std::once_flag once;

  void finish_once() {
    std::call_once(once, [this] { if (after) after(); });
  }
  bool isCompleted() override {
    return std::all_of(parts.begin(), parts.end(), [](auto& part) { return part->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(parts.begin(), parts.end(), [](auto& part) { return part->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {  // the current stream waits, not the host
    for (auto& part : parts) part->wait(timeout);
    finish_once();
    Lock lock(mutex);
    join(clocks[current_stream(stream.first)], end);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<Device>{Device(at::kCUDA, stream.first)});
    auto self = c10::intrusive_ptr<NCCLWork>::reclaim_copy(this);
    parts.at(0)->getFuture()->addCallback([self, future](c10::ivalue::Future& done) {
      if (done.hasError()) return future->setError(done.exception_ptr());
      self->finish_once();
      // Who waits for the future waits for what is the current stream of this thread now.
      auto before = std::exchange(current_streams[self->stream.first], self->stream.second);
      future->markCompleted(self->outputs);
      current_streams[self->stream.first] = before;
    });
    return future;
  }
};

inline std::atomic<c10::StreamId> next_stream{1};

struct ProcessGroupNCCL final : c10d::Backend {
  BackendPtr gloo;
  DeviceIndex device = -1;  // bound to it, at the latest by the first operation
  c10::StreamId stream = next_stream++;
  bool coalescing = false;
  std::vector<c10::intrusive_ptr<NCCLWork>> coalesced;

  explicit ProcessGroupNCCL(BackendPtr gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void enableCollectivesTiming() override {}
  void shutdown() override { gloo->shutdown(); }
  void abort() override { gloo->abort(); }
  void eagerConnectSingleDevice(Device d) override { device = d.index(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<NCCLOptions>(); }
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>&) override {
    auto own = c10::make_intrusive<c10d::PrefixStore>("nccl", store);  // Gloo is split beside it
    auto options = gloo->getBackendOptions();
    auto all_ranks = options->global_ranks_in_group;
    auto part = gloo->split(own, ranks, options);
    options->global_ranks_in_group = all_ranks;  // Gloo has changed its parent's
    if (!part) return {};
    auto made = c10::make_intrusive<ProcessGroupNCCL>(part);
    made->device = device;
    return made;
  }

  // One kernel of NCCL's stream, which comes after what the current stream has been given so far.
  struct Operation {
    ProcessGroupNCCL& group;
    std::string name;
    std::shared_ptr<Aliases> aliases = std::make_shared<Aliases>();
    at::AutoDispatchBelowADInplaceOrView below;
    std::optional<Kernel> kernel;
    std::function<void()> after;
    Operation(ProcessGroupNCCL& group, const char* name) : group(group), name(std::string("nccl:") + name) {}

    Tensor use(const Tensor& t, bool write) {
      TORCH_CHECK(t.is_cuda() && !t.is_sparse(), "Tensors must be CUDA and dense");
      auto index = t.device().index();
      if (group.device < 0) group.device = index;
      TORCH_CHECK(index == group.device, "NCCL: a tensor on ", t.device(), ", but the communicator of rank ",
        group.getRank(), " is on cuda:", int(group.device));
      TORCH_CHECK(t.is_contiguous() || t.is_contiguous(at::MemoryFormat::ChannelsLast), "Tensors must be contiguous");
      static const std::set<at::ScalarType> known = {at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kFloat,
        at::kDouble, at::kBFloat16, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2};
      TORCH_CHECK(known.count(t.scalar_type()), "Input tensor data type is not supported for NCCL process group: ", t.scalar_type());
      if (!kernel) {
        Lock lock(mutex);
        StreamKey mine{index, group.stream};
        join(clocks[mine], clocks[current_stream(index)]);
        kernel = launch(name, mine);
      }
      touch(*kernel, t, write);
      if (auto block = block_of(t.storage().data_ptr())) block->recorded.insert(kernel->stream);
      return aliases->cpu(t);
    }
    Tensors use(const Tensors& ts, bool write) {
      Tensors made;
      for (auto& t : ts) made.push_back(use(t, write));
      return made;
    }
    Lists use(const Lists& lists, bool write) {
      Lists made;
      for (auto& ts : lists) made.push_back(use(ts, write));
      return made;
    }
    template <class T> T in(const T& given) { return use(given, false); }
    template <class T> T out(const T& given) { return use(given, true); }

    // Gloo has no mean and no product with a factor. Changes `inputs` to what Gloo should add.
    c10d::ReduceOp reduction(const c10d::ReduceOp& op, Tensors& inputs, const Tensors& outputs) {
      using Op = c10d::ReduceOp;
      TORCH_CHECK(op.op_ != Op::BAND && op.op_ != Op::BOR && op.op_ != Op::BXOR, "Cannot use ReduceOp.BAND, BOR, BXOR with NCCL");
      if (op.op_ == Op::AVG)
        after = [outputs, n = group.getSize()] {
          at::AutoDispatchBelowADInplaceOrView below;
          for (auto t : outputs)
            t.is_floating_point() ? t.div_(n) : t.div_(n, "trunc");
        };
      if (op.op_ == Op::PREMUL_SUM) {
        auto& factor = static_cast<c10d::PreMulSumSupplement&>(*op.supplement_);
        for (auto& t : inputs)
          t = factor.tensor_factor.defined() ? t.mul(aliases->cpu(factor.tensor_factor)) : t.mul(factor.double_factor);
      }
      return op.op_ == Op::AVG || op.op_ == Op::PREMUL_SUM ? Op(Op::SUM) : op;
    }
    WorkPtr started(WorkPtr part, Tensors outputs) {
      auto work = c10::make_intrusive<NCCLWork>();
      Lock lock(mutex);
      work->parts = {part};
      work->after = after;
      work->outputs = std::move(outputs);
      work->stream = kernel->stream;
      work->end = clocks[kernel->stream];
      work->aliases = aliases;
      if (group.coalescing) group.coalesced.push_back(work);
      return work;
    }
  };
  static Tensors flat(const Lists& lists) {
    Tensors all;
    for (auto& ts : lists) all.insert(all.end(), ts.begin(), ts.end());
    return all;
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing = true; }
  WorkPtr endCoalescing() override {
    coalescing = false;
    auto all = c10::make_intrusive<NCCLWork>();
    auto parts = std::exchange(coalesced, {});
    TORCH_CHECK(!parts.empty(), "NCCL: no operation between start and end of coalescing");
    for (auto& part : parts) {
      all->parts.push_back(part);
      join(all->end, part->end);
    }
    all->stream = parts[0]->stream;
    return all;
  }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    Operation op(*this, "broadcast");
    auto all = op.out(t);
    return op.started(gloo->broadcast(all, o), t);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& given) override {
    return all_reduce(t, given, [&](auto& all, auto& o) { return gloo->allreduce(all, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& given) override {
    return all_reduce(t, given, [&](auto& all, auto& o) { return gloo->allreduce_coalesced(all, o); });
  }
  template <class Options, class Call>
  WorkPtr all_reduce(Tensors& t, Options o, Call call) {
    Operation op(*this, "all_reduce");
    auto all = op.out(t);
    auto scaled = all;
    o.reduceOp = op.reduction(o.reduceOp, scaled, all);
    for (size_t i = 0; i < all.size(); i++)
      if (!scaled[i].is_same(all[i])) all[i].copy_(scaled[i]);
    return op.started(call(all, o), t);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& given) override {
    Operation op(*this, "reduce");
    auto all = op.out(t);
    auto o = given;
    o.reduceOp = op.reduction(o.reduceOp, all, all);
    return op.started(gloo->reduce(all, o), t);
  }
  WorkPtr allgather(Lists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    Operation op(*this, "all_gather");
    auto in = op.in(from);
    auto out = op.out(to);
    return op.started(gloo->allgather(out, in, o), flat(to));
  }
  WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    Operation op(*this, "all_gather");
    auto in = op.in(from), out = op.out(to);
    return op.started(gloo->_allgather_base(out, in, o), {to});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    Operation op(*this, "all_gather");
    auto in = op.in(from), out = op.out(to);
    return op.started(gloo->allgather_into_tensor_coalesced(out, in, o), to);
  }
  WorkPtr gather(Lists& to, Tensors& from, const c10d::GatherOptions& o) override {
    Operation op(*this, "gather");
    auto in = op.in(from);
    auto out = op.out(to);
    return op.started(gloo->gather(out, in, o), flat(to));
  }
  WorkPtr scatter(Tensors& to, Lists& from, const c10d::ScatterOptions& o) override {
    Operation op(*this, "scatter");
    auto in = op.in(from);
    auto out = op.out(to);
    return op.started(gloo->scatter(out, in, o), to);
  }
  WorkPtr reduce_scatter(Tensors& to, Lists& from, const c10d::ReduceScatterOptions& given) override {
    Operation op(*this, "reduce_scatter");
    auto in = op.in(from);
    auto out = op.out(to);
    auto o = given;
    for (auto& list : in) o.reduceOp = op.reduction(given.reduceOp, list, out);
    return op.started(gloo->reduce_scatter(out, in, o), to);
  }
  WorkPtr _reduce_scatter_base(Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& given) override {
    Operation op(*this, "reduce_scatter");
    Tensors in{op.in(from)}, out{op.out(to)};
    auto o = given;
    o.reduceOp = op.reduction(o.reduceOp, in, out);
    return op.started(gloo->_reduce_scatter_base(out[0], in[0], o), {to});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& given) override {
    Operation op(*this, "reduce_scatter");
    auto in = op.in(from), out = op.out(to);
    auto o = given;
    o.reduceOp = op.reduction(o.reduceOp, in, out);
    return op.started(gloo->reduce_scatter_tensor_coalesced(out, in, o), to);
  }
  WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& o) override {
    Operation op(*this, "all_to_all");
    auto in = op.in(from), out = op.out(to);
    return op.started(gloo->alltoall_base(out, in, out_sizes, in_sizes, o), {to});
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    Operation op(*this, "send");
    auto all = op.in(t);
    return op.started(gloo->send(all, to, tag), t);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    Operation op(*this, "recv");
    auto all = op.out(t);
    return op.started(gloo->recv(all, from, tag), t);
  }
  WorkPtr recvAnysource(Tensors&, int) override { TORCH_CHECK(false, "ProcessGroupNCCL does not support recvAnysource"); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return gloo->barrier(o); }  // the host waits, too
};
}  // namespace emulated
