// Parsing of single trace lines; for trace.cc and its tests.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "serve/trace.h"

namespace kda::serve {

// One line's values. Times are relative to the format's own origin.
struct TraceLine {
  int64_t time_ns = 0;
  int64_t input_length = 0;
  int64_t output_length = 0;
  std::vector<uint64_t> blocks;
};

// A value as it may stand in a message: quoted, unprintable bytes escaped, cut to a readable length.
std::string quote_value(std::string_view text);

// Messages name field, expectation and value; the caller puts file and line before them.
Status parse_mooncake_line(std::string_view line, TraceLine& out);

// Columns of a CSV trace.
struct CsvColumns {
  enum class Time { kCalendar, kSeconds } time = Time::kSeconds;
  size_t count = 0;
  size_t timestamp = 0, input = 0, output = 0;
  std::string timestamp_name, input_name, output_name;
};

Result<std::vector<std::string>> split_csv(std::string_view line);
// Columns by the header of the named format ("azure", "burstgpt").
Result<CsvColumns> parse_csv_header(std::string_view line, std::string_view format);
Status parse_csv_line(std::string_view line, const CsvColumns& columns, TraceLine& out);

// "2023-11-16 18:15:46.6805900", also with T, Z or an offset such as +00:00: nanoseconds since 1970.
Result<int64_t> parse_calendar_time(std::string_view text);

}  // namespace kda::serve
