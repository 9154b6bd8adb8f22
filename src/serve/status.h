// Status and Result of the serving engine: a kda_status and a message. Nothing throws.
#pragma once

#include <fmt/format.h>
#include <kda/kda.h>

#include <optional>
#include <string>
#include <utility>

namespace kda::serve {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(kda_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == KDA_OK; }
  kda_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  kda_status code_ = KDA_OK;
  std::string message_;
};

template <class... Args>
Status error(kda_status code, fmt::format_string<Args...> format, Args&&... args) {
  return Status(code, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
Status invalid_argument(fmt::format_string<Args...> format, Args&&... args) {
  return Status(KDA_INVALID_ARGUMENT, fmt::format(format, std::forward<Args>(args)...));
}

// What a call of the C ABI said.
inline Status from_kda(kda_status code) {
  return code == KDA_OK ? Status() : Status(code, fmt::format("{}: {}", kda_status_name(code), kda_last_error()));
}

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

#define KDA_SERVE_TRY(expr)                                \
  do {                                                     \
    ::kda::serve::Status kda_serve_status_ = (expr);       \
    if (!kda_serve_status_.ok()) return kda_serve_status_; \
  } while (0)

}  // namespace kda::serve
