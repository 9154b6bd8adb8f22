#include "serve/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace kda::serve {

DeviceUse Timeline::device_use() const {
  DeviceUse use;
  std::vector<double> waits;
  double end = -1;  // of the last operator; spans lie in the order in which they ran
  for (size_t i = 0; i < spans_.size();) {
    const int64_t step = spans_[i].step;
    double busy = 0, wait = 0;
    bool any = false;
    for (; i < spans_.size() && spans_[i].step == step; ++i) {
      const Span& s = spans_[i];
      if (std::strcmp(s.name, "step") == 0) continue;  // the host's
      if (end >= 0) wait += std::max(0.0, s.begin_s - end);
      busy += s.end_s - s.begin_s;
      end = s.end_s;
      any = true;
    }
    if (!any) continue;
    ++use.steps;
    use.busy_s += busy;
    use.wait_s += wait;
    waits.push_back(wait);
    if (wait > use.longest_wait_s) use.longest_wait_s = wait, use.longest_wait_step = step;
    if (wait > busy) ++use.starved_steps, use.starved_wait_s += wait;
  }
  if (waits.empty()) return use;
  std::nth_element(waits.begin(), waits.begin() + static_cast<std::ptrdiff_t>(waits.size() / 2), waits.end());
  use.median_wait_s = waits[waits.size() / 2];
  return use;
}

std::string Timeline::to_json() const {
  fmt::memory_buffer out;
  auto at = std::back_inserter(out);
  fmt::format_to(at, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  fmt::format_to(at, R"({{"ph":"M","pid":1,"name":"process_name","args":{{"name":"kda replay"}}}},)"
                     "\n");
  fmt::format_to(at, R"({{"ph":"M","pid":1,"tid":1,"name":"thread_name","args":{{"name":"steps"}}}},)"
                     "\n");
  fmt::format_to(at, R"({{"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{{"name":"operators"}}}})");
  for (const Span& s : spans_) {
    fmt::format_to(at,
                   ",\n"
                   R"({{"ph":"X","pid":1,"tid":{},"name":"{}","ts":{:.3f},"dur":{:.3f},)",
                   s.layer < 0 ? 1 : 2, s.name, s.begin_s * 1e6, (s.end_s - s.begin_s) * 1e6);
    fmt::format_to(at, R"("args":{{"step":{},"layer":{},"tokens":{},"sequences":{}}}}})", s.step, s.layer, s.tokens,
                   s.sequences);
  }
  fmt::format_to(at, "\n]}}\n");
  return fmt::to_string(out);
}

}  // namespace kda::serve
