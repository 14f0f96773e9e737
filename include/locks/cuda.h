// The CUDA backend: the same stages on device memory. Present in builds with LOCKS_HAVE_CUDA.
//
// Every pointer within the arguments (cache, tables, lengths, records, reference keys) is a device
// pointer, the structs themselves live on the host. Work is enqueued on `stream` (a cudaStream_t)
// of the current device; nothing is allocated and nothing waits, launch shapes do not depend on
// data: a call can be captured into a graph and replayed with other lengths and contents.
#pragma once

#include <cstddef>
#include <cstdint>

#include "locks/decode.h"
#include "locks/summary.h"

namespace locks {

// summarise_blocks on the GPU: the same bytes as on the CPU. Nobody can check lengths, begin_tokens
// and block ids here: they must not be negative, and lengths lie within the tables. A block whose
// id is outside its cache is skipped and not counted; begin_tokens past the length build nothing.
// *num_records_built (device memory, may be null) grows by the records written.
// Reads 16 * head_dim * scalar_bytes(keys.type) bytes a record and writes record_bytes.
// Errors: kInvalidArgument for formats, shapes and strides; kUnsupported with CUDA's own words.
Status summarise_blocks_cuda(const SummaryParams& params, const PagedTensor& keys,
                             const SequenceBatch& seqs, const std::int32_t* begin_tokens,
                             const RecordCache& records, std::int64_t* num_records_built,
                             void* stream);

// For KV that came without its records, from another machine or a disk: reads the keys of every
// complete block of the batch, blocks [0, lengths[i] / 16), and builds the records whose header
// does not say that they describe these keys in this format. rows: device [num_seqs], rows with 0
// are left alone; null: all are verified. *num_records_rebuilt (device memory, may be null) grows
// by the records written; one that several rows share may count more than once. Errors and bad data
// as above.
Status verify_blocks_cuda(const SummaryParams& params, const PagedTensor& keys,
                          const SequenceBatch& seqs, const std::uint8_t* rows,
                          const RecordCache& records, std::int64_t* num_records_rebuilt,
                          void* stream);

// One sequence of a step, decided on the device by plan_rows_cuda; the same for all layers with
// pages of one size.
struct RowPlan {
  std::int32_t length;           // tokens, the newest included; 0: a padded row
  std::int32_t first_new_block;  // records of blocks [first_new_block, length / 16) are built
  std::int32_t scored_blocks;    // complete blocks to score; 0: the row is read whole (or padded)
  std::int32_t budget_pages;     // pages to take of a scored row, always-read ones included
  std::int32_t first_tile;       // tiles of the scored rows in front of this one
  std::int32_t raised;           // 1: the budget was below the always-read set
};

inline constexpr std::uint8_t kRowIsExact = 1;  // read whole, whatever the budget
// All its records are built anew first. Another row of the step that shares its blocks may read
// their records meanwhile: unless those are valid already, it has to have this flag too.
inline constexpr std::uint8_t kRowIsRebuilt = 2;

// What decode_cuda counts: the fields of DecodeCounters, then the number of records built.
inline constexpr int kNumCudaCounters = sizeof(DecodeCounters) / sizeof(std::int64_t) + 1;

// What bounds the scoring of a step, apart from the budget.
struct ScoreLimits {
  // Sequences of at most so many tokens are read whole: below it that is as fast.
  std::int32_t dense_tokens = 0;
  // Room for scores in the workspace, in tiles of 256 tokens, over all sequences of a step. Those
  // that find no room are read whole.
  std::int32_t max_tiles = 0;
};

// Plans a step whose sequences have lengths[i] tokens, the one new token included. row_flags:
// kRowIs..., may be null. plan: [num_rows + 1] entries; the last one's first_tile is the number of
// all tiles. Lengths below 0 count as 0. lengths, row_flags and plan are device pointers.
// Errors: kInvalidArgument for the budget, page_tokens other than 4, 8 and 16, and limits below 0.
Status plan_rows_cuda(const std::int32_t* lengths, const std::uint8_t* row_flags, int num_rows,
                      const Budget& budget, int page_tokens, const ScoreLimits& limits,
                      RowPlan* plan, void* stream);

// Bytes of workspace for steps of at most `num_rows` rows, on the device, at any address.
std::size_t decode_workspace_bytes_cuda(const DecodePlan& plan, int num_rows,
                                        std::int32_t max_tiles);

// The keys and values of the tokens that a step adds, one a row, for steps that write them to the
// caches themselves: [row][KV head][head_dim] of the caches' type, strides in elements, rows
// aligned to 16 bytes. All pointers are null where the caches hold the tokens already.
struct NewTokens {
  const void* keys = nullptr;
  const void* values = nullptr;
  std::int64_t key_seq_stride = 0;
  std::int64_t key_head_stride = 0;
  std::int64_t value_seq_stride = 0;
  std::int64_t value_head_stride = 0;
  // Device [num_seqs]: where a row's token goes, as block id * block_tokens + token of the block;
  // below 0: nowhere, and the caches hold the row as it is. It is the place that the row's length
  // and its table name for the newest token, and no other row's; nor does it lie in a block that is
  // incomplete in another row.
  const std::int64_t* slots = nullptr;
};

// Which pages a call read, for tests and evaluation: mask[(row * num_kv_heads + head) * num_pages +
// page] is 1 where the page was read and 0 elsewhere.
struct SelectionMask {
  std::uint8_t* mask = nullptr;  // null: not wanted
  std::int64_t num_pages = 0;    // of a run; pages beyond it are not told
};

// One layer's decode step: first the keys and values of `added` are written to the caches and the
// records of the blocks that the step completed are built, then pages are scored, selected and
// attended to as decode() does. `rows` is a plan for seqs.num_seqs rows, at most 65,535, and
// max_tiles no less than that plan's limits.max_tiles; seqs.lengths is not used.
// Launch shapes hang on num_seqs and the layer's shapes alone.
//
// Differs from decode(): masses are kept as bf16, so that of pages with shares within 0.4 % of each
// other either may be taken; the choice is exact on what is kept, and the same in any batch. If the
// always-read pages and those without a finite score exceed the budget, all pages are read.
// counters: DecodeCounters and then the number of records built, kNumCudaCounters numbers.
// Keys and values: both bf16 or both fp16, rows aligned to 16 bytes. Writes `records`, `output`,
// `selected`, the counters, the workspace and, at the slots of `added`, the caches; none of them
// may overlap another argument.
// Bytes, of each KV head: record_bytes a complete block of a scored row, and the keys and values of
// the tokens attended to; a block that the step completed costs what summarise_blocks_cuda says.
// Errors: kInvalidArgument for shapes, strides, alignment and new tokens given in part;
// kUnsupported for float32 caches, keys and values of different types, and with CUDA's own words.
// Device data cannot be checked: block ids and slots must lie within the caches.
Status decode_cuda(const DecodePlan& plan, const QueryTensor& query, const PagedTensor& keys,
                   const PagedTensor& values, const NewTokens& added, const RecordCache& records,
                   const SequenceBatch& seqs, const RowPlan* rows, std::int32_t max_tiles,
                   const AttentionOutput& output, const SelectionMask& selected,
                   std::int64_t* counters, void* workspace, std::size_t workspace_bytes,
                   void* stream);

}  // namespace locks
