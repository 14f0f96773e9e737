// Page scores, against the double-precision reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "score/score_ref.h"
#include "support/compare.h"
#include "support/stage_calls.h"

namespace locks::testing {
namespace {

using ref::PageSummary;
using ref::Vector;

double sum_of_magnitudes(const Vector& x) {
  double sum = 0;
  for (double value : x) sum += std::abs(value);
  return sum;
}

double norm(const Vector& x) { return std::sqrt(ref::dot(x, x.data())); }

// A query as scoring sees it.
Vector prepared_query(const PagedFixture& fixture, int seq, int head) {
  Vector query = fixture.dense_query(seq, head);
  if (fixture.edge().format.improved) query = ref::rotate(std::move(query));
  for (double& x : query) x *= static_cast<double>(fixture.attention().scale);
  return query;
}

// Codes of 16 bits, less what a kernel may keep clear of their ends.
constexpr double kQuerySteps = 32000;

// What the score may be off by. 16-bit queries err by up to half a step on each channel: at most
// half a step times the sum of the key's magnitudes, and never more than six standard deviations,
// of step / sqrt(12) a channel. The float rotation errs by a few roundoffs of the norms, the float
// arithmetic on the sums by a few roundoffs of their size.
Tolerance score_tolerance(const PageSummary& page, const Vector& query, const Vector& reference) {
  double largest_query = 0, spread = 0, spread_norm = 0, largest_logit = 0;
  for (double x : query) largest_query = std::max(largest_query, std::abs(x));
  PageSummary centred = page;
  centred.centroid.assign(page.centroid.size(), 0.0);
  for (int i = 0; i < page.page_tokens; ++i) {
    const Vector deviation = ref::reconstruct_key(centred, i);
    spread = std::max(spread, sum_of_magnitudes(deviation));
    spread_norm = std::max(spread_norm, norm(deviation));
    // The sum over components adds magnitudes that may cancel.
    double logit = 0;
    for (int m = 0; m < page.rank; ++m) {
      logit += std::abs(ref::dot(query, page.basis.data() + m * page.head_dim) *
                        page.coefficients[static_cast<std::size_t>(m * page.page_tokens + i)]);
    }
    largest_logit = std::max(largest_logit, logit);
  }
  const double magnitudes =
      sum_of_magnitudes(page.centroid) + sum_of_magnitudes(reference) + spread;
  const double norms = norm(page.centroid) + norm(reference) + spread_norm;
  const double constant = reference.empty() ? 0 : std::abs(ref::dot(query, reference.data()));
  const double size =
      std::abs(ref::dot(query, page.centroid.data())) + constant + largest_logit + 4;
  const double query_error =
      largest_query / kQuerySteps * std::min(magnitudes / 2, 6 / std::sqrt(12) * norms);
  return {query_error + 16 * kFloatRoundoff * norm(query) * norms + 8 * kFloatRoundoff * size +
              dot_error(page.head_dim) * norm(query) * norm(reference),
          0, "16-bit query, float rotation, float sums"};
}

void expect_scores_match(PagedFixture& fixture, const std::vector<float>& scores) {
  const EdgeCase& edge = fixture.edge();
  const PageIndex pages = fixture.pages();
  const RecordLayout layout = record_layout(edge.format, edge.head_dim);
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      const Vector reference = edge.format.improved ? fixture.reference(h) : Vector{};
      std::vector<PageSummary> summaries;
      for (int b = 0; b < edge.lengths[static_cast<std::size_t>(i)] / kBlockTokens; ++b) {
        for (PageSummary& page : ref::unpack_pages(layout, fixture.record(i, h, b))) {
          summaries.push_back(std::move(page));
        }
      }
      for (int g = 0; g < edge.group_size; ++g) {
        const int head = h * edge.group_size + g;
        const Vector query = prepared_query(fixture, i, head);
        const float* row =
            scores.data() + pages.begin[i] * fixture.num_query_heads() + head * pages.pages(i);
        for (std::int64_t p = 0; p < pages.pages(i); ++p) {
          const auto at = static_cast<std::size_t>(p);
          if (at >= summaries.size()) {
            EXPECT_TRUE(is_poison(row[p])) << "page " << p << " has no record";
            continue;
          }
          ASSERT_TRUE(near(row[p], ref::score_page(summaries[at], query, reference),
                           score_tolerance(summaries[at], query, reference)))
              << "sequence " << i << ", query head " << head << ", page " << p;
        }
      }
    }
  }
}

