#include "engine/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace eckpt {
namespace {

class TaskQueue {
 public:
  TaskQueue(size_t count, const std::function<void(size_t)>& task) : count_(count), task_(task) {}

  void Drain() noexcept {
    try {
      for (size_t i = next_++; i < count_; i = next_++) task_(i);
    } catch (...) {
      next_ = count_;
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }

  // Only after every Drain has returned.
  void RethrowFailure() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  const size_t count_;
  const std::function<void(size_t)>& task_;
  std::atomic<size_t> next_ = 0;
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace

void ParallelFor(size_t count, int threads, const std::function<void(size_t)>& task) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("threads must be in [1, " + std::to_string(kMaxThreads) +
                                "], got " + std::to_string(threads));
  }
  TaskQueue queue(count, task);
  {
    std::vector<std::jthread> extra;
    const size_t wanted = std::min(count, static_cast<size_t>(threads));
    extra.reserve(wanted);
    try {
      while (extra.size() + 1 < wanted) extra.emplace_back([&queue] { queue.Drain(); });
    } catch (const std::system_error&) {
      // The system gives no more threads: slower, but correct.
    }
    queue.Drain();
  }
  queue.RethrowFailure();
}

}  // namespace eckpt
