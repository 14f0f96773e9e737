// Double-precision references of the selectors of tokens, from the formulas of their papers: for
// each step the score of every token that may be read or left, and the tokens that are read in any
// case. Eigen does the products.
#pragma once

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "locks/select.h"
#include "locks/trace.h"
#include "summary/summary_ref.h"
#include "support/paged_fixture.h"

namespace locks::testing {

using Rows = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline constexpr double kForced = std::numeric_limits<double>::infinity();
inline constexpr double kGone = -std::numeric_limits<double>::infinity();

inline Rows rows_of(const float* data, int count, int d) {
  return Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(
             data, count, d)
      .cast<double>();
}

inline Eigen::VectorXd softmax_of(const Eigen::VectorXd& logits) {
  const Eigen::VectorXd masses = (logits.array() - logits.maxCoeff()).exp();
  return masses / masses.sum();
}

// The trace as matrices.
struct TraceMatrices {
  explicit TraceMatrices(const AttentionTrace& view)
      : trace(view), keys(rows_of(view.keys, view.num_tokens, view.head_dim)) {
    for (int head = 0; head < view.group_size; ++head) {
      queries.push_back(rows_of(view.query(head, 0), view.num_steps, view.head_dim));
    }
  }
  double scale() const { return static_cast<double>(trace.scale); }
  int length(int step) const { return trace.positions[step] + 1; }

  const AttentionTrace& trace;
  Rows keys;
  std::vector<Rows> queries;  // of each head
};

// Attention that the window gives to each token before it.
inline std::vector<double> votes_of(const TraceMatrices& m) {
  const int prefix = m.trace.positions[0];
  std::vector<double> votes(static_cast<std::size_t>(prefix));
  for (const Rows& queries : m.queries) {
    for (int step = 0; step < m.trace.window; ++step) {
      const Eigen::VectorXd shares =
          softmax_of(m.scale() * m.keys.topRows(m.length(step)) * queries.row(step).transpose());
      for (int t = 0; t < prefix; ++t) votes[static_cast<std::size_t>(t)] += shares(t);
    }
  }
  return votes;
}

// The mean over five neighbours, zeros outside; or the maximum of 63.
inline std::vector<double> pooled_votes(const std::vector<double>& votes, bool largest) {
  const int size = static_cast<int>(votes.size());
  const int reach = largest ? 31 : 2;
  std::vector<double> result(votes.size());
  for (int i = 0; i < size; ++i) {
    double value = 0;
    for (int j = std::max(0, i - reach); j <= std::min(size - 1, i + reach); ++j) {
      const double vote = votes[static_cast<std::size_t>(j)];
      value = largest ? std::max(value, vote) : value + vote / 5;
    }
    result[static_cast<std::size_t>(i)] = value;
  }
  return result;
}

inline std::vector<double> snapkv_scores(const TraceMatrices& m, int step) {
  std::vector<double> scores = pooled_votes(votes_of(m), false);
  scores.resize(static_cast<std::size_t>(m.length(step)), kForced);
  return scores;
}

inline std::vector<double> kvzip_scores(const TraceMatrices& m, int step) {
  const Reconstruction& pass = m.trace.reconstruction;
  const int d = m.trace.head_dim;
  const Rows repeat_keys = rows_of(pass.keys, pass.num_rows, d);
  const int sink = pass.chunks[0];
  std::vector<double> scores(static_cast<std::size_t>(m.length(step)), kForced);
  for (int chunk = 0; chunk < pass.num_chunks; ++chunk) {
    const std::int32_t* four = pass.chunks + chunk * 4;
    const int tokens = four[1] - four[0];
    Eigen::VectorXd most = Eigen::VectorXd::Zero(tokens);
    for (int head = 0; head < m.trace.group_size; ++head) {
      const Rows queries = rows_of(
          pass.queries + static_cast<std::ptrdiff_t>(head) * pass.num_rows * d, pass.num_rows, d);
      for (int row = four[2]; row < four[3]; ++row) {
        Rows seen(sink + tokens + row - four[2] + 1, d);
        seen << m.keys.topRows(sink), m.keys.middleRows(four[0], tokens),
            repeat_keys.middleRows(four[2], row - four[2] + 1);
        const Eigen::VectorXd shares = softmax_of(m.scale() * seen * queries.row(row).transpose());
        most = most.cwiseMax(shares.segment(sink, tokens));
      }
    }
    for (int t = 0; t < tokens; ++t) scores[static_cast<std::size_t>(four[0] + t)] = most(t);
  }
  return scores;
}

inline Eigen::RowVectorXd fp16_row(const Eigen::RowVectorXd& row) {
  return row.unaryExpr([](double x) { return round_to(ScalarType::kFloat16, x); });
}

// Chunks of eight; outliers are forced, and so is what follows the last chunk before the last 64.
inline std::vector<double> shadowkv_scores(const TraceMatrices& m, int step) {
  const int chunks = (m.length(step) - 64) / 8;
  const int known = (m.length(m.trace.window) - 64) / 8;  // when the prompt ends
  std::vector<std::pair<double, int>> likeness;
  Rows means(chunks, m.trace.head_dim);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const Rows own = m.keys.middleRows(chunk * 8, 8);
    means.row(chunk) = fp16_row(own.colwise().mean());
    double least = 1;
    for (int t = 0; t < 8; ++t) {
      least = std::min(least, own.row(t).normalized().dot(means.row(chunk).normalized()));
    }
    if (chunk < known) likeness.emplace_back(least, chunk);
  }
  std::sort(likeness.begin(), likeness.end());
  likeness.resize((likeness.size() * 3 + 1023) / 1024);
  std::vector<bool> outlier(static_cast<std::size_t>(chunks));
  for (const auto& [least, chunk] : likeness) outlier[static_cast<std::size_t>(chunk)] = true;

