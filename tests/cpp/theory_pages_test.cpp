// What the theory says of pages and outputs, in double precision: the page's own basis is the best
// one, a shared projection is blind, the output errs by the dropped mass. docs/method.md has the
// statements.
#include <gtest/gtest.h>

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "decode/decode_ref.h"
#include "support/heads.h"

namespace locks::testing {
namespace {

using ref::PageSummary;

// sum_i |x_i - projection of x_i onto the rows of `frame`|^2, x centred, frame [rank, d]
// orthonormal.
double residual(const Vector& centred, int n, int d, const Vector& frame, int rank) {
  double sum = 0;
  for (int i = 0; i < n; ++i) {
    Vector x(centred.begin() + i * d, centred.begin() + (i + 1) * d);
    for (int m = 0; m < rank; ++m) {
      const double along = ref::dot(x, frame.data() + m * d);
      for (int c = 0; c < d; ++c) x[at(c)] -= along * frame[at(m * d + c)];
    }
    sum += ref::dot(x, x.data());
  }
  return sum;
}

// Gram-Schmidt on the rows.
Vector orthonormal(Vector rows, int rank, int d) {
  for (int m = 0; m < rank; ++m) {
    Vector row(rows.begin() + m * d, rows.begin() + (m + 1) * d);
    for (int k = 0; k < m; ++k) {
      const double along = ref::dot(row, rows.data() + k * d);
      for (int c = 0; c < d; ++c) row[at(c)] -= along * rows[at(k * d + c)];
    }
    const double length = norm(row);
    for (int c = 0; c < d; ++c) rows[at(m * d + c)] = row[at(c)] / length;
  }
  return rows;
}

struct CentredPage {
  Vector keys;
  PageSummary summary;
  Vector spectrum;
};

CentredPage centred_page(const Vector& keys, int n, int d, int rank) {
  CentredPage page{keys, {}, {}};
  page.summary = ref::summarise_exact(keys.data(), n, d, rank, &page.spectrum);
  for (int i = 0; i < n * d; ++i) page.keys[at(i)] -= page.summary.centroid[at(i % d)];
  return page;
}

TEST(TheoryOfPages, OwnBasis_MinimisesTheResidual) {
  constexpr int kTokens = 16, kDim = 64;
  for (std::uint64_t seed : kSeeds) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const Vector keys = random_head(seed, kTokens, kDim, 1).keys;
    for (int rank : {1, 2, 4, 8, 15}) {
      const CentredPage page = centred_page(keys, kTokens, kDim, rank);
      const double own = residual(page.keys, kTokens, kDim, page.summary.basis, rank);
      const double tail = std::accumulate(page.spectrum.begin() + rank, page.spectrum.end(), 0.0);
      EXPECT_NEAR(own, tail, kRounding * page.spectrum[0]) << "rank " << rank;
      for (int trial = 0; trial < 20; ++trial) {
        // Anywhere; within the span of the keys; and a little off the page's own basis.
        const Vector anywhere = normal_vector(random, rank * kDim);
        Vector spanned(at(rank * kDim)), near_own = page.summary.basis;
        for (int m = 0; m < rank; ++m) {
          const Vector mix = normal_vector(random, kTokens);
          for (int i = 0; i < kTokens * kDim; ++i) {
            spanned[at(m * kDim + i % kDim)] += mix[at(i / kDim)] * page.keys[at(i)];
          }
        }
        const Vector push = normal_vector(random, rank * kDim, 1e-2);
        for (std::size_t c = 0; c < push.size(); ++c) near_own[c] += push[c];
        for (const Vector& frame : {anywhere, spanned, near_own}) {
          EXPECT_GE(residual(page.keys, kTokens, kDim, orthonormal(frame, rank, kDim), rank),
                    own - kRounding * page.spectrum[0]);
        }
      }
    }
  }
}

TEST(TheoryOfPages, Eigenpairs_AgreeWithEigen) {
  for (std::uint64_t seed : kSeeds) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    for (int n : {4, 8, 16}) {
      std::mt19937_64 random(seed);
      const Vector x = normal_vector(random, n * n);
      Eigen::MatrixXd matrix = Eigen::Map<const Eigen::MatrixXd>(x.data(), n, n);
      matrix = (matrix * matrix.transpose()).eval();
      const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(matrix);
      const auto pairs =
          ref::symmetric_eigenpairs(Vector(matrix.data(), matrix.data() + matrix.size()), n);
      const double largest = solver.eigenvalues()[n - 1];
      for (int m = 0; m < n; ++m) {
        EXPECT_NEAR(pairs.values[at(m)], solver.eigenvalues()[n - 1 - m], kRounding * largest);
        const Eigen::Map<const Eigen::VectorXd> vector(&pairs.vectors[at(m * n)], n);
        EXPECT_LE((matrix * vector - pairs.values[at(m)] * vector).norm(), kRounding * largest);
        EXPECT_NEAR(std::abs(vector.dot(solver.eigenvectors().col(n - 1 - m))), 1, 1e-6);
      }
    }
  }
}

