#include "baselines/rocket_kv.h"

#include <cmath>
#include <cstddef>

#include "baselines/page_keys.h"
#include "baselines/window_votes.h"

namespace locks::detail {

RocketKvSplit rocket_kv_split(std::int64_t prompt, std::int64_t budget, int head_dim) {
  const auto length = static_cast<double>(prompt);
  const double ratio = std::max(1.0, length / static_cast<double>(2 * budget));
  const double factor = std::min(0.2 + 0.06 * std::log2(ratio), 0.8);
  const double rest = std::pow(ratio, 1 - factor);
  // Below 2, pages of two would leave less than one for the channels: the published code has none.
  const double page = std::ceil(std::sqrt(rest)) <= rest ? std::ceil(std::sqrt(rest)) : 1.0;
  const int channels = static_cast<int>(head_dim * page / rest);
  return {static_cast<std::int64_t>(length / std::pow(ratio, factor)), static_cast<int>(page),
          std::clamp(channels, 1, head_dim)};
}

RocketKv::RocketKv(const AttentionTrace& trace, int page_tokens, const Executor& executor)
    : trace_(trace),
      page_tokens_(page_tokens),
      prompt_end_(prompt_end(trace)),
      order_(ranking(max_pooled(window_votes(trace, executor), kRocketKvKernel))) {}

// What the first judged step always reads is among what is left.
void RocketKv::set_budget(const Budget& budget) {
  const std::int32_t length =
      1 + *std::min_element(trace_.positions + trace_.window, trace_.positions + trace_.num_steps);
  split_ =
      rocket_kv_split(prompt_end_, budget_tokens(budget, length, page_tokens_), trace_.head_dim);
  std::vector<bool> kept(static_cast<std::size_t>(prompt_end_));
  std::int64_t room = split_.capacity;
  const auto keep = [&](std::int32_t token) {
    if (kept[static_cast<std::size_t>(token)]) return;
    kept[static_cast<std::size_t>(token)] = true;
    --room;
  };
  for (std::int32_t token = 0; token < prompt_end_; ++token) {
    if (token >= window_begin(trace_) || always_read(token / page_tokens_, length, page_tokens_)) {
      keep(token);
    }
  }
  for (std::int32_t token : order_) {
    if (room > 0) keep(token);
  }
  kept_.clear();
  for (std::int32_t token = 0; token < prompt_end_; ++token) {
    if (kept[static_cast<std::size_t>(token)]) kept_.push_back(token);
  }
}

std::vector<std::int32_t> RocketKv::residents(std::int32_t length) const {
  std::vector<std::int32_t> tokens = kept_;
  for (std::int32_t token = prompt_end_; token < length; ++token) tokens.push_back(token);
  return tokens;
}

std::int64_t RocketKv::kept_tokens(std::int32_t length, std::int64_t) const {
  return static_cast<std::int64_t>(kept_.size()) + length - prompt_end_;
}

std::int64_t RocketKv::num_pages(std::int32_t length) const {
  return (kept_tokens(length, 0) + split_.page_tokens - 1) / split_.page_tokens;
}

std::int64_t RocketKv::statistics_bytes(std::int32_t length) const {
  return num_pages(length) * 4 * trace_.head_dim;
}

std::int64_t RocketKv::read_bytes(std::int32_t length) const {
  return num_pages(length) * 2 * split_.channels;
}

std::vector<RocketKv::Channel> RocketKv::channels(int step) const {
  std::vector<double> sizes(static_cast<std::size_t>(trace_.head_dim));
  std::vector<double> sums(sizes.size());
  for (int head = 0; head < trace_.group_size; ++head) {
    const float* query = trace_.query(head, step);
    for (std::size_t c = 0; c < sizes.size(); ++c) {
      sizes[c] += std::abs(static_cast<double>(query[c]));
      sums[c] += static_cast<double>(query[c]);
    }
  }
  std::vector<std::int32_t> order = ranking(sizes);
  order.resize(static_cast<std::size_t>(split_.channels));
  std::vector<Channel> chosen;
  for (std::int32_t c : order) chosen.push_back({c, sums[static_cast<std::size_t>(c)] >= 0});
  return chosen;
}

std::vector<float> RocketKv::bounds(const std::vector<std::int32_t>& tokens,
                                    const std::vector<Channel>& chosen) const {
  const auto page_tokens = static_cast<std::size_t>(split_.page_tokens);
  std::vector<float> bounds;
  for (std::size_t first = 0; first < tokens.size(); first += page_tokens) {
    const std::size_t last = std::min(first + page_tokens, tokens.size());
    for (const Channel& channel : chosen) {
      const auto key = [&](std::size_t i) {
        return trace_
            .keys[static_cast<std::ptrdiff_t>(tokens[i]) * trace_.head_dim + channel.index];
      };
      float bound = key(first);
      for (std::size_t i = first + 1; i < last; ++i) {
        bound = channel.upper ? std::max(bound, key(i)) : std::min(bound, key(i));
      }
      bounds.push_back(as_fp16(bound));
    }
  }
  return bounds;
}

// Mean share of each page over the heads of the group.
std::vector<double> RocketKv::scores(int step, const std::vector<std::int32_t>& tokens) const {
  const std::vector<Channel> chosen = channels(step);
  const std::vector<float> of_pages = bounds(tokens, chosen);
  std::vector<double> mean(of_pages.size() / chosen.size());
  std::vector<double> shares(mean.size());
  for (int head = 0; head < trace_.group_size; ++head) {
    const float* query = trace_.query(head, step);
    double all = 0;
    double seen = 0;
    for (int c = 0; c < trace_.head_dim; ++c) all += std::abs(static_cast<double>(query[c]));
    for (const Channel& channel : chosen) {
      seen += std::abs(static_cast<double>(query[channel.index]));
    }
    const double scale =
        static_cast<double>(trace_.scale) * (seen > 0 ? std::sqrt(all / seen) : 1.0);
    auto bound = of_pages.begin();
    for (double& share : shares) {
      double sum = 0;
      for (const Channel& channel : chosen) {
        sum += static_cast<double>(query[channel.index]) * static_cast<double>(*bound++);
      }
      share = scale * sum;
    }
    softmax(shares);
    for (std::size_t page = 0; page < mean.size(); ++page) {
      mean[page] += shares[page] / trace_.group_size;
    }
  }
  return mean;
}

void RocketKv::choose(int step, StepTokens& tokens) const {
  const std::vector<std::int32_t> left = residents(tokens.length());
  for (std::int32_t page : ranking(scores(step, left))) {
    const auto first =
        static_cast<std::size_t>(page) * static_cast<std::size_t>(split_.page_tokens);
    const auto last = std::min(first + static_cast<std::size_t>(split_.page_tokens), left.size());
    for (std::size_t i = first; i < last; ++i) tokens.take(left[i]);
  }
}

}  // namespace locks::detail
