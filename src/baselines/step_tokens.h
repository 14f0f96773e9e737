// What the selectors of tokens share: the tokens of a step under its budget, and rankings.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "locks/select.h"
#include "locks/trace.h"

namespace locks::detail {

// As many tokens as the pages hold that the budget allows.
inline std::int64_t budget_tokens(const Budget& budget, std::int64_t length, int page_tokens) {
  const std::int64_t missing = num_pages(length, page_tokens) * page_tokens - length;
  return budget_pages(budget, length, page_tokens, nullptr) * page_tokens - missing;
}

// Tokens that one step reads. The always-read ones are in it from the start.
class StepTokens {
 public:
  StepTokens(std::int32_t length, int page_tokens, const Budget& budget)
      : room_(budget_tokens(budget, length, page_tokens)),
        taken_(static_cast<std::size_t>(length)) {
    for (std::int32_t token = 0; token < length; ++token) {
      if (always_read(token / page_tokens, length, page_tokens)) add(token);
    }
  }

  std::int32_t length() const { return static_cast<std::int32_t>(taken_.size()); }
  // Tokens that the budget still allows; negative if those forced exceed it.
  std::int64_t room() const { return room_; }
  bool taken(std::int32_t token) const { return taken_[static_cast<std::size_t>(token)]; }

  // Tokens that the selector never leaves out, whatever the budget.
  void force(std::int32_t begin, std::int32_t end) {
    for (std::int32_t token = begin; token < std::min(end, length()); ++token) add(token);
  }
  // The token, if there is room.
  void take(std::int32_t token) {
    if (room_ > 0) add(token);
  }
  void append_to(std::vector<std::int32_t>& ids) const {
    for (std::int32_t token = 0; token < length(); ++token) {
      if (taken(token)) ids.push_back(token);
    }
  }

 private:
  void add(std::int32_t token) {
    if (taken(token)) return;
    taken_[static_cast<std::size_t>(token)] = true;
    --room_;
  }

  std::int64_t room_;
  std::vector<bool> taken_;
};

// Places of the scores, the largest first; equal scores in the order of places.
inline std::vector<std::int32_t> ranking(const std::vector<double>& scores) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  return order;
}

// The softmax of the logits, in their place.
inline void softmax(std::vector<double>& logits) {
  if (logits.empty()) return;
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double& logit : logits) sum += logit = std::exp(logit - most);
  for (double& logit : logits) logit /= sum;
}

// Bytes of keys and values of `tokens` tokens, in 16 bits.
inline std::int64_t cache_bytes(std::int64_t tokens, int head_dim) { return tokens * 4 * head_dim; }

// One method on one trace: made once, then asked for each judged step, from any thread.
class TokenSelector {
 public:
  virtual ~TokenSelector() = default;

  // Before steps are chosen at another budget.
  virtual void set_budget(const Budget&) {}
  // Tokens that are never left out, then the best of the others. `step` counts all steps of the
  // trace, the window included.
  virtual void choose(int step, StepTokens& tokens) const = 0;
  virtual std::int64_t statistics_bytes(std::int32_t length) const = 0;
  virtual std::int64_t read_bytes(std::int32_t length) const = 0;
  // Of keys and values that are still there when a step reads `chosen` of `length` tokens.
  virtual std::int64_t kept_tokens(std::int32_t length, std::int64_t chosen) const = 0;
};

}  // namespace locks::detail
