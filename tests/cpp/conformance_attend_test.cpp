// Attention over chosen pages, against brute force in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/attention_check.h"
#include "support/stage_calls.h"

namespace locks::testing {
namespace {

enum class Choice { kAll, kNone, kLast, kFirst, kFew, kHalf };

// Ascending pages of one sequence and KV head.
std::vector<std::int32_t> choose(Choice choice, std::int64_t pages, std::mt19937_64& random) {
  const double share = choice == Choice::kFew ? 0.05 : 0.5;
  std::vector<std::int32_t> chosen;
  for (std::int32_t p = 0; p < pages; ++p) {
    const bool lucky = std::bernoulli_distribution(share)(random);
    const bool take = choice == Choice::kAll     ? true
                      : choice == Choice::kNone  ? false
                      : choice == Choice::kLast  ? p == pages - 1
                      : choice == Choice::kFirst ? p == 0
                                                 : lucky;
    if (take) chosen.push_back(p);
  }
  return chosen;
}

// Another kind of set for each sequence and head, so that neighbours differ.
Sets make_sets(PagedFixture& fixture, int round) {
  constexpr Choice kChoices[] = {Choice::kAll,  Choice::kHalf, Choice::kNone,
                                 Choice::kLast, Choice::kFew,  Choice::kFirst};
  std::mt19937_64 random(static_cast<std::uint64_t>(round) + 17);
  const int heads = fixture.edge().num_kv_heads;
  const PageIndex pages = fixture.pages();
  Sets sets = poisoned_sets(fixture);
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    for (int h = 0; h < heads; ++h) {
      const auto chosen = choose(kChoices[(round + i + h) % 6], pages.pages(i), random);
      sets.counts[static_cast<std::size_t>(i * heads + h)] =
          static_cast<std::int32_t>(chosen.size());
      std::copy(chosen.begin(), chosen.end(),
                sets.ids.begin() +
                    static_cast<std::ptrdiff_t>(pages.begin[i] * heads + h * pages.pages(i)));
    }
  }
  return sets;
}

class AttendConformance : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(AttendConformance, Outputs_MatchReference) {
  PagedFixture fixture(GetParam());
  const EdgeCase& edge = fixture.edge();
  const PageIndex pages = fixture.pages();
  for (int round = 0; round < 2; ++round) {
    Sets sets = make_sets(fixture, round);
    for_each_setting([&](const Executor& executor) {
      Output output(fixture), serial(fixture);
      for (Output* target : {&output, &serial}) {
        const Executor& workers = target == &output ? executor : serial_executor();
        const Workspace workspace(attend_workspace_bytes(fixture.attention(), fixture.seqs(), pages,
                                                         workers.num_workers));
        const Status status = attend_pages(fixture.attention(), fixture.query(), fixture.keys(),
                                           fixture.values(), fixture.seqs(), pages, sets.view(),
                                           target->view(), workspace.data(), workers);
        ASSERT_TRUE(status.ok()) << status.message();
      }
      EXPECT_TRUE(output.same_bytes(serial)) << "the number of workers changed a bit";
      EXPECT_TRUE(output.padding_is_untouched());
      for (int i = 0; i < fixture.num_seqs(); ++i) {
        for (int head = 0; head < fixture.num_query_heads(); ++head) {
          SCOPED_TRACE(::testing::Message() << "sequence " << i << ", query head " << head);
          const auto chosen = sets.of(pages, edge.num_kv_heads, i, head / edge.group_size);
          check_attention(output, i, head, fixture,
                          ref::token_mask(chosen, edge.format.page_tokens,
                                          edge.lengths[static_cast<std::size_t>(i)]));
          if (chosen.empty()) {
            EXPECT_EQ(output.lse(i, head), -INFINITY);
            for (float value : output.row(i, head)) ASSERT_EQ(value, 0.0f);
          }
          if (HasFailure()) return;
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Edge, AttendConformance, ::testing::ValuesIn(edge_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

}  // namespace
}  // namespace locks::testing
