// Paired measuring (state-copy.md U-2, U-8): every round runs all variants once, in a freshly shuffled, seeded order.
// Variants are compared by the ratio of their rates within a round, never by numbers of two runs; raw samples are
// kept.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace kda::bench {

enum class Unit { kFlop, kByte, kCall };
// 1.5e9 FLOP/s as "1.5 GFLOP/s", a rate of calls as microseconds each.
std::string rate_text(double per_second, Unit unit);

struct Variant {
  std::string label;
  // Call number i, on a stream of the device (none on the CPU). Calls that follow one another work on other memory.
  std::function<void(int64_t i, void* stream)> call;
  double work = 1;  // of one call, in `unit`
  Unit unit = Unit::kCall;
  std::string detail;      // kernel that runs, if it has a name
  double floor_bytes = 0;  // that one call must move once (design: floors); 0: none is named
};

struct Sample {
  int round, order, variant;
  double seconds;      // wall
  double cpu_seconds;  // of the process
};

struct RoundOptions {
  int rounds = 15;
  uint64_t seed = 1;
  int warmup = 2;  // rounds that are not kept
  // Judge by the process's CPU time instead of wall time: for one thread beside other loads.
  bool cpu_time = false;
};

struct Rounds {
  std::vector<Variant> variants;
  std::vector<Sample> samples;
  bool cpu_time = false;

  // Rates (work per second) of one variant, by round. Unknown label: empty.
  std::vector<double> rates(const std::string& label) const;
  // Within each round: rate of `of` over the largest rate among `over`.
  std::vector<double> ratios(const std::string& of, const std::vector<std::string>& over) const;
  // Share of the cores that the variant had: CPU time over wall time and threads, the median.
  double core_share(const std::string& label, int threads) const;

 private:
  int index_of(const std::string& label) const;
};

void shuffle(std::vector<int>& order, std::mt19937_64& engine);

Rounds run_rounds(const std::vector<Variant>& variants, const RoundOptions& options);

// Linear between the sorted values; q in [0, 1]. 0 for none.
double quantile(std::vector<double> x, double q);
inline double median(std::vector<double> x) { return quantile(std::move(x), 0.5); }

}  // namespace kda::bench
