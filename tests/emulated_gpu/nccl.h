// NCCL's rules, over Gloo: a backend for CUDA tensors only, contiguous, on this rank's GPU, one GPU per rank.
//
// As in PyTorch since 2.8, an operation with async_op=False is a kernel of the current stream and returns no Work.
// With async_op=True it is a kernel of the group's own stream; its Work keeps its tensors until wait(), or the group
// until it is over. Sends and receives are always of that kind, and use record_stream instead. The kernels of one
// group run one after the other, on whatever streams they are. (One difference: a send of Gloo ends when its receive has
// begun. NCCL buffers a small one, so that a program which orders these wrongly hangs here and not always there.)
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

struct Message {
  ArrivalPtr arrival;
  std::shared_ptr<Aliases> tensors;
};

struct NCCLWork final : c10d::Work {
  std::shared_ptr<std::vector<Message>> messages = std::make_shared<std::vector<Message>>();
  Tensors outputs;
  StreamKey stream;
  Clock end;
  bool is_barrier = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  // PyTorch's future is complete at once, too: who waits for it waits for what this stream has been given.
  NCCLWork(StreamKey stream, Tensors outputs) : outputs(outputs), stream(stream), end(clock_of(stream)) {
    future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<Device>{Device(at::kCUDA, stream.first)});
    auto before = std::exchange(current_streams[stream.first], stream.second);
    future->markCompleted(outputs);
    current_streams[stream.first] = before;
  }
  bool isCompleted() override { return is_done(end); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {  // the current stream waits, not the host
    auto current = current_stream(stream.first);
    stream_waits_for(current, end);
    for (auto& message : *messages) {
      message.arrival->timeout = timeout;
      emulated::finish(message.arrival);
      Lock lock(mutex);  // from here on only this order keeps the memory from being given away
      for (auto& [tensor, _] : message.tensors->tensors)
        if (auto block = block_of(tensor.storage().data_ptr()))
          std::erase_if(block->recorded, [&](auto& recorded) {
            return recorded.first == stream && recorded.second == message.arrival->kernel.tick;
          });
    }
    messages->clear();
    if (is_barrier) host_waits_for(clock_of(current));
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

inline std::atomic<c10::StreamId> next_stream{1};

struct ProcessGroupNCCL final : c10d::Backend {
  DeviceIndex device = -1;  // bound to it, at the latest by the first operation
  c10::StreamId stream = next_stream++;
  Clock done;  // what the next operation of this group comes after
  bool coalescing = false, async = false;  // the latter: whether the operations are
  std::vector<Message> coalesced;
  std::list<std::shared_ptr<std::vector<Message>>> watched;  // kept also if the caller drops its Work
  BackendPtr gloo;  // ends before the memory that it writes to

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

  // One kernel, which comes after what the current stream has been given so far.
  struct Operation {
    ProcessGroupNCCL& group;
    std::string name;
    const bool async, send_or_receive;
    std::shared_ptr<Aliases> aliases = std::make_shared<Aliases>();
    std::set<const void*> writes, reads;
    at::AutoDispatchBelowADInplaceOrView below;
    std::optional<Kernel> kernel;
    std::vector<std::function<void()>> after;  // what Gloo has not done, such as to divide a sum
    Operation(ProcessGroupNCCL& group, const char* name, bool async, bool send_or_receive = false)
        : group(group), name(std::string("nccl:") + name), async(async), send_or_receive(send_or_receive) {
      std::erase_if(group.watched, [](auto& messages) {  // PyTorch's watchdog lets go of what is over
        bool over = std::all_of(messages->begin(), messages->end(), [](auto& message) {
          auto& arrival = *message.arrival;
          return !arrival.happen || (arrival.can_happen && arrival.can_happen());
        });
        if (over)
          for (auto& message : std::exchange(*messages, {})) emulated::finish(message.arrival);
        return over;
      });
    }

    void start(DeviceIndex index) {
      Lock lock(mutex);
      auto now = current_stream(index);
      StreamKey mine{index, async ? group.stream : now.second};
      join(clocks[mine], clocks[now]);
      join(clocks[mine], group.done);
      kernel = launch(name, mine);
      group.done = clocks[mine];
    }
    Tensor use(const Tensor& given, bool write) {
      auto t = given.is_complex() ? at::view_as_real(given) : given;
      RULE(t.is_cuda() && !t.is_sparse(), ValueError, "Tensors must be CUDA and dense");
      auto index = t.device().index();
      if (group.device < 0) group.device = index;
      RULE(index == group.device, Error, "NCCL: a tensor on ", t.device(), ", but the communicator of rank ",
        group.getRank(), " is on cuda:", int(group.device));
      RULE(t.is_contiguous() || t.is_contiguous(at::MemoryFormat::ChannelsLast), ValueError, "Tensors must be contiguous");
      static const std::set<at::ScalarType> known = {at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kFloat,
        at::kDouble, at::kBFloat16, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2};
      RULE(known.count(t.scalar_type()), TypeError, "Input tensor data type is not supported for NCCL process group: ", t.scalar_type());
      if (!kernel) start(index);
      touch(*kernel, t, write, send_or_receive);
      auto alias = aliases->cpu(t);
      if (auto block = block_of(t.storage().data_ptr())) {
        (write ? writes : reads).insert(block);
        Lock lock(mutex);
        if (send_or_receive) block->recorded[kernel->stream] = UINT64_MAX;  // by record_stream
        else if (async) join(block->recorded, {{kernel->stream, kernel->tick}});
      }
      if (!shows_races() || !write) return alias;
      auto late = alias.clone();
      after.push_back([alias, late] { Tensor(alias).copy_(late); });
      return late;
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
      RULE(op.op_ != Op::BAND && op.op_ != Op::BOR && op.op_ != Op::BXOR, ValueError, "Cannot use ReduceOp.BAND, BOR, BXOR with NCCL");
      if (op.op_ == Op::AVG)
        after.insert(after.begin(), [outputs, n = group.getSize()] {
          for (auto t : outputs)
            t.is_floating_point() ? t.div_(n) : t.div_(n, "trunc");
        });
      if (op.op_ == Op::PREMUL_SUM) {
        auto& factor = static_cast<c10d::PreMulSumSupplement&>(*op.supplement_);
        for (auto& t : inputs)
          t = factor.tensor_factor.defined() ? t.mul(aliases->cpu(factor.tensor_factor)) : t.mul(factor.double_factor);
      }
      return op.op_ == Op::AVG || op.op_ == Op::PREMUL_SUM ? Op(Op::SUM) : op;
    }
    WorkPtr started(WorkPtr part, Tensors outputs) {
      std::unique_lock<std::recursive_mutex> lock(mutex);
      auto arrival = arrives(*kernel, writes, nullptr);
      arrival->reads = reads;
      arrival->message = send_or_receive;
      arrival->happen = [part, after = after, keep = aliases, self = arrival.get()] {
        part->wait(self->timeout);  // once: Gloo's sends and receives count
        for (auto& step : after) step();
      };
      if (!send_or_receive) arrival->can_happen = [part] { return part->isCompleted(); };
      Message message{arrival, aliases};
      if (group.coalescing) {
        group.async = async;
        group.coalesced.push_back(message);
        return {};
      }
      if (async) return group.work(kernel->stream, {message}, std::move(outputs));
      lock.unlock();
      emulated::finish(arrival);
      return {};
    }
  };
  c10::intrusive_ptr<NCCLWork> work(StreamKey stream, std::vector<Message> messages, Tensors outputs) {
    auto made = c10::make_intrusive<NCCLWork>(stream, std::move(outputs));
    *made->messages = std::move(messages);
    watched.push_back(made->messages);
    return made;
  }
  static Tensors flat(const Lists& lists) {
    Tensors all;
    for (auto& ts : lists) all.insert(all.end(), ts.begin(), ts.end());
    return all;
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing = true; }
  WorkPtr endCoalescing() override {
    coalescing = false;
    auto messages = std::exchange(coalesced, {});
    if (messages.empty()) return {};
    if (async) return work(messages.back().arrival->kernel.stream, messages, {});
    for (auto& message : messages) emulated::finish(message.arrival);
    return {};
  }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    Operation op(*this, "broadcast", o.asyncOp);
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
    Operation op(*this, "all_reduce", o.asyncOp);
    auto all = op.out(t);
    auto scaled = all;
    o.reduceOp = op.reduction(o.reduceOp, scaled, all);
    for (size_t i = 0; i < all.size(); i++)
      if (!scaled[i].is_same(all[i])) all[i].copy_(scaled[i]);
    return op.started(call(all, o), t);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& given) override {
    Operation op(*this, "reduce", given.asyncOp);
    auto all = op.out(t);
    auto o = given;
    o.reduceOp = op.reduction(o.reduceOp, all, all);
    return op.started(gloo->reduce(all, o), t);
  }
  WorkPtr allgather(Lists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    Operation op(*this, "all_gather", o.asyncOp);
    auto in = op.in(from);
    auto out = op.out(to);
    return op.started(gloo->allgather(out, in, o), flat(to));
  }
  WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    Operation op(*this, "all_gather", o.asyncOp);
    auto in = op.in(from), out = op.out(to);
    return op.started(gloo->_allgather_base(out, in, o), {to});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    Operation op(*this, "all_gather", o.asyncOp);
    auto in = op.in(from), out = op.out(to);
    return op.started(gloo->allgather_into_tensor_coalesced(out, in, o), to);
  }
  WorkPtr gather(Lists& to, Tensors& from, const c10d::GatherOptions& o) override {
    Operation op(*this, "gather", o.asyncOp);
    auto in = op.in(from);
    auto out = op.out(to);
    return op.started(gloo->gather(out, in, o), flat(to));
  }
  WorkPtr scatter(Tensors& to, Lists& from, const c10d::ScatterOptions& o) override {
    Operation op(*this, "scatter", o.asyncOp);
    auto in = op.in(from);
    auto out = op.out(to);
    return op.started(gloo->scatter(out, in, o), to);
  }
  WorkPtr reduce_scatter(Tensors& to, Lists& from, const c10d::ReduceScatterOptions& given) override {
    Operation op(*this, "reduce_scatter", given.asyncOp);
    auto in = op.in(from);
    auto out = op.out(to);
    auto o = given;
    for (auto& list : in) o.reduceOp = op.reduction(given.reduceOp, list, out);
    return op.started(gloo->reduce_scatter(out, in, o), to);
  }
  WorkPtr _reduce_scatter_base(Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& given) override {
    Operation op(*this, "reduce_scatter", given.asyncOp);
    Tensors in{op.in(from)}, out{op.out(to)};
    auto o = given;
    o.reduceOp = op.reduction(o.reduceOp, in, out);
    return op.started(gloo->_reduce_scatter_base(out[0], in[0], o), {to});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& given) override {
    Operation op(*this, "reduce_scatter", given.asyncOp);
    auto in = op.in(from), out = op.out(to);
    auto o = given;
    o.reduceOp = op.reduction(o.reduceOp, in, out);
    return op.started(gloo->reduce_scatter_tensor_coalesced(out, in, o), to);
  }
  WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& o) override {
    Operation op(*this, "all_to_all", o.asyncOp);
    auto in = op.in(from), out = op.out(to);
    return op.started(gloo->alltoall_base(out, in, out_sizes, in_sizes, o), {to});
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    Operation op(*this, "all_to_all", o.asyncOp);
    auto in = op.in(from), out = op.out(to);
    return op.started(gloo->alltoall(out, in, o), to);
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    Operation op(*this, "send", true, true);
    auto all = op.in(t);
    return op.started(gloo->send(all, to, tag), t);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    Operation op(*this, "recv", true, true);
    auto all = op.out(t);
    return op.started(gloo->recv(all, from, tag), t);
  }
  WorkPtr recvAnysource(Tensors&, int) override { TORCH_CHECK(false, "ProcessGroupNCCL does not support recvAnysource"); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {  // an all_reduce, for which the host waits, too
    Operation op(*this, "barrier", o.asyncOp);
    op.start(o.device && o.device->is_cuda() ? index_of(*o.device) : device < 0 ? current : device);
    auto started = op.started(gloo->barrier(o), {});
    if (started) static_cast<NCCLWork&>(*started).is_barrier = true;
    else host_waits_for(clock_of(op.kernel->stream));
    return started;
  }
};
}  // namespace emulated
