// exp and log for loops that vectorise: no tables, no branches, no calls, and no fused operations,
// so a value has the same bits at every instruction-set level. Errors were measured against double
// at millions of points of the range (tests/cpp/fast_math_test.cpp).
#pragma once

#include <bit>
#include <cstdint>

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {
namespace {  // one copy a file: attend's has fused multiply-adds, which others must not get

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

namespace fast_math {

// Adding 1.5 * 2^23 to |x| < 2^22 leaves x, rounded to the nearest (ties to even), in the low bits.
inline constexpr float kRounder = 12582912.0f;
inline constexpr std::uint32_t kRounderBits = 0x4B400000u;

// 2^f for f in [-1/2, 1/2]; relative error 1e-7 (minimax of degree 5, exact at 0).
inline float exp2_fraction(float f) {
  float p = 0.001326472731307149f;
  p = p * f + 0.009671512991189957f;
  p = p * f + 0.05550733581185341f;
  p = p * f + 0.24022242426872253f;
  p = p * f + 0.6931470036506653f;
  return p * f + 1.0f;
}

// 2^n for n in [-127, 128], n given as n + kRounder; -127 gives 0 and 128 infinity.
inline float exp2_integer(float rounded) {
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(rounded) - kRounderBits + 127u) << 23);
}

}  // namespace fast_math

// 2^x. Relative error below 2e-7; 0 below -126.5, infinity from 127.5, NaN for NaN.
inline float fast_exp2(float x) {
  x = x > 128.0f ? 128.0f : x;  // comparisons in this form let NaN through
  x = x < -127.0f ? -127.0f : x;
  const float rounded = x + fast_math::kRounder;
  const float fraction = x - (rounded - fast_math::kRounder);
  return fast_math::exp2_fraction(fraction) * fast_math::exp2_integer(rounded);
}

// 2^x for x <= 0 where 3e-6 is accurate enough: 5 operations less. 0 below -126.5 and for NaN.
inline float exp2_nonpositive(float x) {
  x = x > -127.0f ? x : -127.0f;
  const float rounded = x + fast_math::kRounder;
  const float f = x - (rounded - fast_math::kRounder);
  float p = 0.009582852944731712f;  // minimax of degree 4, exact at 0
  p = p * f + 0.055906426161527634f;
  p = p * f + 0.24024099111557007f;
  p = p * f + 0.6931241750717163f;
  return (p * f + 1.0f) * fast_math::exp2_integer(rounded);
}

// e^x. Relative error below 2.5e-7; 0 below -87.7, infinity from 88.4, NaN for NaN.
inline float fast_exp(float x) {
  // ln 2 in two parts; the first has 9 bits: its product with an integer up to 128 is exact.
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440054690583e-4f;
  x = x > 89.0f ? 89.0f : x;
  x = x < -88.0f ? -88.0f : x;
  const float rounded = x * kLog2E + fast_math::kRounder;
  const float n = rounded - fast_math::kRounder;
  const float rest = (x - n * kLn2High) - n * kLn2Low;
  return fast_math::exp2_fraction(rest * kLog2E) * fast_math::exp2_integer(rounded);
}

// ln x for normal, finite x > 0; relative error below 3e-7. Any other x gives some number or NaN.
inline float log_normal(float x) {
  constexpr std::uint32_t kSqrtHalfBits = 0x3F3504F3u;
  // x = 2^n m, m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
  const std::uint32_t above = std::bit_cast<std::uint32_t>(x) - kSqrtHalfBits;
  const auto n = static_cast<float>(static_cast<std::int32_t>(above) >> 23);
  const float m = std::bit_cast<float>((above & 0x7FFFFFu) + kSqrtHalfBits);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float s2 = s * s;
  // The series 2 (s + s^3/3 + s^5/5 + s^7/7 + s^9/9); the next term is below 1e-9.
  float p = 2.0f / 9.0f;
  p = p * s2 + 2.0f / 7.0f;
  p = p * s2 + 2.0f / 5.0f;
  p = p * s2 + 2.0f / 3.0f;
  return n * kLn2 + (s * 2.0f + s * (s2 * p));
}

// The same for every x: infinity for infinity, -infinity for 0 and for subnormal x (of either
// sign), NaN for other x < 0 and NaN.
inline float fast_log(float x) {
  constexpr float kInfinity = std::bit_cast<float>(0x7F800000u);
  constexpr float kSmallestNormal = 1.17549435e-38f;
  float result = log_normal(x);
  result = x < kSmallestNormal ? -kInfinity : result;
  result = x < kInfinity ? result : x;  // infinity and NaN
  return x <= -kSmallestNormal ? std::bit_cast<float>(0x7FC00000u) : result;
}

}  // namespace
}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
