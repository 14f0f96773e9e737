// exp and log against double.
#include "core/fast_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace locks {
namespace {

// fast_math.h, in the copy that this file compiles; its bits are those of every level.
TEST(FastMath, ExpAndLog_MatchDouble) {
  using detail::fast_exp;
  using detail::fast_exp2;
  using detail::fast_log;
  double exp2_error = 0, exp_error = 0, log_error = 0;
  for (std::uint32_t i = 0; i < 2000000; ++i) {
    const float x = -126.0f + static_cast<float>(i) * (253.0f / 2000000);
    exp2_error = std::max(
        exp2_error,
        std::fabs(static_cast<double>(fast_exp2(x)) / std::exp2(static_cast<double>(x)) - 1));
    const float y = x * 0.69f;
    exp_error = std::max(
        exp_error,
        std::fabs(static_cast<double>(fast_exp(y)) / std::exp(static_cast<double>(y)) - 1));
    const float z = std::bit_cast<float>(0x00800000u + i * 1065u);  // normal numbers, to 3e38
    const double expected = std::log(static_cast<double>(z));
    const double near_one = std::max(std::fabs(expected), 1e-30);
    log_error =
        std::max(log_error, std::fabs(static_cast<double>(fast_log(z)) - expected) / near_one);
  }
  EXPECT_LT(exp2_error, 2e-7);
  EXPECT_LT(exp_error, 2.5e-7);
  EXPECT_LT(log_error, 3e-7);
  for (std::uint32_t i = 0; i < 200000; ++i) {  // around 1, where ln is small
    const float z = std::bit_cast<float>(0x3F800000u - 100000u + i);
    const double expected = std::log(static_cast<double>(z));
    ASSERT_LE(std::fabs(static_cast<double>(fast_log(z)) - expected), 3e-7 * std::fabs(expected))
        << z;
  }
}

TEST(FastMath, Exp2Nonpositive_MatchesDouble) {
  using detail::exp2_nonpositive;
  double error = 0;
  for (std::uint32_t i = 0; i < 2000000; ++i) {
    const float x = -126.0f + static_cast<float>(i) * (126.0f / 2000000);
    error = std::max(error, std::fabs(static_cast<double>(exp2_nonpositive(x)) /
                                          std::exp2(static_cast<double>(x)) -
                                      1));
  }
  EXPECT_LT(error, 3e-6);
  EXPECT_EQ(exp2_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(exp2_nonpositive(-127.0f), 0.0f);
  EXPECT_EQ(exp2_nonpositive(-INFINITY), 0.0f);
}

TEST(FastMath, SpecialValues_AreAsDocumented) {
  using detail::fast_exp;
  using detail::fast_exp2;
  using detail::fast_log;
  for (auto* f : {fast_exp, fast_exp2}) {
    EXPECT_EQ(f(0.0f), 1.0f);
    EXPECT_EQ(f(-INFINITY), 0.0f);
    EXPECT_EQ(f(-3e38f), 0.0f);
    EXPECT_EQ(f(INFINITY), INFINITY);
    EXPECT_EQ(f(3e38f), INFINITY);
    EXPECT_TRUE(std::isnan(f(NAN)));
  }
  EXPECT_EQ(fast_exp2(-127.0f), 0.0f);
  EXPECT_EQ(fast_exp2(10.0f), 1024.0f);
  EXPECT_EQ(fast_log(1.0f), 0.0f);
  EXPECT_EQ(fast_log(INFINITY), INFINITY);
  EXPECT_EQ(fast_log(0.0f), -INFINITY);
  EXPECT_EQ(fast_log(-0.0f), -INFINITY);
  EXPECT_EQ(fast_log(1e-40f), -INFINITY);
  EXPECT_TRUE(std::isnan(fast_log(-1.0f)));
  EXPECT_TRUE(std::isnan(fast_log(-INFINITY)));
  EXPECT_TRUE(std::isnan(fast_log(NAN)));
}

}  // namespace
}  // namespace locks
