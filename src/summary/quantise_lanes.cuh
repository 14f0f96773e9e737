// Rows that eight lanes share, to codes: lane j of the eight holds channels 2 j and 2 j + 1 of
// each 16. The same codes and scales as quantise.h, without divisions.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/lanes.h"
#include "core/scalar.h"
#include "summary/quantise.h"
#include "summary/warp.cuh"

namespace locks::detail {

__device__ __forceinline__ float max_keeping_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// float_to_fp16 for numbers >= 0 and NaN.
__device__ __forceinline__ std::uint16_t to_half_bits(float x) {
  return isnan(x) ? kFp16Nan : __half_as_ushort(__float2half_rn(x));
}

__device__ __forceinline__ float reciprocal(float x) {  // to one unit in the last place
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / divisor, correctly rounded, for finite x and a divisor of at most 11 significant bits, whose
// quotients are never within 2^-12 of their last place from the middle between two floats: one
// correction of the product with the reciprocal, itself exact but for 2^-21 of a last place, finds
// the nearest. Quotients below the normal numbers may be off, but all of those make code 0 here.
__device__ __forceinline__ float divide_by_short(float x, float divisor, float inverse) {
  const float quotient = x * inverse;
  return __fmaf_rn(__fmaf_rn(-quotient, divisor, x), inverse, quotient);
}

// find_scale.
__device__ __forceinline__ Quantised find_scale_fast(float largest, float limit) {
  const float quotient = divide_by_short(largest, limit, reciprocal(limit));
  std::uint16_t bits = to_half_bits(is_finite(largest) ? quotient : largest);
  if (bits == 0) bits = 1;
  return {bits, __half2float(__ushort_as_half(bits))};
}

// Codes of a row that eight lanes share. After it `row` holds kRounder + code.
inline constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23, see round_to_code

template <int N>
__device__ __forceinline__ Quantised quantise_row_lanes(float (&row)[N], int bits) {
  const float limit = code_limit(bits);
  float largest = fabsf(row[0]);
#pragma unroll
  for (int s = 1; s < N; ++s) largest = max_keeping_nan(largest, fabsf(row[s]));
#pragma unroll
  for (int apart = 4; apart > 0; apart /= 2) {
    largest = max_keeping_nan(largest, __shfl_xor_sync(kEveryLane, largest, apart));
  }
  const Quantised q = find_scale_fast(largest, limit);
  const bool finite = is_finite(q.scale);
  const float inverse = reciprocal(q.scale);
#pragma unroll
  for (int s = 0; s < N; ++s) row[s] = divide_by_short(row[s], q.scale, inverse);
  // A scale rounded by 2^-11 keeps codes within the limit; a subnormal one, rounded by more, may
  // not.
  constexpr float kSmallestNormalHalf = 0x1p-14f;
  if (__any_sync(kEveryLane, !finite || q.scale < kSmallestNormalHalf)) {
#pragma unroll
    for (int s = 0; s < N; ++s) row[s] = finite ? fminf(fmaxf(row[s], -limit), limit) : 0.0f;
  }
#pragma unroll
  for (int s = 0; s < N; ++s) row[s] += kRounder;
  return q;
}

// A quantised row to its place in the record: a lane's channels 2 j, 2 j + 1 of each 16 side by
// side.
template <int N>
__device__ __forceinline__ void pack_row_lanes(const float (&row)[N], int bits, std::uint8_t* out) {
  const int j = lane_index() % 8;
  const auto code = [&row](int s) { return __float_as_uint(row[s]); };
  const auto store = [out, j](int k, std::uint32_t low, std::uint32_t high) {
    *reinterpret_cast<std::uint16_t*>(out + k * kLanes + 2 * j) =
        static_cast<std::uint16_t>(__byte_perm(low, high, 0x0040));
  };
  if (bits == 8) {
#pragma unroll
    for (int s = 0; s < N; s += 2) store(s / 2, code(s), code(s + 1));
  } else {
#pragma unroll
    for (int s = 0; s < N / 2; s += 2) {
      // The rounder's bits vanish from the low byte, times 17.
      store(s / 2, 16 * code(s + N / 2) + code(s) + 8, 16 * code(s + 1 + N / 2) + code(s + 1) + 8);
    }
  }
}

}  // namespace locks::detail
