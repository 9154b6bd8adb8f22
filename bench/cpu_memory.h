// What the CPU benchmarks of memory-bound operators share: tensors, plans with their workspace, and paired rounds of
// an operator against a plain loop that moves the same bytes.
#pragma once

#include <kda/kda.h>

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace bench {

inline void check(kda_status status, const char* what) {
  if (status == KDA_OK) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, kda_status_name(status), kda_last_error());
  std::exit(1);
}

// "--name value" pairs.
class Options {
 public:
  Options(int argc, char** argv) {
    for (int i = 1; i + 1 < argc; i += 2) pairs_.emplace_back(argv[i], argv[i + 1]);
  }
  int64_t number(const char* name, int64_t fallback) const {
    const std::string text_value = text(name, "");
    return text_value.empty() ? fallback : std::atoll(text_value.c_str());
  }
  std::string text(const char* name, const char* fallback) const {
    for (const auto& [key, value] : pairs_) {
      if (key == std::string("--") + name) return value;
    }
    return fallback;
  }
  kda_dtype dtype(const char* name, kda_dtype fallback) const {
    const std::string value = text(name, "");
    return value == "fp32" ? KDA_FP32 : value == "bf16" ? KDA_BF16 : value == "fp16" ? KDA_FP16 : fallback;
  }

 private:
  std::vector<std::pair<std::string, std::string>> pairs_;
};

// Owns tensors on pages that were touched once.
class Arena {
 public:
  char* bytes(size_t n) {
    char* p = static_cast<char*>(std::aligned_alloc(4096, (n + 4095) / 4096 * 4096 + 4096));
    std::memset(p, 0, n);
    memory_.emplace_back(p, std::free);
    return p;
  }
  kda_tensor zeros(kda_dtype dtype, std::vector<int64_t> shape) {
    kda_tensor t{};
    t.dtype = dtype;
    t.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      t.shape[i] = shape[static_cast<size_t>(i)];
      t.strides[i] = stride;
      stride *= t.shape[i];
    }
    t.data = bytes(static_cast<size_t>(stride) * kda_dtype_size(dtype));
    return t;
  }
  // Uniform in [-1, 1).
  kda_tensor random(kda_dtype dtype, std::vector<int64_t> shape) {
    const kda_tensor t = zeros(dtype, std::move(shape));
    int64_t n = 1;
    for (int i = 0; i < t.rank; ++i) n *= t.shape[i];
    std::mt19937 engine(static_cast<uint32_t>(n));
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t i = 0; i < n; ++i) {
      const float x = uniform(engine);
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (dtype == KDA_FP32) static_cast<float*>(t.data)[i] = x;
      else static_cast<uint16_t*>(t.data)[i] = static_cast<uint16_t>(bits >> 16);
    }
    return t;
  }
  kda_tensor offsets(const std::vector<int64_t>& x) {
    const kda_tensor t = zeros(KDA_INT32, {static_cast<int64_t>(x.size())});
    for (size_t i = 0; i < x.size(); ++i) static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(x[i]);
    return t;
  }
  kda_workspace workspace(const kda_plan* plan) {
    size_t n = 0;
    check(kda_plan_workspace_size(plan, &n), "workspace");
    return {bytes(n), n};
  }

 private:
  std::vector<std::unique_ptr<char, void (*)(void*)>> memory_;
};

inline kda_context* make_context(const Options& o) {
  kda_context_options options{};
  options.struct_size = sizeof options;
  options.num_threads = static_cast<int32_t>(o.number("threads", 0));
  kda_context* context = nullptr;
  check(kda_context_create(&options, &context), "context");
  return context;
}

// KDA_BENCH_CPU_TIME=1 counts the process's CPU time instead of wall time: for one thread beside other loads.
inline double now() {
  static const bool cpu_time = std::getenv("KDA_BENCH_CPU_TIME") != nullptr;
  timespec t;
  clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
inline double seconds(const std::function<void()>& f) {
  const double begin = now();
  f();
  return now() - begin;
}

// Runs part(i) on `threads` threads.
inline void on_threads(int threads, const std::function<void(int)>& part) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(part, i);
  part(0);
  for (auto& t : others) t.join();
}

// x *= c in place.
inline void scale(char* data, size_t bytes, int threads) {
  on_threads(threads, [=](int i) {
    auto* x = reinterpret_cast<float*>(data);
    const size_t n = bytes / 4, begin = n * static_cast<size_t>(i) / static_cast<size_t>(threads),
                 end = n * static_cast<size_t>(i + 1) / static_cast<size_t>(threads);
    for (size_t j = begin; j < end; ++j) x[j] *= 0.9999f;
  });
}

inline void copy(char* to, const char* from, size_t bytes, int threads) {
  on_threads(threads, [=](int i) {
    const size_t begin = bytes * static_cast<size_t>(i) / static_cast<size_t>(threads),
                 end = bytes * static_cast<size_t>(i + 1) / static_cast<size_t>(threads);
    std::memcpy(to + begin, from + begin, end - begin);
  });
}

// Paired rounds in shuffled order. `moved` bytes are read plus written by both. Prints the median of the rounds'
// ratios floor / operator (1: as fast as the plain loop), the ratio of the best times, and every sample.
inline void compare(const std::string& title, double moved, int rounds, const std::function<void()>& floor,
                    const std::function<void()>& operation) {
  std::mt19937 engine(1);
  std::vector<double> ratios, floors, times;
  for (int i = 0; i < rounds + 3; ++i) {
    double f = 0, t = 0;
    if (engine() & 1) t = seconds(operation), f = seconds(floor);
    else f = seconds(floor), t = seconds(operation);
    if (i < 3) continue;
    floors.push_back(f);
    times.push_back(t);
    ratios.push_back(f / t);
  }
  const auto median = [](std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
  };
  const auto best = [](const std::vector<double>& x) { return *std::min_element(x.begin(), x.end()); };
  std::printf("%s source=%s\n", title.c_str(), kda_source_hash());
  std::printf("  median: floor %.3f ms (%.1f GB/s) operator %.3f ms (%.1f GB/s) ratio %.3f\n", 1e3 * median(floors),
              1e-9 * moved / median(floors), 1e3 * median(times), 1e-9 * moved / median(times), median(ratios));
  std::printf("  best:   floor %.3f ms operator %.3f ms ratio %.3f\n  samples (ms):", 1e3 * best(floors),
              1e3 * best(times), best(floors) / best(times));
  for (size_t i = 0; i < ratios.size(); ++i) std::printf(" %.3f,%.3f", 1e3 * floors[i], 1e3 * times[i]);
  std::printf("\n");
}

}  // namespace bench
