// The attend stage on its own: hand-made page sets.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "attend/attend_ref.h"
#include "core/scalar.h"
#include "locks/locks.h"
#include "support/compare.h"
#include "support/paged_fixture.h"
#include "support/text.h"

namespace locks::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

using SetOfPair = std::function<bool(int seq, int kv_head, std::int64_t page)>;

// Page sets, results and workspace of one call over a fixture.
class AttendCall {
 public:
  AttendCall(PagedFixture& fixture, const SetOfPair& chosen)
      : fixture_(fixture), pages_(fixture.pages()) {
    const int kv_heads = fixture.edge().num_kv_heads;
    ids_.assign(static_cast<std::size_t>(pages_.begin[fixture.num_seqs()] * kv_heads), -1);
    for (int seq = 0; seq < fixture.num_seqs(); ++seq) {
      for (int head = 0; head < kv_heads; ++head) {
        std::int32_t* ids = ids_.data() + pages_.begin[seq] * kv_heads + head * pages_.pages(seq);
        std::int32_t count = 0;
        for (std::int64_t page = 0; page < pages_.pages(seq); ++page) {
          if (chosen(seq, head, page)) ids[count++] = static_cast<std::int32_t>(page);
        }
        counts_.push_back(count);
      }
    }
    const auto rows = static_cast<std::size_t>(fixture.num_seqs() * fixture.num_query_heads());
    output_.assign(rows * static_cast<std::size_t>(fixture.edge().head_dim), std::nanf(""));
    lse_.assign(rows, std::nanf(""));
  }

  Status run(const Executor& executor) {
    const int d = fixture_.edge().head_dim;
    const AttentionOutput output{output_.data(), ScalarType::kFloat32,
                                 static_cast<std::int64_t>(fixture_.num_query_heads()) * d, d,
                                 lse_.data()};
    const SequenceBatch seqs = fixture_.seqs();
    // Ends where it should, starts where it likes.
    std::vector<std::uint8_t> workspace(
        1 + attend_workspace_bytes(fixture_.attention(), seqs, pages_, executor.num_workers), 0xFF);
    return attend_pages(fixture_.attention(), fixture_.query(), fixture_.keys(), fixture_.values(),
                        seqs, pages_, {ids_.data(), counts_.data()}, output, workspace.data() + 1,
                        executor);
  }

  std::vector<std::int32_t> set(int seq, int kv_head) const {
    const int kv_heads = fixture_.edge().num_kv_heads;
    const auto begin = ids_.begin() + pages_.begin[seq] * kv_heads + kv_head * pages_.pages(seq);
    return {begin, begin + counts_[static_cast<std::size_t>(seq * kv_heads + kv_head)]};
  }

  const float* output(int seq, int head) const { return output_.data() + row(seq, head) * dim(); }
  float lse(int seq, int head) const { return lse_[row(seq, head)]; }
  std::vector<float>& outputs() { return output_; }
  std::vector<std::int32_t>& ids() { return ids_; }
  std::vector<std::int32_t>& counts() { return counts_; }

