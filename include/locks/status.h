// Errors as values: no public function of LOCKS throws.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace locks {

enum class StatusCode : std::uint8_t {
  kOk,
  kInvalidArgument,  // a value outside what the function documents; the message names both
  kUnsupported,      // a legal value that this build or machine cannot serve
};

// The outcome of a call. Success holds no message and allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status invalid_argument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}
inline Status unsupported(std::string message) {
  return {StatusCode::kUnsupported, std::move(message)};
}

// A value, or the reason why there is none. `value()` may be called only if `ok()`.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  const T& value() const { return value_; }

 private:
  T value_{};
  Status status_;
};

}  // namespace locks

// Returns the status of `expression` from the enclosing function unless it is ok.
#define LOCKS_RETURN_IF_ERROR(expression)                                                        \
  do {                                                                                           \
    if (::locks::Status locks_status_ = (expression); !locks_status_.ok()) return locks_status_; \
  } while (false)
