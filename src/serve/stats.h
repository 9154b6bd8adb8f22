// What a run counts and measures; the reports read nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serve/history.h"

namespace kda::serve {

struct Percentiles {
  double p50 = 0, p90 = 0, p99 = 0, mean = 0, max = 0;
  int64_t count = 0;
};
// Nearest-rank percentiles; zeros for no samples.
Percentiles percentiles(std::vector<double> samples);

struct RunStats {
  // Requests.
  int64_t total = 0, finished = 0, failed = 0;
  // Tokens, as design.md 4 counts them.
  int64_t prompt = 0, cached = 0, prefilled = 0, decoded = 0, drafted = 0, accepted = 0;
  // Steps.
  int64_t steps = 0, mixed_steps = 0, chunk_rows = 0, recurrent_rows = 0, step_tokens = 0;
  double model_s = 0;  // inside the operators
  // Slots of requests.
  int64_t slots = 0, used_slots = 0, peak_used = 0, preemptions = 0;
  // Prefix cache.
  int64_t cache_capacity = 0, cache_blocks = 0, cache_peak_blocks = 0, cache_lookups = 0, cache_hits = 0,
          cache_published = 0, cache_evictions = 0;
  double wall_s = 0;
  bool interrupted = false;
  std::string first_failure;
  std::vector<double> ttft_ms, tpot_ms;
  History history;
};

}  // namespace kda::serve
