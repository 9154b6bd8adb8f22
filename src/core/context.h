// Context: one device, its threads and ISA, the list of backends, the life-cycle flags.
#pragma once

#include <atomic>
#include <string>

#include "base/status.h"
#include "core/device.h"
#include "kda/context.h"

namespace kda {

struct Backends;
class DeviceRuntime;

// The caller's or the built-in parallel-for. `run` calls body(i) for i in [0, n), n <= num_threads, and
// returns when all are done. Which thread runs which i must not change any result (spec N-12).
struct Parallel {
  kda_parallel_for_fn fn = nullptr;
  void* user = nullptr;
  int32_t num_threads = 1;

  template <class F>
  void run(int32_t n, const F& body) const {
    if (n <= 1 || fn == nullptr) {
      for (int32_t i = 0; i < n; ++i) body(i);
      return;
    }
    fn(user, n, [](void* arg, int32_t i) { (*static_cast<const F*>(arg))(i); }, const_cast<F*>(&body));
  }

  // Runs `tasks` tasks over the workers: body(task, worker). Tasks are claimed in order by a shared counter,
  // so put the longest first. `worker` < num_threads indexes per-worker scratch.
  template <class F>
  void for_each(int64_t tasks, const F& body) const {
    const auto workers = static_cast<int32_t>(tasks < num_threads ? tasks : num_threads);
    std::atomic<int64_t> next{0};
    run(workers, [&](int32_t worker) {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, worker);
    });
  }
};

struct Context {
  kda_device device{KDA_CPU, 0};
  Parallel parallel;
  std::string isa;          // "avx512"; the CPU candidates pick their kernel table by it
  DeviceFacts facts;        // of a device other than the CPU
  const DeviceRuntime* runtime = nullptr;  // of its memory and streams
  const Backends* backends = nullptr;
  bool allow_late_plans = false;
  bool allow_observers = false;
  std::atomic<bool> sealed{false};
  kda_launch_observer_fn observer = nullptr;
  void* observer_user = nullptr;

  // Announces a launch to the observer, if any (spec Y-25).
  void announce(const char* kernel) const {
    if (observer != nullptr) observer(observer_user, kernel);
  }
};

}  // namespace kda
