// The theory's bounds on scores and retained mass, in double precision: first unquantised, then
// with the residual that is measured after quantisation. docs/method.md has the statements.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/heads.h"

namespace locks::testing {
namespace {

std::vector<ScoredPage> examine(const Head& head, const Shape& shape) {
  std::vector<ScoredPage> pages;
  for (int p = 0; p < head.num_tokens / shape.format.page_tokens; ++p) {
    pages.push_back(examine_page(head, shape, p));
  }
  return pages;
}

// The exponent delta = |q| max_j eps_j / sqrt(d), the maximum also over heads; queries are scaled.
double worst_delta(const Head& head, const std::vector<ScoredPage>& pages) {
  double largest_query = 0, largest_eps = 0;
  for (const Vector& query : head.queries) largest_query = std::max(largest_query, norm(query));
  for (const ScoredPage& page : pages) largest_eps = std::max(largest_eps, page.eps);
  return largest_query * largest_eps;
}

// The k largest entries.
std::vector<std::size_t> top(const Vector& values, std::size_t k) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
  order.resize(k);
  return order;
}

double sum_over(const Vector& values, const std::vector<std::size_t>& chosen) {
  double sum = 0;
  for (std::size_t p : chosen) sum += values[p];
  return sum;
}

// Softmax over pages of one head's scores.
Vector shares(const std::vector<ScoredPage>& pages, std::size_t head, bool exact) {
  Vector logs;
  for (const ScoredPage& page : pages) logs.push_back((exact ? page.exact : page.scores)[head]);
  const double total = ref::log_sum_exp(logs);
  for (double& x : logs) x = std::exp(x - total);
  return logs;
}

std::string shape_name(const ::testing::TestParamInfo<Shape>& tested) { return tested.param.name; }

class Theory : public ::testing::TestWithParam<Shape> {
 protected:
  // Runs the check on random heads and on a slice of a real one.
  template <class Check>
  void on_all_heads(Check&& check) {
    for (std::uint64_t seed : kSeeds) {
      SCOPED_TRACE(::testing::Message() << "random head, seed " << seed);
      check(random_head(seed, 320, seed % 2 == 0 ? 64 : 80, 4));
    }
    for (std::uint64_t seed : kSeeds) {
      SCOPED_TRACE(::testing::Message() << "nearly low rank, seed " << seed);
      const SummaryFormat& format = GetParam().format;
      check(nearly_low_rank_head(seed, 80, format.page_tokens, format.rank, 0.01));
    }
    SCOPED_TRACE("SmolLM2 layer 9");
    check(real_head(2048));
  }
};

TEST_P(Theory, Score_ErrsByAtMostResidualTimesQuery) {
  on_all_heads([](const Head& head) {
    for (const ScoredPage& page : examine(head, GetParam())) {
      if (!GetParam().quantised) {
        EXPECT_LE(page.eps, std::sqrt(page.tail) + kRounding);
      }
      for (std::size_t h = 0; h < head.queries.size(); ++h) {
        EXPECT_LE(std::abs(page.scores[h] - page.exact[h]),
                  norm(head.queries[h]) * page.eps + kRounding);
      }
    }
  });
}

TEST_P(Theory, SingleHead_RetainsExpMinusTwoDelta) {
  on_all_heads([](const Head& head) {
    Head single = head;
    for (const Vector& query : head.queries) {
      single.queries = {query};
      const auto pages = examine(single, GetParam());
      const double delta = worst_delta(single, pages);
      const Vector mass = shares(pages, 0, true), estimate = shares(pages, 0, false);
      for (std::size_t k : {std::size_t{1}, pages.size() / 8, pages.size() / 2}) {
        const double kept = sum_over(mass, top(estimate, k)), best = sum_over(mass, top(mass, k));
        EXPECT_GE(kept, std::exp(-2 * delta) * best - kRounding) << "k = " << k;
        EXPECT_LE(kept, best + kRounding);
      }
    }
  });
}

TEST_P(Theory, Group_MeanOfShares_RetainsExpMinusFourDelta) {
  on_all_heads([](const Head& head) {
    const auto pages = examine(head, GetParam());
    const double delta = worst_delta(head, pages);
    Vector mass(pages.size()), estimate(pages.size());
    for (std::size_t h = 0; h < head.queries.size(); ++h) {
      const Vector head_mass = shares(pages, h, true), head_estimate = shares(pages, h, false);
      for (std::size_t p = 0; p < pages.size(); ++p) {
        mass[p] += head_mass[p] / static_cast<double>(head.queries.size());
        estimate[p] += head_estimate[p] / static_cast<double>(head.queries.size());
        // Each share errs by a factor within exp(+-2 delta).
        EXPECT_LE(std::abs(std::log(head_estimate[p] / head_mass[p])), 2 * delta + kRounding);
      }
    }
    for (std::size_t k : {std::size_t{1}, pages.size() / 8, pages.size() / 2}) {
      EXPECT_GE(sum_over(mass, top(estimate, k)),
                std::exp(-4 * delta) * sum_over(mass, top(mass, k)) - kRounding)
          << "k = " << k;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Formats, Theory,
                         ::testing::Values(Shape{"b4r1_unquantised", kFine, false},
                                           Shape{"b8r2_unquantised", {8, 2, 4, 4, 4, true}, false},
                                           Shape{"b16r8_unquantised", kWide, false},
                                           Shape{"fine", kFine, true}, Shape{"fine8", kFine8, true},
                                           Shape{"compact", kCompact, true},
                                           Shape{"wide", kWide, true},
                                           Shape{"paper", kPaper, true}),
                         shape_name);

// The retention bound is not slack: pages whose errors all have their worst sign come close to it.
// Each page's main direction u lies across the query, its residual along it, largest on the token
// that holds the mass; half of the pages gain by it what the others lose, and all estimates are
// equal.
TEST(Theory, RetentionBound_IsNearlyReached) {
  constexpr int kTokens = 4, kDim = 64, kPages = 40;
  // Residual of the tokens along the query, in units of the largest, with no sum and no overlap
  // with kMain: the page's first eigenvector is u.
  constexpr double kMain[kTokens] = {2, 1, -1.5, -1.5};
  constexpr double kResidual[kTokens] = {1, -1.4, 0.2, 0.2};
  for (double size_of_residual : {0.01, 0.1, 0.5}) {
    Head head{kPages * kTokens, kDim, Vector(at(kPages * kTokens * kDim), 0.0), {}, {}};
    for (int i = 0; i < kPages * kTokens; ++i) {
      const bool gains = i / kTokens >= kPages / 2;
      const double sign = gains ? 1 : -1;
      double* key = &head.keys[at(i * kDim)];
      key[0] = 20 * kMain[i % kTokens];
      key[1] = sign * size_of_residual * kResidual[i % kTokens];
      key[2] = gains ? -1e-9 : 0;  // the estimate prefers the losing half by next to nothing
    }
    Vector query(at(kDim), 0.0);
    query[0] = 1;  // enough for the first token of a page to hold its mass
    query[1] = 8;
    query[2] = 0.1;
    head.queries = {query};
    const auto pages = examine(head, {"", kFine, false});
    const double delta = worst_delta(head, pages);
    const Vector mass = shares(pages, 0, true), estimate = shares(pages, 0, false);
    const double kept = sum_over(mass, top(estimate, kPages / 2));
    const double best = sum_over(mass, top(mass, kPages / 2));
    EXPECT_GE(kept, std::exp(-2 * delta) * best - kRounding);
    // The largest residual is 1.4 times that of the token with the mass.
    EXPECT_LE(kept, std::exp(-2 * delta / 1.4 * 0.95) * best) << "delta " << delta;
  }
}

}  // namespace
}  // namespace locks::testing
