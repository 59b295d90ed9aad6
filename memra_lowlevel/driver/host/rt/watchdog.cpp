// A limit on the time of a launch. A kernel that loops for ever calls nobody, so the thread that runs it
// is interrupted by a signal and leaves its block as after a fault, but only while it is in the
// kernel's own code: the runtime's is not to be left in the middle. Else it is asked again soon.
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "rt.h"

namespace memra {

namespace {

class Watchdog {
  using Clock = std::chrono::steady_clock;

 public:
  void arm(LaunchState& launch, Worker** workers, uint32_t n) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { serve(); }).detach();
    }
    launch_ = &launch;
    workers_ = workers;
    n_ = n;
    const std::chrono::duration<double> limit(launch.seconds);
    deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
    if (deadline_ < sleeps_until_) wake_.notify_one();
  }

  // Afterwards no signal is sent any more; one on its way finds no kernel and is ignored.
  void disarm() {
    std::lock_guard<std::mutex> lock(mutex_);
    launch_ = nullptr;
  }

 private:
  void serve() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const Clock::time_point now = Clock::now();
      if (!launch_) {
        sleeps_until_ = Clock::time_point::max();
        wake_.wait(lock);
      } else if (now < deadline_) {
        sleeps_until_ = deadline_;
        wake_.wait_until(lock, deadline_);
      } else {
        launch_->overdue.store(true);
        for (uint32_t i = 0; i < n_; ++i) {
          if (workers_[i]->runs.load()) pthread_kill(workers_[i]->os_thread, OVERDUE_SIGNAL);
        }
        sleeps_until_ = Clock::time_point::min();
        wake_.wait_for(lock, std::chrono::milliseconds(1));
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  bool started_ = false;
  LaunchState* launch_ = nullptr;
  Worker** workers_ = nullptr;
  uint32_t n_ = 0;
  Clock::time_point deadline_, sleeps_until_ = Clock::time_point::min();
};

Watchdog* watchdog = new Watchdog();

// Holds the limit of a launch while it runs.
class TimeLimit {
 public:
  TimeLimit(LaunchState& launch, Worker** workers, uint32_t n) : on_(launch.seconds > 0) {
    if (on_) watchdog->arm(launch, workers, n);
  }
  ~TimeLimit() {
    if (on_) watchdog->disarm();
  }

 private:
  bool on_;
};

}  // namespace

}  // namespace memra
