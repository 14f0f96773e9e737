// Validation, splits and their merging.
//
// An item is (sequence, KV head, split): at most 2,048 tokens of the chosen pages, cut at fixed
// places of the chosen list. Each leaves a partial result in the workspace; the worker that ends
// the last split of a pair (sequence, KV head) merges that pair's partials, in order.
#include "locks/attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>

#include "attend/attend_kernels.h"
#include "core/cpu_kernels.h"
#include "core/message.h"
#include "core/scalar.h"
#include "core/work_queue.h"
#include "core/workspace.h"

namespace locks {

namespace detail {
LOCKS_DECLARE_CPU_KERNELS(AttendKernels, attend_kernels)
}  // namespace detail

using detail::join;

namespace {

constexpr int kSplitTokens = 2048;

// An empty set has a split too: the one that writes its zeros.
std::int64_t num_splits(std::int64_t pages, int page_tokens) {
  const std::int64_t split_pages = kSplitTokens / page_tokens;
  return std::max<std::int64_t>(1, (pages + split_pages - 1) / split_pages);
}

struct AttendWorkspace {
  std::int64_t* first_split;  // [pairs + 1], running totals
  std::int32_t* unfinished;   // [pairs], splits still to end
  float* max;                 // [splits, group]
  float* sum;                 // [splits, group]
  float* output;              // [splits, group, head_dim]
  std::byte* scratch;         // [workers, scratch_bytes], each cut by cut_scratch
  std::size_t scratch_bytes;
  std::size_t bytes;
};

detail::AttendScratch cut_scratch(const AttentionParams& attention,
                                  detail::WorkspaceCutter& cutter) {
  const auto group = static_cast<std::size_t>(attention.group_size());
  const auto head_dim = static_cast<std::size_t>(attention.head_dim);
  return {cutter.take<float>(group * head_dim),                // query
          cutter.take<float>(detail::kTileTokens * head_dim),  // keys
          cutter.take<float>(detail::kTileTokens * head_dim),  // values
          cutter.take<float>(group * detail::kTileTokens),     // weights
          cutter.take<float>(group * detail::kTileTokens)};    // sums
}

AttendWorkspace cut_workspace(const AttentionParams& attention, std::int64_t num_pairs,
                              std::int64_t max_splits, int num_workers, void* workspace) {
  const auto group = static_cast<std::size_t>(attention.group_size());
  const auto head_dim = static_cast<std::size_t>(attention.head_dim);
  const auto pairs = static_cast<std::size_t>(num_pairs);
  const std::size_t partials = static_cast<std::size_t>(max_splits) * group;
  detail::WorkspaceCutter cutter(workspace);
  AttendWorkspace cut{};
  cut.first_split = cutter.take<std::int64_t>(pairs + 1);
  cut.unfinished = cutter.take<std::int32_t>(pairs);
  cut.max = cutter.take<float>(partials);
  cut.sum = cutter.take<float>(partials);
  cut.output = cutter.take<float>(partials * head_dim);
  detail::WorkspaceCutter ruler(nullptr);
  cut_scratch(attention, ruler);
  cut.scratch_bytes = ruler.bytes();
  cut.scratch = cutter.take<std::byte>(cut.scratch_bytes *
                                       static_cast<std::size_t>(std::max(num_workers, 1)));
  cut.bytes = cutter.bytes();
  return cut;
}

// Splits of the batch if every page is chosen.
std::int64_t count_max_splits(const AttentionParams& attention, const SequenceBatch& seqs,
                              int page_tokens) {
  std::int64_t splits = 0;
  for (int i = 0; i < seqs.num_seqs; ++i) {
    splits += num_splits(num_pages(seqs.lengths[i], page_tokens), page_tokens);
  }
  return splits * attention.num_kv_heads;
}

// One set of a sequence that holds `held` pages.
Status validate_set(int seq, int kv_head, std::int64_t held, const std::int32_t* ids,
                    std::int32_t count) {
  const auto error = [&](const auto&... parts) {
    return invalid_argument(
        join("attend_pages: sets: sequence ", seq, ", KV head ", kv_head, ": ", parts...));
  };
  if (count < 0 || count > held) return error("count = ", count, ", expected 0 to ", held);
  std::int64_t previous = -1;
  for (int k = 0; k < count; ++k) {
    if (ids[k] <= previous || ids[k] >= held) {
      return error("id = ", ids[k], ", expected above ", previous, " and below ", held);
    }
    previous = ids[k];
  }
  return {};
}

Status validate_sets(const SequenceBatch& seqs, int num_kv_heads, const PageIndex& pages,
                     const PageSets& sets) {
  if (sets.counts == nullptr || (sets.ids == nullptr && pages.begin[seqs.num_seqs] > 0)) {
    return invalid_argument("attend_pages: sets: ids or counts is null");
  }
  const std::int32_t* count = sets.counts;
  for (int i = 0; i < seqs.num_seqs; ++i) {
    for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      const std::int32_t* ids = sets.ids + pages.offset(i, kv_head, num_kv_heads);
      LOCKS_RETURN_IF_ERROR(validate_set(i, kv_head, pages.pages(i), ids, *count++));
    }
  }
  return {};
}

detail::HeadRows head_rows(const PagedTensor& tensor, int kv_head) {
  const std::int64_t bytes = scalar_bytes(tensor.type);
  return {static_cast<const std::byte*>(tensor.data) + kv_head * tensor.head_stride * bytes,
          tensor.type, tensor.block_stride * bytes, tensor.token_stride * bytes};
}

// One call: everything that its items share.
struct Attend {
  const AttentionParams& attention;
  const QueryTensor& query;
  const PagedTensor& keys;
  const PagedTensor& values;
  const SequenceBatch& seqs;
  const PageIndex& pages;
  const PageSets& sets;
  const AttentionOutput& output;
  AttendWorkspace work;

