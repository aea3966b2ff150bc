// Collectives of a group run one after the other, in the order in which they were called.
//
// One that is called with async_op=True is put into a queue, and a thread runs it. Whoever waits
// for it before the thread has begun runs it himself: the thread's core is better left to others.
// One without async_op runs at once, in the caller's thread, after those that are in the queue.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "waiting.h"

namespace shm {

struct Job {
  std::function<void(Patience)> run;  // must not throw
  std::function<void()> report;       // called afterwards, and may use the queue
  bool done = false;                  // guarded by Queue::running_
};

class Queue {
 public:
  // `at_start` and `at_end` are called in the thread. Returns when `at_start` has been.
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

  // Runs what is left in the queue, and ends the thread.
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
    // Added by a report, in our thread: that may wait for it, and nobody else would run it.
    if (std::this_thread::get_id() == thread_.get_id()) finish(*job);
    return job;
  }

  // Return when the job is done; do it, and those before it, unless the thread is at it.
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
  using Jobs = std::deque<std::shared_ptr<Job>>;

  // Run the oldest job, and note it in `ran`; needs running_. False: there is none.
  bool run_first(Patience patience, Jobs& ran) {
    std::shared_ptr<Job> job;
    {
      std::lock_guard lock(waiting_);
      if (jobs_.empty()) return false;
      job = jobs_.front();
      jobs_.pop_front();
    }
    job->run(patience);
    job->run = nullptr;  // it holds tensors
    job->done = true;
    ran.push_back(std::move(job));
    return true;
  }

  // Without running_: what a report calls may want to run jobs.
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
  std::mutex running_;  // held by whoever runs a job; always taken before waiting_
  std::mutex waiting_;  // guards the following
  Jobs jobs_;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace shm