// |o_sel - o| <= (1 - R) diam(values) for any set of tokens, those of a selection or not.
TEST(TheoryOfPages, Output_ErrsByDroppedMassTimesDiameter) {
  auto check = [](const Head& head, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    double diameter = 0;
    for (int i = 0; i < head.num_tokens; ++i) {
      const Vector v(head.values.begin() + i * head.head_dim,
                     head.values.begin() + (i + 1) * head.head_dim);
      for (int j = 0; j < i; ++j) {
        diameter = std::max(diameter, norm(difference(&head.values[at(j * head.head_dim)], v)));
      }
    }
    const std::vector<bool> all(at(head.num_tokens), true);
    for (const Vector& query : head.queries) {
      const auto dense = ref::attend(query, head.keys.data(), head.values.data(), all);
      for (double kept : {0.02, 0.3, 0.9}) {
        std::vector<bool> mask(at(head.num_tokens), false);
        mask[0] = true;
        for (int page = 0; page < head.num_tokens / 4; ++page) {
          if (!std::bernoulli_distribution(kept)(random)) continue;
          for (int i = 0; i < 4; ++i) mask[at(page * 4 + i)] = true;
        }
        const auto sparse = ref::attend(query, head.keys.data(), head.values.data(), mask);
        const double retained = ref::retained_mass(query, head.keys.data(), mask);
        EXPECT_NEAR(std::exp(sparse.lse - dense.lse), retained, kRounding);
        EXPECT_LE(norm(difference(sparse.output.data(), dense.output)),
                  (1 - retained) * diameter + kRounding);
      }
    }
  };
  for (std::uint64_t seed : kSeeds) {
    SCOPED_TRACE(::testing::Message() << "random head, seed " << seed);
    check(random_head(seed, 256, 64, 3), seed);
  }
  SCOPED_TRACE("SmolLM2 layer 9");
  check(real_head(768), 1);
}

