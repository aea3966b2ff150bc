// The smallest backend in C++ that reduces. It uses only the Store that torch passes to it: every
// rank writes its tensor there, and reads those of all ranks. Slow, but complete enough for
// DistributedDataParallel. minimal_backend.py compiles and registers it, and trains on it.

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

using at::Tensor;
using Tensors = std::vector<Tensor>;

// The handle that an operation returns. Operations here are done on return: nothing to wait for.
class DoneWork : public c10d::Work {
 public:
  DoneWork(c10d::OpType type, Tensors tensors) : Work(-1, type) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(c10::IValue(std::move(tensors)));
    finish();
  }
  // DDP uses it: the next step after the reduction of a bucket is a callback of it.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class MinimalBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  MinimalBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                 std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size), store_(std::move(store)), timeout_(timeout) {}

  const std::string getBackendName() const override { return "minimal"; }

  // TORCH_DISTRIBUTED_DEBUG=DETAIL prints it: how many operations there were.
  uint64_t getSequenceNumberForGroup() override { return number_; }

  // torch passes lists of tensors, since a rank could once have several GPUs: take the first.
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "minimal: all_reduce knows SUM only");
    const at::NoGradGuard no_grad;  // a collective is no step of the computation
    const Tensors all = everybodys(tensors[0]);
    Tensor sum = all[0];
    for (int rank = 1; rank < getSize(); ++rank) sum = sum + all[rank];  // in rank order
    tensors[0].copy_(sum);
    return c10::make_intrusive<DoneWork>(c10d::OpType::ALLREDUCE, tensors);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::NoGradGuard no_grad;
    tensors[0].copy_(everybodys(tensors[0])[options.rootRank]);
    return c10::make_intrusive<DoneWork>(c10d::OpType::BROADCAST, tensors);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    const at::NoGradGuard no_grad;
    const Tensors all = everybodys(inputs[0]);
    for (int rank = 0; rank < getSize(); ++rank) outputs[0][rank].copy_(all[rank]);
    return c10::make_intrusive<DoneWork>(c10d::OpType::ALLGATHER, outputs[0]);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    everybodys(at::empty({0}));
    return c10::make_intrusive<DoneWork>(c10d::OpType::BARRIER, Tensors{});
  }

  // For other operations torch raises an error: "Backend minimal does not support reduce".

 private:
  // All operations use this one: it returns the tensors of all ranks.
  Tensors everybodys(const Tensor& given) {
    const Tensor mine = given.contiguous();
    const auto* bytes = static_cast<const uint8_t*>(mine.data_ptr());
    store_->set(key(number_, getRank()), std::vector<uint8_t>(bytes, bytes + mine.nbytes()));
    Tensors all;
    for (int rank = 0; rank < getSize(); ++rank) {
      store_->wait({key(number_, rank)}, timeout_);
      const std::vector<uint8_t> theirs = store_->get(key(number_, rank));
      TORCH_CHECK(theirs.size() == mine.nbytes(), "minimal: rank ", rank, " sent ", theirs.size(),
                  " bytes, rank ", getRank(), " has ", mine.nbytes());
      all.push_back(at::empty_like(mine));
      if (!theirs.empty()) std::memcpy(all.back().data_ptr(), theirs.data(), theirs.size());
    }
    // All ranks are in this operation now, so none still reads what I wrote for the last one.
    if (number_ > 0) store_->deleteKey(key(number_ - 1, getRank()));
    ++number_;
    return all;
  }

  static std::string key(uint64_t number, int rank) {
    return std::to_string(number) + "/" + std::to_string(rank);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds timeout_;
  uint64_t number_ = 0;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // Holding the GIL while waiting for another rank would stop all threads of this one.
  module.def(
      "create",
      [](c10::intrusive_ptr<c10d::Store> store, int rank, int size,
         std::chrono::milliseconds timeout) {
        return c10::intrusive_ptr<c10d::Backend>(
            c10::make_intrusive<MinimalBackend>(std::move(store), rank, size, timeout));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
