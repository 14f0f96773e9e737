// Validates, prepares queries, and deals runs of blocks out to the kernels.
#include "locks/score.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "core/cpu_kernels.h"
#include "core/message.h"
#include "core/scalar.h"
#include "core/work_queue.h"
#include "core/workspace.h"
#include "score/score_kernels.h"

namespace locks {

namespace detail {
LOCKS_DECLARE_CPU_KERNELS(ScoreKernels, score_kernels)
}  // namespace detail

using detail::join;

namespace {

// The arrays of a prepared batch of queries.
struct PreparedQueries {
  std::int16_t* codes;  // [sequence, query head, padded channels]
  float* scales;        // [sequence, query head]
  float* references;    // [sequence, query head]
  std::size_t bytes;
};

PreparedQueries cut_prepared(const AttentionParams& attention, int num_seqs, void* prepared) {
  detail::WorkspaceCutter cutter(prepared);
  const auto rows =
      static_cast<std::size_t>(num_seqs) * static_cast<std::size_t>(attention.num_query_heads);
  const auto channels = static_cast<std::size_t>(detail::padded_channels(attention.head_dim));
  PreparedQueries queries{};
  queries.codes = cutter.take<std::int16_t>(rows * channels);
  queries.scales = cutter.take<float>(rows);
  queries.references = cutter.take<float>(rows);
  queries.bytes = cutter.bytes();
  return queries;
}

// The largest code: 32512 * 128 * 256, the largest sum over 256 channels of int8, fits 32 bits.
constexpr float kMaxQueryCode = 32512.0f;

// x = code * scale; returns the scale. A value that is NaN or infinite makes the scale NaN, and
// with it every score. Below the normal numbers a query counts as zero, whether or not the caller's
// floating-point mode flushes them.
float quantise_query(const float* x, int head_dim, std::int16_t* codes) {
  float largest = 0;
  bool all_finite = true;
  for (int c = 0; c < head_dim; ++c) {
    largest = std::max(largest, std::fabs(x[c]));
    all_finite = all_finite && std::isfinite(x[c]);
  }
  std::fill(codes, codes + detail::padded_channels(head_dim), std::int16_t{0});
  if (!all_finite) return std::numeric_limits<float>::quiet_NaN();
  if (largest < std::numeric_limits<float>::min()) return 0;
  for (int c = 0; c < head_dim; ++c) {
    codes[c] = static_cast<std::int16_t>(std::nearbyint(x[c] / largest * kMaxQueryCode));
  }
  return largest / kMaxQueryCode;
}

// Sequence and run of an item. Sequence i owns slots [slot(i), slot(i + 1)): at least as many as it
// has runs, at most one more, and found without a table of its own.
class RunSlots {
 public:
  RunSlots(const PageIndex& pages, int num_seqs)
      : begin_(pages.begin), num_seqs_(num_seqs), run_pages_(kRunTokens / pages.page_tokens) {}

  std::int64_t slot(int seq) const { return begin_[seq] / run_pages_ + seq; }
  std::int64_t size() const { return slot(num_seqs_); }

  int sequence(std::int64_t item) const {
    int low = 0;
    int high = num_seqs_;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (slot(middle) <= item ? low : high) = middle;
    }
    return low;
  }

 private:
  const std::int64_t* begin_;
  int num_seqs_;
  std::int64_t run_pages_;
};

// Addresses of records [first_block, first_block + run.num_blocks) of a sequence and KV head.
void find_records(const RecordCache& records, const std::int32_t* block_ids, int kv_head,
                  std::int64_t first_block, detail::ScoreRun& run) {
  const std::int64_t cache_block_records = records.block_tokens / kBlockTokens;
  const std::uint8_t* head = records.data + kv_head * records.head_stride;
  std::int64_t entry = first_block / cache_block_records;
  std::int64_t within = first_block % cache_block_records;
  for (int i = 0; i < run.num_blocks; ++i) {
    run.records[i] = head + block_ids[entry] * records.block_stride + within * records.record_bytes;
    if (++within == cache_block_records) {
      within = 0;
      ++entry;
    }
  }
}

std::uint32_t header_word(const SummaryFormat& format) {
  return static_cast<std::uint32_t>(kRecordMagic) |
         static_cast<std::uint32_t>(kRecordVersion) << 16 |
         static_cast<std::uint32_t>(encode_format(format)) << 24;
}

Status validate_score_pages(const AttentionParams& attention, const RecordLayout& layout,
                            const RecordCache& records, const SequenceBatch& seqs,
                            const PageIndex& pages) {
  LOCKS_RETURN_IF_ERROR(validate(records, layout, attention.num_kv_heads, "score_pages: records"));
  if (pages.page_tokens != layout.format.page_tokens) {
    return invalid_argument(join("score_pages: pages: page_tokens = ", pages.page_tokens,
                                 ", expected the format's ", layout.format.page_tokens));
  }
  LOCKS_RETURN_IF_ERROR(validate(pages, seqs, "score_pages: pages"));
  return validate(seqs, records);
}

}  // namespace

