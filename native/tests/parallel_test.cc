#include "engine/parallel.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace eckpt {
namespace {

TEST(each_task_runs_once) {
  for (int threads : {1, 2, 3, 8}) {
    for (size_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> runs(count);
      ParallelFor(count, threads, [&](size_t i) { ++runs[i]; });
      for (const auto& run : runs) CHECK_EQ(1, run.load());
    }
  }
}

TEST(tasks_run_on_several_threads_at_once) {
  std::atomic<int> arrived = 0;
  // Each task waits for the other: one thread alone would never end (and the alarm would fire).
  ParallelFor(2, 2, [&](size_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  CHECK_EQ(2, arrived.load());
}

TEST(what_tasks_wrote_is_visible_afterwards) {
  std::vector<size_t> written(10'000, 0);
  ParallelFor(written.size(), 4, [&](size_t i) { written[i] = i + 1; });
  for (size_t i = 0; i < written.size(); ++i) CHECK_EQ(i + 1, written[i]);
}

TEST(the_first_exception_comes_back_and_no_task_starts_after_it) {
  std::atomic<int> ran = 0;
  CHECK_THROWS(std::domain_error, ParallelFor(1'000'000, 1, [&](size_t i) {
                 ++ran;
                 if (i == 3) throw std::domain_error("task 3");
               }));
  CHECK_EQ(4, ran.load());
  CHECK_THROWS(std::domain_error,
               ParallelFor(100, 4, [&](size_t) { throw std::domain_error("all"); }));
}

TEST(the_number_of_threads_is_bounded) {
  for (int threads : {-1, 0, kMaxThreads + 1}) {
    CHECK_THROWS(std::invalid_argument, ParallelFor(1, threads, [](size_t) {}));
  }
  ParallelFor(3, kMaxThreads, [](size_t) {});
}

}  // namespace
}  // namespace eckpt