  std::int64_t num_pairs() const {
    return static_cast<std::int64_t>(seqs.num_seqs) * attention.num_kv_heads;
  }

  void deal_splits() const {
    std::int64_t total = 0;
    for (std::int64_t pair = 0; pair < num_pairs(); ++pair) {
      const std::int64_t splits = num_splits(sets.counts[pair], pages.page_tokens);
      work.first_split[pair] = total;
      work.unfinished[pair] = static_cast<std::int32_t>(splits);
      total += splits;
    }
    work.first_split[num_pairs()] = total;
  }

  void run_split(const detail::AttendKernels& kernels, std::int64_t split, int worker) const {
    const std::int64_t* firsts = work.first_split;
    const std::int64_t pair =
        std::upper_bound(firsts, firsts + num_pairs() + 1, split) - firsts - 1;
    kernels.attend_split(split_task(pair, split, worker));
    const std::atomic_ref<std::int32_t> unfinished(work.unfinished[pair]);
    if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) merge(pair);
  }

  detail::SplitTask split_task(std::int64_t pair, std::int64_t split, int worker) const {
    const int seq = static_cast<int>(pair / attention.num_kv_heads);
    const int kv_head = static_cast<int>(pair % attention.num_kv_heads);
    const int group = attention.group_size();
    const int split_pages = kSplitTokens / pages.page_tokens;
    const auto first_page = static_cast<int>(split - work.first_split[pair]) * split_pages;

    detail::SplitTask task;
    task.query = query.data;
    task.query_type = query.type;
    const int first_head = kv_head * group;
    task.query_offset = seq * query.seq_stride + first_head * query.head_stride;
    task.query_head_stride = query.head_stride;
    task.group_size = group;
    task.head_dim = attention.head_dim;
    task.scale = attention.scale;
    task.keys = head_rows(keys, kv_head);
    task.values = head_rows(values, kv_head);
    task.block_ids = seqs.cache_blocks.ids + seq * seqs.cache_blocks.seq_stride;
    task.block_tokens = static_cast<std::uint32_t>(keys.block_tokens);
    task.page_ids = sets.ids + pages.offset(seq, kv_head, attention.num_kv_heads) + first_page;
    task.num_pages = std::min(split_pages, sets.counts[pair] - first_page);
    task.page_tokens = pages.page_tokens;
    task.length = seqs.lengths[seq];
    task.scratch = scratch(worker);
    task.partial = partial(split);
    return task;
  }

  detail::AttendScratch scratch(int worker) const {
    detail::WorkspaceCutter cutter(work.scratch +
                                   static_cast<std::size_t>(worker) * work.scratch_bytes);
    return cut_scratch(attention, cutter);
  }

  detail::PartialAttention partial(std::int64_t split) const {
    const std::int64_t first = split * attention.group_size();
    return {work.max + first, work.sum + first, work.output + first * attention.head_dim};
  }

  void merge(std::int64_t pair) const {
    const std::int64_t seq = pair / attention.num_kv_heads;
    const std::int64_t first_head = pair % attention.num_kv_heads * attention.group_size();
    for (int head = 0; head < attention.group_size(); ++head) {
      merge_head(pair, seq, first_head, head);
    }
  }

