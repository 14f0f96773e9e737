#include "quality/token_quality.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/work_queue.h"

namespace locks::detail {

namespace {

// Which tokens a step reads.
class Read {
 public:
  Read(const TokenSets& sets, std::size_t step, std::int32_t length)
      : flags_(static_cast<std::size_t>(length)) {
    for (std::int64_t i = sets.begin[step]; i < sets.begin[step + 1]; ++i) {
      flags_[static_cast<std::size_t>(sets.ids[static_cast<std::size_t>(i)])] = true;
    }
  }
  bool operator[](std::size_t token) const { return flags_[token]; }
  std::size_t length() const { return flags_.size(); }
  // Of tokens begin .. end - 1, as far as the step has them.
  std::ptrdiff_t count(std::int32_t begin, std::int32_t end) const {
    return std::count(flags_.begin() + begin, flags_.begin() + end, true);
  }

 private:
  std::vector<bool> flags_;
};

struct Kept {
  double retained;
  double output_error;
};

// Attention of one step and head over all tokens, and over those that are read.
Kept attend(const AttentionTrace& trace, const float* query, const Read& read) {
  const auto d = static_cast<std::size_t>(trace.head_dim);
  std::vector<double> masses(read.length());
  for (std::size_t token = 0; token < masses.size(); ++token) {
    double product = 0;
    for (std::size_t c = 0; c < d; ++c) {
      product += static_cast<double>(query[c]) * static_cast<double>(trace.keys[token * d + c]);
    }
    masses[token] = product * static_cast<double>(trace.scale);
  }
  const double most = *std::max_element(masses.begin(), masses.end());
  double all = 0;
  double kept = 0;
  std::vector<double> dense(d);
  std::vector<double> sparse(d);
  for (std::size_t token = 0; token < masses.size(); ++token) {
    const double mass = std::exp(masses[token] - most);
    all += mass;
    if (read[token]) kept += mass;
    for (std::size_t c = 0; c < d; ++c) {
      const double part = mass * static_cast<double>(trace.values[token * d + c]);
      dense[c] += part;
      if (read[token]) sparse[c] += part;
    }
  }
  double difference = 0;
  double norm = 0;
  for (std::size_t c = 0; c < d; ++c) {
    const double expected = dense[c] / all;
    const double error = sparse[c] / kept - expected;
    difference += error * error;
    norm += expected * expected;
  }
  return {kept / all, difference == 0 ? 0 : std::sqrt(difference / norm)};
}

// Of the oracle's pages that need not be read, the share of tokens that are.
double recall_of(const TraceRun& run, std::size_t step, int page_tokens, const TraceRun::Sets& best,
                 const Read& read) {
  const std::int32_t* wanted = run.chosen(best, step);
  std::ptrdiff_t total = 0;
  std::ptrdiff_t found = 0;
  for (std::int32_t k = 0; k < best.counts[step]; ++k) {
    if (run.is_always_read(step, wanted[k])) continue;
    const std::int32_t begin = wanted[k] * page_tokens;
    const std::int32_t end = begin + run.page_length(step, wanted[k]);
    total += end - begin;
    found += read.count(begin, end);
  }
  return total == 0 ? 1.0 : static_cast<double>(found) / static_cast<double>(total);
}

}  // namespace

void measure_tokens(const AttentionTrace& trace, const TraceRun& run, int page_tokens,
                    const TokenSets& sets, const TraceRun::Sets& best,
                    std::span<const TokenSpan> spans, const Executor& executor,
                    StepQuality& quality) {
  const std::size_t group = run.group();
  std::vector<Read> steps;
  for (std::size_t step = 0; step < run.num_steps(); ++step) {
    const Read& read = steps.emplace_back(sets, step, run.length(step));
    const auto tokens = static_cast<double>(sets.begin[step + 1] - sets.begin[step]);
    quality.recall.push_back(recall_of(run, step, page_tokens, best, read));
    quality.tokens_read.push_back(tokens);
    constexpr double kKeyAndValueBytes = 2 * 2;  // of a channel, 16 bits each
    quality.bytes_read.push_back(static_cast<double>(sets.read_bytes[step]) +
                                 tokens * kKeyAndValueBytes * trace.head_dim);
    quality.resident_bytes.push_back(static_cast<double>(sets.resident_bytes[step]));
    for (const TokenSpan& span : spans) {
      const std::int32_t end = std::min(span.end, run.length(step));
      const bool whole = span.begin >= end || read.count(span.begin, end) == end - span.begin;
      quality.carriers_read.push_back(whole ? 1 : 0);
    }
  }
  quality.retained.resize(steps.size() * group);
  quality.output_error.resize(steps.size() * group);
  for_each_item(executor, static_cast<std::int64_t>(steps.size() * group),
                [&](std::int64_t item, int) {
                  const auto row = static_cast<std::size_t>(item);
                  const Read& read = steps[row / group];
                  const Kept kept = attend(trace, run.query(row / group, row % group), read);
                  quality.retained[row] = kept.retained;
                  quality.output_error[row] = kept.output_error;
                });
}

}  // namespace locks::detail
