#include "locks/quality.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "core/message.h"
#include "locks/tokens.h"
#include "quality/token_quality.h"
#include "quality/trace_run.h"

namespace locks {

using detail::join;
using detail::TraceRun;

namespace {

// Of the pages that the oracle reads and could have left, the share that the selector reads too.
double recall_of(const TraceRun& run, std::size_t step, const TraceRun::Sets& best,
                 const TraceRun::Sets& chosen) {
  const std::int32_t* wanted = run.chosen(best, step);
  const std::int32_t* got = run.chosen(chosen, step);
  const std::int32_t* got_end = got + chosen.counts[step];
  int total = 0;
  int found = 0;
  for (std::int32_t k = 0; k < best.counts[step]; ++k) {
    if (run.is_always_read(step, wanted[k])) continue;
    ++total;
    found += std::binary_search(got, got_end, wanted[k]) ? 1 : 0;
  }
  return total == 0 ? 1.0 : static_cast<double>(found) / total;
}

// Whether every page that overlaps the span is read; a span that has not begun yet is not missed.
bool reads_span(const TraceRun& run, std::size_t step, const TraceRun::Sets& chosen,
                const TokenSpan& span, int page_tokens) {
  const std::int32_t end = std::min(span.end, run.length(step));
  if (span.begin >= end) return true;
  const std::int32_t* ids = run.chosen(chosen, step);
  const std::int32_t* ids_end = ids + chosen.counts[step];
  const std::int32_t first = span.begin / page_tokens;
  const std::int32_t last = (end - 1) / page_tokens;
  // Ids ascend, so the pages of the span stand side by side if all are there.
  const std::int32_t* found = std::lower_bound(ids, ids_end, first);
  return ids_end - found > last - first && *found == first && found[last - first] == last;
}

// |o - o_dense| / |o_dense| of each step and head.
std::vector<double> output_errors(const TraceRun& run, const std::vector<float>& sparse,
                                  const std::vector<float>& dense) {
  std::vector<double> errors(run.num_steps() * run.group());
  for (std::size_t row = 0; row < errors.size(); ++row) {
    double difference = 0;
    double norm = 0;
    for (std::size_t i = row * run.head_dim(); i < (row + 1) * run.head_dim(); ++i) {
      const auto expected = static_cast<double>(dense[i]);
      difference +=
          (static_cast<double>(sparse[i]) - expected) * (static_cast<double>(sparse[i]) - expected);
      norm += expected * expected;
    }
    errors[row] = difference == 0 ? 0 : std::sqrt(difference / norm);
  }
  return errors;
}

double mean(const std::vector<double>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), 0.0) / static_cast<double>(numbers.size());
}

class Measurement {
 public:
  Measurement(const AttentionTrace& trace, const TraceRun& run, Selector selector,
              const SummaryFormat& format, std::span<const TokenSpan> spans,
              const Executor& executor)
      : trace_(trace),
        run_(run),
        executor_(executor),
        selector_(selector),
        spans_(spans),
        page_tokens_(format.page_tokens),
        bytes_per_block_(
            selector_bytes_per_block(selector, format, static_cast<int>(run.head_dim()))) {}

  // What the budgets share; selectors of tokens choose for all of them.
  Status prepare(std::span<const Budget> budgets) {
    LOCKS_RETURN_IF_ERROR(run_.score(Selector::kOracle, exact_));
    if (selects_tokens(selector_)) {
      auto sets = select_tokens(selector_, trace_, page_tokens_, budgets, executor_);
      if (sets.ok()) token_sets_ = sets.value();
      return sets.status();
    }
    LOCKS_RETURN_IF_ERROR(run_.score(selector_, scores_));
    TraceRun::Sets all = run_.all_pages();
    return run_.attend(all, dense_);
  }

  // The one of prepare's budgets that stands at `index`.
  Result<StepQuality> measure(const Budget& budget, std::size_t index) const {
    TraceRun::Sets best;
    LOCKS_RETURN_IF_ERROR(run_.select(exact_, GroupRule::kMeanOfShares, budget, best));
    StepQuality quality;
    quality.retained_oracle = run_.retained_mass(exact_, best);
    for (std::size_t step = 0; step < run_.num_steps(); ++step) {
      for (const TokenSpan& span : spans_) {
        quality.carriers_wanted.push_back(reads_span(run_, step, best, span, page_tokens_) ? 1 : 0);
      }
    }
    if (selects_tokens(selector_)) {
      detail::measure_tokens(trace_, run_, page_tokens_, token_sets_[index], best, spans_,
                             executor_, quality);
    } else {
      LOCKS_RETURN_IF_ERROR(measure_pages(budget, best, quality));
    }
    if (!std::isfinite(mean(quality.retained_oracle) + mean(quality.retained) +
                       mean(quality.output_error))) {
      return invalid_argument(
          "trace: attention is NaN or infinite, expected scale * q.k within the range of float");
    }
    return quality;
  }