  ::testing::AssertionResult matches_reference() const {
    const EdgeCase& edge = fixture_.edge();
    for (int seq = 0; seq < fixture_.num_seqs(); ++seq) {
      for (int head = 0; head < fixture_.num_query_heads(); ++head) {
        const int kv_head = head / edge.group_size;
        const auto mask = ref::token_mask(set(seq, kv_head), edge.format.page_tokens,
                                          edge.lengths[static_cast<std::size_t>(seq)]);
        auto result = head_matches(seq, head, kv_head, mask);
        if (!result) return result << ", sequence " << seq << ", head " << head;
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  std::size_t dim() const { return static_cast<std::size_t>(fixture_.edge().head_dim); }
  std::size_t row(int seq, int head) const {
    return static_cast<std::size_t>(seq * fixture_.num_query_heads() + head);
  }

  ::testing::AssertionResult head_matches(int seq, int head, int kv_head,
                                          const std::vector<bool>& mask) const {
    ref::Vector query = fixture_.dense_query(seq, head);
    for (double& x : query) x *= static_cast<double>(fixture_.attention().scale);
    const ref::Vector& keys = fixture_.dense_keys(seq, kv_head);
    const ref::Vector& values = fixture_.dense_values(seq, kv_head);
    const ref::Attention expected = ref::attend(query, keys.data(), values.data(), mask);
    // A logit errs by its dot product's rounding, relative to the sum of its terms' magnitudes;
    // each weight by that much, so an output by at most twice that of the largest value.
    double terms = 0;
    double largest_value = 0;
    for (std::size_t t = 0; t < mask.size(); ++t) {
      if (!mask[t]) continue;
      double sum = 0;
      for (std::size_t c = 0; c < dim(); ++c) {
        sum += std::abs(query[c] * keys[t * dim() + c]);
        largest_value = std::max(largest_value, std::abs(values[t * dim() + c]));
      }
      terms = std::max(terms, sum);
    }
    const double logit = terms * dot_error(static_cast<int>(dim())) + 3e-7;  // 2^x errs by 2e-7
    const double sums = sum_error(static_cast<std::int64_t>(mask.size()));
    const Tolerance lse_tolerance{logit + sums, 4 * kFloatRoundoff, "dot products and sum"};
    const Tolerance output_tolerance{(2 * logit + 2 * sums) * largest_value, 4 * kFloatRoundoff,
                                     "weights and sums"};
    if (auto result = near(static_cast<double>(lse(seq, head)), expected.lse, lse_tolerance);
        !result) {
      return result << " in lse";
    }
    return arrays_near(output(seq, head), expected.output.data(), dim(), output_tolerance);
  }

  PagedFixture& fixture_;
  PageIndex pages_;
  std::vector<std::int32_t> ids_, counts_;
  std::vector<float> output_, lse_;
};

// Differs by sequence and head; takes the last page of some pairs only.
bool some_pages(int seq, int kv_head, std::int64_t page) {
  return (page * 7 + seq * 3 + kv_head * 5) % 4 != 0;
}
bool all_pages(int, int, std::int64_t) { return true; }

TEST(Attend, TypesDimsGroups_MatchReference) {
  const ScalarType types[] = {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16};
  int turn = 0;
  for (int head_dim : {64, 80, 96, 128, 192, 256}) {
    for (int group_size : {1, 2, 3, 4, 5, 6, 7, 8, 16, 71}) {
      const SummaryFormat formats[] = {kFine, kCompact, kWide};
      EdgeCase edge{.name = "attend",
                    .format = formats[turn % 3],
                    .lengths = {130, 0, 1, 37},
                    .head_dim = head_dim,
                    .group_size = group_size,
                    .type = types[turn / 3 % 3]};
      ++turn;
      SCOPED_TRACE("head_dim " + std::to_string(head_dim) + ", group " +
                   std::to_string(group_size));
      PagedFixture fixture(edge);
      for_each_setting([&](const Executor& executor) {
        AttendCall call(fixture, some_pages);
        ASSERT_TRUE(call.run(executor).ok());
        EXPECT_TRUE(call.matches_reference());
      });
    }
  }
}

TEST(Attend, SplitBoundaries_MatchReference) {
  EdgeCase edge{.name = "splits",
                .lengths = {2047, 2048, 2049, 4095, 4096, 4101},
                .num_kv_heads = 1,
                .group_size = 2};
  PagedFixture fixture(edge);
  for_each_setting([&](const Executor& executor) {
    AttendCall call(fixture, all_pages);
    ASSERT_TRUE(call.run(executor).ok());
    EXPECT_TRUE(call.matches_reference());
  });
}

TEST(Attend, AnyWorkersAnyOrder_SameBits) {
  EdgeCase edge{.name = "workers", .lengths = {5000, 3, 2500}, .type = ScalarType::kBFloat16};
  PagedFixture fixture(edge);
  AttendCall serial(fixture, all_pages);
  ASSERT_TRUE(serial.run(serial_executor()).ok());
  for (const Executor& executor : {thread_executor(4), reversed_executor(3)}) {
    AttendCall call(fixture, all_pages);
    ASSERT_TRUE(call.run(executor).ok());
    EXPECT_EQ(call.outputs(), serial.outputs());
  }
}

TEST(Attend, RowAlone_SameBitsAsInBatch) {
  EdgeCase edge{.name = "batch", .lengths = {2100, 90, 2600, 16}};
  PagedFixture fixture(edge);
  AttendCall batch(fixture, all_pages);
  ASSERT_TRUE(batch.run(serial_executor()).ok());

  SequenceBatch one = fixture.seqs();
  one.num_seqs = 1;
  one.lengths += 2;
  one.cache_blocks.ids += 2 * one.cache_blocks.seq_stride;
  QueryTensor query = fixture.query();
  ASSERT_EQ(query.type, ScalarType::kFloat32);
  query.data = static_cast<const float*>(query.data) + 2 * query.seq_stride;
  std::int64_t begin[2];
  const PageIndex pages = build_page_index(one, 4, begin);
  std::vector<std::int32_t> ids;
  for (int head = 0; head < 2; ++head) {
    for (std::int32_t page = 0; page < 650; ++page) ids.push_back(page);
  }
  std::int32_t counts[] = {650, 650};
  std::vector<float> output(6 * 64);
  const AttentionOutput target{output.data(), ScalarType::kFloat32, 6 * 64, 64, nullptr};
  std::vector<std::uint8_t> workspace(attend_workspace_bytes(fixture.attention(), one, pages, 1));
  ASSERT_TRUE(attend_pages(fixture.attention(), query, fixture.keys(), fixture.values(), one, pages,
                           {ids.data(), counts}, target, workspace.data(), serial_executor())
                  .ok());
  EXPECT_EQ(std::memcmp(output.data(), batch.output(2, 0), output.size() * sizeof(float)), 0);
}

TEST(Attend, EmptySet_GivesZeroAndMinusInfinity) {
  PagedFixture fixture({.name = "empty", .lengths = {50, 0, 20}});
  AttendCall call(fixture, [](int seq, int, std::int64_t) { return seq == 2; });
  ASSERT_TRUE(call.run(serial_executor()).ok());
  for (int head = 0; head < fixture.num_query_heads(); ++head) {
    EXPECT_EQ(call.lse(0, head), -kInfinity);
    EXPECT_EQ(call.lse(1, head), -kInfinity);
    for (int c = 0; c < 64; ++c) EXPECT_EQ(call.output(0, head)[c], 0.0f);
  }
  EXPECT_TRUE(call.matches_reference());
}

TEST(Attend, HugeLogits_MatchReference) {
  PagedFixture fixture({.name = "huge", .lengths = {3000}, .keys = KeyPattern::kHuge});
  for_each_setting([&](const Executor& executor) {
    AttendCall call(fixture, all_pages);
    ASSERT_TRUE(call.run(executor).ok());
    EXPECT_TRUE(call.matches_reference());
  });
}

TEST(Attend, NanKey_SpoilsOnlyRowsThatReadIt) {
  PagedFixture fixture({.name = "nan", .lengths = {300}, .keys = KeyPattern::kNanKey});
  std::int64_t nan_page[2] = {};
  for (int head = 0; head < 2; ++head) {
    const ref::Vector& keys = fixture.dense_keys(0, head);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (std::isnan(keys[i])) nan_page[head] = static_cast<std::int64_t>(i / 64 / 4);
    }
  }
  AttendCall with(fixture, all_pages);
  ASSERT_TRUE(with.run(serial_executor()).ok());
  EXPECT_TRUE(std::isnan(with.lse(0, 0)) && std::isnan(with.output(0, 0)[5]));
  AttendCall without(fixture,
                     [&](int, int head, std::int64_t page) { return page != nan_page[head]; });
  ASSERT_TRUE(without.run(serial_executor()).ok());
  EXPECT_TRUE(without.matches_reference());
}

TEST(Attend, MinusInfinityLogits_WeighNothing) {
  std::vector<float> keys(32 * 64, 0.0f), values(32 * 64), query(64, 0.0f), output(64);
  query[0] = 1;
  for (int t = 0; t < 20; ++t) keys[static_cast<std::size_t>(t) * 64] = -kInfinity;  // a whole tile
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i / 64);
  const PagedTensor cache{keys.data(), ScalarType::kFloat32, 2, 16, 1, 64, 1024, 1024, 64};
  PagedTensor value_cache = cache;
  value_cache.data = values.data();
  const std::int32_t length = 32, table[] = {0, 1}, count = 8;
  std::vector<std::int32_t> ids(8);
  std::iota(ids.begin(), ids.end(), 0);
  std::int32_t counts[] = {count};
  const SequenceBatch seqs{1, &length, {table, 2, 2}, {}};
  std::int64_t begin[2];
  const PageIndex pages = build_page_index(seqs, 4, begin);
  const AttentionParams attention{1, 1, 64, 0.125f};
  float lse = 0;
  std::vector<std::uint8_t> workspace(attend_workspace_bytes(attention, seqs, pages, 1), 0xFF);
  for_each_setting([&](const Executor&) {
    ASSERT_TRUE(attend_pages(attention, {query.data(), ScalarType::kFloat32, 1, 64, 64}, cache,
                             value_cache, seqs, pages, {ids.data(), counts},
                             {output.data(), ScalarType::kFloat32, 64, 64, &lse}, workspace.data(),
                             serial_executor())
                    .ok());
    EXPECT_FLOAT_EQ(lse, std::log(12.0f));
    EXPECT_FLOAT_EQ(output[7], 25.5f);  // the mean of tokens 20 to 31
  });
}

TEST(Attend, HalfOutputs_RoundToNearest) {
  PagedFixture fixture({.name = "types", .lengths = {100, 60}});
  AttendCall exact(fixture, all_pages);
  ASSERT_TRUE(exact.run(serial_executor()).ok());
  const PageIndex pages = fixture.pages();
  const std::size_t elements = exact.outputs().size();
  for (ScalarType type : {ScalarType::kBFloat16, ScalarType::kFloat16}) {
    std::vector<std::uint16_t> output(elements);
    std::vector<std::uint8_t> workspace(
        attend_workspace_bytes(fixture.attention(), fixture.seqs(), pages, 1));
    // Heads outermost: any strides will do.
    ASSERT_TRUE(attend_pages(fixture.attention(), fixture.query(), fixture.keys(), fixture.values(),
                             fixture.seqs(), pages, {exact.ids().data(), exact.counts().data()},
                             {output.data(), type, 64, 2 * 64, nullptr}, workspace.data(),
                             serial_executor())
                    .ok());
    for (int seq = 0; seq < 2; ++seq) {
      for (int head = 0; head < fixture.num_query_heads(); ++head) {
        for (int c = 0; c < 64; ++c) {
          EXPECT_EQ(
              detail::load_scalar(output.data(), type, seq * 64 + head * 128 + c),
              static_cast<float>(round_to(type, static_cast<double>(exact.output(seq, head)[c]))));
        }
      }
    }
  }
}

TEST(Attend, BadInput_IsNamed) {
  PagedFixture fixture({.name = "errors", .lengths = {40, 70}});
  const PageIndex pages = fixture.pages();
  AttendCall call(fixture, all_pages);
  std::vector<std::uint8_t> workspace(
      attend_workspace_bytes(fixture.attention(), fixture.seqs(), pages, 1));
  struct Arguments {
    AttentionParams attention;
    QueryTensor query;
    PagedTensor keys, values;
    PageIndex pages;
    AttentionOutput output;
  };
  const auto message = [&](const std::function<void(Arguments&)>& spoil) {
    Arguments a{fixture.attention(),
                fixture.query(),
                fixture.keys(),
                fixture.values(),
                pages,
                {call.outputs().data(), ScalarType::kFloat32, 6 * 64, 64, nullptr}};
    spoil(a);
    const Status status = attend_pages(a.attention, a.query, a.keys, a.values, fixture.seqs(),
                                       a.pages, {call.ids().data(), call.counts().data()}, a.output,
                                       workspace.data(), serial_executor());
    return status.ok() ? std::string("ok") : status.message();
  };
  EXPECT_EQ(message([](Arguments&) {}), "ok");
  EXPECT_TRUE(contains(message([](Arguments& a) { a.keys.head_dim = 96; }), "keys: "));
  EXPECT_TRUE(contains(message([](Arguments& a) { a.values.num_kv_heads = 1; }),
                       "values: num_kv_heads = 1, expected 2"));
  EXPECT_TRUE(contains(message([](Arguments& a) { a.values.block_tokens = 32; }),
                       "values: block_tokens = 32, expected 16"));
  EXPECT_TRUE(
      contains(message([](Arguments& a) { a.output.data = nullptr; }), "output: data is null"));
  EXPECT_TRUE(contains(message([](Arguments& a) { a.output.head_stride = 63; }),
                       "output: head_stride = 63"));
  EXPECT_TRUE(contains(message([](Arguments& a) { a.pages.page_tokens = 5; }), "page_tokens = 5"));
  call.counts()[2] = 19;
  EXPECT_TRUE(
      contains(message([](Arguments&) {}), "sequence 1, KV head 0: count = 19, expected 0 to 18"));
  call.counts()[2] = 18;
  call.ids()[3] = 10;
  EXPECT_TRUE(
      contains(message([](Arguments&) {}), "KV head 0: id = 10, expected above 2 and below 10"));
  call.ids()[3] = 1;
  EXPECT_TRUE(
      contains(message([](Arguments&) {}), "KV head 0: id = 1, expected above 2 and below 10"));
}

}  // namespace
}  // namespace locks::testing
