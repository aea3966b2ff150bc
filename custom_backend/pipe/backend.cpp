// An asynchronous backend: a call puts its operation into a queue and returns a Work; a thread of
// the group runs the operations in the order of the calls.
//
//     caller:   all_reduce(t) -> Work          ...computes...           work.wait()
//                     | queue                                               ^ wakes
//     worker:         +-> t += ... over the pipes (pipe.h) -> complete() ---+-> future: DDP goes on
//
// What the author of a backend has to know:
//
// - The caller may drop its tensors as soon as the call returns: `all_reduce(x + 1, async_op=True)`.
//   So the queue holds the tensors until the operation is done.
// - wait() on a CPU returns when the result is in the tensor, or raises what the operation raised.
//   (NCCL's wait() only puts the next kernels behind the operation, in the stream.)
// - The future is completed when the bytes are there, not before: DDP copies them at once.
// - Callbacks of the future run in this worker thread. If they are in Python they need the GIL, so
//   a thread that waits for the worker must have released the GIL.
// - A program may end without destroying its groups. Freeing a tensor may need the GIL, and a thread
//   that asks for it while Python ends is ended, which aborts the process. So close_all(), which
//   Python calls at exit, ends the workers before.
#include <pybind11/chrono.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "pipe.h"

namespace {

using at::Tensor;
using c10d::OpType;
using pipe_backend::Pipe;
using Tensors = std::vector<Tensor>;
using Milliseconds = std::chrono::milliseconds;

thread_local const void* working_for = nullptr;  // the group whose worker this thread is

// The handle of one operation. isCompleted() and exception() are inherited: finish() sets what they
// return.
class PipeWork : public c10d::Work {
 public:
  PipeWork(const void* group, OpType type, Tensors results)
      : Work(-1, type), group_(group), results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(Milliseconds timeout) override {
    TORCH_CHECK(isCompleted() || working_for != group_,
                "pipe: a callback runs in the thread of the group, which would wait for itself");
    return Work::wait(timeout);
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors result() override { return results_; }

  void complete(std::exception_ptr error) {  // the worker calls it
    finish(error);  // wakes wait(); first, because a callback of the future may call wait()
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
  }

 private:
  const void* const group_;
  const Tensors results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class PipeBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  PipeBackend(Pipe* pipes, int rank, int size, int left_pidfd, int right_pidfd,
              Milliseconds timeout)
      : Backend(rank, size), pipes_(pipes), timeout_(timeout),
        ring_(pipes, rank, size, left_pidfd, right_pidfd), worker_([this] { work(); }) {
    std::lock_guard lock(groups_mutex);
    groups.insert(this);
  }

  ~PipeBackend() override {
    {
      std::lock_guard lock(groups_mutex);
      groups.erase(this);
    }
    give_up();
    munmap(pipes_, getSize() * sizeof(Pipe));  // the last one to unmap it frees it: it has no name
  }

  // Without shutdown() the program ends early, often by an exception: give up what is queued.
  void give_up() {
    ring_.leaving = true;
    shutdown();
  }

  static void close_all() {
    std::lock_guard lock(groups_mutex);
    for (PipeBackend* group : groups) {
      if (group->pid_ == getpid()) group->give_up();  // a fork has the groups, not their threads
    }
  }

  // The other ranks may never come. (The name of torch's abort of a group.)
  void abort() override { give_up(); }

  // destroy_process_group() calls it: run the rest of the queue, end the thread.
  void shutdown() override {
    if (getpid() != pid_) {  // a fork has no worker
      if (worker_.joinable()) worker_.detach();
      (void)changed_.release();  // its destructor would wait for the worker
      return;
    }
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_->notify_all();
    if (!worker_.joinable()) return;
    std::optional<pybind11::gil_scoped_release> release;
    if (PyGILState_Check()) release.emplace();  // the worker may need the GIL: see above
    worker_.join();
  }

  const std::string getBackendName() const override { return "pipe"; }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }  // of the calls so far

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "pipe: all_reduce knows SUM only");
    const Tensor tensor = tensors.at(0);
    const Tensor one = at::zeros({1}, tensor.options());
    at::add(one, one);  // if torch cannot add this dtype, all ranks raise here, before any waits
    return submit(OpType::ALLREDUCE, describe("all_reduce", tensor), options.timeout, tensors, [=, this] {
      const auto add = [&](char* mine, char* theirs, size_t bytes) {
        const int64_t count = bytes / tensor.element_size();
        at::from_blob(mine, count, tensor.options()).add_(at::from_blob(theirs, count, tensor.options()));
      };
      in_memory(tensor, [&](char* data, size_t bytes) { ring_.all_reduce(data, bytes, add); });
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor tensor = tensors.at(0);
    const int root = options.rootRank;
    const auto call = describe("broadcast", tensor) + " from rank " + std::to_string(root);
    return submit(OpType::BROADCAST, call, options.timeout, tensors, [=, this] {
      in_memory(tensor, [&](char* data, size_t bytes) { ring_.broadcast(data, bytes, root); });
    });
  }

  // DDP's constructor compares the models' numbers of parameters with it.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    const Tensor input = inputs.at(0);
    const Tensors results = outputs.at(0);
    TORCH_CHECK(static_cast<int>(results.size()) == getSize(), "pipe: one output for each rank");
    for (const Tensor& output : results) {
      TORCH_CHECK(output.nbytes() == input.nbytes() && output.dtype() == input.dtype(),
                  "pipe: all_gather: each output must be as large as the input");
    }
    return submit(OpType::ALLGATHER, describe("all_gather", input), options.timeout, results, [=, this] {
      results[getRank()].copy_(input);
      for (int root = 0; root < getSize(); ++root) {
        in_memory(results[root],
                  [&](char* data, size_t bytes) { ring_.broadcast(data, bytes, root); });
      }
    });
  }

