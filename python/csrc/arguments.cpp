#include "arguments.h"

#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

namespace locks::binding {

locks::ScalarType core_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return locks::ScalarType::kBFloat16;
    case ScalarType::Half:
      return locks::ScalarType::kFloat16;
    default:
      return locks::ScalarType::kFloat32;
  }
}

SummaryFormat format_of(const Checks& checks, std::int64_t code) {
  return checks.value(decode_format(checks.to_int("format", code)));
}

PagedTensor paged_tensor(const Checks& checks, const char* name, const Tensor& tensor) {
  PagedTensor paged;
  paged.data = tensor.const_data_ptr();
  paged.type = core_type(tensor);
  paged.num_blocks = tensor.size(0);
  paged.num_kv_heads = checks.to_int(name, tensor.size(1));
  paged.block_tokens = checks.to_int(name, tensor.size(2));
  paged.head_dim = checks.to_int(name, tensor.size(3));
  paged.token_stride = stride_or(tensor, 2, paged.head_dim);
  paged.head_stride = stride_or(tensor, 1, paged.token_stride * paged.block_tokens);
  paged.block_stride = stride_or(tensor, 0, paged.head_stride * paged.num_kv_heads);
  checks.ok(validate(paged, name));
  return paged;
}

PagedTensor checked_keys(const Checks& checks, const Tensor& keys) {
  checks.tensor("keys", keys, {"num_blocks", "kv_heads", "block_tokens", "head_dim"}, kFloating,
                Strides::kRows);
  return paged_tensor(checks, "keys", keys);
}

RecordCache checked_records(const Checks& checks, const Tensor& records, int num_kv_heads,
                            std::int64_t record_bytes, Strides strides) {
  checks.tensor("records", records, {"num_blocks", num_kv_heads, "block_tokens / 16", record_bytes},
                kUInt8, strides);
  const std::int64_t blocks = records.size(2);
  if (stride_or(records, 2, record_bytes) != record_bytes) {
    checks.fail("records: expected the records of a block side by side (stride ", record_bytes,
                "), got stride ", records.stride(2));
  }
  RecordCache cache;
  // The core writes through this pointer only where the op declares that it does.
  cache.data = const_cast<std::uint8_t*>(const_data<std::uint8_t>(records));
  cache.num_blocks = records.size(0);
  cache.num_kv_heads = num_kv_heads;
  cache.block_tokens = checks.to_int("records", blocks * kBlockTokens);
  cache.record_bytes = record_bytes;
  cache.head_stride = stride_or(records, 1, record_bytes * blocks);
  cache.block_stride = stride_or(records, 0, cache.head_stride * num_kv_heads);
  checks.ok(validate(cache, "records"));
  return cache;
}

BlockTable checked_table(const Checks& checks, const char* name, const Tensor& table,
                         int num_seqs) {
  checks.tensor(name, table, {num_seqs, "max_blocks"}, kInt32, Strides::kRows);
  return {const_data<std::int32_t>(table), stride_or(table, 0, table.size(1)), table.size(1)};
}

const std::int32_t* checked_lengths(const Checks& checks, const Tensor& lengths, Dim num_seqs) {
  checks.tensor("lengths", lengths, {num_seqs}, kInt32, Strides::kContiguous);
  const std::int32_t* data = const_data<std::int32_t>(lengths);
  if (checks.device() != kOnCpu) return data;  // only its kernel can read them
  for (std::int64_t i = 0; i < lengths.size(0); ++i) {
    if (data[i] < 0) {
      checks.fail("lengths: expected >= 0, got ", data[i], " for sequence ", i);
    }
  }
  return data;
}

const float* checked_reference(const Checks& checks, const std::optional<Tensor>& reference_keys,
                               const PagedTensor& keys) {
  if (!reference_keys.has_value()) return nullptr;
  checks.tensor("reference_keys", *reference_keys, {keys.num_kv_heads, keys.head_dim}, kFloat32,
                Strides::kContiguous);
  return const_data<float>(*reference_keys);
}

Budget budget_of(const Checks& checks, double budget) {
  // Doubles hold each whole number up to here; a longer context does not exist.
  constexpr double kMostTokens = 9007199254740992.0;
  if (std::isinf(budget) && budget > 0) return Budget::all();
  if (budget > 0 && budget < 1) return Budget::fraction(budget);
  if (budget >= 1 && budget <= kMostTokens && budget == std::floor(budget)) {
    return Budget::tokens(static_cast<std::int64_t>(budget));
  }
  std::array<char, 32> text;  // the shortest digits that name this double
  const auto end = std::to_chars(text.data(), text.data() + text.size(), budget).ptr;
  checks.fail("budget: expected a whole number of tokens >= 1, a fraction in (0, 1) or inf, got ",
              std::string_view(text.data(), end));
}

}  // namespace locks::binding
