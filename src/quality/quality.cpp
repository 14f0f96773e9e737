// Drives the real stages over a captured trace: its keys and values as one contiguous cache, its
// steps as sequences of growing length that share one block table row.
#include "locks/quality.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/message.h"
#include "locks/attend.h"
#include "locks/page.h"
#include "locks/score.h"

namespace locks {

using detail::join;

namespace {

// The reference key is the mean of these of the trace's rotated keys: past the first tokens, which
// gather attention, and within what any trace has.
constexpr int kReferenceBegin = 64;
constexpr int kReferenceEnd = 1088;

Status check(const AttentionTrace& trace, int page_tokens) {
  const auto field = [](const char* name, auto value, const auto&... expected) {
    return invalid_argument(join("trace: ", name, " = ", value, ", expected ", expected...));
  };
  if (trace.queries == nullptr) return invalid_argument("trace: queries is null");
  if (trace.keys == nullptr) return invalid_argument("trace: keys is null");
  if (trace.values == nullptr) return invalid_argument("trace: values is null");
  if (trace.positions == nullptr) return invalid_argument("trace: positions is null");
  if (trace.group_size < 1 || trace.group_size > kMaxGroupSize) {
    return field("group_size", trace.group_size, "1 to ", kMaxGroupSize);
  }
  if (trace.num_steps < 1) return field("num_steps", trace.num_steps, ">= 1");
  if (trace.window < 0 || trace.window >= trace.num_steps) {
    return field("window", trace.window, "0 to ", trace.num_steps - 1,
                 ": what is left of num_steps = ", trace.num_steps, " is judged");
  }
  if (!std::isfinite(trace.scale) || trace.scale <= 0) {
    return field("scale", trace.scale, "a finite number above 0");
  }
  if (!is_supported_head_dim(trace.head_dim)) {
    return field("head_dim", trace.head_dim, "64, 80, 96, 128, 192 or 256");
  }
  if (trace.num_tokens < kReferenceBegin + page_tokens) {
    return field("num_tokens", trace.num_tokens, "at least ", kReferenceBegin + page_tokens,
                 " (the reference key is the mean of keys from ", kReferenceBegin, " on)");
  }
  const int num_tokens = trace.num_tokens / page_tokens * page_tokens;
  for (int t = 0; t < trace.num_steps; ++t) {
    if (trace.positions[t] < 0 || trace.positions[t] >= num_tokens) {
      return invalid_argument(join("trace: positions[", t, "] = ", trace.positions[t],
                                   ", expected 0 to ", num_tokens - 1, " (num_tokens cut to whole ",
                                   "pages of ", page_tokens, ")"));
    }
  }
  return {};
}

class TraceRun {
 public:
  TraceRun(const AttentionTrace& trace, const SummaryFormat& format, const Budget& budget,
           const Executor& executor)
      : format_(format),
        budget_(budget),
        executor_(executor),
        num_tokens_(trace.num_tokens / format.page_tokens * format.page_tokens),
        num_blocks_((num_tokens_ + kBlockTokens - 1) / kBlockTokens),
        lengths_(static_cast<std::size_t>(trace.num_steps - trace.window)),
        block_ids_(static_cast<std::size_t>(num_blocks_)),
        begin_(lengths_.size() + 1) {
    std::transform(trace.positions + trace.window, trace.positions + trace.num_steps,
                   lengths_.begin(), [](std::int32_t position) { return position + 1; });
    std::iota(block_ids_.begin(), block_ids_.end(), 0);
    attention_ = {trace.group_size, 1, trace.head_dim, trace.scale};
    query_ = {trace.queries + static_cast<std::ptrdiff_t>(trace.window) * trace.head_dim,
              ScalarType::kFloat32, trace.group_size, trace.head_dim,
              static_cast<std::int64_t>(trace.num_steps) * trace.head_dim};
    keys_ = contiguous_cache(trace.keys);
    values_ = contiguous_cache(trace.values);
    const BlockTable table{block_ids_.data(), 0, num_blocks_};
    seqs_ = {trace.num_steps - trace.window, lengths_.data(), table, table};
    pages_ = build_page_index(seqs_, format.page_tokens, begin_.data());
  }

