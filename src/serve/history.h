// What happened over time, in a bounded number of intervals: where there would be more, neighbours become one, so
// that a run of any length keeps its shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kda::serve {

struct Interval {
  double begin_s = 0, end_s = 0;
  double operators_s = 0;  // inside the operators
  // Sums.
  int64_t steps = 0, prefilled = 0, decoded = 0, cached = 0;
  int64_t recurrent_tokens = 0, chunk_tokens = 0;  // computed, rejected drafts included
  int64_t recurrent_rows = 0, chunk_rows = 0;
  // The highest.
  int64_t used_slots = 0, cache_blocks = 0, waiting = 0;

  double seconds() const { return end_s - begin_s; }
  // `next` begins where this ends.
  void append(const Interval& next);
};

class History {
 public:
  static constexpr size_t kMost = 256;  // even

  History() { intervals_.reserve(kMost); }
  // Intervals come in order; all but the newest cover about the same number of steps.
  void add(const Interval& step);
  const std::vector<Interval>& intervals() const { return intervals_; }

 private:
  std::vector<Interval> intervals_;
  int64_t steps_each_ = 1;
};

}  // namespace kda::serve
