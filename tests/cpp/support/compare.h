// Comparison of a kernel's array with a double-precision oracle.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>

#include "locks/page.h"

namespace locks::testing {

// Unit roundoffs, 2^-p for a significand of p bits (24, 8 and 11).
inline constexpr double kFloatRoundoff = 0x1p-24;

inline double roundoff(ScalarType type) {
  return type == ScalarType::kFloat32 ? 0x1p-24 : type == ScalarType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

// Worst relative error of a dot product of d floats that runs in at least 8 lanes which are added
// at the end: d / 8 additions a lane, 3 across lanes, 1 product, and 2 to scale and convert.
inline double dot_error(int d) { return (d / 8 + 6) * kFloatRoundoff; }

// Relative error of a float sum of n positive terms. The worst case n * roundoff never occurs:
// errors are as good as independent, so 4 standard deviations of their sum stand in for it.
inline double sum_error(std::int64_t n) {
  return 4 * std::sqrt(static_cast<double>(n) + 1) * kFloatRoundoff;
}

// |actual - expected| <= absolute + relative * |expected|; failures print the reason.
struct Tolerance {
  double absolute = 0;
  double relative = 0;
  const char* reason = "";
};

// NaN and infinities have to stand at the same places (infinities with the same sign) before any
// difference counts.
inline ::testing::AssertionResult near(double actual, double expected, const Tolerance& tolerance) {
  const bool same_class =
      std::isnan(actual) == std::isnan(expected) && std::isinf(actual) == std::isinf(expected);
  const bool finite = std::isfinite(actual) && std::isfinite(expected);
  const double allowed = tolerance.absolute + tolerance.relative * std::abs(expected);
  if (same_class && (finite ? std::abs(actual - expected) <= allowed
                            : std::isnan(actual) || actual == expected)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << actual << ", expected " << expected << " +- " << allowed
                                       << " (" << tolerance.reason << ")";
}

template <class Actual, class Expected>
::testing::AssertionResult arrays_near(const Actual* actual, const Expected* expected,
                                       std::size_t count, const Tolerance& tolerance) {
  for (std::size_t i = 0; i < count; ++i) {
    auto result = near(static_cast<double>(actual[i]), static_cast<double>(expected[i]), tolerance);
    if (!result) return result << " at element " << i << " of " << count;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace locks::testing
