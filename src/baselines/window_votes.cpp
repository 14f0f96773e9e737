#include "baselines/window_votes.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "baselines/page_keys.h"
#include "baselines/step_tokens.h"
#include "core/work_queue.h"

namespace locks::detail {

namespace {

// Adds one head's attention to the tokens before the window.
void vote(const AttentionTrace& trace, int head, std::vector<double>& votes) {
  std::vector<double> shares;
  for (int step = 0; step < trace.window; ++step) {
    const float* query = trace.query(head, step);
    shares.resize(static_cast<std::size_t>(trace.positions[step]) + 1);
    for (std::size_t token = 0; token < shares.size(); ++token) {
      const float* key = trace.keys + token * static_cast<std::size_t>(trace.head_dim);
      shares[token] = static_cast<double>(trace.scale * dot(query, key, trace.head_dim));
    }
    softmax(shares);
    for (std::size_t token = 0; token < votes.size(); ++token) votes[token] += shares[token];
  }
}

template <class Pool>
std::vector<double> pooled(const std::vector<double>& votes, int kernel, const Pool& pool) {
  std::vector<double> result(votes.size());
  const auto reach = static_cast<std::ptrdiff_t>(kernel / 2);
  const auto size = static_cast<std::ptrdiff_t>(votes.size());
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    const auto first = votes.begin() + std::max<std::ptrdiff_t>(i - reach, 0);
    const auto last = votes.begin() + std::min(i + reach + 1, size);
    result[static_cast<std::size_t>(i)] = pool(first, last);
  }
  return result;
}

}  // namespace

std::int32_t window_begin(const AttentionTrace& trace) {
  return *std::min_element(trace.positions, trace.positions + trace.window);
}

std::int32_t prompt_end(const AttentionTrace& trace) {
  return *std::max_element(trace.positions, trace.positions + trace.window) + 1;
}

std::vector<double> window_votes(const AttentionTrace& trace, const Executor& executor) {
  const auto heads = static_cast<std::size_t>(trace.group_size);
  const auto tokens = static_cast<std::size_t>(window_begin(trace));
  std::vector<std::vector<double>> of_heads(heads, std::vector<double>(tokens));
  for_each_item(executor, trace.group_size, [&](std::int64_t head, int) {
    vote(trace, static_cast<int>(head), of_heads[static_cast<std::size_t>(head)]);
  });
  std::vector<double> votes(tokens);
  for (const std::vector<double>& own : of_heads) {
    for (std::size_t token = 0; token < tokens; ++token) votes[token] += own[token];
  }
  return votes;
}

std::vector<double> mean_pooled(const std::vector<double>& votes, int kernel) {
  return pooled(votes, kernel,
                [=](auto first, auto last) { return std::accumulate(first, last, 0.0) / kernel; });
}

std::vector<double> max_pooled(const std::vector<double>& votes, int kernel) {
  return pooled(votes, kernel,
                [](auto first, auto last) { return *std::max_element(first, last); });
}

}  // namespace locks::detail