  // Each rank needs a byte to which all ranks have added.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return submit(OpType::BARRIER, "barrier()", options.timeout, {}, [this] {
      char byte = 0;
      ring_.all_reduce(&byte, 1, [](char*, char*, size_t) {});
    });
  }

 private:
  WorkPtr submit(OpType type, std::string call, Milliseconds timeout, const Tensors& results,
                 std::function<void()> run) {
    TORCH_CHECK(getpid() == pid_, "pipe: this process is a fork, and has no thread of the group");
    if (timeout.count() < 0) timeout = timeout_;  // the caller gave none
    auto work = c10::make_intrusive<PipeWork>(this, type, results);
    {
      std::lock_guard lock(mutex_);
      TORCH_CHECK(!closing_, "pipe: the group is destroyed");
      ++sequence_;
      queue_.push_back([=, this] {
        if (!error_) {
          try {
            ring_.begin(call, timeout);
            run();
          } catch (...) {
            error_ = std::current_exception();
          }
        }
        work->complete(error_);
      });
    }
    changed_->notify_one();
    return work;
  }

  void work() {  // the worker thread
    // Settings such as no_grad() belong to a thread, and this one has none of the caller's. Numbers
    // arrive in parameters, too: leave autograd out.
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    working_for = this;
    while (true) {
      std::function<void()> next;
      {
        std::unique_lock lock(mutex_);
        changed_->wait(lock, [&] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      next();  // without the lock: a callback may call the next collective
    }
  }

  // Call move(data, bytes) with the numbers of the tensor one after another in memory.
  template <class Move>
  static void in_memory(const Tensor& tensor, Move move) {
    const Tensor dense = tensor.contiguous();  // a copy if the tensor has gaps, such as x.T
    move(static_cast<char*>(dense.data_ptr()), dense.nbytes());
    if (!dense.is_same(tensor)) tensor.copy_(dense);
  }

  static std::string describe(const char* name, const Tensor& tensor) {
    return std::string(name) + "(" + toString(tensor.scalar_type()) + ", " +
           std::to_string(tensor.nbytes()) + " bytes)";
  }

  static inline std::mutex groups_mutex;
  static inline std::set<PipeBackend*> groups;  // of this process

  Pipe* const pipes_;
  const Milliseconds timeout_;
  const pid_t pid_ = getpid();
  pipe_backend::Ring ring_;   // only the worker uses it,
  std::exception_ptr error_;  // and this: the first error stays, since the pipes may hold half a tensor
  std::mutex mutex_;          // guards the next two
  std::deque<std::function<void()>> queue_;
  bool closing_ = false;
  uint64_t sequence_ = 0;
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::thread worker_;  // last: it starts when everything above exists
};

c10::intrusive_ptr<c10d::Backend> create(int memory_fd, int rank, int size, int left_pidfd,
                                         int right_pidfd, Milliseconds timeout) {
  void* memory = mmap(nullptr, size * sizeof(Pipe), PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
  TORCH_CHECK(memory != MAP_FAILED, "pipe: cannot map the memory of the group: ", strerror(errno));
  return c10::make_intrusive<PipeBackend>(static_cast<Pipe*>(memory), rank, size, left_pidfd,
                                          right_pidfd, timeout);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("bytes_of_a_pipe") = sizeof(Pipe);
  module.def("create", &create);
  module.def("close_all", &PipeBackend::close_all);
}