Status validate(const AttentionParams& attention) {
  const int kv_heads = attention.num_kv_heads;
  const int query_heads = attention.num_query_heads;
  if (kv_heads < 1) {
    return invalid_argument(join("attention: num_kv_heads = ", kv_heads, ", expected >= 1"));
  }
  if (query_heads < kv_heads || query_heads % kv_heads != 0 ||
      query_heads / kv_heads > kMaxGroupSize) {
    return invalid_argument(join("attention: num_query_heads = ", query_heads, ", expected 1 to ",
                                 kMaxGroupSize, " times num_kv_heads = ", kv_heads));
  }
  const int d = attention.head_dim;
  if (!is_supported_head_dim(d)) {
    return invalid_argument(
        join("attention: head_dim = ", d, ", expected 64, 80, 96, 128, 192 or 256"));
  }
  if (!std::isfinite(attention.scale) || attention.scale <= 0) {
    return invalid_argument(
        join("attention: scale = ", attention.scale, ", expected a finite value > 0"));
  }
  return {};
}

Status validate(const AttentionParams& attention, const QueryTensor& query) {
  if (query.data == nullptr) return invalid_argument("query: data is null");
  if (query.num_query_heads != attention.num_query_heads) {
    return invalid_argument(join("query: num_query_heads = ", query.num_query_heads, ", expected ",
                                 attention.num_query_heads));
  }
  if (query.head_stride < attention.head_dim && query.num_query_heads > 1) {
    return invalid_argument(join("query: head_stride = ", query.head_stride,
                                 " elements, expected at least head_dim = ", attention.head_dim,
                                 " (channels must be contiguous)"));
  }
  if (query.seq_stride < 0) {
    return invalid_argument(
        join("query: seq_stride = ", query.seq_stride, " elements, expected >= 0"));
  }
  return {};
}

Status validate(const AttentionParams& attention, const PagedTensor& tensor, const char* name) {
  LOCKS_RETURN_IF_ERROR(validate(tensor, name));
  if (tensor.num_kv_heads != attention.num_kv_heads) {
    return invalid_argument(join(name, ": num_kv_heads = ", tensor.num_kv_heads, ", expected ",
                                 attention.num_kv_heads));
  }
  if (tensor.head_dim != attention.head_dim) {
    return invalid_argument(
        join(name, ": head_dim = ", tensor.head_dim, ", expected ", attention.head_dim));
  }
  return {};
}

std::size_t prepared_query_bytes(const AttentionParams& attention, int num_seqs) {
  return cut_prepared(attention, num_seqs, nullptr).bytes;
}

Status prepare_queries(const AttentionParams& attention, const SummaryParams& summary,
                       const QueryTensor& query, int num_seqs, void* prepared,
                       const Executor& executor) {
  LOCKS_RETURN_IF_ERROR(validate(attention));
  LOCKS_RETURN_IF_ERROR(validate(summary.format));
  if (num_seqs < 0) {
    return invalid_argument(join("prepare_queries: num_seqs = ", num_seqs, ", expected >= 0"));
  }
  if (num_seqs == 0) return {};
  LOCKS_RETURN_IF_ERROR(validate(attention, query));
  if (prepared == nullptr) return invalid_argument("prepare_queries: prepared is null");
  const PreparedQueries out = cut_prepared(attention, num_seqs, prepared);
  const int d = attention.head_dim;
  const bool has_reference = summary.format.improved && summary.reference_keys != nullptr;

  detail::for_each_item(executor, num_seqs, [&](std::int64_t seq, int) {
    for (int head = 0; head < attention.num_query_heads; ++head) {
      float x[kMaxHeadDim];
      detail::load_floats(query.data, query.type, seq * query.seq_stride + head * query.head_stride,
                          d, x);
      for (int c = 0; c < d; ++c) x[c] *= attention.scale;
      if (summary.format.improved) rotate(x, d);
      double reference = 0;
      if (has_reference) {
        const float* key =
            summary.reference_keys + static_cast<std::int64_t>(head / attention.group_size()) * d;
        for (int c = 0; c < d; ++c) reference += static_cast<double>(x[c]) * key[c];
      }
      const std::int64_t row = seq * attention.num_query_heads + head;
      out.scales[row] = quantise_query(x, d, out.codes + row * detail::padded_channels(d));
      out.references[row] = static_cast<float>(reference);
    }
  });
  return {};
}

