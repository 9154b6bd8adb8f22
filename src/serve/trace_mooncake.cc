#include <cmath>
#include <nlohmann/json.hpp>

#include "serve/trace_line.h"

namespace kda::serve {
namespace {

using Json = nlohmann::json;

constexpr double kMaxMilliseconds = 9e12;  // nanoseconds stay below 2^63

// Reads one object by events: values of known fields are checked where they stand, so that the message can name
// them, and nothing is built for unknown ones.
class LineHandler : public nlohmann::json_sax<Json> {
 public:
  LineHandler(std::string_view line, TraceLine& out) : line_(line), out_(out) {}

  Status status;

  bool null() override { return other("null"); }
  bool boolean(bool v) override { return other(v ? "true" : "false"); }
  bool string(string_t& v) override { return other(quote_value(v)); }
  bool binary(binary_t&) override { return other("binary data"); }
  bool number_integer(number_integer_t v) override {  // with a minus sign: the parser gives others as unsigned
    if (v == 0) return number_unsigned(0);
    return ignored() || bad(std::to_string(v));
  }
  bool number_unsigned(number_unsigned_t v) override {
    if (ignored()) return true;
    if (depth_ == 0) return bad(std::to_string(v));
    if (in_array_) {
      if (v > static_cast<uint64_t>(INT64_MAX)) return bad(std::to_string(v));
      out_.blocks.push_back(v);
      return true;
    }
    if (key_ == "timestamp") return timestamp(static_cast<double>(v), std::to_string(v));
    if (key_ == "hash_ids") return bad(std::to_string(v));
    const int64_t least = key_ == "input_length" ? 1 : 0;
    if (v > static_cast<uint64_t>(kMaxLength) || static_cast<int64_t>(v) < least) return bad(std::to_string(v));
    (key_ == "input_length" ? out_.input_length : out_.output_length) = static_cast<int64_t>(v);
    return seen();
  }
  bool number_float(number_float_t v, const string_t& text) override {
    if (ignored()) return true;
    if (depth_ == 1 && key_ == "timestamp") return timestamp(v, text);
    return bad(shortened(text));
  }

  bool start_object(std::size_t) override {
    if (depth_ == 0) return ++depth_ > 0;
    if (!ignored()) return bad("an object");
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ == 0) return fail("line: wanted a JSON object, got an array");
    if (ignored()) return ++depth_ > 0;
    if (key_ != "hash_ids" || in_array_) return bad("an array");
    in_array_ = true;
    ++depth_;
    return true;
  }
  bool end_array() override {
    if (--depth_ == 1 && in_array_) {
      in_array_ = false;
      return seen();
    }
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ == 1) key_ = name;
    return true;
  }
  bool parse_error(std::size_t position, const std::string& token, const Json::exception& fault) override {
    constexpr int kNumberOverflow = 406;
    if (fault.id == kNumberOverflow) return bad(shortened(token));
    const size_t at = position == 0 ? 0 : std::min(position - 1, line_.size());
    std::string_view rest = line_.substr(at);
    const std::string_view value = rest.substr(0, rest.find_first_of(",}] ", 1));
    const std::string where = depth_ >= 1 && !key_.empty() ? field() + ": " : std::string();
    if (value.empty()) {
      return fail(
          fmt::format("{}wanted a complete JSON object, got a line that ends at column {}", where, line_.size() + 1));
    }
    return fail(fmt::format("{}wanted valid JSON, got {} at column {}", where, quote_value(value), at + 1));
  }

  Status finish() {
    if (!status.ok()) return status;
    for (const char* name : {"timestamp", "input_length", "output_length", "hash_ids"}) {
      if ((seen_ & bit(name)) == 0) return invalid_argument("{}: wanted a value, got none", name);
    }
    const int64_t wanted = (out_.input_length + kBlockTokens - 1) / kBlockTokens;
    if (static_cast<int64_t>(out_.blocks.size()) != wanted) {
      return invalid_argument("hash_ids: wanted {} entries (one per {} tokens of input_length {}), got {}", wanted,
                              kBlockTokens, out_.input_length, out_.blocks.size());
    }
    return {};
  }

 private:
  static unsigned bit(std::string_view name) {
    if (name == "timestamp") return 1;
    if (name == "input_length") return 2;
    if (name == "output_length") return 4;
    return name == "hash_ids" ? 8 : 0;
  }
  const char* wanted() const {
    if (key_ == "timestamp") return "milliseconds in [0, 9e12]";
    if (key_ == "input_length") return "an integer in 1..2147483647";
    if (key_ == "output_length") return "an integer in 0..2147483647";
    if (key_ != "hash_ids") return "a finite number";
    return in_array_ ? "integers in 0..2^63-1" : "an array of integers";
  }
  // The field as it may stand in a message: an unknown name can be anything.
  std::string field() const { return bit(key_) != 0 ? key_ : quote_value(key_); }
  // A number's text, which may have any length.
  static std::string shortened(std::string_view number) {
    constexpr size_t kShown = 60;
    return std::string(number.substr(0, kShown)) + (number.size() > kShown ? "..." : "");
  }
  // Values inside unknown fields, however deep.
  bool ignored() const { return depth_ > 0 && bit(key_) == 0; }
  bool fail(std::string message) {
    if (status.ok()) status = Status(KDA_INVALID_ARGUMENT, std::move(message));
    return false;
  }
  bool bad(const std::string& got) {
    if (depth_ == 0) return fail("line: wanted a JSON object, got " + got);
    return fail(fmt::format("{}: wanted {}, got {}", field(), wanted(), got));
  }
  bool other(const std::string& got) { return ignored() || bad(got); }
  bool seen() {
    if ((seen_ & bit(key_)) != 0) return fail(key_ + ": wanted one value, got the field twice");
    seen_ |= bit(key_);
    key_.clear();  // what follows belongs to no field until the next key
    return true;
  }
  bool timestamp(double ms, const std::string& text) {
    if (!(ms >= 0 && ms <= kMaxMilliseconds)) return bad(shortened(text));
    out_.time_ns = std::llround(ms * 1e6);
    return seen();
  }

  std::string_view line_;
  TraceLine& out_;
  std::string key_;
  int depth_ = 0;
  bool in_array_ = false;
  unsigned seen_ = 0;
};

}  // namespace

Status parse_mooncake_line(std::string_view line, TraceLine& out) {
  out.blocks.clear();
  LineHandler handler(line, out);
  if (!Json::sax_parse(line.begin(), line.end(), &handler) && handler.status.ok()) {
    return invalid_argument("line: wanted valid JSON, got {}", quote_value(line));
  }
  return handler.finish();
}

}  // namespace kda::serve
