#include "cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace kda::cpu {
namespace {

using Body = void (*)(void* arg, int32_t i);

std::vector<int> allowed_cores() {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &set)) cores.push_back(i);
    }
  }
#endif
  return cores;
}

int64_t process_id() {
#if defined(__unix__) || defined(__APPLE__)
  return getpid();
#else
  return 0;
#endif
}

// Polls until ready() or for that long. True: ready.
template <class Ready>
bool watch(std::chrono::microseconds limit, const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
#if defined(__x86_64__) || defined(_M_X64)
      _mm_pause();
#elif defined(__aarch64__)
      __asm__ volatile("yield");
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// A core for each helper that is not the caller's. Where no core is idle, the system starts a woken thread on the
// core of the one that woke it and leaves it there for milliseconds: both then share one core, whatever the others
// do. (Measured with low-priority compilers on both cores of two: 9.4 ms without this for work of 2 x 4.7 ms, 4.8
// with.) Only where there is a thread for every core: with fewer, binding could put pools of two contexts on the same
// ones.
class Cores {
 public:
  void bind(std::vector<std::thread>& helpers) {
#if defined(__linux__)
    cores_ = allowed_cores();
    if (helpers.empty() || cores_.size() != helpers.size() + 1) return cores_.clear();
    for (size_t i = 0; i < helpers.size(); ++i) move(helpers[i], cores_[i + 1]);
#else
    (void)helpers;
#endif
  }

  // Before a call: cores_[0] is the caller's, cores_[i + 1] that of helper i.
  void leave_callers_core(std::vector<std::thread>& helpers) {
#if defined(__linux__)
    if (cores_.empty()) return;
    const int core = sched_getcpu();
    if (core == cores_[0]) return;
    const auto found = std::find(cores_.begin() + 1, cores_.end(), core);
    if (found == cores_.end()) return;
    std::swap(cores_[0], *found);
    move(helpers[static_cast<size_t>(found - cores_.begin()) - 1], *found);
#else
    (void)helpers;
#endif
  }

 private:
#if defined(__linux__)
  static void move(std::thread& thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    (void)pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);  // refused: it stays where it is
  }
#endif
  std::vector<int> cores_;  // empty: nothing is bound
};

}  // namespace

int32_t default_num_threads() {
  const std::vector<int> cores = allowed_cores();
  if (!cores.empty()) return static_cast<int32_t>(cores.size());
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int32_t>(count) : 1;
}

// A call opens `ticket`; whoever moves it on from index i runs task i. The fields of a call are written only while
// the ticket is closed, and a claim succeeds only if the ticket has not changed since they were read: a helper that
// comes late, or slept in the middle of a claim, cannot take a task of a call it does not know.
struct ThreadPool::State {
  static constexpr uint32_t kClosed = UINT32_MAX;
  static constexpr std::chrono::microseconds kWatch{200};

  struct Task {
    Body body;
    void* arg;
    int32_t i;
  };

  bool claim(Task& task) {
    uint64_t now = ticket.load(std::memory_order_acquire);
    for (;;) {
      const auto index = static_cast<uint32_t>(now);
      task = {body.load(std::memory_order_relaxed), arg.load(std::memory_order_relaxed), static_cast<int32_t>(index)};
      if (index == kClosed || task.i >= size.load(std::memory_order_relaxed)) return false;
      if (ticket.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire))
        return true;
    }
  }

  void serve() {
    uint32_t seen = 0;
    for (;;) {
      const auto called = [&] { return calls.load(std::memory_order_acquire) != seen; };
      if (!watch(kWatch, called)) calls.wait(seen, std::memory_order_acquire);
      seen = calls.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      for (Task task; claim(task);) {
        task.body(task.arg, task.i);
        done.fetch_add(1, std::memory_order_acq_rel);
        done.notify_one();
      }
    }
  }

  void wake(int32_t wanted) {
    calls.fetch_add(1, std::memory_order_acq_rel);
    if (wanted >= static_cast<int32_t>(helpers.size())) return calls.notify_all();
    for (int32_t i = 0; i < wanted; ++i) calls.notify_one();
  }

  void call(int32_t n, Body new_body, void* new_arg) {
    cores.leave_callers_core(helpers);
    body.store(new_body, std::memory_order_relaxed);
    arg.store(new_arg, std::memory_order_relaxed);
    size.store(n, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
    const uint64_t generation = (ticket.load(std::memory_order_relaxed) >> 32) + 1;
    ticket.store(generation << 32, std::memory_order_release);
    wake(n - 1);
    int32_t others = n;
    for (Task task; claim(task); --others) task.body(task.arg, task.i);
    ticket.store(generation << 32 | kClosed, std::memory_order_release);
    // The last tasks of the helpers: watched, since a sleeping caller may get its core back late.
    if (watch(kWatch, [&] { return done.load(std::memory_order_acquire) == others; })) return;
    for (int32_t now; (now = done.load(std::memory_order_acquire)) != others;) {
      done.wait(now, std::memory_order_acquire);
    }
  }

  explicit State(int32_t count) {
    try {
      for (int32_t i = 0; i < count; ++i) helpers.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {  // no more threads to be had: fewer helpers
    }
    cores.bind(helpers);
  }

  ~State() {
    if (process != process_id()) {  // a forked child: the helpers are not here
      for (std::thread& helper : helpers) helper.detach();
      return;
    }
    stop.store(true, std::memory_order_relaxed);
    wake(static_cast<int32_t>(helpers.size()));
    for (std::thread& helper : helpers) helper.join();
  }

  std::atomic<uint64_t> ticket{kClosed};  // generation of the call << 32 | next index
  std::atomic<Body> body{nullptr};
  std::atomic<void*> arg{nullptr};
  std::atomic<int32_t> size{0};
  alignas(64) std::atomic<int32_t> done{0};  // tasks that helpers have finished
  alignas(64) std::atomic<uint32_t> calls{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> taken{false};  // by a calling thread
  const int64_t process = process_id();
  Cores cores;
  std::vector<std::thread> helpers;
};

ThreadPool::ThreadPool(int32_t num_threads)
    : num_threads_(num_threads > 0 ? num_threads : default_num_threads()),
      state_(std::make_unique<State>(std::min(num_threads_, default_num_threads()) - 1)) {}

ThreadPool::~ThreadPool() = default;

Parallel ThreadPool::parallel() { return {&ThreadPool::run, this, num_threads_}; }

void ThreadPool::run(void* self, int32_t n, void (*body)(void*, int32_t), void* arg) {
  State& state = *static_cast<ThreadPool*>(self)->state_;
  if (state.helpers.empty() || state.taken.exchange(true, std::memory_order_acquire)) {
    for (int32_t i = 0; i < n; ++i) body(arg, i);
    return;
  }
  state.call(n, body, arg);
  state.taken.store(false, std::memory_order_release);
}

}  // namespace kda::cpu
