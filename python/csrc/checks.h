// Argument checks of the torch ops. A failed check throws std::runtime_error, which torch raises as
// RuntimeError: the only exception type of the stable ABI. They all come before an op's work.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

#include "locks/status.h"

namespace locks::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One expected dimension: a size, or any size under a name that messages show.
struct Dim {
  Dim(std::int64_t wanted) : size(wanted) {}     // NOLINT(google-explicit-constructor)
  Dim(const char* any_size) : name(any_size) {}  // NOLINT(google-explicit-constructor)

  std::int64_t size = -1;
  const char* name = nullptr;
};

using DTypes = std::span<const ScalarType>;
inline constexpr std::array kFloating{ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline constexpr std::array kFloat32{ScalarType::Float};
inline constexpr std::array kFloat64{ScalarType::Double};
inline constexpr std::array kInt32{ScalarType::Int};
inline constexpr std::array kInt64{ScalarType::Long};
inline constexpr std::array kUInt8{ScalarType::Byte};

enum class Strides {
  kContiguous,  // dense and in row-major order
  kRows,        // the last dimension is contiguous, the others are free
  kOwnRows,     // kRows, and no two elements share memory: for tensors that an op writes
};

inline constexpr std::int32_t kOnCpu = -1;

class Checks {
 public:
  // Tensors must be on the CPU, or on the CUDA device of this number.
  explicit Checks(const char* op, std::int32_t device = kOnCpu) : op_(op), device_(device) {}

  std::int32_t device() const { return device_; }

  // Throws "op: " and the parts, printed one after the other.
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::ostringstream text;
    text << op_ << ": ";
    (text << ... << parts);
    raise(text.str());
  }

  // Device, shape, dtype and strides, in this order.
  void tensor(const char* name, const Tensor& tensor, std::initializer_list<Dim> shape,
              DTypes dtypes, Strides strides) const;

  // The value as an int, if it lies in [0, 2^31).
  int to_int(const char* name, std::int64_t value) const;

  // Throws the message of a failed status, with the op in front unless the core's function of the
  // same name has put it there.
  void ok(const Status& status) const {
    if (status.ok()) return;
    const std::string& message = status.message();
    if (message.starts_with(std::string(op_) + ": ")) raise(message);
    fail(message);
  }
  template <class T>
  const T& value(const Result<T>& result) const {
    ok(result.status());
    return result.value();
  }

 private:
  // torch hands the message on as a C string: a caller's name with a zero in it would cut it off.
  [[noreturn]] static void raise(std::string message) {
    std::replace(message.begin(), message.end(), '\0', '?');
    throw std::runtime_error(message);
  }

  const char* op_;
  std::int32_t device_;
};

// The stride of a dimension, or `dense` where the dimension has one entry at most: torch leaves
// such a stride undefined.
std::int64_t stride_or(const Tensor& tensor, int dim, std::int64_t dense);

}  // namespace locks::binding
