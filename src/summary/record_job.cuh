// Where the keys and the record of a block lie, for the kernels that build records.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "locks/summary.h"
#include "summary/rotate_rows.cuh"

namespace locks::detail {

// What all records of a launch share. Device pointers.
struct RecordJob {
  RecordLayout layout;
  std::uint8_t format_code;
  bool keys_aligned;            // rows of keys begin at multiples of 16 bytes
  const float* reference_keys;  // [KV heads, head_dim]; null: zero
  PagedTensor keys;
  RecordCache records;
  BlockTable cache_blocks;
  BlockTable record_blocks;
};

inline bool rows_aligned(const PagedTensor& t) {
  const std::int64_t bytes = scalar_bytes(t.type);
  return is_aligned_to(t.data, 16) && t.block_stride * bytes % 16 == 0 &&
         t.head_stride * bytes % 16 == 0 && t.token_stride * bytes % 16 == 0;
}

inline RecordJob make_record_job(const RecordLayout& layout, std::uint8_t format_code,
                                 const float* reference_keys, const PagedTensor& keys,
                                 const RecordCache& records, const SequenceBatch& seqs) {
  return {layout, format_code, rows_aligned(keys), reference_keys,
          keys,   records,     seqs.cache_blocks,  seqs.record_blocks};
}

// Element of token 0, channel 0 of a block; -1 if the table names a cache block that does not
// exist.
__device__ inline std::int64_t find_keys(const RecordJob& job, int seq, std::int64_t block,
                                         int head) {
  const auto at = static_cast<std::uint32_t>(block);  // lengths are 32-bit
  const auto blocks = static_cast<std::uint32_t>(job.keys.block_tokens) / kBlockTokens;
  const std::int64_t id = job.cache_blocks.ids[seq * job.cache_blocks.seq_stride + at / blocks];
  if (id < 0 || id >= job.keys.num_blocks) return -1;
  return id * job.keys.block_stride + head * job.keys.head_stride +
         at % blocks * kBlockTokens * job.keys.token_stride;
}

// Where a block's record lies; null if the table names a cache block that does not exist.
__device__ inline std::uint8_t* find_record(const RecordCache& records, const BlockTable& table,
                                            int seq, std::int64_t block, int head) {
  const auto at = static_cast<std::uint32_t>(block);
  const auto blocks = static_cast<std::uint32_t>(records.block_tokens) / kBlockTokens;
  const std::int64_t id = table.ids[seq * table.seq_stride + at / blocks];
  if (id < 0 || id >= records.num_blocks) return nullptr;
  return records.data + id * records.block_stride + head * records.head_stride +
         at % blocks * records.record_bytes;
}

__device__ inline void clear_header(const RecordJob& job, int seq, std::int64_t block, int head) {
  std::uint8_t* record = find_record(job.records, job.record_blocks, seq, block, head);
  if (record != nullptr) *reinterpret_cast<std::uint64_t*>(record + job.layout.header_offset) = 0;
}

}  // namespace locks::detail
