#include "cpu/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/sanitizer.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace kda::cpu {
namespace {

// Every index once, whatever the number of cores behind the pool.
TEST(ThreadPool, EachTaskRunsOnce) {
  for (int32_t threads : {1, 2, 3, 16}) {
    ThreadPool pool(threads);
    for (int32_t n : {1, 2, 3, 16}) {
      std::vector<int> runs(static_cast<size_t>(n), 0);
      for (int call = 1; call <= 50; ++call) {
        pool.parallel().run(n, [&](int32_t i) { ++runs[static_cast<size_t>(i)]; });
        for (int count : runs) ASSERT_EQ(count, call);
      }
    }
  }
}

TEST(ThreadPool, ForEachClaimsEveryTaskOnceAndNamesWorkersInRange) {
  ThreadPool pool(3);
  std::vector<std::atomic<int>> runs(1000);
  pool.parallel().for_each(1000, [&](int64_t task, int32_t worker) {
    ASSERT_GE(worker, 0);
    ASSERT_LT(worker, 3);
    ++runs[static_cast<size_t>(task)];
  });
  for (const auto& count : runs) EXPECT_EQ(count, 1);
}

TEST(ThreadPool, SleepingHelpersTakePartAgain) {
  if (default_num_threads() < 2) GTEST_SKIP() << "one core";
  ThreadPool pool(2);
  const std::thread::id caller = std::this_thread::get_id();
  for (int pause_us : {0, 100, 5000}) {
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    // The caller waits inside its task until the other one runs, which only a helper can then do.
    std::atomic<bool> helped{false};
    pool.parallel().run(2, [&](int32_t) {
      if (std::this_thread::get_id() != caller) helped = true;
      while (!helped) std::this_thread::yield();
    });
    EXPECT_TRUE(helped);
  }
}

// One of the calls gets the helpers, the others run alone; results are the same.
TEST(ThreadPool, CallsFromSeveralThreadsAtOnce) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int call = 0; call < 500; ++call) {
        int64_t parts[4] = {};
        pool.parallel().run(4, [&](int32_t i) { parts[i] = i + 1; });
        sum += parts[0] + parts[1] + parts[2] + parts[3];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 500 * 10);
}

TEST(ThreadPool, ACallInsideATaskRuns) {
  ThreadPool pool(2);
  std::atomic<int> runs{0};
  pool.parallel().run(2, [&](int32_t) { pool.parallel().run(2, [&](int32_t) { ++runs; }); });
  EXPECT_EQ(runs, 4);
}

#if defined(__linux__)
TEST(ThreadPool, LeavesTheCallersAffinityAlone) {
  cpu_set_t before, after;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  ThreadPool pool(0);
  pool.parallel().run(pool.num_threads(), [](int32_t) {});
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

#if !defined(KDA_THREAD_SANITIZER)  // which does not follow a fork of a process with threads
TEST(ThreadPool, AForkedChildHasNoHelpersAndFinishesAlone) {
  auto pool = std::make_unique<ThreadPool>(2);
  pool->parallel().run(2, [](int32_t) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int runs[2] = {};
    pool->parallel().run(2, [&](int32_t i) { ++runs[i]; });
    pool.reset();
    _exit(runs[0] == 1 && runs[1] == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif
#endif

}  // namespace
}  // namespace kda::cpu