// Codes over their whole range, which summaries of real keys seldom use, and scales of all sizes.
void write_random_records(PagedFixture& fixture, std::uint64_t seed) {
  const EdgeCase& edge = fixture.edge();
  std::mt19937_64 random(seed);
  auto codes = [&](int count, int bits) {
    const int limit = (1 << (bits - 1)) - 1;
    std::vector<int> result(static_cast<std::size_t>(count));
    for (int& code : result) code = std::uniform_int_distribution<int>(-limit, limit)(random);
    if (random() % 4 == 0) std::fill(result.begin(), result.end(), random() % 2 ? limit : -limit);
    return result;
  };
  auto scale = [&] {
    return ref::round_to_fp16(std::exp2(std::uniform_real_distribution<double>(-16, -7)(random)));
  };
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      for (int b = 0; b < edge.lengths[static_cast<std::size_t>(i)] / kBlockTokens; ++b) {
        ref::Record record;
        for (int p = 0; p < edge.format.pages_per_block(); ++p) {
          ref::QuantisedPage page;
          page.centroid = codes(edge.head_dim, edge.format.centroid_bits);
          page.centroid_scale = scale();
          for (int m = 0; m < edge.format.rank; ++m) {
            const auto row = codes(edge.head_dim, edge.format.basis_bits);
            page.basis.insert(page.basis.end(), row.begin(), row.end());
            page.component_scales.push_back(scale());
          }
          page.coefficients =
              codes(edge.format.rank * edge.format.page_tokens, edge.format.coefficient_bits);
          record.pages.push_back(std::move(page));
        }
        record.header = {kRecordMagic, kRecordVersion, encode_format(edge.format), 0x12345678};
        const auto bytes = ref::pack_record(edge.format, edge.head_dim, record);
        std::memcpy(fixture.record(i, h, b), bytes.data(), bytes.size());
      }
    }
  }
}

void expect_unpack_inverts_pack(const PagedFixture& fixture) {
  const EdgeCase& edge = fixture.edge();
  const RecordLayout layout = record_layout(edge.format, edge.head_dim);
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    for (int b = 0; b < edge.lengths[static_cast<std::size_t>(i)] / kBlockTokens; ++b) {
      const std::uint8_t* bytes = fixture.record(i, 0, b);
      const ref::Record record = ref::parse_record(edge.format, edge.head_dim, bytes);
      const std::vector<PageSummary> unpacked = ref::unpack_pages(layout, bytes);
      ASSERT_EQ(unpacked.size(), record.pages.size());
      for (std::size_t p = 0; p < unpacked.size(); ++p) {
        const PageSummary expected = ref::dequantise(edge.format, edge.head_dim, record.pages[p]);
        const Tolerance tolerance = {0, kFloatRoundoff, "one float product"};
        EXPECT_TRUE(arrays_near(unpacked[p].centroid.data(), expected.centroid.data(),
                                expected.centroid.size(), tolerance));
        EXPECT_TRUE(arrays_near(unpacked[p].basis.data(), expected.basis.data(),
                                expected.basis.size(), tolerance));
        EXPECT_TRUE(arrays_near(unpacked[p].coefficients.data(), expected.coefficients.data(),
                                expected.coefficients.size(), tolerance));
      }
    }
  }
}

// The same bits at every level and number of workers; then the values.
void check_scores(PagedFixture& fixture) {
  std::vector<float> first;
  for_each_setting([&](const Executor& executor) {
    const Scores scores = call_score(fixture, false, executor);
    EXPECT_EQ(scores.invalid_records, 0);
    if (first.empty()) {
      first = scores.values;
      expect_scores_match(fixture, first);
    }
    EXPECT_EQ(std::memcmp(first.data(), scores.values.data(), first.size() * sizeof(float)), 0)
        << "scores differ between CPU levels or numbers of workers";
  });
}

class ScoreConformance : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(ScoreConformance, SummariesOfKeys_ScoreAsReference) {
  PagedFixture fixture(GetParam());
  fixture.write_reference_records();
  expect_unpack_inverts_pack(fixture);
  check_scores(fixture);
}

