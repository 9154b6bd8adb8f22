#include "serve/timeline.h"

#include <fmt/format.h>

#include <iterator>

namespace kda::serve {

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
