// The handles that operations return: a collective in the queue, a send or recv.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <map>

#include "group.h"
#include "tensors.h"

namespace adapter {

using c10d::OpType;
using Core = shm::Collectives;
using shm::Kind;
using shm::Limits;
using Milliseconds = std::chrono::milliseconds;

// The error that the core reports, as torch's class of error. (If memory runs out here: bad_alloc.)
inline std::exception_ptr as_torch_error(std::exception_ptr error) noexcept {
  try {
    try {
      std::rethrow_exception(error);
    } catch (const shm::Error& e) {
      throw c10::DistBackendError({__func__, __FILE__, __LINE__}, std::string("shm: ") + e.what());
    }
  } catch (...) {
    return std::current_exception();
  }
}

// "shm:all_reduce", which the profiler shows. Torch keeps the pointer.
inline const char* title_of(Kind kind) {
  static std::map<Kind, std::string> titles;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  return titles.try_emplace(kind, std::string("shm:") + shm::name_of(kind)).first->second.c_str();
}

// The handle that an operation returns, with wait() and a future.
class Work : public c10d::Work {
 public:
  // The profiler shows the title and the shapes of the inputs.
  Work(int rank, OpType type, const char* title, const Tensors& inputs, Tensors outputs)
      : c10d::Work(rank, type, title, inputs), outputs_(std::move(outputs)) {}

  bool isSuccess() const override {
    std::lock_guard lock(mutex_);
    return completed_ && !exception_;
  }
  Tensors result() override { return outputs_; }
  void abort() override { TORCH_CHECK(false, "shm: an operation can not be aborted"); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    {
      std::lock_guard lock(mutex_);
      if (!future_) {
        future_ = c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()));
      }
    }
    report();
    return future_;
  }

  // Complete the future, if there is one. It calls its callbacks, which may call operations of this
  // group and wait for them: so hold no lock.
  void report() {
    {
      std::lock_guard lock(mutex_);
      if (!completed_ || !future_ || reported_) return;
      reported_ = true;
    }
    if (exception_) {
      future_->setErrorIfNeeded(exception_);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
  }

 protected:
  void rethrow() const {
    std::unique_lock lock(mutex_);
    if (exception_) std::rethrow_exception(exception_);
  }

 private:
  const Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool reported_ = false;
};

class CollectiveWork : public Work {
 public:
  using Work::Work;

  template <class Operation>
  void run(Kind kind, const Operation& operation, Core& core, Limits limits) {
    std::exception_ptr error;
    try {
      try {
        core.run(kind, [&] {
          c10::InferenceMode as_the_caller(inference_);
          at::NoGradGuard no_grad;  // after the line above, which sets the grad mode
          operation(core, limits);
        });
      } catch (...) {
        // A late rank may still write into the tensors: never free their memory. (That happens once
        // per group, since a broken group begins no other operation.)
        if (std::exchange(core.lies_in_heap, false)) new Operation(operation);
        throw;
      }
    } catch (...) {
      error = std::current_exception();
    }
    finish(error ? as_torch_error(error) : nullptr);
  }

  // Without a timeout the caller runs the operation itself, if it has not begun. With one it leaves
  // that to the queue's thread, since an operation can not be interrupted. After the timeout, the
  // operation goes on, and the caller may wait again.
  bool wait(Milliseconds timeout) override {
    const auto alive = isCompleted() ? nullptr : group.lock();
    if (alive && timeout != kNoTimeout && !alive->queue.is_here()) {
      std::unique_lock lock(mutex_);
      if (!cv_.wait_for(lock, timeout, [&] { return completed_; })) {
        C10_THROW_ERROR(DistBackendError,
                        c10::str("shm: timeout: ", alive->peers.where_is(rank_), " waited ",
                                 timeout.count(), " ms in Work.wait(timeout) for ", title_of(kind),
                                 "; the operation goes on, and can be waited for again"));
      }
    } else if (alive) {
      alive->queue.finish(*job);
    }
    return c10d::Work::wait(kNoTimeout);  // a closing group may be running it
  }

  // Set only for operations in the queue. (A weak_ptr: the last owner of the group ends its
  // threads, and must not be one of them. A closing group runs the rest of its queue.)
  std::weak_ptr<shm::Group> group;
  std::shared_ptr<shm::Job> job;
  Kind kind = Kind::none;

 private:
  const bool inference_ = c10::InferenceMode::is_enabled();
};

class TransferWork : public Work {
 public:
  TransferWork(int rank, OpType type, const char* title, const Tensors& tensors,
               std::shared_ptr<shm::Transfer> transfer, std::weak_ptr<shm::Group> group,
               Milliseconds timeout)
      : Work(rank, type, title, tensors, tensors),
        transfer_(std::move(transfer)),
        group_(std::move(group)),
        timeout_(timeout) {}

  bool wait(Milliseconds timeout) override {
    if (const auto group = isCompleted() ? nullptr : group_.lock()) {
      const auto limit = timeout == kNoTimeout ? timeout_ : timeout;
      try {
        group->wait(*transfer_, shm::Clock::now() + limit);
      } catch (const shm::Error&) {
        std::rethrow_exception(as_torch_error(std::current_exception()));
      }
      complete(nullptr);  // another thread may have moved it, and not reported it yet
    }
    rethrow();
    return true;
  }
  void complete(std::exception_ptr error) {
    finish(error ? as_torch_error(error) : nullptr);
    report();
  }
  int sourceRank() const override { return transfer_->peer; }

 private:
  const std::shared_ptr<shm::Transfer> transfer_;
  const std::weak_ptr<shm::Group> group_;
  const Milliseconds timeout_;
};

}  // namespace adapter