TEST_P(ScoreConformance, RandomRecords_ScoreAsReference) {
  PagedFixture fixture(GetParam());
  write_random_records(fixture, 11);
  expect_unpack_inverts_pack(fixture);
  check_scores(fixture);
}

TEST_P(ScoreConformance, UnrecordedPages_GetTheirExactMass) {
  PagedFixture fixture(GetParam());
  const EdgeCase& edge = fixture.edge();
  const PageIndex pages = fixture.pages();
  for_each_setting([&](const Executor& executor) {
    std::vector<float> scores(
        static_cast<std::size_t>(pages.begin[fixture.num_seqs()] * fixture.num_query_heads()),
        poison_float());
    const Status status =
        score_unrecorded_pages(fixture.attention(), fixture.query(), fixture.keys(), fixture.seqs(),
                               pages, scores.data(), executor);
    ASSERT_TRUE(status.ok()) << status.message();
    for (int i = 0; i < fixture.num_seqs(); ++i) {
      const int length = edge.lengths[static_cast<std::size_t>(i)];
      for (int head = 0; head < fixture.num_query_heads(); ++head) {
        const Vector query = ref::scaled(fixture.dense_query(i, head),
                                         static_cast<double>(fixture.attention().scale));
        const Vector& keys = fixture.dense_keys(i, head / edge.group_size);
        const float* row =
            scores.data() + pages.begin[i] * fixture.num_query_heads() + head * pages.pages(i);
        for (int p = 0; p < pages.pages(i); ++p) {
          const int begin = p * edge.format.page_tokens;
          if (begin < length / kBlockTokens * kBlockTokens) {
            ASSERT_TRUE(is_poison(row[p])) << "page " << p << " has a record";
            continue;
          }
          const double* first = keys.data() + static_cast<std::ptrdiff_t>(begin) * edge.head_dim;
          const int tokens = std::min(edge.format.page_tokens, length - begin);
          double size = 0;
          for (int t = 0; t < tokens; ++t) {
            for (int c = 0; c < edge.head_dim; ++c) {
              const double term = query[static_cast<std::size_t>(c)] * first[t * edge.head_dim + c];
              size = std::max(size, std::isfinite(term) ? std::abs(term) * edge.head_dim : 0);
            }
          }
          ASSERT_TRUE(near(row[p], ref::log_mass(first, tokens, query),
                           {dot_error(edge.head_dim) * size + 8 * kFloatRoundoff,
                            4 * kFloatRoundoff, "float dot products and log-sum-exp"}))
              << "sequence " << i << ", query head " << head << ", page " << p;
        }
      }
    }
  });
}

// A record of another format, version or magic is never scored.
TEST_P(ScoreConformance, ForeignHeader_ScoresNanAndCounts) {
  PagedFixture fixture(GetParam());
  fixture.write_reference_records();
  const EdgeCase& edge = fixture.edge();
  const RecordLayout layout = record_layout(edge.format, edge.head_dim);
  std::int64_t invalid = 0;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    const int blocks = edge.lengths[static_cast<std::size_t>(i)] / kBlockTokens;
    for (int b = i % 3; b < blocks; b += 3) {  // in the last KV head: the others stay as they are
      fixture.record(i, edge.num_kv_heads - 1, b)[layout.header_offset + b % 4] ^= 0x40;
      ++invalid;
    }
  }
  for_each_setting([&](const Executor& executor) {
    const Scores scores = call_score(fixture, false, executor);
    EXPECT_EQ(scores.invalid_records, invalid);
    const PageIndex pages = fixture.pages();
    for (int i = 0; i < fixture.num_seqs(); ++i) {
      const int blocks = edge.lengths[static_cast<std::size_t>(i)] / kBlockTokens;
      const float* row = scores.values.data() + pages.begin[i] * fixture.num_query_heads() +
                         (fixture.num_query_heads() - 1) * pages.pages(i);
      for (int p = 0; p < blocks * edge.format.pages_per_block(); ++p) {
        const bool foreign = p / edge.format.pages_per_block() % 3 == i % 3;
        if (foreign) {
          ASSERT_TRUE(std::isnan(row[p])) << p;
        } else if (edge.keys != KeyPattern::kNanKey && edge.keys != KeyPattern::kInfKey) {
          ASSERT_TRUE(std::isfinite(row[p])) << p;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Edge, ScoreConformance, ::testing::ValuesIn(edge_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

}  // namespace
}  // namespace locks::testing
