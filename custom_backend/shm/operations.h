// From a call of torch to an operation of the group: it connects c10d::Backend to the core (group.h).
//
// Nothing here knows how bytes move. Each method checks its tensors, converts them to Spans, and
// puts a function into the queue of the group; the Work that it returns knows when the function has
// run. shared_memory.cpp derives the class that torch calls.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "heap.h"
#include "work.h"

namespace adapter {

class Operations : public c10d::Backend {
 public:
  using Future = c10::intrusive_ptr<c10d::Work>;

  Operations(std::shared_ptr<shm::Group> group, int rank, int size, Milliseconds timeout)
      : c10d::Backend(rank, size), group_(std::move(group)), timeout_(timeout) {}

  ~Operations() override {
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

  // destroy_process_group() calls it: end the threads, in the thread of the caller. Else a callback
  // that holds the last reference to the group would end the thread in which it runs.
  void shutdown() override {
    if (shm::Heap::forked()) return;
    TORCH_CHECK(!group_->queue.is_here(), "shm: a callback can not destroy its group");
    std::optional<pybind11::gil_scoped_release> release;
    if (PyGILState_Check()) release.emplace();
    group_->close();
  }

  // The other ranks may never come: end what runs and what is queued, with an error.
  void abort() override {
    if (!shm::Heap::forked()) group_->peers.leaving = true;
    shutdown();
  }

 protected:
  Limits limits(Milliseconds timeout, shm::Patience patience) const {
    return {shm::Clock::now() + (timeout.count() < 0 ? timeout_ : timeout), patience};
  }

  // Run an operation now, or put it into the queue.
  template <class Operation>
  Future submit(OpType type, Kind kind, const Tensors& inputs, Tensors outputs, bool is_async,
                Milliseconds timeout, Operation operation) {
    shm::Heap::throw_if_forked();
    throw_if_closed();
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
                      data[i].read();
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
                      input[i].read();
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
                      input[i].read();
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
                      input[i].read();
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
    throw_if_closed();
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

  void throw_if_closed() const {  // a callback may call while the group runs the rest of its queue
    TORCH_CHECK(!group_->closed || group_->queue.is_here(), "shm: the group was destroyed");
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

}  // namespace adapter