  // Partials relative to 2^max of their own: raised to the largest, added in order, normalised.
  void merge_head(std::int64_t pair, std::int64_t seq, std::int64_t first_head, int head) const {
    const int head_dim = attention.head_dim;
    const std::int64_t begin = work.first_split[pair];
    const std::int64_t end = work.first_split[pair + 1];
    float max = -std::numeric_limits<float>::infinity();
    for (std::int64_t split = begin; split < end; ++split) {
      max = std::max(max, partial(split).max[head]);
    }
    float* total = partial(begin).output + head * head_dim;  // summed in place
    float sum = 0;
    for (std::int64_t split = begin; split < end; ++split) {
      const detail::PartialAttention part = partial(split);
      const float* part_output = part.output + head * head_dim;
      const float factor = part.max[head] == max ? 1.0f : std::exp2(part.max[head] - max);
      sum += factor * part.sum[head];
      if (split == begin) {
        for (int c = 0; c < head_dim; ++c) total[c] *= factor;
      } else {
        for (int c = 0; c < head_dim; ++c) total[c] += factor * part_output[c];
      }
    }
    write_head(seq, first_head + head, total, max, sum);
  }

  void write_head(std::int64_t seq, std::int64_t query_head, const float* total, float max,
                  float sum) const {
    const std::int64_t first = seq * output.seq_stride + query_head * output.head_stride;
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    for (int c = 0; c < attention.head_dim; ++c) {
      detail::store_scalar(output.data, output.type, first + c, total[c] * inverse);
    }
    if (output.lse != nullptr) {
      output.lse[seq * attention.num_query_heads + query_head] =
          sum == 0 ? -std::numeric_limits<float>::infinity()
                   : (max + std::log2(sum)) * std::numbers::ln2_v<float>;
    }
  }
};

}  // namespace

Status validate(const AttentionParams& attention, const PagedTensor& keys,
                const PagedTensor& values) {
  LOCKS_RETURN_IF_ERROR(validate(attention, keys, "keys"));
  LOCKS_RETURN_IF_ERROR(validate(attention, values, "values"));
  if (values.block_tokens != keys.block_tokens) {
    return invalid_argument(join("values: block_tokens = ", values.block_tokens, ", expected ",
                                 keys.block_tokens, " as in keys"));
  }
  if (values.num_blocks != keys.num_blocks) {
    return invalid_argument(join("values: num_blocks = ", values.num_blocks, ", expected ",
                                 keys.num_blocks, " as in keys"));
  }
  return {};
}

Status validate(const AttentionParams& attention, int num_seqs, const AttentionOutput& output) {
  if (output.data == nullptr) return invalid_argument("output: data is null");
  if (attention.num_query_heads > 1 && output.head_stride < attention.head_dim) {
    return invalid_argument(join("output: head_stride = ", output.head_stride,
                                 ", expected at least head_dim = ", attention.head_dim));
  }
  if (num_seqs > 1 && output.seq_stride < attention.head_dim) {
    return invalid_argument(join("output: seq_stride = ", output.seq_stride,
                                 ", expected at least head_dim = ", attention.head_dim));
  }
  return {};
}

std::size_t attend_workspace_bytes(const AttentionParams& attention, const SequenceBatch& seqs,
                                   const PageIndex& pages, int num_workers) {
  const std::int64_t pairs = static_cast<std::int64_t>(seqs.num_seqs) * attention.num_kv_heads;
  const std::int64_t splits = count_max_splits(attention, seqs, pages.page_tokens);
  return cut_workspace(attention, pairs, splits, num_workers, nullptr).bytes;
}

Status attend_pages(const AttentionParams& attention, const QueryTensor& query,
                    const PagedTensor& keys, const PagedTensor& values, const SequenceBatch& seqs,
                    const PageIndex& pages, const PageSets& sets, const AttentionOutput& output,
                    void* workspace, const Executor& executor) {
  LOCKS_RETURN_IF_ERROR(validate(attention));
  LOCKS_RETURN_IF_ERROR(validate(attention, keys, values));
  LOCKS_RETURN_IF_ERROR(validate(seqs, keys, nullptr));
  if (seqs.num_seqs == 0) return {};
  LOCKS_RETURN_IF_ERROR(validate(attention, query));
  LOCKS_RETURN_IF_ERROR(validate(attention, seqs.num_seqs, output));
  LOCKS_RETURN_IF_ERROR(validate(pages, seqs, "attend_pages: pages"));
  LOCKS_RETURN_IF_ERROR(validate_sets(seqs, attention.num_kv_heads, pages, sets));
  if (workspace == nullptr) return invalid_argument("attend_pages: workspace is null");

  const std::int64_t pairs = static_cast<std::int64_t>(seqs.num_seqs) * attention.num_kv_heads;
  const std::int64_t max_splits = count_max_splits(attention, seqs, pages.page_tokens);
  const Attend attend{attention,
                      query,
                      keys,
                      values,
                      seqs,
                      pages,
                      sets,
                      output,
                      cut_workspace(attention, pairs, max_splits, executor.num_workers, workspace)};
  attend.deal_splits();
  const detail::AttendKernels& kernels = LOCKS_CPU_KERNELS(attend_kernels);
  detail::for_each_item(
      executor, attend.work.first_split[pairs],
      [&](std::int64_t split, int worker) { attend.run_split(kernels, split, worker); });
  return {};
}

}  // namespace locks