 private:
  Status measure_pages(const Budget& budget, const TraceRun::Sets& best,
                       StepQuality& quality) const {
    TraceRun::Sets chosen;
    LOCKS_RETURN_IF_ERROR(run_.select(scores_, group_rule(selector_), budget, chosen));
    quality.retained = run_.retained_mass(exact_, chosen);
    std::vector<float> sparse;
    LOCKS_RETURN_IF_ERROR(run_.attend(chosen, sparse));
    quality.output_error = output_errors(run_, sparse, dense_);
    for (std::size_t step = 0; step < run_.num_steps(); ++step) {
      add_step(step, best, chosen, quality);
    }
    return {};
  }

  void add_step(std::size_t step, const TraceRun::Sets& best, const TraceRun::Sets& chosen,
                StepQuality& quality) const {
    std::int64_t tokens = 0;
    const std::int32_t* ids = run_.chosen(chosen, step);
    for (std::int32_t k = 0; k < chosen.counts[step]; ++k) {
      tokens += run_.page_length(step, ids[k]);
    }
    // 16 bits a channel, of a key and of a value.
    const std::int64_t token_bytes = 2 * 2 * static_cast<std::int64_t>(run_.head_dim());
    const std::int64_t kept_bytes = run_.length(step) / kBlockTokens * bytes_per_block_;
    quality.recall.push_back(recall_of(run_, step, best, chosen));
    quality.tokens_read.push_back(static_cast<double>(tokens));
    quality.bytes_read.push_back(static_cast<double>(kept_bytes + tokens * token_bytes));
    quality.resident_bytes.push_back(
        static_cast<double>(kept_bytes + run_.length(step) * token_bytes));
    for (const TokenSpan& span : spans_) {
      quality.carriers_read.push_back(reads_span(run_, step, chosen, span, page_tokens_) ? 1 : 0);
    }
  }

  const AttentionTrace& trace_;
  const TraceRun& run_;
  const Executor& executor_;
  Selector selector_;
  std::span<const TokenSpan> spans_;
  int page_tokens_;
  std::int64_t bytes_per_block_;
  std::vector<TokenSets> token_sets_;  // of a selector of tokens, one a budget
  std::vector<float> exact_;           // log mass of every page
  std::vector<float> scores_;          // the selector's
  std::vector<float> dense_;           // output of dense attention
};

Status validate_spans(std::span<const TokenSpan> spans, int num_tokens) {
  for (const TokenSpan& span : spans) {
    if (span.begin < 0 || span.begin >= span.end || span.end > num_tokens) {
      return invalid_argument(join("span: ", span.begin, " to ", span.end,
                                   ", expected 0 <= begin < end <= ", num_tokens,
                                   ", the tokens in whole pages"));
    }
  }
  return {};
}

}  // namespace

Result<std::vector<StepQuality>> measure_steps(const AttentionTrace& trace, Selector selector,
                                               const SummaryFormat& format,
                                               std::span<const Budget> budgets,
                                               std::span<const TokenSpan> spans,
                                               const Executor& executor) {
  LOCKS_RETURN_IF_ERROR(validate(format));
  for (const Budget& budget : budgets) LOCKS_RETURN_IF_ERROR(validate(budget));
  LOCKS_RETURN_IF_ERROR(detail::check_for_run(trace, format.page_tokens));
  const TraceRun run(trace, format, executor);
  LOCKS_RETURN_IF_ERROR(validate_spans(spans, run.num_tokens()));
  Measurement measurement(trace, run, selector, format, spans, executor);
  LOCKS_RETURN_IF_ERROR(measurement.prepare(budgets));
  std::vector<StepQuality> all;
  for (std::size_t i = 0; i < budgets.size(); ++i) {
    const Result<StepQuality> quality = measurement.measure(budgets[i], i);
    if (!quality.ok()) return quality.status();
    all.push_back(quality.value());
  }
  return all;
}

Result<Quality> measure_quality(const AttentionTrace& trace, Selector selector,
                                const SummaryFormat& format, const Budget& budget,
                                const Executor& executor) {
  const auto steps = measure_steps(trace, selector, format, {&budget, 1}, {}, executor);
  if (!steps.ok()) return steps.status();
  const StepQuality& quality = steps.value().front();
  return Quality{mean(quality.retained_oracle), mean(quality.retained), mean(quality.output_error),
                 selector_bytes_per_block(selector, format, trace.head_dim)};
}

}  // namespace locks
