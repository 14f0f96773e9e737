// The score stage: an estimate of each page's attention mass, from records alone.
#pragma once

#include <cstddef>

#include "locks/executor.h"
#include "locks/page.h"
#include "locks/status.h"
#include "locks/summary.h"

namespace locks {

inline constexpr int kMaxGroupSize = 71;  // query heads that share a KV head

// Shapes and constants that all stages of a layer's decode step share.
struct AttentionParams {
  int num_query_heads = 0;  // a multiple of num_kv_heads; up to kMaxGroupSize times as many
  int num_kv_heads = 0;
  int head_dim = 0;
  float scale = 0;  // of the softmax, usually head_dim^-1/2

  int group_size() const { return num_query_heads / num_kv_heads; }
};

Status validate(const AttentionParams& attention);
Status validate(const AttentionParams& attention, const QueryTensor& query);
// Checks a cache of keys or values, and that its KV heads and head_dim are the layer's.
Status validate(const AttentionParams& attention, const PagedTensor& tensor, const char* name);

// Queries made ready for scoring: rotated if the format asks for it, scaled by the softmax scale,
// and quantised to 16 bits against their largest channel, so that sums over codes are exact
// integers and scores are the same at every instruction-set level.
std::size_t prepared_query_bytes(const AttentionParams& attention, int num_seqs);
Status prepare_queries(const AttentionParams& attention, const SummaryParams& summary,
                       const QueryTensor& query, int num_seqs, void* prepared,
                       const Executor& executor);

// Log of the estimated attention mass, in nats, of every page that has a record (its block is
// complete):
//   s = q.ref + q.mu + log sum_i exp((V q) . c_i),  q already scaled.
// scores: ragged [sequence, query head, page], see PageIndex. Entries of pages without a record are
// not touched. A record whose header does not match gives its pages NaN; *num_invalid_records (if
// not null) grows by the number of such records.
// Reads each record once: record_bytes for each complete block and KV head of the batch.
// Errors, before any work: kInvalidArgument for shapes, strides, page index, lengths or block ids.
Status score_pages(const AttentionParams& attention, const SummaryParams& summary,
                   const void* prepared, const RecordCache& records, const SequenceBatch& seqs,
                   const PageIndex& pages, float* scores, std::int64_t* num_invalid_records,
                   const Executor& executor);

// The same log mass, exactly, for the pages of the last, incomplete block (at most 16 / B of them),
// which have no record yet: from the keys, in the unrotated channels. Errors as above.
Status score_unrecorded_pages(const AttentionParams& attention, const QueryTensor& query,
                              const PagedTensor& keys, const SequenceBatch& seqs,
                              const PageIndex& pages, float* scores, const Executor& executor);

}  // namespace locks
