// What the files of the summary stage ask of each other.
#pragma once

#include <cstdint>

#include "locks/summary.h"

namespace locks::detail {

// The 16 keys of one block and KV head, in the cache.
struct BlockKeys {
  const void* data;
  ScalarType type;
  std::int64_t first;         // element index of token 0, channel 0
  std::int64_t token_stride;  // in elements
};

// The checks that need no table: formats, shapes, strides and the size of a record.
Status check_summary_shapes(const SummaryParams& params, const PagedTensor& keys,
                            const RecordCache& records);

struct SummaryKernels {
  // Writes every byte of the record. reference: [head_dim], or null for zero.
  void (*build_record)(const RecordLayout& layout, std::uint8_t format_code, const BlockKeys& keys,
                       const float* reference, std::uint8_t* record);
  void (*rotate)(float* x, int head_dim);
};

}  // namespace locks::detail
