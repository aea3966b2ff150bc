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
    Jobs ran;
    {
      std::lock_guard lock(running_);
      while (run_first(patience_, ran)) {
      }
      run(patience_);
    }
    report(ran);
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
    Jobs ran;
    {
      std::lock_guard lock(running_);
      while (!job.done && run_first(patience_, ran)) {
      }
    }
    report(ran);
  }

 private:
  using Jobs = std::list<std::shared_ptr<Job>>;

  // Run the oldest job, and add it to `ran`; the caller holds running_. False: there is none.
  bool run_first(Patience patience, Jobs& ran) {
    {
      std::lock_guard lock(waiting_);
      if (jobs_.empty()) return false;
      ran.splice(ran.end(), jobs_, jobs_.begin());  // can not throw: no job gets lost
    }
    Job& job = *ran.back();
    job.run(patience);
    job.run = nullptr;  // it holds tensors
    job.done = true;
    return true;
  }

  // Call without running_: a report may run jobs.
  static void report(const Jobs& ran) {
    for (auto& job : ran) {
      job->report();
      job->report = nullptr;
    }
  }

  void work() {
    while (true) {
      {
        std::unique_lock lock(waiting_);
        changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
      }
      Jobs ran;
      {
        std::lock_guard lock(running_);
        run_first(kInBackground, ran);
      }
      report(ran);
    }
  }

  const Patience patience_;
  std::mutex running_;  // held while a job runs; always locked before waiting_
  std::mutex waiting_;  // guards the members below
  Jobs jobs_;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace shm