  Result<Quality> measure(Selector selector) {
    LOCKS_RETURN_IF_ERROR(score_all(Selector::kOracle, exact_));
    std::vector<float> scores;
    LOCKS_RETURN_IF_ERROR(score_all(selector, scores));
    Quality quality;
    Sets best;
    Sets chosen;
    LOCKS_RETURN_IF_ERROR(select(exact_, GroupRule::kMeanOfShares, best));
    LOCKS_RETURN_IF_ERROR(select(scores, group_rule(selector), chosen));
    quality.retained_oracle = retained_mass(best);
    quality.retained = retained_mass(chosen);
    LOCKS_RETURN_IF_ERROR(output_error(chosen, quality.output_error));
    if (!std::isfinite(quality.retained_oracle + quality.retained + quality.output_error)) {
      return invalid_argument(
          "trace: attention is NaN or infinite, expected scale * q.k within the range of float");
    }
    quality.bytes_per_record = selector_bytes_per_block(selector, format_, attention_.head_dim);
    return quality;
  }

 private:
  struct Sets {
    std::vector<std::int32_t> ids;
    std::vector<std::int32_t> counts;
    PageSets view() { return {ids.data(), counts.data()}; }
  };

  std::size_t total_pages() const { return static_cast<std::size_t>(begin_.back()); }
  std::size_t group() const { return static_cast<std::size_t>(attention_.num_query_heads); }
  std::size_t head_dim() const { return static_cast<std::size_t>(attention_.head_dim); }
  std::size_t num_steps() const { return lengths_.size(); }

  PagedTensor contiguous_cache(const float* data) const {
    const std::int64_t block = static_cast<std::int64_t>(kBlockTokens) * attention_.head_dim;
    return {data,  ScalarType::kFloat32, num_blocks_, kBlockTokens, 1, attention_.head_dim, block,
            block, attention_.head_dim};
  }

  Status score_all(Selector selector, std::vector<float>& scores) {
    scores.resize(total_pages() * group());
    if (selector == Selector::kOracle) return score_baseline_over(seqs_, selector, scores);
    if (selector == Selector::kLocks) {
      LOCKS_RETURN_IF_ERROR(score_records(scores));
      return score_unrecorded_pages(attention_, query_, keys_, seqs_, pages_, scores.data(),
                                    executor_);
    }
    // Statistics are those of whole pages, so a step's unfinished page enters with up to B - 1 keys
    // from its future. It is always read: its score only weighs in the shares' denominator, where
    // the mean of one or two keys, far above that of a whole page, would distort its head's others.
    const int page_tokens = format_.page_tokens;
    std::vector<std::int32_t> lengths(num_steps());
    std::transform(lengths_.begin(), lengths_.end(), lengths.begin(), [=](std::int32_t length) {
      return (length + page_tokens - 1) / page_tokens * page_tokens;
    });
    SequenceBatch whole_pages = seqs_;
    whole_pages.lengths = lengths.data();
    return score_baseline_over(whole_pages, selector, scores);
  }

  Status score_baseline_over(const SequenceBatch& seqs, Selector selector,
                             std::vector<float>& scores) {
    return score_baseline(selector, format_, attention_, query_, keys_, seqs, pages_, scores.data(),
                          executor_);
  }

  // Builds every record of the trace once; a step reads those of its own complete blocks.
  Status score_records(std::vector<float>& scores) {
    const std::vector<float> reference = reference_key();
    const SummaryParams params{format_, format_.improved ? reference.data() : nullptr};
    const std::int64_t record_bytes = record_layout(format_, attention_.head_dim).record_bytes;
    std::vector<std::uint8_t> memory(static_cast<std::size_t>(num_blocks_ * record_bytes));
    const RecordCache records{memory.data(), num_blocks_,  kBlockTokens, 1,
                              record_bytes,  record_bytes, record_bytes};
    const std::int32_t begin_token = 0;
    const SequenceBatch whole{1, &num_tokens_, seqs_.cache_blocks, seqs_.record_blocks};
    LOCKS_RETURN_IF_ERROR(
        summarise_blocks(params, keys_, whole, &begin_token, records, nullptr, executor_));
    std::vector<std::byte> prepared(prepared_query_bytes(attention_, seqs_.num_seqs));
    LOCKS_RETURN_IF_ERROR(
        prepare_queries(attention_, params, query_, seqs_.num_seqs, prepared.data(), executor_));
    std::int64_t num_invalid = 0;
    return score_pages(attention_, params, prepared.data(), records, seqs_, pages_, scores.data(),
                       &num_invalid, executor_);
  }

  std::vector<float> reference_key() const {
    const auto* keys = static_cast<const float*>(keys_.data);
    const int end = std::min<int>(kReferenceEnd, num_tokens_);
    std::vector<double> sum(head_dim());
    std::vector<float> key(head_dim());
    for (int t = kReferenceBegin; t < end; ++t) {
      std::copy_n(keys + t * keys_.token_stride, head_dim(), key.begin());
      rotate(key.data(), attention_.head_dim);
      for (std::size_t c = 0; c < head_dim(); ++c) sum[c] += static_cast<double>(key[c]);
    }
    std::transform(sum.begin(), sum.end(), key.begin(), [&](double total) {
      return static_cast<float>(total / (end - kReferenceBegin));
    });
    return key;
  }

