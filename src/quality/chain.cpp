// The theory's chain on a trace, each bound beside the truth. Bounds and truths are in double; the
// stored scores and the choices are the stages' own.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "core/work_queue.h"
#include "locks/quality.h"
#include "quality/trace_run.h"

namespace locks {

using detail::for_each_item;
using detail::TraceRun;

namespace {

// What stands for the keys: how far off it is, page by page, and its scores.
struct StandIn {
  std::vector<double> residuals;
  std::vector<float> scores;
  ChainError ChainPage::*error;
  ChainChoice ChainStep::*choice;
};

double distance(const float* a, const float* b, std::size_t count) {
  double sum = 0;
  for (std::size_t c = 0; c < count; ++c) {
    const double difference = static_cast<double>(a[c]) - static_cast<double>(b[c]);
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

double norm(const float* x, std::size_t count) {
  double sum = 0;
  for (std::size_t c = 0; c < count; ++c) {
    sum += static_cast<double>(x[c]) * static_cast<double>(x[c]);
  }
  return std::sqrt(sum);
}

std::vector<double> ideal_residuals(const TraceRun& run, int page_tokens, const float* keys,
                                    const float* ideal_keys) {
  const std::size_t d = run.head_dim();
  std::vector<double> largest(static_cast<std::size_t>(run.num_tokens() / page_tokens));
  for (std::size_t t = 0; t < static_cast<std::size_t>(run.num_tokens()); ++t) {
    double& page = largest[t / static_cast<std::size_t>(page_tokens)];
    page = std::max(page, distance(keys + t * d, ideal_keys + t * d, d));
  }
  return largest;
}

// A record's keys as it gives them back: reference + centroid + basis * coefficients, in its own
// channels.
class RecordReader {
 public:
  RecordReader(const RecordLayout& layout, const std::vector<float>& reference)
      : layout_(layout),
        d_(static_cast<std::size_t>(layout.head_dim)),
        pages_(static_cast<std::size_t>(layout.format.pages_per_block())),
        rank_(static_cast<std::size_t>(layout.format.rank)),
        tokens_(static_cast<std::size_t>(layout.format.page_tokens)),
        reference_(reference),
        centroid_(pages_ * d_),
        basis_(pages_ * rank_ * d_),
        coefficients_(pages_ * rank_ * tokens_),
        key_(d_) {}

  Status load(const std::uint8_t* record) {
    return unpack_record(layout_, record, centroid_.data(), basis_.data(), coefficients_.data());
  }

  const std::vector<float>& key(std::size_t page, std::size_t token) {
    for (std::size_t c = 0; c < d_; ++c) {
      float sum = centroid_[page * d_ + c] + (reference_.empty() ? 0.0f : reference_[c]);
      for (std::size_t r = page * rank_; r < (page + 1) * rank_; ++r) {
        sum += coefficients_[r * tokens_ + token] * basis_[r * d_ + c];
      }
      key_[c] = sum;
    }
    return key_;
  }

 private:
  const RecordLayout& layout_;
  std::size_t d_, pages_, rank_, tokens_;
  const std::vector<float>& reference_;
  std::vector<float> centroid_, basis_, coefficients_, key_;
};

// Of pages with a record; zero for others, whose scores are exact.
Status stored_residuals(const TraceRun& run, const SummaryFormat& format, const float* keys,
                        std::vector<double>& largest) {
  const std::size_t d = run.head_dim();
  const RecordLayout layout = record_layout(format, static_cast<int>(d));
  const std::vector<float> reference = run.reference_key();
  std::vector<std::uint8_t> memory;
  LOCKS_RETURN_IF_ERROR(run.build_records(memory, reference));
  largest.assign(static_cast<std::size_t>(run.num_tokens() / format.page_tokens), 0);
  RecordReader reader(layout, reference);
  std::vector<float> key(d);
  for (std::size_t block = 0; block < static_cast<std::size_t>(run.num_tokens()) / kBlockTokens;
       ++block) {
    LOCKS_RETURN_IF_ERROR(
        reader.load(memory.data() + block * static_cast<std::size_t>(layout.record_bytes)));
    for (std::size_t t = 0; t < kBlockTokens; ++t) {
      const auto tokens = static_cast<std::size_t>(format.page_tokens);
      std::copy_n(keys + (block * kBlockTokens + t) * d, d, key.begin());
      if (format.improved) rotate(key.data(), layout.head_dim);
      double& page = largest[(block * kBlockTokens + t) / tokens];
      page = std::max(page, distance(key.data(), reader.key(t / tokens, t % tokens).data(), d));
    }
  }
  return {};
}

// Log mass of one page of keys.
float log_mass(const float* query, const float* keys, std::size_t d, int page_tokens,
               double scale) {
  double logits[kBlockTokens];
  double max = -std::numeric_limits<double>::infinity();
  for (int t = 0; t < page_tokens; ++t, keys += d) {
    double sum = 0;
    for (std::size_t c = 0; c < d; ++c) {
      sum += static_cast<double>(query[c]) * static_cast<double>(keys[c]);
    }
    logits[t] = sum * scale;
    max = std::max(max, logits[t]);
  }
  double mass = 0;
  for (int t = 0; t < page_tokens; ++t) mass += std::exp(logits[t] - max);
  return static_cast<float>(max + std::log(mass));
}

// The exact scores, with those of pages that have a record made from `keys` instead.
std::vector<float> scores_of(const TraceRun& run, int page_tokens, const float* keys,
                             const std::vector<float>& exact, const Executor& executor) {
  std::vector<float> scores = exact;
  const std::size_t page_floats = static_cast<std::size_t>(page_tokens) * run.head_dim();
  for_each_item(executor, static_cast<std::int64_t>(run.num_steps()), [&](std::int64_t item, int) {
    const auto step = static_cast<std::size_t>(item);
    for (std::size_t head = 0; head < run.group(); ++head) {
      const std::ptrdiff_t offset = run.scores(exact, step, head) - exact.data();
      for (std::size_t page = 0; page < run.recorded_pages(step); ++page) {
        scores[static_cast<std::size_t>(offset) + page] =
            log_mass(run.query(step, head), keys + page * page_floats, run.head_dim(), page_tokens,
                     static_cast<double>(run.scale()));
      }
    }
  });
  return scores;
}

void judge_scores(const TraceRun& run, const std::vector<float>& exact, const StandIn& stand_in,
                  Chain& chain) {
  for (std::size_t p = 0; p < chain.pages.size(); ++p) {
    (chain.pages[p].*stand_in.error).residual = stand_in.residuals[p];
  }
  for (std::size_t step = 0; step < run.num_steps(); ++step) {
    double& delta = (chain.steps[step].*stand_in.choice).delta;
    for (std::size_t head = 0; head < run.group(); ++head) {
      const double reach =
          static_cast<double>(run.scale()) * norm(run.query(step, head), run.head_dim());
      const float* truth = run.scores(exact, step, head);
      const float* guess = run.scores(stand_in.scores, step, head);
      for (std::size_t p = 0; p < run.recorded_pages(step); ++p) {
        ChainError& page = chain.pages[p].*stand_in.error;
        const double missed =
            std::abs(static_cast<double>(guess[p]) - static_cast<double>(truth[p]));
        const double bound = reach * stand_in.residuals[p];
        page.score_error = std::max(page.score_error, missed);
        page.score_bound = std::max(page.score_bound, bound);
        delta = std::max(delta, bound);
      }
    }
  }
}

// Of each step, the group's mean.
std::vector<double> group_means(const TraceRun& run, const std::vector<double>& rows) {
  std::vector<double> means(run.num_steps());
  for (std::size_t row = 0; row < rows.size(); ++row) {
    means[row / run.group()] += rows[row] / static_cast<double>(run.group());
  }
  return means;
}

Status judge_choice(const TraceRun& run, const std::vector<float>& exact, const Budget& budget,
                    const StandIn& stand_in, TraceRun::Sets& sets, Chain& chain) {
  LOCKS_RETURN_IF_ERROR(run.select(stand_in.scores, GroupRule::kMeanOfShares, budget, sets));
  const std::vector<double> retained = group_means(run, run.retained_mass(exact, sets));
  for (std::size_t step = 0; step < run.num_steps(); ++step) {
    (chain.steps[step].*stand_in.choice).retained = retained[step];
  }
  return {};
}

// Twice the largest distance of a value from their mean: no two values are further apart.
double value_diameter(const TraceRun& run, const float* values) {
  const std::size_t d = run.head_dim();
  const auto count = static_cast<std::size_t>(run.num_tokens());
  std::vector<double> sum(d);
  for (std::size_t i = 0; i < count * d; ++i) sum[i % d] += static_cast<double>(values[i]);
  std::vector<float> mean(d);
  std::transform(sum.begin(), sum.end(), mean.begin(), [&](double total) {
    return static_cast<float>(total / static_cast<double>(count));
  });
  double radius = 0;
  for (std::size_t t = 0; t < count; ++t) {
    radius = std::max(radius, distance(values + t * d, mean.data(), d));
  }
  return 2 * radius;
}

Status judge_output(const TraceRun& run, const float* values, const std::vector<float>& exact,
                    TraceRun::Sets& chosen, Chain& chain) {
  std::vector<float> sparse;
  std::vector<float> dense;
  TraceRun::Sets all = run.all_pages();
  LOCKS_RETURN_IF_ERROR(run.attend(chosen, sparse));
  LOCKS_RETURN_IF_ERROR(run.attend(all, dense));
  const std::vector<double> retained = run.retained_mass(exact, chosen);
  const double diameter = value_diameter(run, values);
  std::vector<double> errors(retained.size());
  std::vector<double> bounds(retained.size());
  for (std::size_t row = 0; row < retained.size(); ++row) {
    const std::size_t begin = row * run.head_dim();
    errors[row] = distance(sparse.data() + begin, dense.data() + begin, run.head_dim());
    bounds[row] = (1 - retained[row]) * diameter;
  }
  const std::vector<double> mean_errors = group_means(run, errors);
  const std::vector<double> mean_bounds = group_means(run, bounds);
  for (std::size_t step = 0; step < run.num_steps(); ++step) {
    chain.steps[step].output_error = mean_errors[step];
    chain.steps[step].output_bound = mean_bounds[step];
  }
  return {};
}

}  // namespace

Result<Chain> measure_chain(const AttentionTrace& trace, const SummaryFormat& format,
                            const Budget& budget, const float* ideal_keys,
                            const Executor& executor) {
  LOCKS_RETURN_IF_ERROR(validate(format));
  LOCKS_RETURN_IF_ERROR(validate(budget));
  LOCKS_RETURN_IF_ERROR(detail::check_for_run(trace, format.page_tokens));
  if (ideal_keys == nullptr) return invalid_argument("measure_chain: ideal_keys is null");
  const TraceRun run(trace, format, executor);
  Chain chain{std::vector<ChainPage>(static_cast<std::size_t>(run.num_tokens() / kBlockTokens *
                                                              format.pages_per_block())),
              std::vector<ChainStep>(run.num_steps())};
  std::vector<float> exact;
  LOCKS_RETURN_IF_ERROR(run.score(Selector::kOracle, exact));
  StandIn oracle{{}, exact, &ChainPage::ideal, &ChainStep::oracle};
  StandIn ideal{ideal_residuals(run, format.page_tokens, trace.keys, ideal_keys),
                scores_of(run, format.page_tokens, ideal_keys, exact, executor), &ChainPage::ideal,
                &ChainStep::ideal};
  StandIn stored{{}, {}, &ChainPage::stored, &ChainStep::stored};
  LOCKS_RETURN_IF_ERROR(stored_residuals(run, format, trace.keys, stored.residuals));
  LOCKS_RETURN_IF_ERROR(run.score(Selector::kLocks, stored.scores));
  judge_scores(run, exact, ideal, chain);
  judge_scores(run, exact, stored, chain);
  TraceRun::Sets sets;
  LOCKS_RETURN_IF_ERROR(judge_choice(run, exact, budget, oracle, sets, chain));
  LOCKS_RETURN_IF_ERROR(judge_choice(run, exact, budget, ideal, sets, chain));
  LOCKS_RETURN_IF_ERROR(judge_choice(run, exact, budget, stored, sets, chain));
  LOCKS_RETURN_IF_ERROR(judge_output(run, trace.values, exact, sets, chain));
  return chain;
}

}  // namespace locks
