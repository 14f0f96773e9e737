// The GPU scorer where masses leave the range of a float or cannot be told: shifted tiles, records
// and block ids that are not valid, queries that are not finite. Needs a device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/scalar.h"
#include "support/score_rig.h"

namespace locks::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Formats, ScoreCudaFormat, score_cuda_formats(),
                         [](const auto& tested) { return format_name(tested.param); });

// The base lies far from the masses of some heads and rows: their tiles are shifted, each by the
// smallest step that fits, and others are not.
TEST_P(ScoreCudaFormat, BaseFarBelow_ShiftsTiles) {
  Rig rig(plain_case(GetParam(), {16 * 40, 16 * 17 + 5}, 2, 5));
  const float offsets[] = {0, -99, -101.5f, -200, -1000, -120000, 60};
  for (int row = 0; row < 2; ++row) {
    for (int head = 0; head < rig.heads(); ++head) {
      rig.base_of(row, head) += offsets[(head + row) % 7];
    }
  }
  const Scored scored = rig.score();
  check_all(rig, scored);
  expect_equal(scored, rig.score());
  expect_batch_invariant(rig, scored);
}

TEST_P(ScoreCudaFormat, RecordsThatCannotBeScored_AreNanAndCounted) {
  Rig rig(plain_case(GetParam(), {16 * 50, 16 * 3}, 3, 6));
  const RecordLayout layout = rig.layout();
  std::vector<std::uint8_t> spoilt;
  const auto half = [](std::uint8_t* at_byte, float value) {
    const std::uint16_t bits = detail::float_to_fp16(value);
    std::memcpy(at_byte, &bits, 2);
  };
  // Headers, byte by byte; scales of a centroid and of a component.
  rig.fixture.record(0, 0, 5)[layout.header_offset] ^= 1;
  rig.fixture.record(0, 1, 5)[layout.header_offset + 1] ^= 0x80;
  rig.fixture.record(0, 2, 49)[layout.header_offset + 2] = 9;
  rig.fixture.record(1, 0, 2)[layout.header_offset + 3] ^= 2;
  rig.fixture.record(1, 0, 0)[layout.header_offset + 5] ^= 2;  // the hash is not checked
  half(rig.fixture.record(0, 0, 20) + layout.scales_offset, NAN);
  half(rig.fixture.record(0, 1, 21) + layout.scales_offset, INFINITY);
  half(rig.fixture.record(0, 1, 30) + layout.scales_offset + 2, INFINITY);
  half(rig.fixture.record(0, 2, 31) + layout.scales_offset + 2, -NAN);
  rig.forget_records();
  const Scored scored = rig.score();
  EXPECT_EQ(scored.counters[detail::kInvalidRecords], 4u);
  const std::vector<RowPlan> plan = rig.plan();
  const auto mass = [&](int row, int head, int block) {
    const std::int64_t tile = detail::tile_index(plan[at(row)], rig.heads(), head);
    return bf16_value(
        scored.masses[at(tile * 16 * rig.pages() + detail::mass_offset(block, 0, rig.pages()))]);
  };
  for (int g = 0; g < 6; ++g) {
    EXPECT_TRUE(std::isnan(mass(0, g, 5)));
    EXPECT_TRUE(std::isnan(mass(0, 6 + g, 5)));
    EXPECT_TRUE(std::isnan(mass(0, 12 + g, 49)));
    EXPECT_TRUE(std::isnan(mass(1, g, 2)));
    EXPECT_FALSE(std::isnan(mass(1, g, 0)));
    EXPECT_TRUE(std::isnan(mass(0, g, 20)));
    EXPECT_TRUE(std::isnan(mass(0, 6 + g, 21)));
    EXPECT_TRUE(std::isnan(mass(0, 6 + g, 30)));
    EXPECT_TRUE(std::isnan(mass(0, 12 + g, 31)));
    EXPECT_FALSE(std::isnan(mass(0, g, 6)));
  }
  expect_equal(scored, rig.score());
}

TEST_P(ScoreCudaFormat, BlockIdsOutOfRange_AreInvalidRecords) {
  Rig rig(plain_case(GetParam(), {16 * 40, 16 * 20}, 4, 3));
  const auto num_blocks = static_cast<std::int32_t>(rig.fixture.records().num_blocks);
  rig.edit_table = [&](std::vector<std::int32_t>& table, std::int64_t stride) {
    table[7] = -1;
    table[at(stride) + 19] = num_blocks;
  };
  const Scored scored = rig.score();
  EXPECT_EQ(scored.counters[detail::kInvalidRecords], 8u);
  const std::vector<RowPlan> plan = rig.plan();
  for (int head = 0; head < rig.heads(); ++head) {
    for (int row = 0; row < 2; ++row) {
      const std::int64_t tile = detail::tile_index(plan[at(row)], rig.heads(), head);
      for (int block = 0; block < 20; ++block) {
        const bool bad = block == (row == 0 ? 7 : 19);
        const float mass = bf16_value(
            scored
                .masses[at(tile * 16 * rig.pages() + detail::mass_offset(block, 0, rig.pages()))]);
        EXPECT_EQ(std::isnan(mass), bad) << "row " << row << " block " << block;
      }
    }
  }
}

TEST_P(ScoreCudaFormat, QueriesThatAreNotFinite_AreNanAlone) {
  Rig rig(plain_case(GetParam(), {16 * 20, 16 * 33}, 2, 9));
  rig.query(0, 3)[17] = NAN;
  rig.query(0, 16)[127] = INFINITY;
  rig.base_of(1, 1) = NAN;
  rig.base_of(1, 10) = INFINITY;
  rig.base_of(1, 12) = -INFINITY;
  const Scored scored = rig.score();
  EXPECT_EQ(scored.counters[detail::kInvalidRecords], 0u);
  const std::vector<RowPlan> plan = rig.plan();
  for (int row = 0; row < 2; ++row) {
    for (int head = 0; head < rig.heads(); ++head) {
      const bool bad = row == 0 ? head == 3 || head == 16 : head == 1 || head == 10 || head == 12;
      if (!bad) {
        check_run(rig, plan[at(row)], row, head, scored);
        continue;
      }
      const std::int64_t tile = detail::tile_index(plan[at(row)], rig.heads(), head);
      EXPECT_TRUE(std::signbit(scored.sums[at(tile)]));
      EXPECT_EQ(scored.sums[at(tile)], 0);
      EXPECT_EQ(scored.shifts[at(tile)], 0);
      for (int i = 0; i < 16 * rig.pages(); ++i) {
        EXPECT_TRUE(std::isnan(bf16_value(scored.masses[at(tile * 16 * rig.pages() + i)])));
      }
    }
  }
}

}  // namespace
}  // namespace locks::testing
