#include "base/status.h"

#include <charconv>
#include <cstdio>

namespace kda {

void Part::set(long long value) {
  text_ = {number_, static_cast<size_t>(std::to_chars(number_, number_ + sizeof number_, value).ptr - number_)};
}

void Part::set(unsigned long long value) {
  text_ = {number_, static_cast<size_t>(std::to_chars(number_, number_ + sizeof number_, value).ptr - number_)};
}

void Part::set(double value) {
  text_ = {number_, static_cast<size_t>(std::snprintf(number_, sizeof number_, "%g", value))};
}

Part::Part(const void* pointer) {
  text_ = {number_, static_cast<size_t>(std::snprintf(number_, sizeof number_, "%p", pointer))};
}

std::string join(std::initializer_list<Part> parts) {
  size_t size = 0;
  for (const Part& part : parts) size += part.text().size();
  std::string text;
  text.reserve(size);
  for (const Part& part : parts) text += part.text();
  return text;
}

}  // namespace kda
