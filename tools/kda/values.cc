#include "values.h"

#include <fmt/format.h>

#include <charconv>

namespace kda::tools {
namespace {

template <class T>
bool is(const std::string& text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, fault] = std::from_chars(text.data(), end, value);
  return fault == std::errc() && stop == end;
}

CLI::Validator number(const char* wanted, bool (*fits)(const std::string&)) {
  const auto check = [=](std::string& text) {
    return fits(text) ? std::string() : fmt::format("wanted {}, got \"{}\"", wanted, text);
  };
  return CLI::Validator(check, "");
}

}  // namespace

void check_numbers(CLI::App& verb) {
  for (CLI::Option* option : verb.get_options()) {
    const std::string type = option->get_type_name();
    // transform() puts it before the validators that the option has.
    if (type.rfind("INT", 0) == 0) option->transform(number("an integer", is<int64_t>));
    if (type.rfind("UINT", 0) == 0) option->transform(number("an integer >= 0", is<uint64_t>));
    if (type.rfind("FLOAT", 0) == 0) option->transform(number("a number", is<double>));
  }
}

CLI::Validator whole(int64_t least, int64_t most) {
  const auto check = [=](std::string& text) {
    int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, fault] = std::from_chars(text.data(), end, value);
    if (fault == std::errc() && stop == end && value >= least && value <= most) return std::string();
    const std::string upto = most == INT64_MAX ? fmt::format(">= {}", least) : fmt::format("in {}..{}", least, most);
    return fmt::format("wanted an integer {}, got \"{}\"", upto, text);
  };
  return CLI::Validator(check, "");
}

void set_names(CLI::Option& option, std::map<std::string, int> names) {
  std::string list;
  for (const auto& [name, value] : names) list += (list.empty() ? "" : ", ") + name;
  const auto replace = [names = std::move(names), list](std::string& text) {
    const auto at = names.find(CLI::detail::to_lower(text));
    if (at == names.end()) return fmt::format("wanted one of {}, got \"{}\"", list, text);
    text = std::to_string(at->second);
    return std::string();
  };
  option.transform(CLI::Validator(replace, ""))->type_name("{" + list + "}")->default_str("");
}

}  // namespace kda::tools