  Eigen::VectorXd best = Eigen::VectorXd::Zero(chunks);
  for (const Rows& queries : m.queries) {
    Eigen::VectorXd logits = m.scale() * means * queries.row(step).transpose();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (outlier[static_cast<std::size_t>(chunk)]) logits(chunk) = kGone;
    }
    best = best.cwiseMax(softmax_of(logits));
  }
  std::vector<double> scores(static_cast<std::size_t>(m.length(step)), kForced);
  for (int t = 0; t < chunks * 8; ++t) {
    if (!outlier[static_cast<std::size_t>(t / 8)])
      scores[static_cast<std::size_t>(t)] = best(t / 8);
  }
  return scores;
}

// The paper's section 3.6 at a budget of `budget` tokens attended to: capacity, page, channels.
struct RocketShape {
  int capacity;
  int page;
  int channels;
};

inline RocketShape rocket_shape(double prompt, double budget, int d) {
  const double c = std::max(1.0, prompt / (2 * budget));
  const double r = std::min(0.2 + 0.06 * std::log2(c), 0.8);
  const double rest = std::pow(c, 1 - r);
  double page = std::ceil(std::pow(c, (1 - r) / 2));
  if (page > rest) page = 1;
  return {static_cast<int>(prompt / std::pow(c, r)), static_cast<int>(page),
          std::min(d, static_cast<int>(d / (rest / page)))};
}

inline std::vector<double> rocketkv_scores(const TraceMatrices& m, int step, int budget,
                                           int page_tokens) {
  const int prompt = m.length(m.trace.window - 1);
  const int first_length = m.length(m.trace.window);
  const RocketShape shape = rocket_shape(prompt, budget, m.trace.head_dim);
  const std::vector<double> votes = pooled_votes(votes_of(m), true);
  std::vector<int> order(static_cast<std::size_t>(prompt));
  std::vector<double> first(static_cast<std::size_t>(prompt), kForced);
  for (int t = 0; t < prompt; ++t) {
    order[static_cast<std::size_t>(t)] = t;
    if (t < m.trace.positions[0] && !always_read(t / page_tokens, first_length, page_tokens)) {
      first[static_cast<std::size_t>(t)] = votes[static_cast<std::size_t>(t)];
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return first[static_cast<std::size_t>(a)] > first[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(std::min(prompt, shape.capacity)));
  std::sort(order.begin(), order.end());
  for (int t = prompt; t < m.length(step); ++t) order.push_back(t);

  Eigen::RowVectorXd sizes = Eigen::RowVectorXd::Zero(m.trace.head_dim);
  Eigen::RowVectorXd sums = sizes;
  for (const Rows& queries : m.queries) {
    sizes += queries.row(step).cwiseAbs();
    sums += queries.row(step);
  }
  std::vector<double> descending(sizes.data(), sizes.data() + sizes.size());
  std::sort(descending.begin(), descending.end(), std::greater<>());
  const double least = descending[static_cast<std::size_t>(shape.channels) - 1];

  const int pages = (static_cast<int>(order.size()) + shape.page - 1) / shape.page;
  Eigen::VectorXd mean = Eigen::VectorXd::Zero(pages);
  for (const Rows& queries : m.queries) {
    Eigen::VectorXd logits = Eigen::VectorXd::Zero(pages);
    double seen = 0;
    for (int c = 0; c < m.trace.head_dim; ++c) {
      if (sizes(c) < least) continue;
      seen += std::abs(queries(step, c));
      for (int page = 0; page < pages; ++page) {
        double high = kGone;
        double low = kForced;
        for (int i = page * shape.page;
             i < std::min<int>((page + 1) * shape.page, static_cast<int>(order.size())); ++i) {
          high = std::max(high, m.keys(order[static_cast<std::size_t>(i)], c));
          low = std::min(low, m.keys(order[static_cast<std::size_t>(i)], c));
        }
        logits(page) +=
            queries(step, c) * round_to(ScalarType::kFloat16, sums(c) >= 0 ? high : low);
      }
    }
    const double temperature = std::sqrt(queries.row(step).cwiseAbs().sum() / seen);
    mean += softmax_of(m.scale() * temperature * logits) / m.trace.group_size;
  }
  std::vector<double> scores(static_cast<std::size_t>(m.length(step)), kGone);
  for (std::size_t i = 0; i < order.size(); ++i) {
    scores[static_cast<std::size_t>(order[i])] = mean(static_cast<Eigen::Index>(i) / shape.page);
  }
  return scores;
}

}  // namespace locks::testing
