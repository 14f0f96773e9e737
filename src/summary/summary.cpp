// Front end of the summary stage: checks, and deals blocks out to workers.
#include "locks/summary.h"

#include "core/cpu_kernels.h"
#include "core/message.h"
#include "core/work_queue.h"
#include "summary/summary_kernels.h"

namespace locks {

namespace detail {
LOCKS_DECLARE_CPU_KERNELS(SummaryKernels, summary_kernels)
}  // namespace detail

using detail::BlockKeys;
using detail::join;

namespace {

// Blocks of one sequence and KV head that make a work item: long enough to hide the queue, short
// enough that one long prompt spreads over all workers.
constexpr std::int64_t kItemBlocks = 32;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Status check(const SummaryParams& params, const PagedTensor& keys, const SequenceBatch& seqs,
             const std::int32_t* begin_tokens, const RecordCache& records) {
  LOCKS_RETURN_IF_ERROR(detail::check_summary_shapes(params, keys, records));
  if (seqs.num_seqs > 0 && begin_tokens == nullptr) {
    return invalid_argument("begin_tokens: null, expected one entry a sequence");
  }
  LOCKS_RETURN_IF_ERROR(validate(seqs, keys, &records));
  for (int i = 0; i < seqs.num_seqs; ++i) {
    if (begin_tokens[i] < 0 || begin_tokens[i] > seqs.lengths[i]) {
      return invalid_argument(join("begin_tokens: sequence ", i, " has ", begin_tokens[i],
                                   ", expected 0 to its length ", seqs.lengths[i]));
    }
  }
  return {};
}

// Where block `block` of a sequence lies in a cache whose cache blocks hold `block_tokens` tokens.
struct Place {
  std::int64_t cache_block;
  std::int64_t offset;  // blocks into the cache block
};

Place find(const BlockTable& table, int seq, std::int64_t block, int block_tokens) {
  const std::int64_t per_cache_block = block_tokens / kBlockTokens;
  return {table.ids[seq * table.seq_stride + block / per_cache_block], block % per_cache_block};
}

// Everything that the items of one call share.
struct Job {
  const PagedTensor& keys;
  const SequenceBatch& seqs;
  const RecordCache& records;
  const float* reference_keys;
  RecordLayout layout;
  std::uint8_t format_code;
  const detail::SummaryKernels& kernels;

  BlockKeys keys_of(int seq, int kv_head, std::int64_t block) const {
    const Place at = find(seqs.cache_blocks, seq, block, keys.block_tokens);
    return {keys.data, keys.type,
            at.cache_block * keys.block_stride + kv_head * keys.head_stride +
                at.offset * kBlockTokens * keys.token_stride,
            keys.token_stride};
  }

  std::uint8_t* record_of(int seq, int kv_head, std::int64_t block) const {
    const Place at = find(seqs.record_blocks, seq, block, records.block_tokens);
    return records.data + at.cache_block * records.block_stride + kv_head * records.head_stride +
           at.offset * records.record_bytes;
  }

  void update(int seq, int kv_head, std::int64_t block) const {
    std::uint8_t* record = record_of(seq, kv_head, block);
    if ((block + 1) * kBlockTokens > seqs.lengths[seq]) {
      std::uint8_t* header = record + layout.header_offset;
      for (int i = 0; i < 8; ++i) header[i] = 0;
      return;
    }
    const float* reference = reference_keys == nullptr
                                 ? nullptr
                                 : reference_keys + std::int64_t{kv_head} * keys.head_dim;
    kernels.build_record(layout, format_code, keys_of(seq, kv_head, block), reference, record);
  }
};

}  // namespace

Status detail::check_summary_shapes(const SummaryParams& params, const PagedTensor& keys,
                                    const RecordCache& records) {
  LOCKS_RETURN_IF_ERROR(validate(params.format));
  LOCKS_RETURN_IF_ERROR(validate(keys, "keys"));
  return validate(records, record_layout(params.format, keys.head_dim), keys.num_kv_heads,
                  "records");
}

void rotate(float* x, int head_dim) { LOCKS_CPU_KERNELS(summary_kernels).rotate(x, head_dim); }

Status summarise_blocks(const SummaryParams& params, const PagedTensor& keys,
                        const SequenceBatch& seqs, const std::int32_t* begin_tokens,
                        const RecordCache& records, std::int64_t* num_records_built,
                        const Executor& executor) {
  if (Status status = check(params, keys, seqs, begin_tokens, records); !status.ok()) {
    return {status.code(), join("summarise_blocks: ", status.message())};
  }
  std::int64_t max_touched = 0, num_completed = 0;
  for (int i = 0; i < seqs.num_seqs; ++i) {
    const std::int64_t first = begin_tokens[i] / kBlockTokens;
    const std::int64_t touched = ceil_div(seqs.lengths[i], kBlockTokens) - first;
    max_touched = touched > max_touched ? touched : max_touched;
    num_completed += seqs.lengths[i] / kBlockTokens - first;
  }
  const std::int64_t kv_heads = keys.num_kv_heads;
  const std::int64_t items_per_seq = ceil_div(max_touched, kItemBlocks) * kv_heads;
  const Job job{keys,
                seqs,
                records,
                params.format.improved ? params.reference_keys : nullptr,
                record_layout(params.format, keys.head_dim),
                encode_format(params.format),
                LOCKS_CPU_KERNELS(summary_kernels)};
  detail::for_each_item(executor, seqs.num_seqs * items_per_seq, [&](std::int64_t item, int) {
    const auto seq = static_cast<int>(item / items_per_seq);
    const auto kv_head = static_cast<int>(item % kv_heads);
    const std::int64_t run = item % items_per_seq / kv_heads;
    if (begin_tokens[seq] == seqs.lengths[seq]) return;
    const std::int64_t first = begin_tokens[seq] / kBlockTokens + run * kItemBlocks;
    const std::int64_t end = ceil_div(seqs.lengths[seq], kBlockTokens);
    for (std::int64_t block = first; block < end && block < first + kItemBlocks; ++block) {
      job.update(seq, kv_head, block);
    }
  });
  if (num_records_built != nullptr) *num_records_built += num_completed * kv_heads;
  return {};
}

}  // namespace locks
