#include "serve/trace.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "serve/trace_line.h"

namespace kda::serve {
namespace {

constexpr size_t kMaxLine = size_t{64} << 20;

// Lines without their ending (LF or CRLF); a byte order mark before the first is dropped.
class LineReader {
 public:
  explicit LineReader(std::istream& in) : in_(in), buffer_(size_t{1} << 16) {}

  // False at the end of input or on an error, see status(). Of a line that is too long only the beginning is read.
  bool next(std::string& line) {
    if (too_long_) skip_rest();
    line.clear();
    bool any = false, ended = false;
    while (!ended && !too_long_ && fill()) {
      any = true;
      const auto piece = rest();
      const size_t size = std::min(piece.find('\n'), piece.size());
      too_long_ = size > kMaxLine - line.size();
      if (too_long_) break;
      line.append(piece, 0, size);
      ended = size < piece.size();
      at_ += size + (ended ? 1 : 0);
    }
    if (!status_.ok() || !any) return false;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (number_++ == 0 && line.compare(0, 3, "\xEF\xBB\xBF") == 0) line.erase(0, 3);
    return true;
  }

  int64_t number() const { return number_; }
  bool too_long() const { return too_long_; }
  const Status& status() const { return status_; }

 private:
  std::string_view rest() const { return {buffer_.data() + at_, end_ - at_}; }

  // False if there is nothing more.
  bool fill() {
    if (at_ < end_) return true;
    in_.read(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
    at_ = 0;
    end_ = static_cast<size_t>(in_.gcount());
    if (end_ == 0 && in_.bad()) status_ = invalid_argument("wanted readable input, got an error while reading");
    return end_ > 0;
  }

  void skip_rest() {
    too_long_ = false;
    while (fill()) {
      const size_t size = rest().find('\n');
      at_ = size == std::string_view::npos ? end_ : at_ + size + 1;
      if (size != std::string_view::npos) return;
    }
  }

  std::istream& in_;
  std::vector<char> buffer_;
  size_t at_ = 0, end_ = 0;
  int64_t number_ = 0;
  bool too_long_ = false;
  Status status_;
};

bool is_blank(const std::string& line) { return line.find_first_not_of(" \t") == std::string::npos; }

// The format of the first line that is not blank; empty if it is none of the known ones.
std::string detect(const std::string& line) {
  if (line[line.find_first_not_of(" \t")] == '{') return "mooncake";
  if (parse_csv_header(line, "azure").ok()) return "azure";
  if (parse_csv_header(line, "burstgpt").ok()) return "burstgpt";
  return "";
}

class Reader {
 public:
  Reader(std::istream& in, const std::string& name, const TraceOptions& options)
      : lines_(in), name_(name), options_(options) {}

  Result<Trace> read() {
    std::string line;
    bool first = true;
    while ((options_.limit == 0 || count() < options_.limit) && lines_.next(line)) {
      Status status;
      if (lines_.too_long()) {
        status = invalid_argument("line: wanted at most {} bytes, got more", kMaxLine);
        if (first) return at_line(status);  // what the format is cannot be seen
      } else {
        if (is_blank(line)) continue;
        if (first) {
          first = false;
          KDA_SERVE_TRY(begin(line));
          if (trace_.format != "mooncake") continue;  // that was the header
        }
        status = parse(line);
      }
      if (status.ok()) {
        add();
        continue;
      }
      const Status located = at_line(status);
      if (!options_.skip_bad) return located;
      if (trace_.skipped++ == 0) trace_.first_skipped = located.message();
    }
    if (!lines_.status().ok()) return at_line(lines_.status());
    if (trace_.requests.empty()) {
      return invalid_argument("{}: wanted at least one request, got none{}", name_,
                              trace_.skipped > 0 ? "; first bad line: " + trace_.first_skipped : "");
    }
    finish();
    return std::move(trace_);
  }

 private:
  int64_t count() const { return static_cast<int64_t>(trace_.requests.size()); }
  Status at_line(const Status& status) const {
    return invalid_argument("{}:{}: {}", name_, lines_.number(), status.message());
  }

  Status parse(const std::string& line) {
    return trace_.format == "mooncake" ? parse_mooncake_line(line, parsed_) : parse_csv_line(line, columns_, parsed_);
  }

  Status begin(const std::string& line) {
    trace_.format = options_.format == "auto" ? detect(line) : options_.format;
    if (trace_.format == "mooncake") return {};
    if (trace_.format.empty()) {
      return at_line(
          invalid_argument("line: wanted a Mooncake JSON object or the header of an Azure or BurstGPT "
                           "CSV, got {}; --format names a format",
                           quote_value(line)));
    }
    auto columns = parse_csv_header(line, trace_.format);
    if (!columns.ok()) return at_line(columns.status());
    columns_ = std::move(columns.value());
    return {};
  }

  void add() {
    TraceRequest r;
    r.index = count();
    r.arrival_ns = parsed_.time_ns;
    r.input_length = parsed_.input_length;
    r.output_length = parsed_.output_length;
    r.first_block = static_cast<int64_t>(trace_.blocks.size());
    r.num_blocks = static_cast<int64_t>(parsed_.blocks.size());
    trace_.blocks.insert(trace_.blocks.end(), parsed_.blocks.begin(), parsed_.blocks.end());
    trace_.requests.push_back(r);
  }

  void finish() {
    std::vector<TraceRequest>& requests = trace_.requests;
    std::stable_sort(requests.begin(), requests.end(),
                     [](const TraceRequest& a, const TraceRequest& b) { return a.arrival_ns < b.arrival_ns; });
    const int64_t origin = requests.front().arrival_ns;
    for (TraceRequest& r : requests) r.arrival_ns -= origin;
  }

  LineReader lines_;
  std::string name_;
  TraceOptions options_;
  Trace trace_;
  CsvColumns columns_;
  TraceLine parsed_;
};

}  // namespace

std::string quote_value(std::string_view text) {
  constexpr size_t kShown = 60;
  std::string out = "\"";
  for (char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte >= 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  out += '"';
  if (text.size() > kShown) out += "...";
  return out;
}

Result<Trace> read_trace(std::istream& in, const std::string& name, const TraceOptions& options) {
  const auto& f = options.format;
  if (f != "auto" && f != "mooncake" && f != "azure" && f != "burstgpt") {
    return invalid_argument("format: wanted auto, mooncake, azure or burstgpt, got {}", quote_value(f));
  }
  return Reader(in, name, options).read();
}

Result<Trace> read_trace(const std::string& path, const TraceOptions& options) {
  if (path == "-") return read_trace(std::cin, "<stdin>", options);
  if (path.empty()) return invalid_argument("trace: wanted a file name, got \"\"");
  std::error_code fault;
  if (std::filesystem::is_directory(path, fault)) {
    return invalid_argument("{}: wanted a file, got a directory", path);
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) return invalid_argument("{}: wanted a readable file, got: {}", path, std::strerror(errno));
  return read_trace(in, path, options);
}

}  // namespace kda::serve
