// Status and Result: how functions inside the library report failure. Nothing throws.
#pragma once

#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "kda/types.h"

namespace kda {

// Joins its arguments as an output stream would. For messages: error paths only.
template <class... Args>
std::string str_cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
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

#define KDA_RETURN_IF_ERROR(expr)             \
  do {                                        \
    ::kda::Status kda_status_ = (expr);       \
    if (!kda_status_.ok()) return kda_status_; \
  } while (0)

}  // namespace kda
