// Torch arguments as the core's plain structs, checked on the way.
#pragma once

#include <cstdint>
#include <optional>

#include "checks.h"
#include "locks/locks.h"

namespace locks::binding {

template <class T>
const T* const_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

locks::ScalarType core_type(const Tensor& tensor);

SummaryFormat format_of(const Checks& checks, std::int64_t code);
Budget budget_of(const Checks& checks, double budget);

// Keys or values whose shape and dtype the caller has checked, who knows what they must agree with.
PagedTensor paged_tensor(const Checks& checks, const char* name, const Tensor& tensor);
PagedTensor checked_keys(const Checks& checks, const Tensor& keys);
RecordCache checked_records(const Checks& checks, const Tensor& records, int num_kv_heads,
                            std::int64_t record_bytes, Strides strides);
BlockTable checked_table(const Checks& checks, const char* name, const Tensor& table, int num_seqs);
const std::int32_t* checked_lengths(const Checks& checks, const Tensor& lengths, Dim num_seqs);
// Null for no reference keys.
const float* checked_reference(const Checks& checks, const std::optional<Tensor>& reference_keys,
                               const PagedTensor& keys);

}  // namespace locks::binding
