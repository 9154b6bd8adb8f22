// Spans of steps and operators for a Chrome trace (chrome://tracing, Perfetto).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace kda::serve {

class Clock {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// How a device was used, from the spans of its operators. A step's wait is the time in which nothing ran: from the
// end of the step before to its first operator, and between its operators.
struct DeviceUse {
  int64_t steps = 0;
  double busy_s = 0;  // operators
  double wait_s = 0;
  double median_wait_s = 0, longest_wait_s = 0;
  int64_t longest_wait_step = -1;
  // Steps that the device waited for longer than it worked on them.
  int64_t starved_steps = 0;
  double starved_wait_s = 0;
};

class Timeline {
 public:
  struct Span {
    const char* name;  // static storage
    double begin_s, end_s;
    int64_t step;
    int32_t layer;  // -1: of the whole step
    int64_t tokens, sequences;
  };

  explicit Timeline(const Clock& clock) : clock_(clock) {}
  const Clock& clock() const { return clock_; }
  // Times count from now on.
  void restart() { clock_ = Clock(); }
  void add(const Span& span) { spans_.push_back(span); }
  DeviceUse device_use() const;
  // The file's whole text.
  std::string to_json() const;

 private:
  Clock clock_;
  std::vector<Span> spans_;
};

}  // namespace kda::serve
