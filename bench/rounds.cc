#include "bench/rounds.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

namespace kda::bench {
namespace {

double seconds_of(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

void shuffle(std::vector<int>& order, std::mt19937_64& engine) {
  // Fisher-Yates by hand: std::shuffle's sequence is the library's own, and a seed should mean the same everywhere.
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[engine() % i]);
}

std::string rate_text(double per_second, Unit unit) {
  char text[64];
  if (unit == Unit::kCall) std::snprintf(text, sizeof text, "%.2f us", per_second > 0 ? 1e6 / per_second : 0);
  else std::snprintf(text, sizeof text, "%.1f %s", 1e-9 * per_second, unit == Unit::kFlop ? "GFLOP/s" : "GB/s");
  return text;
}

int Rounds::index_of(const std::string& label) const {
  for (size_t i = 0; i < variants.size(); ++i) {
    if (variants[i].label == label) return static_cast<int>(i);
  }
  return -1;
}

std::vector<double> Rounds::rates(const std::string& label) const {
  const int v = index_of(label);
  std::vector<double> rates;
  for (const Sample& s : samples) {
    if (s.variant == v)
      rates.push_back(variants[static_cast<size_t>(v)].work / (cpu_time ? s.cpu_seconds : s.seconds));
  }
  return rates;  // samples lie in the order of the rounds
}

std::vector<double> Rounds::ratios(const std::string& of, const std::vector<std::string>& over) const {
  std::vector<double> best;
  for (const std::string& label : over) {
    const std::vector<double> r = rates(label);
    best.resize(std::max(best.size(), r.size()), 0);
    for (size_t i = 0; i < r.size(); ++i) best[i] = std::max(best[i], r[i]);
  }
  std::vector<double> result = rates(of);
  result.resize(std::min(result.size(), best.size()));
  for (size_t i = 0; i < result.size(); ++i) result[i] /= best[i];
  return result;
}

double Rounds::core_share(const std::string& label, int threads) const {
  const int v = index_of(label);
  std::vector<double> shares;
  for (const Sample& s : samples) {
    if (s.variant == v) shares.push_back(s.cpu_seconds / (s.seconds * threads));
  }
  return median(std::move(shares));
}

Rounds run_rounds(const std::vector<Variant>& variants, const RoundOptions& options) {
  Rounds result;
  result.variants = variants;
  result.cpu_time = options.cpu_time;
  std::mt19937_64 engine(options.seed);
  std::vector<int> order(variants.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  int64_t calls = 0;
  for (int round = -options.warmup; round < options.rounds; ++round) {
    shuffle(order, engine);
    for (size_t i = 0; i < order.size(); ++i) {
      const Variant& v = variants[static_cast<size_t>(order[i])];
      const double cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID), wall = seconds_of(CLOCK_MONOTONIC);
      v.call(calls++, nullptr);
      const double wall_end = seconds_of(CLOCK_MONOTONIC), cpu_end = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
      if (round >= 0) {
        result.samples.push_back({round, static_cast<int>(i), order[i], wall_end - wall, cpu_end - cpu});
      }
    }
  }
  return result;
}

double quantile(std::vector<double> x, double q) {
  if (x.empty()) return 0;
  std::sort(x.begin(), x.end());
  const double at = q * static_cast<double>(x.size() - 1);
  const auto below = static_cast<size_t>(std::floor(at));
  const size_t above = std::min(below + 1, x.size() - 1);
  return x[below] + (at - static_cast<double>(below)) * (x[above] - x[below]);
}

}  // namespace kda::bench
