// The paged cache as LOCKS sees it: keys, values and records in place, addressed by block tables.
//
// Words. A *page* is B tokens (4, 8 or 16, by the summary format): the unit of selection. A *block*
// is 16 tokens: the unit of a record. A *cache block* is what the serving engine allocates, one or
// more whole blocks. Everything below describes one layer.
#pragma once

#include <cstdint>

#include "locks/status.h"

namespace locks {

inline constexpr int kBlockTokens = 16;

inline constexpr int kMaxHeadDim = 256;

constexpr bool is_supported_head_dim(int head_dim) {
  return head_dim == 64 || head_dim == 80 || head_dim == 96 || head_dim == 128 || head_dim == 192 ||
         head_dim == 256;
}

enum class ScalarType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

inline constexpr std::int64_t scalar_bytes(ScalarType type) {
  return type == ScalarType::kFloat32 ? 4 : 2;
}

// The keys, or the values, of one layer. Strides are in elements and 64-bit from the start: pools
// pass 2^31 elements. Channels are contiguous; head-major and token-major caches differ in strides
// only. Element (cache block b, KV head h, token t, channel c) lies at
//   b * block_stride + h * head_stride + t * token_stride + c.
struct PagedTensor {
  const void* data = nullptr;
  ScalarType type = ScalarType::kFloat32;
  std::int64_t num_blocks = 0;
  int block_tokens = 0;  // tokens of a cache block: a multiple of 16
  int num_kv_heads = 0;
  int head_dim = 0;  // 64, 80, 96, 128, 192 or 256
  std::int64_t block_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};

// The records of one layer, 16-byte aligned. Strides in bytes. The record of (cache block b, KV
// head h, block k within the cache block) lies at b * block_stride + h * head_stride + k *
// record_bytes.
struct RecordCache {
  std::uint8_t* data = nullptr;
  std::int64_t num_blocks = 0;
  int block_tokens = 0;  // tokens of a cache block of records; may differ from that of the keys
  int num_kv_heads = 0;
  std::int64_t record_bytes = 0;
  std::int64_t block_stride = 0;
  std::int64_t head_stride = 0;
};

// Row i holds the cache block ids of sequence i in token order: ids[i * seq_stride + n]. A
// seq_stride of 0 lets all sequences share one row (many query positions over one context).
struct BlockTable {
  const std::int32_t* ids = nullptr;
  std::int64_t seq_stride = 0;
  std::int64_t max_blocks = 0;  // valid entries a row; a sequence may use fewer
};

// One decode step: sequence i has lengths[i] tokens in the cache, its newest token included. Length
// 0 is a padded row: it reads nothing, its output is zero and its lse is -inf.
struct SequenceBatch {
  int num_seqs = 0;
  const std::int32_t* lengths = nullptr;  // [num_seqs]
  BlockTable cache_blocks;                // of keys and values
  BlockTable record_blocks;               // of records
};

// One query token a sequence: element (i, head, c) lies at i * seq_stride + head * head_stride + c.
struct QueryTensor {
  const void* data = nullptr;
  ScalarType type = ScalarType::kFloat32;
  int num_query_heads = 0;
  std::int64_t seq_stride = 0;
  std::int64_t head_stride = 0;
};

inline constexpr std::int64_t num_pages(std::int64_t length, int page_tokens) {
  return (length + page_tokens - 1) / page_tokens;
}

// Running totals of pages, the index of every per-page array of a batch: entries [0, num_seqs],
// with begin[i] pages in front of sequence i. Per-page arrays are ragged, [sequence][head][page]:
// the entry of (sequence i, head h, page p) of an array with H heads lies at
//   begin[i] * H + h * pages(i) + p.
struct PageIndex {
  const std::int64_t* begin = nullptr;
  int page_tokens = 0;

  std::int64_t pages(int seq) const { return begin[seq + 1] - begin[seq]; }
  // Where the run of (sequence, head) starts in an array with `num_heads` heads.
  std::int64_t offset(int seq, int head, int num_heads) const {
    return begin[seq] * num_heads + head * pages(seq);
  }
};

// Fills begin[0 .. num_seqs] for pages of `page_tokens` tokens.
PageIndex build_page_index(const SequenceBatch& seqs, int page_tokens, std::int64_t* begin);

// Checks that the index is the batch's, for pages of 4, 8 or 16 tokens.
Status validate(const PageIndex& pages, const SequenceBatch& seqs, const char* name);

// Checks shapes, strides and block size of a cache. `name` opens each message.
Status validate(const PagedTensor& tensor, const char* name);
Status validate(const RecordCache& records, const char* name);
// Checks lengths (>= 0, within the table) and every block id that the lengths reach (in [0,
// num_blocks)), in both tables. Linear in the number of cache blocks of the batch. Pass a null
// `records` for a call that touches none.
Status validate(const SequenceBatch& seqs, const PagedTensor& cache, const RecordCache* records);
// The same for the table of records alone, as far as complete blocks reach.
Status validate(const SequenceBatch& seqs, const RecordCache& records);

}  // namespace locks
