// What the kernels of a decode step on the GPU share: the plan of the rows, the workspace between
// the launches, and the launches themselves. One step of one layer is three launches:
//
//   prepare        writes the new tokens' keys and values to the caches, if the call brings them;
//                  builds the records of blocks that the step completed; rotates and quantises q;
//                  exact logits of the tokens that no record covers yet
//   score          streams all records of the sparse rows once; writes every page's mass
//   select_attend  picks one set of pages per (row, KV head) and attends over it; rows that are
//                  read whole are attended to without a look at scores
//
// plan_rows runs once a step for all layers, outside the graph. Launch shapes hang on the number of
// rows and on the layer's shapes only; all lengths stay on the device.
//
// Who waits for what (programmatic dependent launch). A launch may begin while the ones in front of
// it are at work; what it must not read or write before their end lies behind its wait:
//   - prepare lets score begin at once, or, in CTAs whose first group is scored, when its own wait
//     is over. Before that wait it reads the plan, the block tables and the slots alone; plan_rows,
//     which may be right in front, makes its writes visible before it ends. Within prepare the new
//     keys are read from where the call brings them, never from the cache, but by the CTA that has
//     written them.
//   - score fetches, before its wait, the plan, the block tables and the records that prepare does
//     not build for the same row; it reads no key. A row that is rebuilt may share blocks with one
//     that is scored: equal keys give equal bytes, so a valid record does not change by that. It
//     lets select_attend begin only behind its wait for prepare.
//   - So all that was there before the step (queries, keys, values, tables, plan) and all that
//     prepare wrote, new keys and values among it, is final for select_attend from its first
//     instruction on. It waits for score before it reads what score wrote, and in any case before
//     it ends.
// A wait is for the end of the launch in front; each launch waits in one CTA at least, whatever
// there is to do, so that its end means the end of all in front of it.
//
// Units. Logits are in log2 units here: scale * log2(e) * q.k. The mass of a page is
// sum_i 2^(logit_i - base), with one `base` for each (row, query head).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/cpu_namespace.h"
#include "locks/attend.h"
#include "locks/cuda.h"
#include "locks/page.h"
#include "locks/score.h"
#include "locks/select.h"
#include "locks/summary.h"

namespace locks::detail {

// Blocks a tile. A tile is the unit of scoring work, and of the sums of masses: its boundaries are
// fixed within a sequence, and so is the order of every sum, whatever the batch.
inline constexpr int kTileBlocks = 16;
// Blocks whose masses lie side by side: 8 masses of 2 bytes are one store.
inline constexpr int kMassBlocks = 8;

// A tile whose masses might leave the range of a float is scaled down by 2^(kShiftUnit * shift).
inline constexpr int kShiftUnit = 64;
// A tile is shifted until its sum is at most this.
inline constexpr float kLargestTileSum = 0x1p100f;

struct PlanArguments {
  const std::int32_t* lengths;    // device [num_rows]
  const std::uint8_t* row_flags;  // device [num_rows], kRowIs...; null: none
  int num_rows;
  Budget budget;
  int page_tokens;
  ScoreLimits limits;
  RowPlan* plan;  // device [num_rows + 1]
};

// Blocks of a row, rounded up to whole tiles; what its masses take room for.
LOCKS_HD constexpr std::int32_t num_tiles(std::int32_t blocks) {
  return (blocks + kTileBlocks - 1) / kTileBlocks;
}

// What lies between the launches, cut from the caller's workspace. Per (row, KV head, head g of the
// group) the masses of a row are one run of bf16, padded to whole tiles.
struct StepWorkspace {
  float* rotated;  // [row, query head, d]: scale * log2(e) * q, rotated if the format asks
  std::uint32_t* fragments;   // [row, KV head, fragment_words]: q as the tuned scorer's operand
  float* base;                // [row, query head]: base of the masses, see above
  float* log2_tail;           // [row, query head]: log2 of the mass of the tokens without a record,
                              // relative to base; -inf if there is none
  __nv_bfloat16* masses;      // see mass_index; NaN: not finite, or an invalid record
  float* tile_sums;           // see tile_index; sum of the finite masses of a tile as computed in
                              // float; negative: the tile is shifted, and the sum is its magnitude
  std::int32_t* tile_shifts;  // same index; holds only where the tile sum is negative
};

// The place of the masses of (row, query head) in units of tiles; tile t of it is at + t.
LOCKS_HD constexpr std::int64_t tile_index(const RowPlan& row, int num_query_heads,
                                           int query_head) {
  return std::int64_t{row.first_tile} * num_query_heads +
         std::int64_t{query_head} * num_tiles(row.scored_blocks);
}

// Where the mass of page p of block b (within its sequence) lies behind the start of its run:
// groups of 8 blocks, in a group page by page, 8 blocks side by side.
LOCKS_HD constexpr std::int64_t mass_offset(std::int64_t block, int page, int pages_per_block) {
  return block / kMassBlocks * (kMassBlocks * pages_per_block) + page * kMassBlocks +
         block % kMassBlocks;
}
// Start of the run of (row, query head): tile_index * kTileBlocks * pages_per_block.

// Everything that the three launches of one layer need; a kernel parameter, passed by value.
// Pointers within are device pointers. seqs.lengths is not used: lengths are the plan's.
struct StepArguments {
  AttentionParams attention;
  RecordLayout layout;
  std::uint8_t format_code;
  const float* reference_keys;  // null: zero; null for formats that are not improved
  QueryTensor query;
  PagedTensor keys;
  PagedTensor values;
  RecordCache records;
  SequenceBatch seqs;
  const RowPlan* plan;
  AttentionOutput output;
  std::uint8_t* selected;  // [row, KV head, selected_pages], 1: read; null: not wanted
  std::int64_t selected_pages;
  unsigned long long* counters;  // DecodeCounters, then records built
  StepWorkspace workspace;
  bool drops_masses;  // select_attend leaves them undefined, if nobody wants `selected`
  NewTokens added;    // prepare writes these to `keys` and `values`
};

enum StepCounter {
  kSparseRows,
  kDenseRows,
  kRecordsRead,
  kPagesRead,
  kBytesRead,
  kBytesDense,
  kNonfinitePages,
  kInvalidRecords,
  kRaisedBudgets,
  kBytesUnused,
  kRecordsBuilt
};

// 32-bit words of `fragments` for one (row, KV head): src/score/query_fragments.cuh.
int fragment_words(const SummaryFormat& format, int group_size, int head_dim);

// Cuts a workspace of decode_workspace_bytes_cuda(plan, num_rows, max_tiles) bytes.
StepWorkspace cut_step_workspace(void* workspace, const DecodePlan& plan, int num_rows,
                                 std::int32_t max_tiles);

// Launches, in this order on one stream.
cudaError_t launch_plan_rows(const PlanArguments& arguments, cudaStream_t stream);
cudaError_t launch_prepare(const StepArguments& arguments, cudaStream_t stream);
cudaError_t launch_score(const StepArguments& arguments, cudaStream_t stream);
cudaError_t launch_select_attend(const StepArguments& arguments, cudaStream_t stream);

}  // namespace locks::detail
