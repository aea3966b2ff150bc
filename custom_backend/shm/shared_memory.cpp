// The class that torch calls, and the module that Python loads.
//
// Each method of the class checks its tensors and submits an operation; operations.h has what several
// methods share.

#include <pybind11/chrono.h>

#include "operations.h"

namespace adapter {
namespace {

// A byte tensor in the heap; its memory is released with the last tensor that uses it.
Tensor allocate(int64_t bytes) {
  void* address = shm::Heap::own().allocate(bytes);
  return at::from_blob(address, {bytes}, [](void* p) { shm::Heap::own().release(p); }, at::kByte);
}

class Backend : public Operations {
 public:
  using Operations::Operations;

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
                    data.read();
                    core.reduce_to(root, data.data(), data.count(), numbers, limits);
                    if (core.rank() == root) data.write_back();
                  });
  }

  Future broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Dense data(tensors.at(0), "broadcast");
    const int root = options.rootRank;
    return submit(OpType::BROADCAST, Kind::broadcast, tensors, tensors, options.asyncOp, options.timeout,
                  [=](Core& core, Limits limits) {
                    if (core.rank() == root) data.read();
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
                    read(input);
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
                    input.read();
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
                    read(input);
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
                    read(input);
                    core.all_to_all(spans(input), spans(output), dtype_of(output[0].tensor),
                                      limits);
                    write_back(output);
                  });
  }

  Future alltoall_base(Tensor& output_tensor, Tensor& input_tensor,
                       std::vector<int64_t>& output_split, std::vector<int64_t>& input_split,
                       const c10d::AllToAllOptions& options) override {
    const Dense output(output_tensor, "all_to_all"), input(input_tensor, "all_to_all");
    const auto from = parts(input, getSize(), rows(input, input_split), "all_to_all");
    const auto to = parts(output, getSize(), rows(output, output_split), "all_to_all");
    return submit(OpType::ALLTOALL_BASE, Kind::all_to_all, {input_tensor}, {output_tensor},
                  options.asyncOp, options.timeout, [=](Core& core, Limits limits) {
                    input.read();
                    core.all_to_all(from, to, dtype_of(output.tensor), limits);
                    output.write_back();
                  });
  }

  // How many rows each rank gets: without a split, equal numbers of whole rows.
  std::vector<int64_t> rows(const Dense& whole, const std::vector<int64_t>& split) const {
    if (!split.empty()) return split;
    return std::vector<int64_t>(getSize(), whole.tensor.size(0) / getSize());
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
  Tensor allocateTensor(long size, at::TensorOptions options) override {
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    return allocate(size * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
  }
};

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
