// How a decode step divides the caller's workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/workspace.h"
#include "locks/decode.h"

namespace locks::detail {

// Page indices of the whole batch and of the rows that are scored: cut first, since every other
// size follows from the former.
struct DecodeIndex {
  std::int64_t* begin = nullptr;           // [num_seqs + 1]
  std::int64_t* scored_begin = nullptr;    // [num_seqs + 1]
  std::int32_t* scored_lengths = nullptr;  // [num_seqs], 0 for rows that are not scored
};

struct DecodeArrays {
  std::int32_t* ids = nullptr;     // [pages, num_kv_heads], ragged
  std::int32_t* counts = nullptr;  // [num_seqs, num_kv_heads]
  // Ranking and attention follow one another and share their memory.
  std::byte* prepared = nullptr;
  float* scores = nullptr;  // [pages, num_query_heads], ragged
  std::byte* select = nullptr;
  std::byte* attend = nullptr;
};

DecodeIndex cut_decode_index(WorkspaceCutter& cutter, int num_seqs);

// `cutter` continues after cut_decode_index; `pages` is the whole batch's.
DecodeArrays cut_decode_arrays(WorkspaceCutter& cutter, const DecodePlan& plan,
                               const SequenceBatch& seqs, const PageIndex& pages, int num_workers);

}  // namespace locks::detail