  Status select(const std::vector<float>& scores, GroupRule rule, Sets& sets) {
    sets.ids.resize(total_pages());
    sets.counts.resize(num_steps());
    SelectCounters counters;
    std::vector<std::byte> workspace(select_workspace_bytes(seqs_, pages_, executor_.num_workers));
    return select_pages(attention_, scores.data(), seqs_, pages_, budget_, rule, sets.view(),
                        &counters, workspace.data(), executor_);
  }

  // From the exact log masses of all pages, in double.
  double retained_mass(const Sets& sets) const {
    double total = 0;
    for (std::size_t step = 0; step < num_steps(); ++step) {
      const auto pages = static_cast<std::size_t>(pages_.pages(static_cast<int>(step)));
      const auto begin = static_cast<std::size_t>(begin_[step]);
      const std::int32_t* ids = sets.ids.data() + begin;
      for (std::size_t head = 0; head < group(); ++head) {
        const float* masses = exact_.data() + begin * group() + head * pages;
        const double max = static_cast<double>(*std::max_element(masses, masses + pages));
        const auto mass = [&](float log_mass) {
          return std::exp(static_cast<double>(log_mass) - max);
        };
        double all = 0;
        double kept = 0;
        for (std::size_t page = 0; page < pages; ++page) all += mass(masses[page]);
        for (std::int32_t k = 0; k < sets.counts[step]; ++k) kept += mass(masses[ids[k]]);
        total += kept / all;
      }
    }
    return total / static_cast<double>(num_steps() * group());
  }

  Status attend(Sets& sets, std::vector<float>& output) {
    output.resize(num_steps() * group() * head_dim());
    const AttentionOutput target{output.data(), ScalarType::kFloat32,
                                 static_cast<std::int64_t>(group() * head_dim()),
                                 attention_.head_dim, nullptr};
    std::vector<std::byte> workspace(
        attend_workspace_bytes(attention_, seqs_, pages_, executor_.num_workers));
    return attend_pages(attention_, query_, keys_, values_, seqs_, pages_, sets.view(), target,
                        workspace.data(), executor_);
  }

  Status output_error(Sets& chosen, double& error) {
    Sets all{std::vector<std::int32_t>(total_pages()), std::vector<std::int32_t>(num_steps())};
    for (std::size_t step = 0; step < num_steps(); ++step) {
      std::iota(all.ids.begin() + begin_[step], all.ids.begin() + begin_[step + 1], 0);
      all.counts[step] = static_cast<std::int32_t>(begin_[step + 1] - begin_[step]);
    }
    std::vector<float> sparse;
    std::vector<float> dense;
    LOCKS_RETURN_IF_ERROR(attend(chosen, sparse));
    LOCKS_RETURN_IF_ERROR(attend(all, dense));
    double total = 0;
    for (std::size_t row = 0; row < num_steps() * group(); ++row) {
      double difference = 0;
      double norm = 0;
      for (std::size_t i = row * head_dim(); i < (row + 1) * head_dim(); ++i) {
        const auto expected = static_cast<double>(dense[i]);
        difference += (static_cast<double>(sparse[i]) - expected) *
                      (static_cast<double>(sparse[i]) - expected);
        norm += expected * expected;
      }
      total += difference == 0 ? 0 : std::sqrt(difference / norm);
    }
    error = total / static_cast<double>(num_steps() * group());
    return {};
  }

  SummaryFormat format_;
  Budget budget_;
  const Executor& executor_;
  std::int32_t num_tokens_;
  std::int64_t num_blocks_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int32_t> block_ids_;
  std::vector<std::int64_t> begin_;
  AttentionParams attention_;
  QueryTensor query_;
  PagedTensor keys_;
  PagedTensor values_;
  SequenceBatch seqs_;
  PageIndex pages_;
  std::vector<float> exact_;  // log mass of every page
};

}  // namespace

Result<Quality> measure_quality(const AttentionTrace& trace, Selector selector,
                                const SummaryFormat& format, const Budget& budget,
                                const Executor& executor) {
  LOCKS_RETURN_IF_ERROR(validate(format));
  LOCKS_RETURN_IF_ERROR(validate(budget));
  LOCKS_RETURN_IF_ERROR(check(trace, format.page_tokens));
  return TraceRun(trace, format, budget, executor).measure(selector);
}

}  // namespace locks
