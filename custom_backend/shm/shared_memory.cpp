// The class that torch calls: it connects c10d::Backend to the core (group.h).
//
// Nothing here knows how bytes move. Each method checks its tensors, converts them to Spans, and
// puts a function into the queue of the group; the Work that it returns knows when the function has
// run.

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "heap.h"
#include "work.h"

namespace adapter {
namespace {

class Backend : public c10d::Backend {
 public:
  using Future = c10::intrusive_ptr<c10d::Work>;

  Backend(std::shared_ptr<shm::Group> group, int rank, int size, Milliseconds timeout)
      : c10d::Backend(rank, size), group_(std::move(group)), timeout_(timeout) {}

  ~Backend() override {
    if (shm::Heap::forked()) {  // a forked copy, without its threads: never close it
      new std::shared_ptr<shm::Group>(group_);
      return;
    }
    // The group's thread may still have to complete a future in Python, and needs the GIL for it.
    if (PyGILState_Check()) {
      pybind11::gil_scoped_release release;
      group_.reset();
    }
  }

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("shm", timeout_);
  }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  Future allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.at(0).layout() == at::kSparse) return all_reduce_sparse(tensors, options);
    return reduce_all(tensors, options, OpType::ALLREDUCE);
  }

  Future allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return all_reduce_sparse(tensors, options);
  }

  Future allreduce_coalesced(Tensors& tensors,
                             const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all(tensors, options, OpType::ALLREDUCE_COALESCED);
  }

  Future reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Dense data(tensors.at(0), "reduce");
    const Numbers numbers = numbers_of(data, options.reduceOp, "reduce");
    const int root = options.rootRank;
    return submit(OpType::REDUCE, Kind::reduce, tensors, tensors, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    core.reduce_to(root, data.data(), data.count(), numbers, limits);
                    if (core.rank() == root) data.write_back();
                  });
  }

  Future broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Dense data(tensors.at(0), "broadcast");
    const int root = options.rootRank;
    return submit(OpType::BROADCAST, Kind::broadcast, tensors, tensors, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    core.broadcast(root, data.span(), dtype_of(data.tensor), limits);
                    if (core.rank() != root) data.write_back();
                  });
  }

  Future allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                   const c10d::AllgatherOptions& options) override {
    return gather_all(outputs, inputs, options, OpType::ALLGATHER);
  }

  Future allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::AllgatherOptions& options) override {
    // Here outputs has one list per rank, not one per tensor.
    std::vector<Tensors> by_tensor(inputs.size());
    for (auto& of_rank : outputs) {
      for (size_t i = 0; i < inputs.size(); ++i) by_tensor[i].push_back(of_rank.at(i));
    }
    return gather_all(by_tensor, inputs, options, OpType::ALLGATHER_COALESCED);
  }

  Future _allgather_base(Tensor& output, Tensor& input,
                         const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return gather_into(outputs, inputs, options, OpType::_ALLGATHER_BASE);
  }

  Future allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) override {
    return gather_into(outputs, inputs, options, OpType::ALLGATHER_INTO_TENSOR_COALESCED);
  }

  Future reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                        const c10d::ReduceScatterOptions& options) override {
    const Dense output(outputs.at(0), "reduce_scatter");
    const auto input = dense(inputs.at(0), "reduce_scatter");
    check_parts(input, output, getRank(), "reduce_scatter");
    const Numbers numbers = numbers_of(output, options.reduceOp, "reduce_scatter");
    return submit(OpType::REDUCE_SCATTER, Kind::reduce_scatter, inputs.at(0), outputs,
                  options.asyncOp, options.timeout, [=](Core& core, Limits limits) {
                    core.reduce_scatter(spans(input), nullptr, output.data(), numbers, limits);
                    output.write_back();
                  });
  }

  Future _reduce_scatter_base(Tensor& output, Tensor& input,
                              const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return scatter_reduced(outputs, inputs, options, OpType::_REDUCE_SCATTER_BASE);
  }

  Future reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::ReduceScatterOptions& options) override {
    return scatter_reduced(outputs, inputs, options, OpType::REDUCE_SCATTER_TENSOR_COALESCED);
  }

  Future gather(std::vector<Tensors>& outputs, Tensors& inputs,
                const c10d::GatherOptions& options) override {
    const Dense input(inputs.at(0), "gather");
    const int root = options.rootRank;
    const auto output = dense(getRank() == root ? outputs.at(0) : Tensors{}, "gather");
    for (size_t peer = 0; peer < output.size(); ++peer) check_parts(output, input, peer, "gather");
    return submit(OpType::GATHER, Kind::gather, inputs, outputs.empty() ? Tensors{} : outputs[0],
                  options.asyncOp, options.timeout, [=](Core& core, Limits limits) {
                    core.gather(root, input.span(), spans(output), dtype_of(input.tensor), limits);
                    write_back(output);
                  });
  }

  Future scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                 const c10d::ScatterOptions& options) override {
    const Dense output(outputs.at(0), "scatter");
    const int root = options.rootRank;
    const auto input = dense(getRank() == root ? inputs.at(0) : Tensors{}, "scatter");
    for (size_t peer = 0; peer < input.size(); ++peer) check_parts(input, output, peer, "scatter");
    return submit(OpType::SCATTER, Kind::scatter, inputs.empty() ? Tensors{} : inputs[0], outputs,
                  options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    core.scatter(root, spans(input), output.span(), dtype_of(output.tensor), limits);
                    output.write_back();
                  });
  }

  Future alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto output = dense(outputs, "all_to_all"), input = dense(inputs, "all_to_all");
    check_count(output.size(), "all_to_all");
    check_count(input.size(), "all_to_all");
    return submit(OpType::ALLTOALL, Kind::all_to_all, inputs, outputs, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    core.all_to_all(spans(input), spans(output), dtype_of(output[0].tensor),
                                      limits);
                    write_back(output);
                  });
  }

  Future alltoall_base(Tensor& output_tensor, Tensor& input_tensor,
                       std::vector<int64_t>& output_split, std::vector<int64_t>& input_split,
                       const c10d::AllToAllOptions& options) override {
    const Dense output(output_tensor, "all_to_all"), input(input_tensor, "all_to_all");
    const auto from = parts(input, getSize(), input_split, "all_to_all");
    const auto to = parts(output, getSize(), output_split, "all_to_all");
    return submit(OpType::ALLTOALL_BASE, Kind::all_to_all, {input_tensor}, {output_tensor},
                  options.asyncOp, options.timeout, [=](Core& core, Limits limits) {
                    core.all_to_all(from, to, dtype_of(output.tensor), limits);
                    output.write_back();
                    (void)input;  // keeps the memory of `from` alive
                  });
  }

  Future barrier(const c10d::BarrierOptions& options) override {
    return submit(OpType::BARRIER, Kind::barrier, {}, {}, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) { core.barrier(limits); });
  }

  // After a timeout, every barrier here names the missing ranks, and what they are doing.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool /* wait_all_ranks */) override {
    c10d::BarrierOptions at_once = options;
    at_once.asyncOp = false;
    barrier(at_once)->wait();
  }

  Future send(Tensors& tensors, int to, int tag) override {
    return start(Kind::send, OpType::SEND, "shm:send", tensors, to, tag);
  }
  Future recv(Tensors& tensors, int from, int tag) override {
    return start(Kind::recv, OpType::RECV, "shm:recv", tensors, from, tag);
  }
  Future recvAnysource(Tensors& tensors, int tag) override {
    return start(Kind::recv, OpType::RECVANYSOURCE, "shm:recvAnySource", tensors,
                 shm::kAnySource, tag);
  }

  // For FSDP: model.set_allocate_memory_from_process_group_for_comm(True)
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  Tensor allocateTensor(long size, at::TensorOptions options) override;

 private:
  Limits limits(Milliseconds timeout, shm::Patience patience) const {
    return {shm::Clock::now() + (timeout.count() < 0 ? timeout_ : timeout), patience};
  }

  // Run an operation now, or put it into the queue.
  template <class Operation>
  Future submit(OpType type, Kind kind, const Tensors& inputs, Tensors outputs, bool is_async,
                Milliseconds timeout, Operation operation) {
    shm::Heap::throw_if_forked();
    ++sequence_;
    c10::intrusive_ptr<CollectiveWork> work;
    const auto begin = [&] {
      work = c10::make_intrusive<CollectiveWork>(getRank(), type, title_of(kind), inputs,
                                                 std::move(outputs));
      const auto deadline = limits(timeout, {}).deadline;
      auto run = [=, &core = group_->collectives](shm::Patience patience) {
        work->run(kind, operation, core, {deadline, patience});
      };
      if (is_async) {
        work->group = group_;
        work->kind = kind;
        work->job = group_->queue.add(std::move(run), [work] { work->report(); });
      } else {
        group_->queue.run_now(run);
      }
    };
    try {
      group_->peers.run(kind, begin);  // all ranks hear of it if this rank can not begin
    } catch (const shm::Error&) {
      std::rethrow_exception(as_torch_error(std::current_exception()));
    }
    if (!is_async) work->wait(kNoTimeout);
    return work;
  }

  template <class Options>
  Future reduce_all(Tensors& tensors, const Options& options, OpType type) {
    const auto data = dense(tensors, "all_reduce");
    std::vector<Numbers> numbers;
    for (auto& one : data) numbers.push_back(numbers_of(one, options.reduceOp, "all_reduce"));
    return submit(type, Kind::all_reduce, tensors, tensors, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    for (size_t i = 0; i < data.size(); ++i) {
                      core.all_reduce(data[i].data(), data[i].count(), numbers[i], limits);
                      data[i].write_back();
                    }
                  });
  }

  Future gather_all(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options, OpType type) {
    std::vector<std::vector<Dense>> output;
    Tensors flat;
    const auto input = dense(inputs, "all_gather");
    for (size_t i = 0; i < inputs.size(); ++i) {
      output.push_back(dense(outputs.at(i), "all_gather"));
      check_parts(output.back(), input[i], getRank(), "all_gather");
      flat.insert(flat.end(), outputs[i].begin(), outputs[i].end());
    }
    return submit(type, Kind::all_gather, inputs, flat, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    for (size_t i = 0; i < input.size(); ++i) {
                      core.all_gather(input[i].span(), spans(output[i]),
                                        dtype_of(input[i].tensor), limits);
                      write_back(output[i]);
                    }
                  });
  }

  Future gather_into(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options,
                     OpType type) {
    const auto output = dense(outputs, "all_gather"), input = dense(inputs, "all_gather");
    for (size_t i = 0; i < input.size(); ++i) {
      TORCH_CHECK(output[i].count() == input[i].count() * getSize() &&
                      output[i].tensor.dtype() == input[i].tensor.dtype(),
                  "shm: all_gather: the output must be ", getSize(), " times the input, of its type");
    }
    return submit(type, Kind::all_gather, inputs, outputs, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    for (size_t i = 0; i < input.size(); ++i) {
                      core.all_gather(input[i].span(), parts(output[i], core.size(), {}, ""),
                                        dtype_of(input[i].tensor), limits);
                      output[i].write_back();
                    }
                  });
  }

  Future scatter_reduced(Tensors& outputs, Tensors& inputs,
                         const c10d::ReduceScatterOptions& options, OpType type) {
    const auto output = dense(outputs, "reduce_scatter"), input = dense(inputs, "reduce_scatter");
    std::vector<Numbers> numbers;
    for (size_t i = 0; i < input.size(); ++i) {
      TORCH_CHECK(input[i].count() == output[i].count() * getSize() &&
                      output[i].tensor.dtype() == input[i].tensor.dtype(),
                  "shm: reduce_scatter: the input must be ", getSize(),
                  " times the output, of its type");
      numbers.push_back(numbers_of(output[i], options.reduceOp, "reduce_scatter"));
    }
    return submit(type, Kind::reduce_scatter, inputs, outputs, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    for (size_t i = 0; i < input.size(); ++i) {
                      core.reduce_scatter(parts(input[i], core.size(), {}, ""), input[i].data(),
                                            output[i].data(), numbers[i], limits);
                      output[i].write_back();
                    }
                  });
  }

  // Sum sparse tensors: every rank gathers all indices and values, and adds them.
  Future all_reduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "shm: sparse tensors can only be summed");
    const Tensor mine = tensors.at(0).coalesce();
    const Tensor user = tensors[0];
    return submit(
        OpType::_ALLREDUCE_SPARSE, Kind::all_reduce, tensors, tensors, options.asyncOp,
        options.timeout, [=](Core& core, Limits limits) {
          const Tensor count = at::full({1}, mine._nnz(), at::kLong);
          const Tensor counts = at::empty({core.size()}, at::kLong);
          gather_uneven(core, {count}, counts.split(1), limits);
          Tensors indices, values;
          for (int peer = 0; peer < core.size(); ++peer) {
            const int64_t n = counts[peer].item<int64_t>();
            auto shape = mine.values().sizes().vec();
            shape[0] = n;
            indices.push_back(at::empty({mine.sparse_dim(), n}, at::kLong));
            values.push_back(at::empty(shape, mine.values().options()));
          }
          gather_uneven(core, {mine.indices().contiguous()}, indices, limits);
          gather_uneven(core, {mine.values().contiguous()}, values, limits);
          const Tensor sum = at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values),
                                                   mine.sizes(), mine.options());
          user.copy_(sum.coalesce());
        });
  }

  static void gather_uneven(Core& core, const Tensors& input, const Tensors& outputs, Limits limits) {
    core.all_gather(Dense(input[0], "all_reduce").span(), spans(dense(outputs, "all_reduce")),
                      dtype_of(input[0]), limits);
  }

  Future start(Kind kind, OpType type, const char* title, Tensors& tensors, int peer, int tag) {
    Tensor& tensor = tensors.at(0);
    TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous(), "shm: ", shm::name_of(kind),
                " takes contiguous tensors on the CPU");
    TORCH_CHECK(peer != getRank(), "shm: a rank can not ", shm::name_of(kind), " to or from itself");
    shm::Heap::throw_if_forked();
    auto transfer = std::make_shared<shm::Transfer>(kind, peer, tag,
                                                    static_cast<uint8_t*>(tensor.data_ptr()),
                                                    tensor.nbytes(), dtype_of(tensor));
    auto work = c10::make_intrusive<TransferWork>(getRank(), type, title, tensors, transfer, group_,
                                                  timeout_);
    transfer->report = [work](std::exception_ptr error) { work->complete(error); };
    try {
      group_->start(transfer);
    } catch (const shm::Error&) {
      std::rethrow_exception(as_torch_error(std::current_exception()));
    }
    return work;
  }

  void check_count(size_t count, const char* operation) const {
    TORCH_CHECK(count == static_cast<size_t>(getSize()), "shm: ", operation, " takes one tensor for ",
                "each of the ", getSize(), " ranks, not ", count);
  }

  // Check: one tensor per rank, and the tensor of `rank` matches `other`.
  void check_parts(const std::vector<Dense>& each, const Dense& other, int rank,
                   const char* operation) const {
    check_count(each.size(), operation);
    TORCH_CHECK(each[rank].count() == other.count() &&
                    each[rank].tensor.dtype() == other.tensor.dtype(),
                "shm: ", operation, ": the tensor for rank ", rank, " has ", each[rank].count(),
                " numbers of ", each[rank].tensor.dtype(), ", the other side ", other.count(), " of ",
                other.tensor.dtype());
  }

  std::shared_ptr<shm::Group> group_;
  Milliseconds timeout_;
  uint64_t sequence_ = 0;
};

