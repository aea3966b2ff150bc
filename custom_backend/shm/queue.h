// The collectives of a group run one after another, in the order of the calls.
//
// A collective with async_op=True goes into a queue, and a thread runs it. A thread that waits for
// it before it has begun runs it itself, which saves a core. A collective without async_op runs at
// once in the caller's thread, after those in the queue.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "waiting.h"

namespace shm {

struct Job {
  std::function<void(Patience)> run;  // must not throw
  std::function<void()> report;       // called after run, may use the queue
  bool done = false;                  // guarded by Queue::running_
};

class Queue {
 public:
  // The thread calls `at_start` and `at_end`. The constructor returns after `at_start`.
  Queue(Patience patience, std::function<void()> at_start, std::function<void()> at_end)
      : patience_(patience) {
    std::unique_lock lock(waiting_);
    bool started = false;
    thread_ = std::thread([this, &started, at_start, at_end] {
      at_start();
      {
        std::lock_guard lock(waiting_);
        started = true;
      }
      changed_.notify_all();
      work();
      at_end();
    });
    changed_.wait(lock, [&] { return started; });
  }

  // Run the rest of the queue, and end the thread.
  ~Queue() { close(); }

  void close() {
    if (!thread_.joinable()) return;
    {
      std::lock_guard lock(waiting_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void run_now(const std::function<void(Patience)>& run) {
    while (true) {
      std::unique_lock lock(running_);
      const auto earlier = run_first(patience_);
      if (!earlier) return run(patience_);
      lock.unlock();
      report(*earlier);
    }
  }

  std::shared_ptr<Job> add(std::function<void(Patience)> run, std::function<void()> report) {
    auto job = std::make_shared<Job>();
    job->run = std::move(run);
    job->report = std::move(report);
    {
      std::lock_guard lock(waiting_);
      jobs_.push_back(job);
    }
    changed_.notify_one();
    if (is_here()) finish(*job);  // a report added it, and may wait for it
    return job;
  }

  // Is the caller the queue's own thread, in a report? No other thread would run a job.
  bool is_here() const { return std::this_thread::get_id() == thread_.get_id(); }

  // Return when the job is done; run it and all earlier jobs, unless the thread is running them.
  void finish(const Job& job) {
    while (true) {
      std::unique_lock lock(running_);
      const auto ran = job.done ? nullptr : run_first(patience_);
      if (!ran) return;
      lock.unlock();
      report(*ran);
    }
  }

 private:
  // Run the oldest job, and return it; the caller holds running_. Null: there is none.
  std::shared_ptr<Job> run_first(Patience patience) {
    std::shared_ptr<Job> job;
    {
      std::lock_guard lock(waiting_);
      if (jobs_.empty()) return nullptr;
      job = std::move(jobs_.front());  // can not throw: no job gets lost
      jobs_.pop_front();
    }
    job->run(patience);
    job->run = nullptr;  // it holds tensors
    job->done = true;
    return job;
  }

  // Report each job before the next one runs: another rank may begin the next one only after this
  // report. Call it without running_, since a report may run jobs.
  static void report(Job& job) {
    job.report();
    job.report = nullptr;
  }

  void work() {
    while (true) {
      {
        std::unique_lock lock(waiting_);
        changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
      }
      std::unique_lock lock(running_);
      const auto job = run_first(kInBackground);
      lock.unlock();
      if (job) report(*job);
    }
  }

  const Patience patience_;
  std::mutex running_;  // held while a job runs; always locked before waiting_
  std::mutex waiting_;  // guards the members below
  std::list<std::shared_ptr<Job>> jobs_;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace shm
