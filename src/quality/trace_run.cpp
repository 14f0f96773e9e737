#include "quality/trace_run.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/message.h"

namespace locks::detail {

namespace {

// The reference key is the mean of these of the trace's rotated keys: past the first tokens, which
// gather attention, and within what any trace has.
constexpr int kReferenceBegin = 64;
constexpr int kReferenceEnd = 1088;

}  // namespace

Status check_for_run(const AttentionTrace& trace, int page_tokens) {
  if (trace.num_tokens < kReferenceBegin + page_tokens) {
    return invalid_argument(join("trace: num_tokens = ", trace.num_tokens, ", expected at least ",
                                 kReferenceBegin + page_tokens, " (the reference key is the mean ",
                                 "of keys from ", kReferenceBegin, " on)"));
  }
  return validate(trace, page_tokens);
}

TraceRun::TraceRun(const AttentionTrace& trace, const SummaryFormat& format,
                   const Executor& executor)
    : format_(format),
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

const float* TraceRun::query(std::size_t step, std::size_t head) const {
  return static_cast<const float*>(query_.data) +
         static_cast<std::ptrdiff_t>(step) * query_.seq_stride +
         static_cast<std::ptrdiff_t>(head) * query_.head_stride;
}

PagedTensor TraceRun::contiguous_cache(const float* data) const {
  const std::int64_t block = static_cast<std::int64_t>(kBlockTokens) * attention_.head_dim;
  return {data,  ScalarType::kFloat32, num_blocks_, kBlockTokens, 1, attention_.head_dim, block,
          block, attention_.head_dim};
}

Status TraceRun::score(Selector selector, std::vector<float>& scores) const {
  scores.resize(static_cast<std::size_t>(begin_.back()) * group());
  if (selector == Selector::kOracle) return score_keys(seqs_, selector, scores);
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
  return score_keys(whole_pages, selector, scores);
}

Status TraceRun::score_keys(const SequenceBatch& seqs, Selector selector,
                            std::vector<float>& scores) const {
  return score_baseline(selector, format_, attention_, query_, keys_, seqs, pages_, scores.data(),
                        executor_);
}

Status TraceRun::build_records(std::vector<std::uint8_t>& memory,
                               const std::vector<float>& reference) const {
  const std::int64_t record_bytes = record_layout(format_, attention_.head_dim).record_bytes;
  memory.assign(static_cast<std::size_t>(num_blocks_ * record_bytes), 0);
  const RecordCache records{memory.data(), num_blocks_,  kBlockTokens, 1,
                            record_bytes,  record_bytes, record_bytes};
  const SummaryParams params{format_, reference.empty() ? nullptr : reference.data()};
  const std::int32_t begin_token = 0;
  const SequenceBatch whole{1, &num_tokens_, seqs_.cache_blocks, seqs_.record_blocks};
  return summarise_blocks(params, keys_, whole, &begin_token, records, nullptr, executor_);
}

Status TraceRun::score_records(std::vector<float>& scores) const {
  const std::vector<float> reference = reference_key();
  const SummaryParams params{format_, reference.empty() ? nullptr : reference.data()};
  const std::int64_t record_bytes = record_layout(format_, attention_.head_dim).record_bytes;
  std::vector<std::uint8_t> memory;
  LOCKS_RETURN_IF_ERROR(build_records(memory, reference));
  const RecordCache records{memory.data(), num_blocks_,  kBlockTokens, 1,
                            record_bytes,  record_bytes, record_bytes};
  std::vector<std::byte> prepared(prepared_query_bytes(attention_, seqs_.num_seqs));
  LOCKS_RETURN_IF_ERROR(
      prepare_queries(attention_, params, query_, seqs_.num_seqs, prepared.data(), executor_));
  std::int64_t num_invalid = 0;
  return score_pages(attention_, params, prepared.data(), records, seqs_, pages_, scores.data(),
                     &num_invalid, executor_);
}

std::vector<float> TraceRun::reference_key() const {
  if (!format_.improved) return {};
  const auto* keys = static_cast<const float*>(keys_.data);
  const int end = std::min<int>(kReferenceEnd, num_tokens_);
  std::vector<double> sum(head_dim());
  std::vector<float> key(head_dim());
  for (int t = kReferenceBegin; t < end; ++t) {
    std::copy_n(keys + t * keys_.token_stride, head_dim(), key.begin());
    rotate(key.data(), attention_.head_dim);
    for (std::size_t c = 0; c < head_dim(); ++c) sum[c] += static_cast<double>(key[c]);
  }
  std::transform(sum.begin(), sum.end(), key.begin(),
                 [&](double total) { return static_cast<float>(total / (end - kReferenceBegin)); });
  return key;
}

Status TraceRun::select(const std::vector<float>& scores, GroupRule rule, const Budget& budget,
                        Sets& sets) const {
  sets.ids.resize(static_cast<std::size_t>(begin_.back()));
  sets.counts.resize(num_steps());
  SelectCounters counters;
  std::vector<std::byte> workspace(select_workspace_bytes(seqs_, pages_, executor_.num_workers));
  return select_pages(attention_, scores.data(), seqs_, pages_, budget, rule, sets.view(),
                      &counters, workspace.data(), executor_);
}

TraceRun::Sets TraceRun::all_pages() const {
  Sets all{std::vector<std::int32_t>(static_cast<std::size_t>(begin_.back())),
           std::vector<std::int32_t>(num_steps())};
  for (std::size_t step = 0; step < num_steps(); ++step) {
    std::iota(all.ids.begin() + begin_[step], all.ids.begin() + begin_[step + 1], 0);
    all.counts[step] = static_cast<std::int32_t>(pages(step));
  }
  return all;
}

Status TraceRun::attend(Sets& sets, std::vector<float>& output) const {
  output.resize(num_steps() * group() * head_dim());
  const AttentionOutput target{output.data(), ScalarType::kFloat32,
                               static_cast<std::int64_t>(group() * head_dim()), attention_.head_dim,
                               nullptr};
  std::vector<std::byte> workspace(
      attend_workspace_bytes(attention_, seqs_, pages_, executor_.num_workers));
  return attend_pages(attention_, query_, keys_, values_, seqs_, pages_, sets.view(), target,
                      workspace.data(), executor_);
}

std::vector<double> TraceRun::retained_mass(const std::vector<float>& exact,
                                            const Sets& sets) const {
  std::vector<double> retained;
  retained.reserve(num_steps() * group());
  for (std::size_t step = 0; step < num_steps(); ++step) {
    const std::int32_t* ids = chosen(sets, step);
    for (std::size_t head = 0; head < group(); ++head) {
      const float* masses = scores(exact, step, head);
      const double max = static_cast<double>(*std::max_element(masses, masses + pages(step)));
      const auto mass = [&](float log_mass) {
        return std::exp(static_cast<double>(log_mass) - max);
      };
      double all = 0;
      double kept = 0;
      for (std::size_t page = 0; page < pages(step); ++page) all += mass(masses[page]);
      for (std::int32_t k = 0; k < sets.counts[step]; ++k) kept += mass(masses[ids[k]]);
      retained.push_back(kept / all);
    }
  }
  return retained;
}

std::int32_t TraceRun::page_length(std::size_t step, std::int32_t page) const {
  return std::min(format_.page_tokens, lengths_[step] - page * format_.page_tokens);
}

}  // namespace locks::detail
