#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>

#include "serve/trace_line.h"

namespace kda::serve {
namespace {

constexpr double kMaxSeconds = 9e9;  // nanoseconds stay below 2^63

Status parse_length(const std::string& text, const std::string& field, int64_t least, int64_t& out) {
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (fault != std::errc() || end != text.data() + text.size() || out < least || out > kMaxLength) {
    return invalid_argument("{}: wanted an integer in {}..{}, got {}", field, least, kMaxLength, quote_value(text));
  }
  return {};
}

Status parse_seconds(const std::string& text, const std::string& field, int64_t& out) {
  double seconds = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (fault != std::errc() || end != text.data() + text.size() || !(seconds >= 0 && seconds <= kMaxSeconds)) {
    return invalid_argument("{}: wanted seconds in [0, 9e9], got {}", field, quote_value(text));
  }
  out = std::llround(seconds * 1e9);
  return {};
}

// Reads exactly `digits` digits at the front of `text`.
bool take_number(std::string_view& text, size_t digits, int& out) {
  if (text.size() < digits) return false;
  out = 0;
  for (size_t i = 0; i < digits; ++i) {
    if (text[i] < '0' || text[i] > '9') return false;
    out = out * 10 + (text[i] - '0');
  }
  text.remove_prefix(digits);
  return true;
}

bool take(std::string_view& text, char c) {
  if (text.empty() || text.front() != c) return false;
  text.remove_prefix(1);
  return true;
}

bool take_fraction(std::string_view& text, int64_t& ns) {
  int64_t scale = 100000000;
  size_t digits = 0;
  for (; !text.empty() && text.front() >= '0' && text.front() <= '9'; ++digits, scale /= 10) {
    ns += (text.front() - '0') * scale;  // digits past the ninth count nothing
    text.remove_prefix(1);
  }
  return digits > 0;
}

// "", "Z", "+hh:mm", "-hh:mm": minutes to subtract.
bool take_offset(std::string_view& text, int& minutes) {
  if (text.empty() || take(text, 'Z')) return text.empty();
  const int sign = text.front() == '-' ? -1 : 1;
  int h = 0, m = 0;
  if (!take(text, '+') && !take(text, '-')) return false;
  if (!take_number(text, 2, h) || !take(text, ':') || !take_number(text, 2, m) || h > 23 || m > 59) return false;
  minutes = sign * (h * 60 + m);
  return text.empty();
}

}  // namespace

Result<int64_t> parse_calendar_time(std::string_view text) {
  namespace chrono = std::chrono;
  std::string_view rest = text;
  int year = 0, month = 0, day = 0, hour = 0, minute = 0, second = 0, offset = 0;
  int64_t ns = 0;
  const bool shaped = take_number(rest, 4, year) && take(rest, '-') && take_number(rest, 2, month) &&
                      take(rest, '-') && take_number(rest, 2, day) && (take(rest, ' ') || take(rest, 'T')) &&
                      take_number(rest, 2, hour) && take(rest, ':') && take_number(rest, 2, minute) &&
                      take(rest, ':') && take_number(rest, 2, second) &&
                      (!take(rest, '.') || take_fraction(rest, ns)) && take_offset(rest, offset);
  const chrono::year_month_day date{chrono::year(year), chrono::month(static_cast<unsigned>(month)),
                                    chrono::day(static_cast<unsigned>(day))};
  if (!shaped || !date.ok() || year < 1970 || year > 2200 || hour > 23 || minute > 59 || second > 59) {
    return invalid_argument("wanted a time such as 2023-11-16 18:15:46.68, got {}", quote_value(text));
  }
  const int64_t days = chrono::sys_days(date).time_since_epoch().count();
  const int64_t seconds = ((days * 24 + hour) * 60 + minute - offset) * 60 + second;
  return seconds * 1000000000 + ns;
}

Result<std::vector<std::string>> split_csv(std::string_view line) {
  std::vector<std::string> fields(1);
  bool quotes = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quotes) {
      if (c != '"') {
        fields.back() += c;
      } else if (i + 1 < line.size() && line[i + 1] == '"') {
        fields.back() += '"';
        ++i;
      } else {
        quotes = false;
      }
    } else if (c == '"' && fields.back().empty()) {
      quotes = true;
    } else if (c == ',') {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  if (quotes) return invalid_argument("line: wanted a closing quote, got the end of the line");
  return fields;
}

Result<CsvColumns> parse_csv_header(std::string_view line, std::string_view format) {
  auto fields = split_csv(line);
  if (!fields.ok()) return fields.status();
  CsvColumns c;
  if (format == "azure") {
    c.time = CsvColumns::Time::kCalendar;
    c.timestamp_name = "TIMESTAMP", c.input_name = "ContextTokens", c.output_name = "GeneratedTokens";
  } else {
    c.timestamp_name = "Timestamp", c.input_name = "Request tokens", c.output_name = "Response tokens";
  }
  c.count = fields.value().size();
  const auto find = [&](const std::string& name, size_t& out) {
    const auto begin = fields.value().begin(), end = fields.value().end();
    const auto at = std::find(begin, end, name);
    out = static_cast<size_t>(at - begin);
    return std::count(at, end, name);
  };
  const auto times = find(c.timestamp_name, c.timestamp), inputs = find(c.input_name, c.input),
             outputs = find(c.output_name, c.output);
  if (times != 1 || inputs != 1 || outputs != 1) {
    const bool twice = times > 1 || inputs > 1 || outputs > 1;
    return invalid_argument("header: wanted the columns {}, {} and {}{}, got {}", c.timestamp_name, c.input_name,
                            c.output_name, twice ? ", each once" : "", quote_value(line));
  }
  return c;
}

Status parse_csv_line(std::string_view line, const CsvColumns& columns, TraceLine& out) {
  auto fields = split_csv(line);
  if (!fields.ok()) return fields.status();
  const std::vector<std::string>& f = fields.value();
  if (f.size() != columns.count) {
    return invalid_argument("line: wanted {} fields as in the header, got {} in {}", columns.count, f.size(),
                            quote_value(line));
  }
  out.blocks.clear();
  if (columns.time == CsvColumns::Time::kCalendar) {
    auto time = parse_calendar_time(f[columns.timestamp]);
    if (!time.ok()) return invalid_argument("{}: {}", columns.timestamp_name, time.status().message());
    out.time_ns = time.value();
  } else {
    KDA_SERVE_TRY(parse_seconds(f[columns.timestamp], columns.timestamp_name, out.time_ns));
  }
  KDA_SERVE_TRY(parse_length(f[columns.input], columns.input_name, 1, out.input_length));
  return parse_length(f[columns.output], columns.output_name, 0, out.output_length);
}

}  // namespace kda::serve
