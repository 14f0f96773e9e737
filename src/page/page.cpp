// Validation of the paged cache and its tables.
#include "locks/page.h"

#include "core/message.h"

namespace locks {

using detail::join;

namespace {

// Beyond every format's: four pages of three int8 rows of 256 channels take 3,072 bytes.
constexpr std::int64_t kMaxRecordBytes = 4096;

Status check_block_tokens(const char* name, int block_tokens) {
  if (block_tokens >= kBlockTokens && block_tokens % kBlockTokens == 0) return {};
  return invalid_argument(
      join(name, ": block_tokens = ", block_tokens, ", expected a positive multiple of 16"));
}

// Every id that `tokens` of sequence `seq` reach.
Status check_ids(const char* table, const BlockTable& blocks, int seq, std::int64_t tokens,
                 int block_tokens, std::int64_t num_blocks) {
  const std::int64_t needed = (tokens + block_tokens - 1) / block_tokens;
  if (needed > blocks.max_blocks) {
    return invalid_argument(join(table, ": sequence ", seq, " needs ", needed,
                                 " cache blocks, the table has ", blocks.max_blocks));
  }
  if (needed == 0) return {};
  if (blocks.ids == nullptr) return invalid_argument(join(table, ": ids is null"));
  const std::int32_t* row = blocks.ids + seq * blocks.seq_stride;
  for (std::int64_t n = 0; n < needed; ++n) {
    if (row[n] < 0 || row[n] >= num_blocks) {
      return invalid_argument(join(table, ": sequence ", seq, ", entry ", n, " = ", row[n],
                                   ", expected 0 to ", num_blocks - 1));
    }
  }
  return {};
}

Status check_lengths(const SequenceBatch& seqs) {
  if (seqs.num_seqs < 0) {
    return invalid_argument(join("num_seqs = ", seqs.num_seqs, ", expected >= 0"));
  }
  if (seqs.num_seqs > 0 && seqs.lengths == nullptr) return invalid_argument("lengths: null");
  for (int i = 0; i < seqs.num_seqs; ++i) {
    if (seqs.lengths[i] < 0) {
      return invalid_argument(
          join("lengths: sequence ", i, " has ", seqs.lengths[i], ", expected >= 0"));
    }
  }
  return {};
}

}  // namespace

PageIndex build_page_index(const SequenceBatch& seqs, int page_tokens, std::int64_t* begin) {
  begin[0] = 0;
  for (int i = 0; i < seqs.num_seqs; ++i) {
    begin[i + 1] = begin[i] + num_pages(seqs.lengths[i], page_tokens);
  }
  return {begin, page_tokens};
}

Status validate(const PageIndex& pages, const SequenceBatch& seqs, const char* name) {
  if (pages.begin == nullptr) return invalid_argument(join(name, ": begin is null"));
  if (pages.page_tokens != 4 && pages.page_tokens != 8 && pages.page_tokens != 16) {
    return invalid_argument(
        join(name, ": page_tokens = ", pages.page_tokens, ", expected 4, 8 or 16"));
  }
  LOCKS_RETURN_IF_ERROR(check_lengths(seqs));
  for (int i = 0; i < seqs.num_seqs; ++i) {
    const std::int64_t held = num_pages(seqs.lengths[i], pages.page_tokens);
    if (pages.pages(i) != held) {
      return invalid_argument(join(name, ": sequence ", i, " has ", pages.pages(i), ", expected ",
                                   held, " for its length"));
    }
  }
  return {};
}

Status validate(const PagedTensor& tensor, const char* name) {
  if (tensor.data == nullptr) return invalid_argument(join(name, ": data is null"));
  LOCKS_RETURN_IF_ERROR(check_block_tokens(name, tensor.block_tokens));
  if (!is_supported_head_dim(tensor.head_dim)) {
    return invalid_argument(
        join(name, ": head_dim = ", tensor.head_dim, ", expected 64, 80, 96, 128, 192 or 256"));
  }
  if (tensor.num_kv_heads < 1) {
    return invalid_argument(
        join(name, ": num_kv_heads = ", tensor.num_kv_heads, ", expected >= 1"));
  }
  if (tensor.num_blocks < 0) {
    return invalid_argument(join(name, ": num_blocks = ", tensor.num_blocks, ", expected >= 0"));
  }
  if (tensor.token_stride < tensor.head_dim) {
    return invalid_argument(join(name, ": token_stride = ", tensor.token_stride,
                                 " elements, expected at least head_dim = ", tensor.head_dim,
                                 " (channels must be contiguous)"));
  }
  if (tensor.head_stride < 0 || tensor.block_stride < 0) {
    return invalid_argument(join(name, ": head_stride = ", tensor.head_stride,
                                 ", block_stride = ", tensor.block_stride, ", expected >= 0"));
  }
  return {};
}

Status validate(const RecordCache& records, const char* name) {
  if (records.data == nullptr) return invalid_argument(join(name, ": data is null"));
  LOCKS_RETURN_IF_ERROR(check_block_tokens(name, records.block_tokens));
  if (records.num_kv_heads < 1) {
    return invalid_argument(
        join(name, ": num_kv_heads = ", records.num_kv_heads, ", expected >= 1"));
  }
  if (records.record_bytes < 32 || records.record_bytes > kMaxRecordBytes ||
      records.record_bytes % 32 != 0) {
    return invalid_argument(join(name, ": record_bytes = ", records.record_bytes,
                                 ", expected a multiple of 32 from 32 to ", kMaxRecordBytes));
  }
  if (records.num_blocks < 0 || records.block_stride < 0) {
    return invalid_argument(join(name, ": num_blocks = ", records.num_blocks,
                                 ", block_stride = ", records.block_stride, ", expected >= 0"));
  }
  const std::int64_t head_bytes = records.block_tokens / kBlockTokens * records.record_bytes;
  if (records.head_stride < head_bytes && records.num_kv_heads > 1) {
    return invalid_argument(join(name, ": head_stride = ", records.head_stride,
                                 " bytes, expected at least ", head_bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(records.data) % 16 != 0 || records.head_stride % 16 != 0 ||
      records.block_stride % 16 != 0) {
    return invalid_argument(join(name, ": address or strides are not multiples of 16 bytes"));
  }
  return {};
}

Status validate(const SequenceBatch& seqs, const RecordCache& records) {
  LOCKS_RETURN_IF_ERROR(check_lengths(seqs));
  for (int i = 0; i < seqs.num_seqs; ++i) {
    const std::int64_t complete = seqs.lengths[i] / kBlockTokens * kBlockTokens;
    LOCKS_RETURN_IF_ERROR(check_ids("record block table", seqs.record_blocks, i, complete,
                                    records.block_tokens, records.num_blocks));
  }
  return {};
}

Status validate(const SequenceBatch& seqs, const PagedTensor& cache, const RecordCache* records) {
  LOCKS_RETURN_IF_ERROR(check_lengths(seqs));
  for (int i = 0; i < seqs.num_seqs; ++i) {
    const std::int64_t length = seqs.lengths[i];
    LOCKS_RETURN_IF_ERROR(check_ids("block table", seqs.cache_blocks, i, length, cache.block_tokens,
                                    cache.num_blocks));
    if (records != nullptr) {
      LOCKS_RETURN_IF_ERROR(check_ids("record block table", seqs.record_blocks, i, length,
                                      records->block_tokens, records->num_blocks));
    }
  }
  return {};
}

}  // namespace locks
