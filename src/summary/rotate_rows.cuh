// Loading of keys and queries in pieces of eight channels, and their rotation, by any number of
// threads together. Sums and differences are taken in the order of the CPU's rotation: neighbours
// 1, 2, 4, ... apart, then the scale.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/scalar.h"
#include "locks/page.h"
#include "summary/rotation.h"

namespace locks::detail {

inline constexpr int kPieceChannels = 8;
inline constexpr int kPieceWords = 8;  // of 32 bits, at most: those of floats
// Rows in shared memory lie this many floats further apart than they are long. Threads that hold
// channels 8 apart of four rows then meet 32 different banks.
inline constexpr int kRowPadding = 8;

LOCKS_HD constexpr int row_floats(int head_dim) { return head_dim + kRowPadding; }

// Bits of eight channels: 1 where the rotation flips the sign. channel: a multiple of 8.
__device__ inline std::uint32_t flips_of_piece(int channel) {
  constexpr auto word = [](int w) {
    std::uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) {
      if (rotation_flips(32 * w + i)) bits |= 1u << i;
    }
    return bits;
  };
  constexpr std::uint32_t words[kMaxHeadDim / 32] = {word(0), word(1), word(2), word(3),
                                                     word(4), word(5), word(6), word(7)};
  std::uint32_t bits = words[0];
#pragma unroll
  for (int w = 1; w < kMaxHeadDim / 32; ++w) bits = channel >= 32 * w ? words[w] : bits;
  return bits >> (channel % 32);
}

// The bytes of a piece as they lie in memory.
struct RawPiece {
  std::uint32_t words[kPieceWords];
};

inline bool is_aligned_to(const void* data, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
}

// aligned: rows begin at multiples of 16 bytes.
__device__ inline RawPiece load_raw(const void* data, ScalarType type, bool aligned,
                                    std::int64_t element) {
  RawPiece piece{};
  if (type == ScalarType::kFloat32) {
    const auto* source = static_cast<const std::uint32_t*>(data) + element;
    if (aligned) {
      const uint4 a = reinterpret_cast<const uint4*>(source)[0];
      const uint4 b = reinterpret_cast<const uint4*>(source)[1];
      piece = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    } else {
#pragma unroll
      for (int i = 0; i < kPieceChannels; ++i) piece.words[i] = source[i];
    }
  } else {
    const auto* source = static_cast<const std::uint16_t*>(data) + element;
    if (aligned) {
      const uint4 a = *reinterpret_cast<const uint4*>(source);
      piece = {{a.x, a.y, a.z, a.w, 0, 0, 0, 0}};
    } else {
#pragma unroll
      for (int i = 0; i < kPieceChannels / 2; ++i) {
        piece.words[i] = source[2 * i] | static_cast<std::uint32_t>(source[2 * i + 1]) << 16;
      }
    }
  }
  return piece;
}

__device__ inline void to_floats(const RawPiece& piece, ScalarType type,
                                 float (&x)[kPieceChannels]) {
  if (type == ScalarType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kPieceChannels; ++i) x[i] = __uint_as_float(piece.words[i]);
  } else if (type == ScalarType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < kPieceChannels / 2; ++i) {
      x[2 * i] = __uint_as_float(piece.words[i] << 16);
      x[2 * i + 1] = __uint_as_float(piece.words[i] & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPieceChannels / 2; ++i) {
      const auto bits = piece.words[i];
      x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits & 0xFFFFu)));
      x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits >> 16)));
    }
  }
}

__device__ inline void store_piece(float* row, const float (&x)[kPieceChannels]) {
  reinterpret_cast<float4*>(row)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(row)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Sums and differences of elements 1, 2, ..., N / 2 apart.
template <int N>
__device__ __forceinline__ void butterflies(float (&x)[N]) {
#pragma unroll
  for (int h = 1; h < N; h *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((i & h) != 0) continue;
      const float low = x[i], high = x[i + h];
      x[i] = low + high;
      x[i + h] = low - high;
    }
  }
}

__device__ inline void flip_signs(float (&x)[kPieceChannels], int channel) {
  const std::uint32_t flips = flips_of_piece(channel);
#pragma unroll
  for (int i = 0; i < kPieceChannels; ++i) {
    x[i] = __uint_as_float(__float_as_uint(x[i]) ^ (flips >> i & 1u) << 31);
  }
}

// Signs and the first three stages of the rotation, within a piece.
__device__ inline void begin_rotation(float (&x)[kPieceChannels], int channel) {
  flip_signs(x, channel);
  butterflies(x);
}

// The other stages, of rows in shared memory whose pieces went through begin_rotation. `thread` of
// `num_threads` takes run / 8 channels that lie 8 apart at a time.
template <int kFactor>
__device__ void finish_rotation_by(float* rows, int num_rows, int stride, int head_dim, int thread,
                                   int num_threads) {
  const float scale = rotation_scale(head_dim);
  for (int task = thread; task < num_rows * head_dim / kFactor; task += num_threads) {
    const int rest = task / kPieceChannels;
    float* first = rows + rest % num_rows * stride + rest / num_rows * (kFactor * kPieceChannels) +
                   task % kPieceChannels;
    float x[kFactor];
#pragma unroll
    for (int k = 0; k < kFactor; ++k) x[k] = first[k * kPieceChannels];
    butterflies(x);
#pragma unroll
    for (int k = 0; k < kFactor; ++k) first[k * kPieceChannels] = x[k] * scale;
  }
}

__device__ inline void finish_rotation(float* rows, int num_rows, int stride, int head_dim,
                                       int thread, int num_threads) {
  switch (rotation_run(head_dim)) {
    case 16:
      return finish_rotation_by<2>(rows, num_rows, stride, head_dim, thread, num_threads);
    case 32:
      return finish_rotation_by<4>(rows, num_rows, stride, head_dim, thread, num_threads);
    case 64:
      return finish_rotation_by<8>(rows, num_rows, stride, head_dim, thread, num_threads);
    case 128:
      return finish_rotation_by<16>(rows, num_rows, stride, head_dim, thread, num_threads);
    default:
      return finish_rotation_by<32>(rows, num_rows, stride, head_dim, thread, num_threads);
  }
}

}  // namespace locks::detail
