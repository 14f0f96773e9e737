// Exact scores of pages that have no record yet, against double, at every CPU level.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/scalar.h"
#include "locks/locks.h"
#include "support/record_set.h"

namespace locks {
namespace {

using namespace testing;

class Unrecorded : public ::testing::TestWithParam<ScalarType> {};

TEST_P(Unrecorded, IncompleteBlock_MatchesDoubleAtEveryLevel) {
  const ScalarType type = GetParam();
  const int d = 80, kv_heads = 2, group = 5, blocks = 4, block_tokens = 32;
  const auto draw = [&](std::size_t count, unsigned seed, std::vector<std::uint8_t>& bytes) {
    auto x = random_floats(count, seed, 2);
    bytes.resize(count * at(scalar_bytes(type)));
    for (std::size_t i = 0; i < count; ++i) {
      detail::store_scalar(bytes.data(), type, static_cast<std::int64_t>(i), x[i]);
      x[i] = detail::load_scalar(bytes.data(), type, static_cast<std::int64_t>(i));
    }
    return x;
  };
  std::vector<std::uint8_t> key_bytes, query_bytes;
  // Token-major: [block, token, head, channel].
  const auto keys = draw(at(blocks * block_tokens * kv_heads * d), 1, key_bytes);
  const PagedTensor tensor{
      key_bytes.data(), type, blocks, block_tokens, kv_heads, d, block_tokens * kv_heads * d, d,
      kv_heads * d};
  const std::vector<std::int32_t> lengths = {0, 1, 16, 17, 31, 64, 71, 109};
  const auto num_seqs = static_cast<int>(lengths.size());
  const auto queries = draw(lengths.size() * at(kv_heads * group * d), 2, query_bytes);
  const std::int32_t ids[] = {2, 0, 3, 1};
  const BlockTable table{ids, 0, blocks};
  const SequenceBatch seqs{num_seqs, lengths.data(), table, {}};
  const AttentionParams attention{kv_heads * group, kv_heads, d, 0.2f};
  const QueryTensor query{query_bytes.data(), type, kv_heads * group, kv_heads * group * d, d};
  for (int page_tokens : {4, 8, 16}) {
    std::vector<std::int64_t> begin(lengths.size() + 1);
    const PageIndex pages = build_page_index(seqs, page_tokens, begin.data());
    std::vector<float> first;
    for (CpuLevel level : cpu_levels()) {
      ASSERT_TRUE(set_cpu_level(level).ok());
      std::vector<float> scores(at(begin.back() * attention.num_query_heads), kPoisonScore);
      ASSERT_TRUE(score_unrecorded_pages(attention, query, tensor, seqs, pages, scores.data(),
                                         thread_executor(2))
                      .ok());
      if (first.empty()) first = scores;
      ASSERT_EQ(scores, first) << cpu_level_name(level);
    }
    for (int seq = 0; seq < num_seqs; ++seq) {
      const std::int64_t length = lengths[at(seq)];
      for (int head = 0; head < attention.num_query_heads; ++head) {
        for (std::int64_t p = 0; p < pages.pages(seq); ++p) {
          const float actual =
              first[at(begin[at(seq)] * attention.num_query_heads + head * pages.pages(seq) + p)];
          if (p * page_tokens < length / 16 * 16) {
            ASSERT_EQ(actual, kPoisonScore);
            continue;
          }
          double sum = 0;
          for (std::int64_t t = p * page_tokens;
               t < std::min<std::int64_t>(length, (p + 1) * page_tokens); ++t) {
            double logit = 0;
            for (int c = 0; c < d; ++c) {
              logit +=
                  static_cast<double>(queries[at((seq * kv_heads * group + head) * d + c)]) *
                  static_cast<double>(
                      keys[at(((ids[t / 32] * 32 + t % 32) * kv_heads + head / group) * d + c)]);
            }
            sum += std::exp(logit * static_cast<double>(attention.scale));
          }
          // Float accumulation over 80 channels in 16 lanes, logits up to about 40.
          ASSERT_NEAR(static_cast<double>(actual), std::log(sum), 2e-5);
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Types, Unrecorded,
                         ::testing::Values(ScalarType::kFloat32, ScalarType::kBFloat16,
                                           ScalarType::kFloat16));

TEST(UnrecordedPages, NonfiniteKey_GivesNonfiniteScoreForItsPage) {
  std::vector<float> keys = random_floats(16 * 64, 1);
  const std::int32_t id = 0;
  const std::int32_t length = 14;
  const BlockTable table{&id, 0, 1};
  const SequenceBatch seqs{1, &length, table, {}};
  const AttentionParams attention{3, 1, 64, 1.0f};
  const auto queries = random_floats(3 * 64, 9);
  std::int64_t begin[2];
  const PageIndex pages = build_page_index(seqs, 4, begin);
  for (float bad : {NAN, INFINITY}) {
    for (int token = 0; token < 14; ++token) {
      std::vector<float> with_bad = keys;
      with_bad[at(token * 64 + 33)] = bad;
      std::vector<float> scores(12, 0);
      const PagedTensor tensor{
          with_bad.data(), ScalarType::kFloat32, 1, 16, 1, 64, 16 * 64, 16 * 64, 64};
      ASSERT_TRUE(score_unrecorded_pages(attention,
                                         {queries.data(), ScalarType::kFloat32, 3, 0, 64}, tensor,
                                         seqs, pages, scores.data(), serial_executor())
                      .ok());
      for (int head = 0; head < 3; ++head) {
        const float q = queries[at(head * 64 + 33)];
        for (int p = 0; p < 4; ++p) {
          // exp(-inf) = 0 leaves the page's other tokens: the mass is right without the bad one.
          if (p == token / 4 && bad > 0 && q < 0) continue;
          ASSERT_EQ(std::isfinite(scores[at(head * 4 + p)]), p != token / 4)
              << token << " " << head;
        }
      }
    }
  }
}

}  // namespace
}  // namespace locks