// A byte tensor in the heap; its memory is released with the last tensor that uses it.
Tensor allocate(int64_t bytes) {
  void* address = shm::Heap::own().allocate(bytes);
  return at::from_blob(address, {bytes}, [](void* p) { shm::Heap::own().release(p); }, at::kByte);
}

Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  return allocate(size * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

bool lies_in_heap(const Tensor& tensor) {
  return tensor.device().is_cpu() && shm::Heap::own().offset_of(tensor.data_ptr()) >= 0;
}

// Move the storage of a tensor, and so of all its views, into the heap. Pointers outside of torch,
// such as numpy's, keep pointing to the old memory.
void adopt(const Tensor& tensor) {
  auto storage = tensor.storage();
  const size_t bytes = storage.nbytes();
  void* address = shm::Heap::own().allocate(bytes);
  std::memcpy(address, storage.data(), bytes);
  storage.set_data_ptr_noswap(at::DataPtr(
      address, address, [](void* p) { shm::Heap::own().release(p); }, at::kCPU));
}

// All groups, since a program may forget to destroy one.
std::vector<std::weak_ptr<shm::Group>>& groups() {
  static auto* all = new std::vector<std::weak_ptr<shm::Group>>;
  return *all;
}

// Runs before Python exits. A backend thread that released a tensor after that would be stopped in
// the middle of C++ code, which aborts the process.
void close_all() {
  for (auto& one : groups()) {
    const auto group = one.lock();
    if (!group) continue;
    group->peers.leaving = true;
    group->close();
  }
}

c10::intrusive_ptr<c10d::Backend> create(int segment_fd, int rank, int size,
                                         std::vector<int> heap_fds, double spin_us, int yields,
                                         Milliseconds timeout) {
  shm::Heaps heaps;
  for (const int fd : heap_fds) {
    heaps.push_back(fd < 0 ? shm::Heap::own().view() : shm::HeapView::of(fd));
  }
  auto segment = shm::map_segment(segment_fd, size);
  close(segment_fd);
  auto group = std::make_shared<shm::Group>(segment, rank, std::move(heaps),
                                            shm::Patience{spin_us, yields});
  groups().push_back(group);
  return c10::make_intrusive<Backend>(std::move(group), rank, size, timeout);
}

}  // namespace
}  // namespace adapter

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace adapter;
  using namespace pybind11::literals;
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("create", &create, Release(), "segment_fd"_a, "rank"_a, "size"_a, "heap_fds"_a,
             "spin_us"_a, "yields"_a, "timeout"_a);
  module.def("segment_bytes", &shm::Segment::bytes, "size"_a);
  module.def("prepare_segment", [](int fd, int size) { shm::prepare(*shm::map_segment(fd, size)); });
  module.def("heap_fd", [] { return shm::Heap::own().view()->fd; });
  module.def("close_all", &close_all, Release());
  module.def("allocate", &allocate, "bytes"_a);
  module.def("adopt", &adopt, "tensor"_a);
  module.def("lies_in_heap", &lies_in_heap, "tensor"_a);
}
