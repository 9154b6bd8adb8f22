#include "base/json.h"

#include <new>
#include <set>
#include <vector>

namespace kda {
namespace {

using Json = nlohmann::json;
using Event = Json::parse_event_t;

constexpr size_t kShort = 40;  // characters

}  // namespace

Result<Json> parse_json(std::string_view text) {
  std::vector<std::set<std::string>> open;  // the keys of each object that is being read
  std::string repeated;
  const auto watch = [&](int, Event event, Json& value) {
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key && !open.back().insert(value.get_ref<const std::string&>()).second && repeated.empty()) {
      repeated = brief(value);
    }
    return true;
  };
  try {
    Json json = Json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
    if (json.is_discarded()) return invalid_argument("wanted JSON, got text that does not parse");
    if (!repeated.empty()) return invalid_argument("wanted distinct names, got ", repeated, " twice");
    return json;
  } catch (const std::bad_alloc&) {
    return Status(KDA_OUT_OF_MEMORY, "out of memory while reading JSON");
  } catch (const std::exception& e) {  // the library's own, on text that parses but cannot be used
    return invalid_argument(e.what());
  }
}

std::string brief(const Json& value) {
  if (value.is_structured()) return str_cat(value.type_name(), " of ", value.size());
  if (!value.is_string()) return value.dump();
  const auto& text = value.get_ref<const std::string&>();
  if (text.size() <= kShort) return "'" + text + "'";
  size_t end = kShort;  // not inside a character
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return "'" + text.substr(0, end) + "...'";
}

}  // namespace kda