Status score_pages(const AttentionParams& attention, const SummaryParams& summary,
                   const void* prepared, const RecordCache& records, const SequenceBatch& seqs,
                   const PageIndex& pages, float* scores, std::int64_t* num_invalid_records,
                   const Executor& executor) {
  LOCKS_RETURN_IF_ERROR(validate(attention));
  LOCKS_RETURN_IF_ERROR(validate(summary.format));
  const RecordLayout layout = record_layout(summary.format, attention.head_dim);
  LOCKS_RETURN_IF_ERROR(validate_score_pages(attention, layout, records, seqs, pages));
  if (pages.begin[seqs.num_seqs] == 0) return {};
  if (prepared == nullptr) return invalid_argument("score_pages: prepared is null");
  if (scores == nullptr) return invalid_argument("score_pages: scores is null");

  const PreparedQueries queries =
      cut_prepared(attention, seqs.num_seqs, const_cast<void*>(prepared));
  const int channels = detail::padded_channels(attention.head_dim);
  const int group = attention.group_size();
  const detail::ScoreRunFunction score_run =
      LOCKS_CPU_KERNELS(score_kernels).find_score_run(summary.format);
  const std::uint32_t word = header_word(summary.format);
  const RunSlots slots(pages, seqs.num_seqs);
  std::atomic<std::int64_t> num_invalid{0};

  detail::for_each_item(
      executor, slots.size() * attention.num_kv_heads, [&](std::int64_t item, int) {
        const int kv_head = static_cast<int>(item % attention.num_kv_heads);
        const std::int64_t slot = item / attention.num_kv_heads;
        const int seq = slots.sequence(slot);
        const std::int64_t first_block = (slot - slots.slot(seq)) * detail::kRunBlocks;
        const std::int64_t num_blocks = seqs.lengths[seq] / kBlockTokens;
        if (first_block >= num_blocks) return;

        detail::ScoreRun run;
        run.num_blocks =
            static_cast<int>(std::min<std::int64_t>(num_blocks - first_block, detail::kRunBlocks));
        run.layout = layout;
        run.header_word = word;
        const std::int64_t row =
            (static_cast<std::int64_t>(seq) * attention.num_kv_heads + kv_head) * group;
        run.query_codes = queries.codes + row * channels;
        run.query_scales = queries.scales + row;
        run.query_references = queries.references + row;
        run.group_size = group;
        run.head_stride = pages.pages(seq);
        run.scores = scores + pages.offset(seq, kv_head * group, attention.num_query_heads) +
                     first_block * summary.format.pages_per_block();
        find_records(records, seqs.record_blocks.ids + seq * seqs.record_blocks.seq_stride, kv_head,
                     first_block, run);
        const std::int64_t invalid = score_run(run);
        if (invalid != 0) num_invalid.fetch_add(invalid, std::memory_order_relaxed);
      });
  if (num_invalid_records != nullptr) {
    *num_invalid_records += num_invalid.load(std::memory_order_relaxed);
  }
  return {};
}

Status score_unrecorded_pages(const AttentionParams& attention, const QueryTensor& query,
                              const PagedTensor& keys, const SequenceBatch& seqs,
                              const PageIndex& pages, float* scores, const Executor& executor) {
  LOCKS_RETURN_IF_ERROR(validate(attention));
  LOCKS_RETURN_IF_ERROR(validate(pages, seqs, "score_unrecorded_pages: pages"));
  if (seqs.num_seqs == 0) return {};
  LOCKS_RETURN_IF_ERROR(validate(attention, query));
  LOCKS_RETURN_IF_ERROR(validate(attention, keys, "score_unrecorded_pages: keys"));
  if (pages.begin[seqs.num_seqs] == 0) return {};
  if (scores == nullptr) return invalid_argument("score_unrecorded_pages: scores is null");
  LOCKS_RETURN_IF_ERROR(validate(seqs, keys, nullptr));
  const detail::ScoreKernels& kernels = LOCKS_CPU_KERNELS(score_kernels);
  const int group = attention.group_size();

  const std::int64_t num_items = static_cast<std::int64_t>(seqs.num_seqs) * attention.num_kv_heads;
  detail::for_each_item(executor, num_items, [&](std::int64_t item, int) {
    const int kv_head = static_cast<int>(item % attention.num_kv_heads);
    const int seq = static_cast<int>(item / attention.num_kv_heads);
    const std::int64_t length = seqs.lengths[seq];
    const std::int64_t first_token = length / kBlockTokens * kBlockTokens;
    if (first_token == length) return;
    const std::int64_t block_id =
        seqs.cache_blocks.ids[seq * seqs.cache_blocks.seq_stride + first_token / keys.block_tokens];
    const auto address = [](const void* data, ScalarType type, std::int64_t element) {
      return static_cast<const std::byte*>(data) + element * scalar_bytes(type);
    };
    detail::UnrecordedTokens tokens;
    tokens.keys = address(keys.data, keys.type,
                          block_id * keys.block_stride + kv_head * keys.head_stride +
                              first_token % keys.block_tokens * keys.token_stride);
    tokens.key_type = keys.type;
    tokens.token_stride = keys.token_stride;
    tokens.num_tokens = static_cast<int>(length - first_token);
    tokens.page_tokens = pages.page_tokens;
    tokens.head_dim = attention.head_dim;
    tokens.scale = attention.scale;
    tokens.queries = address(
        query.data, query.type,
        seq * query.seq_stride + static_cast<std::int64_t>(kv_head) * group * query.head_stride);
    tokens.query_type = query.type;
    tokens.query_stride = query.head_stride;
    tokens.group_size = group;
    tokens.head_stride = pages.pages(seq);
    tokens.scores = scores + pages.offset(seq, kv_head * group, attention.num_query_heads) +
                    first_token / pages.page_tokens;
    kernels.score_unrecorded(tokens);
  });
  return {};
}

}  // namespace locks
