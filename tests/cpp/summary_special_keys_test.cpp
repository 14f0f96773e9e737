// Records of keys that are not ordinary numbers: NaN, infinite, zero, constant, huge and tiny ones.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "locks/locks.h"
#include "support/summary_sequence.h"

namespace locks::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

bool is_nan_fp16(std::uint16_t bits) { return (bits & 0x7FFF) > 0x7C00; }
bool is_finite_fp16(std::uint16_t bits) { return (bits & 0x7C00) != 0x7C00; }

TEST(SpecialKeys, NanOrInfinite_SpoilTheirPageAlone) {
  for (const SummaryFormat& format : kPresets) {
    for (float bad : {kNan, kInf, -kInf}) {
      at_each_level([&] {
        Sequence clean({}, format), spoiled({}, format);
        const int bad_page = 5 / format.page_tokens;
        spoiled.set(1, 16 + 5, 63, bad);
        ASSERT_TRUE(clean.update(0, 96).ok());
        ASSERT_TRUE(spoiled.update(0, 96).ok());
        const RecordLayout& layout = clean.layout();
        for (int page = 0; page < format.pages_per_block(); ++page) {
          for (int k = 0; k <= format.rank; ++k) {
            EXPECT_EQ(is_nan_fp16(spoiled.scale_bits(1, 1, page, k)), page == bad_page);
          }
          if (page == bad_page) continue;
          const int rows = page * layout.page_rows_bytes;
          EXPECT_EQ(std::memcmp(clean.record(1, 1) + rows, spoiled.record(1, 1) + rows,
                                at(layout.page_rows_bytes)),
                    0);
        }
        EXPECT_TRUE(header_matches(layout, spoiled.record(1, 1)));
        for (int block : {0, 2, 3}) {
          EXPECT_EQ(std::memcmp(clean.record(1, block), spoiled.record(1, block),
                                at(layout.record_bytes)),
                    0);
        }
      });
    }
  }
}

TEST(SpecialKeys, ZeroAndConstant_ReconstructExactly) {
  for (const SummaryFormat& format : kPresets) {
    for (float value : {0.0f, -0.0f, 2.0f}) {
      Sequence sequence({}, format);
      sequence.fill(0, 96, value);
      ASSERT_TRUE(sequence.update(0, 96).ok());
      const int pages = format.pages_per_block();
      std::vector<float> centroid(at(pages * 64)), basis(at(pages * format.rank * 64)),
          coefficients(at(16 * format.rank));
      ASSERT_TRUE(unpack_record(sequence.layout(), sequence.record(0, 1), centroid.data(),
                                basis.data(), coefficients.data())
                      .ok());
      for (float c : coefficients) EXPECT_EQ(c, 0);
      float norm = 0;
      for (int c = 0; c < 64; ++c) norm += centroid[at(c)] * centroid[at(c)];
      // 64 channels of 2; int4 rounds each rotated channel by at most a fourteenth of the largest.
      const double expected = 8 * std::fabs(static_cast<double>(value));
      EXPECT_NEAR(std::sqrt(norm), expected, expected * (format.centroid_bits == 8 ? 0.01 : 0.2));
    }
  }
}

// What fp16 scales cannot hold must show: a score of such a page is NaN or infinite, so it is read.
TEST(SpecialKeys, Huge_EndInScalesThatAreNotFinite) {
  for (const SummaryFormat& format : kPresets) {
    for (float huge : {1e8f, 1e18f, 1e30f, 3e38f}) {
      at_each_level([&] {
        Shape shape;
        shape.type = ScalarType::kFloat32;
        Sequence constant(shape, format), spread(shape, format), mixed(shape, format);
        constant.fill(0, 96, huge);
        for (int t = 0; t < 96; ++t) spread.fill(t, t + 1, t % 2 == 0 ? huge : -huge);
        mixed.set(0, 3, 10, huge);
        ASSERT_TRUE(constant.update(0, 96).ok());
        ASSERT_TRUE(spread.update(0, 96).ok());
        ASSERT_TRUE(mixed.update(0, 96).ok());
        EXPECT_FALSE(is_finite_fp16(constant.scale_bits(0, 0, 0, 0))) << huge;
        EXPECT_FALSE(is_finite_fp16(spread.scale_bits(0, 0, 0, 1))) << huge;
        EXPECT_FALSE(is_finite_fp16(mixed.scale_bits(0, 0, 0, 1))) << huge;
        if (format.pages_per_block() > 1) {
          EXPECT_TRUE(is_finite_fp16(mixed.scale_bits(0, 0, 1, 1)));
        }
      });
    }
  }
}

TEST(SpecialKeys, Tiny_BecomeZero) {
  for (const SummaryFormat& format : kPresets) {
    Shape shape;
    shape.type = ScalarType::kFloat32;
    Sequence sequence(shape, format);
    for (int t = 0; t < 96; ++t) sequence.fill(t, t + 1, t % 2 == 0 ? 1e-30f : -3e-30f);
    ASSERT_TRUE(sequence.update(0, 96).ok());
    for (int k = 0; k <= format.rank; ++k) EXPECT_LE(sequence.scale_bits(0, 0, 0, k), 1);
  }
}

}  // namespace
}  // namespace locks::testing