// Proposition 1. A query-independent projection W of rank < d, shared by pages, does not see a
// change of keys inside its null space that sums to zero over the page; the page's own basis does.
TEST(TheoryOfPages, SharedProjection_IsBlindToItsNullSpace) {
  constexpr int kTokens = 4, kDim = 64, kSharedRank = 32;
  for (std::uint64_t seed : kSeeds) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const Vector frame =
        orthonormal(normal_vector(random, (kSharedRank + 1) * kDim), kSharedRank + 1, kDim);
    const double* hidden = frame.data() + kSharedRank * kDim;  // orthogonal to the rows of W
    const Vector keys = normal_vector(random, kTokens * kDim, 0.1);
    Vector query = ref::scaled(normal_vector(random, kDim), 1 / std::sqrt(kDim));
    for (std::size_t c = 0; c < query.size(); ++c) query[c] += 0.5 * hidden[c];  // q not in rows(W)

    // Any score of projected keys W k and the centroid; here the log mass of q.mu + (W q).(W (k -
    // mu)).
    auto projected = [&](const Vector& page_keys, Vector* coordinates) {
      const PageSummary mean = ref::summarise_exact(page_keys.data(), kTokens, kDim, 1);
      Vector logits(kTokens, ref::dot(query, mean.centroid.data()));
      for (int i = 0; i < kTokens; ++i) {
        const Vector x = difference(page_keys.data() + i * kDim, mean.centroid);
        for (int m = 0; m < kSharedRank; ++m) {
          const double coordinate = ref::dot(x, frame.data() + m * kDim);
          coordinates->push_back(coordinate);
          logits[at(i)] += coordinate * ref::dot(query, frame.data() + m * kDim);
        }
      }
      return ref::log_sum_exp(logits);
    };
    Vector before;
    const double blind = projected(keys, &before);
    const double mass = ref::log_mass(keys.data(), kTokens, query);
    const double sight = std::abs(ref::dot(query, hidden));
    ASSERT_GT(sight, 0.1);

    for (double change : {10.0, 100.0, 1000.0}) {
      Vector changed = keys;
      constexpr double kPattern[kTokens] = {1, -1, 0.5, -0.5};  // sums to zero: the centroid stays
      for (int i = 0; i < kTokens * kDim; ++i) {
        changed[at(i)] += change * kPattern[i / kDim] * hidden[i % kDim];
      }
      Vector after;
      EXPECT_NEAR(projected(changed, &after), blind, 1e-12 * change);
      for (std::size_t n = 0; n < before.size(); ++n) {
        EXPECT_NEAR(after[n], before[n], 1e-12 * change);
      }
      const double true_mass = ref::log_mass(changed.data(), kTokens, query);
      // Without limit: the largest logit grows by change * sight; log 4 and the keys' spread are
      // below 2.
      EXPECT_GT(true_mass, mass + change * sight - 2);
      // Its own rank-1 basis now points along the change, and the score follows the mass.
      const Head head{kTokens, kDim, changed, {}, {query}};
      for (const bool quantised : {false, true}) {
        const ScoredPage page = examine_page(head, {"", kFine8, quantised}, 0);
        EXPECT_LE(std::abs(page.scores[0] - true_mass),
                  norm(query) * page.eps + kRounding * change);
        EXPECT_GT(page.scores[0], mass + 0.95 * change * sight - 2) << "quantised " << quantised;
      }
    }
  }
}

// The whole chain of references on real data, held to what the published numpy reference measured
// on the same slice: mean over 4 steps and 3 heads at 512 tokens.
struct Golden {
  const char* name;
  SummaryFormat format;
  double oracle, locks;
};

TEST(TheoryOfPages, RealHead_RetainsWhatTheNumpyReferenceMeasured) {
  const TraceFile& trace = real_trace();
  const int d = trace.head_dim;
  for (const Golden& golden :
       {Golden{"fine", kFine, 0.9641, 0.9618}, Golden{"compact", kCompact, 0.9455, 0.9267},
        Golden{"wide", kWide, 0.9004, 0.8984}, Golden{"paper", kPaper, 0.9004, 0.8935}}) {
    SCOPED_TRACE(golden.name);
    const int page_tokens = golden.format.page_tokens;
    Vector reference(golden.format.improved ? at(d) : 0, 0.0);
    for (int i = 64; i < 1088 && golden.format.improved; ++i) {
      const Vector key =
          ref::rotate(Vector(trace.keys.begin() + i * d, trace.keys.begin() + (i + 1) * d));
      for (std::size_t c = 0; c < key.size(); ++c) reference[c] += key[c] / 1024;
    }
    double oracle = 0, locks = 0;
    constexpr int kStepsBetween = 21;
    int count = 0;
    for (int step = 0; step < trace.num_steps; step += kStepsBetween) {
      ref::HeadInput input{golden.format, d, trace.positions[at(step)] + 1, trace.scale, {}, {}, {},
                           reference};
      input.keys.assign(trace.keys.begin(), trace.keys.begin() + input.length * d);
      for (int h = 0; h < trace.group_size; ++h) input.queries.push_back(trace.query(h, step));
      for (const bool exact : {true, false}) {
        const auto selection = ref::select_pages(
            exact ? ref::exact_scores(input) : ref::page_scores(input), trace.group_size,
            input.length, page_tokens, Budget::tokens(512), GroupRule::kMeanOfShares);
        const auto mask = ref::token_mask(selection.pages, page_tokens, input.length);
        for (const Vector& query : input.queries) {
          (exact ? oracle : locks) +=
              ref::retained_mass(ref::scaled(query, trace.scale), input.keys.data(), mask);
        }
      }
      count += trace.group_size;
    }
    EXPECT_NEAR(oracle / count, golden.oracle, 0.0005);
    EXPECT_NEAR(locks / count, golden.locks,
                0.003);  // codes that round the other way move single pages
  }
}

}  // namespace
}  // namespace locks::testing
