// Traces for the selectors of tokens: drawn keys that wander, queries that resemble some of them,
// and a pass that repeats the context.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "locks/trace.h"

namespace locks::testing {

struct TraceShape {
  int group = 3;
  int num_steps = 12;
  int window = 6;
  int num_tokens = 640;
  int head_dim = 64;
  std::vector<int> chunks = {};  // tokens of each, behind the first `sink`
  int sink = 4;
};

class TokenTrace {
 public:
  explicit TokenTrace(const TraceShape& shape) : random_(11) {
    const auto d = static_cast<std::size_t>(shape.head_dim);
    const auto tokens = static_cast<std::size_t>(shape.num_tokens);
    keys_ = drawn(tokens * d);
    for (std::size_t i = d; i < keys_.size(); ++i) keys_[i] += 0.8f * keys_[i - d];
    values_ = drawn(tokens * d);
    for (int t = 0; t < shape.num_steps; ++t) {
      positions_.push_back(shape.num_tokens - shape.num_steps + t);
    }
    const auto group = static_cast<std::size_t>(shape.group);
    queries_ = resembling(group * static_cast<std::size_t>(shape.num_steps), d);
    view_.queries = queries_.data();
    view_.keys = keys_.data();
    view_.values = values_.data();
    view_.positions = positions_.data();
    view_.group_size = shape.group;
    view_.num_steps = shape.num_steps;
    view_.num_tokens = shape.num_tokens;
    view_.head_dim = shape.head_dim;
    view_.scale = 1.0f / std::sqrt(static_cast<float>(d));
    view_.window = shape.window;
    repeat(shape);
  }
  TokenTrace(const TokenTrace&) = delete;
  TokenTrace& operator=(const TokenTrace&) = delete;

  const AttentionTrace& view() const { return view_; }

 private:
  std::vector<float> drawn(std::size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> numbers(count);
    for (float& number : numbers) number = normal(random_);
    return numbers;
  }

  std::vector<float> resembling(std::size_t rows, std::size_t d) {
    std::vector<float> queries = drawn(rows * d);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::size_t like = random_() % (keys_.size() / d);
      for (std::size_t c = 0; c < d; ++c) {
        queries[row * d + c] = 0.7f * queries[row * d + c] + 0.5f * keys_[like * d + c];
      }
    }
    return queries;
  }

  // Five tokens ask for each chunk, before those that repeat it.
  void repeat(const TraceShape& shape) {
    std::int32_t token = shape.sink;
    std::int32_t row = 0;
    for (int tokens : shape.chunks) {
      for (std::int32_t number : {token, token + tokens, row, row + 5 + tokens}) {
        chunks_.push_back(number);
      }
      token += tokens;
      row += 5 + tokens;
    }
    const auto d = static_cast<std::size_t>(shape.head_dim);
    const auto rows = static_cast<std::size_t>(row);
    repeat_queries_ = resembling(static_cast<std::size_t>(shape.group) * rows, d);
    repeat_keys_ = drawn(rows * d);
    view_.reconstruction = {repeat_queries_.data(), repeat_keys_.data(), chunks_.data(), row,
                            static_cast<int>(shape.chunks.size())};
  }

  std::mt19937 random_;
  std::vector<float> keys_, values_, queries_, repeat_queries_, repeat_keys_;
  std::vector<std::int32_t> positions_, chunks_;
  AttentionTrace view_;
};

}  // namespace locks::testing
