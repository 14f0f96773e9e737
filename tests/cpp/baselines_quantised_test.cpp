// The selectors that keep codes, int3 and the shared low rank, against their references in double.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "locks/baselines.h"
#include "locks/locks.h"
#include "support/baselines_ref.h"
#include "support/compare.h"
#include "support/paged_fixture.h"

namespace locks::testing {
namespace {

std::vector<float> scores_of(PagedFixture& fixture, Selector selector, const Executor& executor) {
  const PageIndex pages = fixture.pages();
  std::vector<float> scores(
      static_cast<std::size_t>(pages.begin[fixture.num_seqs()] * fixture.num_query_heads()));
  const Status status =
      score_baseline(selector, fixture.edge().format, fixture.attention(), fixture.query(),
                     fixture.keys(), fixture.seqs(), pages, scores.data(), executor);
  EXPECT_TRUE(status.ok()) << status.message();
  return scores;
}

// The keys, or a query as one row, in the channels in which the selector works: the library's own
// rotation, which has its test elsewhere, so that codes near a tie agree.
Keys as_rows(const Vector& numbers, int head_dim, bool rotated) {
  Keys rows(static_cast<Eigen::Index>(numbers.size()) / head_dim, head_dim);
  for (Eigen::Index t = 0; t < rows.rows(); ++t) {
    const auto first = numbers.begin() + static_cast<std::ptrdiff_t>(t * head_dim);
    std::vector<float> row(first, first + head_dim);
    if (rotated) rotate(row.data(), head_dim);
    for (int c = 0; c < head_dim; ++c) {
      rows(t, c) = static_cast<double>(row[static_cast<std::size_t>(c)]);
    }
  }
  return rows;
}

int rank_of(const SummaryFormat& format, int d) {
  const std::int64_t bytes = selector_bytes_per_block(Selector::kSharedLowRank, format, d);
  return static_cast<int>((bytes / format.pages_per_block() - d * format.centroid_bits / 8 - 2) /
                          (format.page_tokens * format.coefficient_bits / 8 + 2));
}

// Keys as they are read back are floats, and so are the logits made of them.
Tolerance tolerance(const Keys& page, const RowVector& query) {
  const double size = (page.cwiseAbs() * query.cwiseAbs().transpose()).maxCoeff();
  return {1e-5 + 16 * dot_error(static_cast<int>(page.cols())) * size, 1e-6,
          "float keys, logits and their sum"};
}

void check_scores(const EdgeCase& edge, Selector selector) {
  SCOPED_TRACE(edge.name + " " + selector_name(selector));
  PagedFixture fixture(edge);
  const PageIndex pages = fixture.pages();
  const std::vector<float> scores = scores_of(fixture, selector, serial_executor());
  EXPECT_EQ(scores, scores_of(fixture, selector, thread_executor(3)));
  const bool shared = selector == Selector::kSharedLowRank;
  const bool rotated = shared && edge.format.improved;
  std::size_t next = 0;
  for (int seq = 0; seq < fixture.num_seqs(); ++seq) {
    for (int head = 0; head < fixture.num_query_heads(); ++head) {
      if (pages.pages(seq) == 0) continue;
      const Keys keys =
          as_rows(fixture.dense_keys(seq, head / edge.group_size), edge.head_dim, rotated);
      const RowVector query =
          as_rows(fixture.dense_query(seq, head), edge.head_dim, rotated).row(0) *
          static_cast<double>(fixture.attention().scale);
      SharedReference reference;
      if (shared) {
        reference = shared_reference(keys, edge.format.page_tokens,
                                     rank_of(edge.format, edge.head_dim), edge.format.improved);
      }
      for (std::int64_t page = 0; page < pages.pages(seq); ++page, ++next) {
        const Eigen::Index first = page * edge.format.page_tokens;
        const Keys own = keys.middleRows(
            first, std::min<Eigen::Index>(edge.format.page_tokens, keys.rows() - first));
        const Keys restored =
            shared ? shared_restored(own, reference, edge.format) : int3_restored(own);
        ASSERT_TRUE(near(static_cast<double>(scores[next]), log_mass_of(restored, query),
                         tolerance(restored, query)))
            << "sequence " << seq << ", head " << head << ", page " << page;
      }
    }
  }
}

// No page, one token, one page, an unfinished last page, more than one run of 2,048 tokens.
const std::vector<int> kLengths = {203, 0, 16, 2100, 1};

std::vector<EdgeCase> cases() {
  std::vector<EdgeCase> all;
  for (const SummaryFormat& format : {kFine, kFine8, kCompact, kWide, kPaper}) {
    all.push_back({.name = format_name(format),
                   .format = format,
                   .lengths = kLengths,
                   .group_size = 9,
                   .type = ScalarType::kBFloat16});
  }
  for (int head_dim : {80, 96, 128, 192, 256}) {
    all.push_back({.name = "head_dim_" + std::to_string(head_dim),
                   .format = head_dim == 128 ? kWide : kFine,
                   .lengths = {300, 5},
                   .head_dim = head_dim,
                   .group_size = 1,
                   .type = ScalarType::kFloat16,
                   .layout = CacheLayout::kTokenMajor,
                   .padding = 5});
  }
  for (KeyPattern pattern :
       {KeyPattern::kBiased, KeyPattern::kHuge, KeyPattern::kConstant, KeyPattern::kZero}) {
    all.push_back({.name = "pattern_" + std::to_string(static_cast<int>(pattern)),
                   .format = pattern == KeyPattern::kHuge ? kPaper : kFine,
                   .lengths = {203, 3},
                   .keys = pattern,
                   .reference_key = pattern == KeyPattern::kBiased});
  }
  return all;
}

TEST(QuantisedBaselines, Int3_MatchesReference) {
  for (const EdgeCase& edge : cases()) check_scores(edge, Selector::kInt3);
}

TEST(QuantisedBaselines, SharedLowRank_MatchesReference) {
  for (const EdgeCase& edge : cases()) check_scores(edge, Selector::kSharedLowRank);
}

TEST(QuantisedBaselines, Int3Bytes_AreMeanCodesAndScales) {
  EXPECT_EQ(selector_bytes_per_block(Selector::kInt3, kWide, 64), 482);
  EXPECT_EQ(selector_bytes_per_block(Selector::kInt3, kWide, 256), 1826);
  EXPECT_EQ(selector_bytes_per_block(Selector::kInt3, kFine, 64), 4 * (64 + 2 + 4 * (24 + 2)));
}

TEST(QuantisedBaselines, SharedLowRankBytes_AreTheRecordsLessThanAComponentShort) {
  EXPECT_EQ(selector_bytes_per_block(Selector::kSharedLowRank, kFine, 64), 280);   // rank 9
  EXPECT_EQ(selector_bytes_per_block(Selector::kSharedLowRank, kWide, 64), 416);   // rank 35
  EXPECT_EQ(selector_bytes_per_block(Selector::kSharedLowRank, kPaper, 64), 480);  // rank 23
  for (const SummaryFormat& format : all_formats()) {
    for (int d : {64, 80, 96, 128, 192, 256}) {
      SCOPED_TRACE(format_name(format) + ", " + std::to_string(d));
      const std::int64_t component = format.page_tokens * format.coefficient_bits / 8 + 2;
      const std::int64_t record = selector_bytes_per_block(Selector::kLocks, format, d);
      const std::int64_t bytes = selector_bytes_per_block(Selector::kSharedLowRank, format, d);
      EXPECT_LE(bytes, record);
      const bool whole = rank_of(format, d) == d;  // nothing is left to spend bytes on
      EXPECT_TRUE(whole || bytes + component * format.pages_per_block() > record);
      EXPECT_GE(rank_of(format, d), 1);
    }
  }
}

// Keys that differ along one direction in all pages: one shared component holds what each page's
// own basis would, to the rounding of an 8-bit code. Page means repeat, so their rounding does too.
TEST(QuantisedBaselines, OneSharedDirection_IsExactButForRounding) {
  PagedFixture fixture({.name = "line",
                        .format = kPaper,
                        .lengths = {160},
                        .num_kv_heads = 1,
                        .group_size = 1,
                        .keys = KeyPattern::kConstant});
  Vector line = fixture.dense_keys(0, 0);
  auto* data = static_cast<float*>(const_cast<void*>(fixture.keys().data));
  const PagedTensor keys = fixture.keys();
  const SequenceBatch seqs = fixture.seqs();
  for (int t = 0; t < 160; ++t) {
    const std::int64_t block = seqs.cache_blocks.ids[t / 16];
    for (int c = 0; c < 64; ++c) {
      const double shift = (t % 16 - 7.5) / 8 * (c % 2 == 0 ? 1 : -0.5);
      double& key = line[static_cast<std::size_t>(t * 64 + c)];
      key = shift;
      data[block * keys.block_stride + t % 16 * keys.token_stride + c] = static_cast<float>(key);
    }
  }
  const auto scores = scores_of(fixture, Selector::kSharedLowRank, serial_executor());
  const auto exact = scores_of(fixture, Selector::kOracle, serial_executor());
  for (std::size_t page = 0; page < 10; ++page) EXPECT_NEAR(scores[page], exact[page], 0.05);
}

}  // namespace
}  // namespace locks::testing
