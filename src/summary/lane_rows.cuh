// Rows of 64 or 128 channels that eight lanes of a warp share: their rotation, rounding and
// packing. A warp holds the rows of four pages so, lane 8 p + j of page p.
//
// There are two ways to share. Near: slot 4 k + u of lane j is channel 32 k + 4 j + u, as keys are
// loaded. Far: slot 8 g + i of lane j is channel 64 g + 32 (j / 4) + 4 i + j % 4. The stages of the
// rotation 1, 2, 32 and 64 channels apart are a near lane's own, those 4, 8 and 16 apart a far
// lane's; an exchange through shared memory leads from one to the other.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/scalar.h"
#include "summary/quantise.h"
#include "summary/warp.cuh"

namespace locks::detail {

inline constexpr int kRowLanes = 8;

template <int D>
struct LaneRow {
  static_assert(D == 64 || D == 128);
  static constexpr int kSlots = D / kRowLanes;
};

// Shared memory of an exchange of `units` (1 or 2) floats from each lane of eight to each, in
// floats: rows and pages lie so that no two lanes meet in a bank.
LOCKS_HD constexpr int exchange_row(int units) { return units == 1 ? 12 : 20; }
LOCKS_HD constexpr int exchange_page(int units) {
  return kRowLanes * exchange_row(units) + (units == 1 ? 8 : 16);
}
LOCKS_HD constexpr int exchange_floats(int units) { return 4 * exchange_page(units); }

// Near to far and back: slots n and 8 + n (if there are 16) go to lane n of the eight, and come
// from there.
template <int N>
__device__ __forceinline__ void exchange_lanes(float (&x)[N], float* memory) {
  constexpr int kUnits = N / kRowLanes, kRow = exchange_row(kUnits);
  const int lane = lane_index(), j = lane % kRowLanes;
  float* page = memory + lane / kRowLanes * exchange_page(kUnits);
  auto* out = reinterpret_cast<float4*>(page + j * kRow);
  __syncwarp();  // what was there has been read
  if constexpr (kUnits == 1) {
    out[0] = make_float4(x[0], x[1], x[2], x[3]);
    out[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      out[q] = make_float4(x[2 * q], x[2 * q + 8], x[2 * q + 1], x[2 * q + 9]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRowLanes; ++i) {
    if constexpr (kUnits == 1) {
      x[i] = page[i * kRow + j];
    } else {
      const float2 pair = *reinterpret_cast<const float2*>(page + i * kRow + 2 * j);
      x[i] = pair.x;
      x[i + 8] = pair.y;
    }
  }
}

// Sums and differences of slots 1, 2, ..., below `kEnd` apart.
template <int kEnd, int N>
__device__ __forceinline__ void turn_slots(float (&x)[N]) {
#pragma unroll
  for (int h = 1; h < kEnd; h *= 2) {
#pragma unroll
    for (int s = 0; s < N; ++s) {
      if ((s & h) != 0) continue;
      const float low = x[s], high = x[s + h];
      x[s] = low + high;
      x[s + h] = low - high;
    }
  }
}

// The rotation of a near row, without signs and scale; leaves it far.
template <int N>
__device__ __forceinline__ void turn_lanes(float (&x)[N], float* memory) {
  turn_slots<N>(x);
  exchange_lanes(x, memory);
  turn_slots<kRowLanes>(x);
}

// The same backwards, of a far row of integers: nothing rounds.
template <int N>
__device__ __forceinline__ void turn_lanes_back(float (&x)[N], float* memory) {
  turn_slots<kRowLanes>(x);
  exchange_lanes(x, memory);
  turn_slots<N>(x);
}

template <int N>
__device__ __forceinline__ void add_over_lanes(float (&x)[N]) {
#pragma unroll
  for (int apart = kRowLanes / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] += __shfl_xor_sync(kEveryLane, x[n], apart);
  }
}

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

// Divides a row by the scale that its largest magnitude asks for, within the limit of its codes;
// zeros if the scale is not finite.
template <int N>
__device__ __forceinline__ Quantised divide_by_scale(float (&row)[N], float largest, float limit) {
  const Quantised q = find_scale_fast(largest, limit);
  const bool finite = is_finite(q.scale);
  const float inverse = divide_by_short(1, q.scale, reciprocal(q.scale));
#pragma unroll
  for (int s = 0; s < N; ++s) row[s] *= inverse;
  // A scale rounded by 2^-11 keeps codes within the limit; a subnormal one, rounded by more, may
  // not.
  constexpr float kSmallestNormalHalf = 0x1p-14f;
  if (__any_sync(kEveryLane, !finite || q.scale < kSmallestNormalHalf)) {
#pragma unroll
    for (int s = 0; s < N; ++s) row[s] = finite ? fminf(fmaxf(row[s], -limit), limit) : 0.0f;
  }
  return q;
}

// The same with a row that eight lanes share.
template <int kBits, int N>
__device__ __forceinline__ Quantised scale_lanes(float (&row)[N]) {
  float largest = fabsf(row[0]);
#pragma unroll
  for (int s = 1; s < N; ++s) largest = max_keeping_nan(largest, fabsf(row[s]));
#pragma unroll
  for (int apart = kRowLanes / 2; apart > 0; apart /= 2) {
    largest = max_keeping_nan(largest, __shfl_xor_sync(kEveryLane, largest, apart));
  }
  return divide_by_scale(row, largest, code_limit(kBits));
}

// A rounder added to a number within 2^15 leaves the nearest integer in the low bits of the float's
// bits. These leave it with more added to it: the low 16 bits are then the fp16 number
// 1024 + added + code, and the low byte of 16 * high + low is a byte of an int4 row.
inline constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23, see round_to_code
inline constexpr int kHalf1024 = 0x6400;
inline constexpr int kAddedToLow = 128 + 8;  // takes off what the high code has too much, times 16
inline constexpr int kAddedToHigh = 8;
inline constexpr float kLowRounder = kRounder + kHalf1024 + kAddedToLow;
inline constexpr float kHighRounder = kRounder + kHalf1024 + kAddedToHigh;

__device__ __forceinline__ void store_byte(std::uint8_t* to, std::uint32_t bits) {
  *to = static_cast<std::uint8_t>(bits);
}

// Rounds and packs a far row that scale_lanes went over. 4 bits: leaves kLowRounder + code in slots
// of the row's first half and kHighRounder + code in the others; 8 bits: kRounder + code.
__device__ __forceinline__ void pack_row4(float (&row)[16], std::uint8_t* out) {
  const int j = lane_index() % kRowLanes;
  out += j % 4 + j / 4 * 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    row[i] += kLowRounder;
    row[i + 8] += kHighRounder;
    store_byte(out + 4 * i, 16 * __float_as_uint(row[i + 8]) + __float_as_uint(row[i]));
  }
}

// 64 channels: lanes j and j ^ 4 hold the two codes of a byte.
__device__ __forceinline__ void pack_row4(float (&row)[8], std::uint8_t* out) {
  const int j = lane_index() % kRowLanes;
  const bool is_high = j >= 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) row[i] += is_high ? kHighRounder : kLowRounder;
  out += j % 4 + (is_high ? 16 : 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // the high lane makes bytes of slots 4 to 7
    const float other = __shfl_xor_sync(kEveryLane, is_high ? row[i] : row[i + 4], 4);
    const float low = is_high ? other : row[i], high = is_high ? row[i + 4] : other;
    store_byte(out + 4 * i, 16 * __float_as_uint(high) + __float_as_uint(low));
  }
}

