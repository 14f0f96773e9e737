// The attend stage: exact attention over chosen pages.
#pragma once

#include <cstddef>

#include "locks/executor.h"
#include "locks/page.h"
#include "locks/score.h"
#include "locks/select.h"
#include "locks/status.h"

namespace locks {

// Where the result goes. Element (sequence i, query head h, channel c) of the output lies at
// i * seq_stride + h * head_stride + c.
struct AttentionOutput {
  void* data = nullptr;
  ScalarType type = ScalarType::kFloat32;
  std::int64_t seq_stride = 0;
  std::int64_t head_stride = 0;
  float* lse = nullptr;  // [num_seqs, num_query_heads]: ln sum_i exp(scale q.k_i); may be null
};

// Shapes of keys, values and output against the layer's, and of values against keys.
Status validate(const AttentionParams& attention, const PagedTensor& keys,
                const PagedTensor& values);
Status validate(const AttentionParams& attention, int num_seqs, const AttentionOutput& output);

// o = sum_i softmax(scale q.k_i) v_i over the tokens of the chosen pages, masked to the sequence's
// length, accumulated in float. Splits have fixed boundaries and are merged in order: the result
// does not depend on the batch, the number of workers or timing. An empty set gives zeros and
// lse = -inf. Output must not overlap any input.
//
// Reads a row of keys and one of values for each chosen token and KV head, once for the whole
// group. workspace: attend_workspace_bytes, any content and alignment. Errors, before any work:
// kInvalidArgument for shapes, strides, lengths, block ids, or page sets that are not ascending
// page numbers of their sequence.
std::size_t attend_workspace_bytes(const AttentionParams& attention, const SequenceBatch& seqs,
                                   const PageIndex& pages, int num_workers);
Status attend_pages(const AttentionParams& attention, const QueryTensor& query,
                    const PagedTensor& keys, const PagedTensor& values, const SequenceBatch& seqs,
                    const PageIndex& pages, const PageSets& sets, const AttentionOutput& output,
                    void* workspace, const Executor& executor);

}  // namespace locks
