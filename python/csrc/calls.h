// What the ops of both devices ask of the core, described from their tensors and checked on the
// way.
#pragma once

#include <cstdint>
#include <optional>

#include "arguments.h"
#include "checks.h"
#include "locks/locks.h"

namespace locks::binding {

inline constexpr int kNumDecodeCounters = sizeof(DecodeCounters) / sizeof(std::int64_t);
inline constexpr int kNumCounters = kNumDecodeCounters + 1;  // and the number of records built

struct SummariseCall {
  SummaryParams summary;
  PagedTensor keys;
  SequenceBatch seqs;
  const std::int32_t* begin_tokens = nullptr;
  RecordCache records;
  std::int64_t* num_built = nullptr;
};

SummariseCall describe_summarise(const Checks& checks, const Tensor& keys,
                                 const Tensor& block_table,
                                 const std::optional<Tensor>& begin_tokens, const Tensor& lengths,
                                 std::int64_t format, const std::optional<Tensor>& reference_keys,
                                 const Tensor& record_table, const Tensor& records,
                                 const std::optional<Tensor>& counters);

// The plan of a layer from numbers alone, for questions about sizes.
DecodePlan plan_of(const Checks& checks, std::int64_t num_query_heads, std::int64_t num_kv_heads,
                   std::int64_t head_dim, std::int64_t format);

// A decode step, all but how its lengths and budget are given.
struct DecodeCall {
  DecodePlan plan;
  QueryTensor query;
  PagedTensor keys;
  PagedTensor values;
  SequenceBatch seqs;
  RecordCache records;
  AttentionOutput output;
};

DecodeCall describe_decode(const Checks& checks, const Tensor& query, const Tensor& keys,
                           const Tensor& values, const Tensor& block_table, const Tensor& records,
                           const Tensor& record_table, std::int64_t format,
                           const std::optional<Tensor>& reference_keys, double scale,
                           const Tensor& output, const std::optional<Tensor>& lse);

}  // namespace locks::binding
