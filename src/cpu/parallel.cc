#include "cpu/parallel.h"

#include <algorithm>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

namespace kda::cpu {

int32_t default_num_threads() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return count;
  }
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int32_t>(count) : 1;
}

struct ThreadPool::Arena {
  // More slots than cores would make oneTBB complain; tasks of an index without a thread of its own simply wait.
  explicit Arena(int32_t num_threads) : arena(std::min(num_threads, default_num_threads())) {}
  tbb::task_arena arena;
};

ThreadPool::ThreadPool(int32_t num_threads)
    : num_threads_(num_threads > 0 ? num_threads : default_num_threads()),
      arena_(std::make_unique<Arena>(num_threads_)) {}

ThreadPool::~ThreadPool() = default;

Parallel ThreadPool::parallel() { return {&ThreadPool::run, this, num_threads_}; }

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer does not see what oneTBB, which is not instrumented, orders; threads of our own it does.
void ThreadPool::run(void*, int32_t n, void (*body)(void*, int32_t), void* arg) {
  std::vector<std::thread> threads;
  for (int32_t i = 1; i < n; ++i) threads.emplace_back(body, arg, i);
  body(arg, 0);
  for (std::thread& thread : threads) thread.join();
}
#else
void ThreadPool::run(void* self, int32_t n, void (*body)(void*, int32_t), void* arg) {
  // One task per index and no splitting by measured load: each index is one worker's share.
  static_cast<ThreadPool*>(self)->arena_->arena.execute([=] {
    tbb::parallel_for(
        int32_t{0}, n, int32_t{1}, [=](int32_t i) { body(arg, i); }, tbb::simple_partitioner());
  });
}
#endif

}  // namespace kda::cpu
