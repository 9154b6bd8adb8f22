#include "serve/history.h"

#include <algorithm>

namespace kda::serve {

void Interval::append(const Interval& next) {
  end_s = next.end_s;
  operators_s += next.operators_s;
  for (int64_t Interval::*sum :
       {&Interval::steps, &Interval::prefilled, &Interval::decoded, &Interval::cached, &Interval::recurrent_tokens,
        &Interval::chunk_tokens, &Interval::recurrent_rows, &Interval::chunk_rows}) {
    this->*sum += next.*sum;
  }
  for (int64_t Interval::*most : {&Interval::used_slots, &Interval::cache_blocks, &Interval::waiting}) {
    this->*most = std::max(this->*most, next.*most);
  }
}

void History::add(const Interval& step) {
  if (!intervals_.empty() && intervals_.back().steps < steps_each_) {
    intervals_.back().append(step);
    return;
  }
  if (intervals_.size() == kMost) {
    for (size_t i = 0; i < kMost / 2; ++i) {
      intervals_[i] = intervals_[2 * i];
      intervals_[i].append(intervals_[2 * i + 1]);
    }
    intervals_.resize(kMost / 2);
    steps_each_ *= 2;
  }
  intervals_.push_back(step);
}

}  // namespace kda::serve
