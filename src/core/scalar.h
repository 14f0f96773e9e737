// Floats, bf16 and fp16 as bits, and conversions with round-to-nearest-even. Vectorisable: no
// tables, no branches on data where the value allows it.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <bit>
#include <cstdint>

#include "core/cpu_namespace.h"
#include "locks/page.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {
namespace {  // one copy a file: attend's has fused multiply-adds, which others must not get

inline constexpr std::uint16_t kFp16Nan = 0x7E00;

LOCKS_HD inline bool is_finite(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFu) < 0x7F800000u;
}

LOCKS_HD inline float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

LOCKS_HD inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const std::uint32_t quiet_nan = bits | 0x400000u;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<std::uint16_t>((is_nan ? quiet_nan : rounded) >> 16);
}

// Exact for every fp16, subnormals, infinities and NaN included: shift the exponent into place,
// then let one float multiplication (or addition for subnormals) do the rest.
LOCKS_HD inline float fp16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7FFFu) << 13;
  const std::uint32_t exponent = magnitude & 0x0F800000u;
  const std::uint32_t normal = magnitude + 0x38000000u;   // exponent bias 15 -> 127
  const std::uint32_t special = magnitude + 0x70000000u;  // inf and NaN keep the all-ones exponent
  const float subnormal =
      std::bit_cast<float>(magnitude + 0x38800000u) - std::bit_cast<float>(0x38800000u);
  const std::uint32_t finite = exponent == 0 ? std::bit_cast<std::uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(sign | (exponent == 0x0F800000u ? special : finite));
}

LOCKS_HD inline std::uint16_t float_to_fp16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | kFp16Nan);
  if (magnitude >= 0x477FF000u)
    return static_cast<std::uint16_t>(sign | 0x7C00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {  // fp16 subnormal: adding 0.5 leaves its 10 bits at the bottom
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u));
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

// One element of an untyped array, for paths that are not hot.
LOCKS_HD inline float load_scalar(const void* data, ScalarType type, std::int64_t index) {
  if (type == ScalarType::kFloat32) return static_cast<const float*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return type == ScalarType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

LOCKS_HD inline void store_scalar(void* data, ScalarType type, std::int64_t index, float value) {
  if (type == ScalarType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] =
        type == ScalarType::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
  }
}

// `count` contiguous elements as floats.
inline void load_floats(const void* data, ScalarType type, std::int64_t index, int count,
                        float* __restrict out) {
  if (type == ScalarType::kFloat32) {
    const float* source = static_cast<const float*>(data) + index;
    for (int i = 0; i < count; ++i) out[i] = source[i];
  } else if (type == ScalarType::kBFloat16) {
    const std::uint16_t* source = static_cast<const std::uint16_t*>(data) + index;
    for (int i = 0; i < count; ++i) out[i] = bf16_to_float(source[i]);
  } else {
    const std::uint16_t* source = static_cast<const std::uint16_t*>(data) + index;
    int i = 0;
#ifdef __F16C__  // one instruction for what g++ 12 makes a dozen of; equal but for quieted NaNs
    for (; i + 8 <= count; i += 8) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(bits));
    }
#endif
    for (; i < count; ++i) out[i] = fp16_to_float(source[i]);
  }
}

}  // namespace
}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
