// Status and Result: how functions inside the library report failure. Nothing throws.
#pragma once

#include <concepts>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "kda/types.h"

namespace kda {

// A part of a message: a text, or a number in the form that an output stream gives it. Lives within the call.
class Part {
 public:
  Part(const char* text) : text_(text) {}
  Part(std::string_view text) : text_(text) {}
  Part(const std::string& text) : text_(text) {}
  Part(char c) : number_{c}, text_(number_, 1) {}
  template <class T>
  requires(std::integral<T> && !std::same_as<T, char>) Part(T value) {
    if constexpr (std::is_signed_v<T>) set(static_cast<long long>(value));
    else set(static_cast<unsigned long long>(value));
  }
  template <std::floating_point T>
  Part(T value) {
    set(static_cast<double>(value));
  }
  template <class T>
  requires std::is_enum_v<T> Part(T value) : Part(static_cast<std::underlying_type_t<T>>(value)) {}
  Part(const void* pointer);
  Part(const Part&) = delete;  // text_ may point into the object
  Part& operator=(const Part&) = delete;

  std::string_view text() const { return text_; }

 private:
  void set(long long value);
  void set(unsigned long long value);
  void set(double value);

  char number_[32];
  std::string_view text_;
};

std::string join(std::initializer_list<Part> parts);

// Joins its arguments. For messages: error paths only.
template <class... Args>
std::string str_cat(const Args&... args) {
  return join({Part(args)...});
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(kda_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == KDA_OK; }
  kda_status code() const { return code_; }
  const std::string& message() const { return message_; }

  // Puts a prefix before the message: "layer 'x': ...".
  Status with_context(const std::string& prefix) const {
    return ok() ? *this : Status(code_, prefix + ": " + message_);
  }

 private:
  kda_status code_ = KDA_OK;
  std::string message_;
};

template <class... Args>
Status invalid_argument(const Args&... args) {
  return Status(KDA_INVALID_ARGUMENT, str_cat(args...));
}
template <class... Args>
Status unsupported(const Args&... args) {
  return Status(KDA_UNSUPPORTED, str_cat(args...));
}
template <class... Args>
Status failed_precondition(const Args&... args) {
  return Status(KDA_FAILED_PRECONDITION, str_cat(args...));
}
template <class... Args>
Status not_found(const Args&... args) {
  return Status(KDA_NOT_FOUND, str_cat(args...));
}
template <class... Args>
Status internal_error(const Args&... args) {
  return Status(KDA_INTERNAL, str_cat(args...));
}

// A value or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

#define KDA_RETURN_IF_ERROR(expr)              \
  do {                                         \
    ::kda::Status kda_status_ = (expr);        \
    if (!kda_status_.ok()) return kda_status_; \
  } while (0)

}  // namespace kda