template <int N>
__device__ __forceinline__ void pack_row8(float (&row)[N], std::uint8_t* out) {
  const int j = lane_index() % kRowLanes;
  out += j % 4 + j / 4 * 32;
#pragma unroll
  for (int s = 0; s < N; ++s) {
    row[s] += kRounder;
    store_byte(out + s / 8 * 64 + s % 8 * 4, __float_as_uint(row[s]));
  }
}

template <int kBits, int N>
__device__ __forceinline__ void pack_row(float (&row)[N], std::uint8_t* out) {
  if constexpr (kBits == 4) {
    pack_row4(row, out);
  } else {
    pack_row8(row, out);
  }
}

// Codes of a packed row back at their channels, near, and rotated backwards without scale; the sum
// of this lane's squared codes. All of it is exact.
template <int kBits, int N>
__device__ __forceinline__ float turn_codes(float (&row)[N], float* memory) {
  float squares = 0;
#pragma unroll
  for (int s = 0; s < N; ++s) {
    if constexpr (kBits == 8) {
      row[s] -= kRounder;
    } else if constexpr (N == 16) {
      row[s] -= s < 8 ? kLowRounder : kHighRounder;
    } else {
      row[s] -= lane_index() % kRowLanes < 4 ? kLowRounder : kHighRounder;
    }
    squares = __fmaf_rn(row[s], row[s], squares);
  }
  turn_lanes_back(row, memory);
  return squares;
}

// Int4 codes of 128 channels, in pairs of fp16: up to 7 * 128, and fp16 holds integers up to 2048.
template <>
__device__ __forceinline__ float turn_codes<4, 16>(float (&row)[16], float* memory) {
  const __half2 added = __floats2half2_rn(-(1024.0f + kAddedToLow), -(1024.0f + kAddedToHigh));
  __half2 pair[8], squares = __floats2half2_rn(0, 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t bits =
        __byte_perm(__float_as_uint(row[i]), __float_as_uint(row[i + 8]), 0x5410);
    pair[i] = __hadd2(*reinterpret_cast<const __half2*>(&bits), added);
    squares = __hfma2(pair[i], pair[i], squares);
  }
  const auto turn = [&pair] {
#pragma unroll
    for (int h = 1; h < 8; h *= 2) {
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        if ((s & h) != 0) continue;
        const __half2 low = pair[s], high = pair[s + h];
        pair[s] = __hadd2(low, high);
        pair[s + h] = __hsub2(low, high);
      }
    }
  };
  turn();
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = *reinterpret_cast<const float*>(&pair[i]);
  exchange_lanes(x, memory);
#pragma unroll
  for (int i = 0; i < 8; ++i) pair[i] = *reinterpret_cast<const __half2*>(&x[i]);
  turn();
  const __half2 signs = __floats2half2_rn(1, -1);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pair[i] = __hfma2(__high2half2(pair[i]), signs, __low2half2(pair[i]));
    row[i] = __low2float(pair[i]);
    row[i + 8] = __high2float(pair[i]);
  }
  return __low2float(squares) + __high2float(squares);
}

}  // namespace locks::detail
