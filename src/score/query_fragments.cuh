// The query of one KV head's group as the tuned scorer wants it: 16-bit codes, split into two
// signed bytes, in the order in which the lanes of a warp hold the A operand of an int8 matrix
// product.
//
// Rows 0-7 of the operand are the high bytes of eight query heads, rows 8-15 their low bytes: one
// product of rank 16 gives eight heads 16-bit accuracy. A group of 9 to 16 heads is two fragments.
//
// An int4 row is read as it lies: byte b is 16 * code[b + d/2] + code[b] + 8. With r the byte and
// n = r & 15 its low nibble,
//   r * q[b + d/2] + n * (16 * q[b] - q[b + d/2]) = 16 * (code[b + d/2] q[b + d/2] + (code[b] + 8)
//   q[b])
// so the codes of a query are those of q[b + d/2] and of 16 q[b] - q[b + d/2], and 8 times the sum
// of all of them is taken off (by the accumulator's start value). An int8 row meets q's own
// channels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cpu_namespace.h"
#include "locks/summary.h"

namespace locks::detail {

inline constexpr int kFragmentHeads = 8;
inline constexpr int kLargestTunedGroup = 2 * kFragmentHeads;
inline constexpr int kPrepareThreads = 128;
// Largest code of a query: 127 * 256, so that the high byte is at most 127.
inline constexpr int kLargestQueryCode = 32512;
// As a float, 1.5 * 2^23: an integer of at most 22 bits added to these bits is the float
// kIntBiasValue + integer, which saves the conversion.
inline constexpr int kIntBias = 0x4B400000;
inline constexpr float kIntBiasValue = 12582912.0f;

LOCKS_HD constexpr bool has_shape(const SummaryFormat& format, int page_tokens, int rank,
                                  int centroid_bits, int basis_bits, int coefficient_bits) {
  return format.page_tokens == page_tokens && format.rank == rank &&
         format.centroid_bits == centroid_bits && format.basis_bits == basis_bits &&
         format.coefficient_bits == coefficient_bits;
}

// Whether the tuned scorer serves this shape: fine, fine8, compact, wide and paper (rotated or not)
// at the common head sizes. All others have no fragments.
LOCKS_HD constexpr bool has_fragments(const SummaryFormat& format, int group_size, int head_dim) {
  const bool is_tuned = has_shape(format, 4, 1, 4, 4, 4) || has_shape(format, 4, 1, 8, 8, 4) ||
                        has_shape(format, 8, 1, 4, 4, 4) || has_shape(format, 16, 8, 8, 4, 4) ||
                        has_shape(format, 16, 8, 8, 4, 8);
  return is_tuned && (head_dim == 64 || head_dim == 128) && group_size >= 1 &&
         group_size <= kLargestTunedGroup;
}

// Words for one width of rows: a 16-byte piece for each of d / 32 products and 32 lanes, then
// QueryScale for each head.
LOCKS_HD constexpr int fragment_operand_words(int head_dim) { return head_dim / 32 * 32 * 4; }
LOCKS_HD constexpr int fragment_width_words(int head_dim) {
  return fragment_operand_words(head_dim) + kFragmentHeads * 4;
}
LOCKS_HD constexpr bool has_rows_of(const SummaryFormat& format, int bits) {
  return format.centroid_bits == bits || format.basis_bits == bits;
}
// Words of one fragment: that of int4 rows, if the format has any, then that of int8 rows.
LOCKS_HD constexpr int one_fragment_words(const SummaryFormat& format, int head_dim) {
  return ((has_rows_of(format, 4) ? 1 : 0) + (has_rows_of(format, 8) ? 1 : 0)) *
         fragment_width_words(head_dim);
}

// dot = high_scale * (high - kIntBiasValue) + high_scale / 256 * (low - kIntBiasValue), with high
// and low the sums' bits as floats. high_scale has 8 significant bits, so that products with
// kIntBiasValue are exact; NaN if a channel is not finite.
struct QueryScale {
  float high_scale;
  std::int32_t high_start;  // of the sums
  std::int32_t low_start;
  std::int32_t unused;
};
static_assert(sizeof(QueryScale) == 16);

#if defined(__CUDACC__)

// Four codes as the words of their low bytes, as signed numbers, and of their high bytes, which
// make up for it; returns their sum. Adding kIntBiasValue rounds a quotient and leaves its code in
// the low bits.
__device__ __forceinline__ int pack_codes(const float4& value, float inverse_step,
                                          std::uint32_t& high, std::uint32_t& low) {
  const auto code = [&](float x) {
    return __float_as_uint(__fadd_rn(__fmul_rn(x, inverse_step), kIntBiasValue));
  };
  const std::uint32_t a = code(value.x), b = code(value.y), c = code(value.z), d = code(value.w);
  low = __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
  high = __byte_perm(__byte_perm(a + 128, b + 128, 0x0051), __byte_perm(c + 128, d + 128, 0x0051),
                     0x5410);
  return static_cast<int>(a + b + c + d - 4u * kIntBias);
}

// The larger of `largest` and the magnitudes of four values, as bits: in their order those that are
// not finite come last.
__device__ __forceinline__ std::uint32_t largest_bits(std::uint32_t largest, const float4& x) {
  const auto size = [](float value) { return __float_as_uint(value) & 0x7FFFFFFFu; };
  return max(largest, max(max(size(x.x), size(x.y)), max(size(x.z), size(x.w))));
}

// What two products of rank 16 take of a head for thread k: values of k-slots 4 j + t and
// 16 + 4 j + t of product i.
struct FragmentValues {
  float4 first, second;
};

__device__ __forceinline__ FragmentValues load_values(int bits, const float* q, int head_dim, int i,
                                                      int j) {
  if (bits == 8) {
    // Word w of lane j lies in 16-byte piece w / 4 of the lane's; the pieces of the four lanes
    // are side by side. Product i takes words 2 i and 2 i + 1.
    const auto* from = reinterpret_cast<const float4*>(q + 64 * (i / 2) + 16 * j + 8 * (i % 2));
    return {from[0], from[1]};
  }
  // A product takes two words as they are, or the low nibbles of two: no register has to be moved
  // to sit beside another.
  const int half = head_dim / 64;
  const bool is_high = i < half;
  const int word = is_high ? 2 * i : 2 * (i - half);
  const auto* low = reinterpret_cast<const float4*>(q + head_dim / 8 * j + 4 * word);
  const auto* high = low + head_dim / 8;
  const auto value = [&](const float4& l, const float4& h) {
    const auto one = [&](float x, float y) { return is_high ? y : 16.0f * x - y; };
    return make_float4(one(l.x, h.x), one(l.y, h.y), one(l.z, h.z), one(l.w, h.w));
  };
  return {value(low[0], high[0]), value(low[1], high[1])};
}

// One width of one fragment. Thread k of the d / 8 that share a head makes the words of one lane
// and one product: lane (head, j), product i with k = j * (d / 32) + i.
__device__ __forceinline__ void write_fragment_width(int bits, const float* rotated, int num_heads,
                                                     int head_dim, std::uint32_t* out) {
  const int products = head_dim / 32, threads_per_head = head_dim / 8;
  const int thread = static_cast<int>(threadIdx.x);
  __builtin_assume(thread < kPrepareThreads);
  const int head = thread / threads_per_head;
  if (head >= kFragmentHeads) return;  // whole warps: 8 heads fill two (d = 64) or four
  const int k = thread % threads_per_head, j = k / products, i = k % products;
  FragmentValues values{};
  if (head < num_heads) values = load_values(bits, rotated + head * head_dim, head_dim, i, j);
  std::uint32_t largest = largest_bits(largest_bits(0, values.first), values.second);
  for (int step = threads_per_head / 2; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  }
  // Rounded up to 8 significant bits. Queries too small to divide by are zero. Quotients may be off
  // in their last bit, which is nothing beside the rounding of a code; exact ones are long code.
  const bool is_finite = largest < 0x7F800000u;
  const bool is_zero = !is_finite || __uint_as_float(largest) < 1e-30f;
  const float step_size = __uint_as_float(
      (__float_as_uint(__uint_as_float(largest) * (1.0f / kLargestQueryCode)) + 0xFFFFu) &
      0xFFFF0000u);
  const float inverse_step = is_zero ? 0.0f : __fdividef(1.0f, step_size);
  if (is_zero) values = {};  // NaN * 0 is no code
  uint4 words;
  int sum = pack_codes(values.first, inverse_step, words.x, words.y);
  sum += pack_codes(values.second, inverse_step, words.z, words.w);
  for (int step = threads_per_head / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
  }
  const int offset = bits == 4 ? 8 * sum : 0;
  const int low_offset = ((offset + 128) & 255) - 128;
  const float code_scale = is_zero ? 0.0f : step_size * (bits == 4 ? 16.0f : 256.0f);
  const auto scale =  // a QueryScale
      make_uint4(is_finite ? __float_as_uint(code_scale) : 0x7FC00000u,
                 static_cast<std::uint32_t>(kIntBias - ((offset - low_offset) >> 8)),
                 static_cast<std::uint32_t>(kIntBias - low_offset), 0);
  reinterpret_cast<uint4*>(out)[i * 32 + head * 4 + j] = words;
  if (k == 0) reinterpret_cast<uint4*>(out + fragment_operand_words(head_dim))[head] = scale;
}

// Writes the fragments of one (row, KV head) of a shape that has_fragments; called by the first
// kPrepareThreads threads of a CTA. rotated: shared memory [group_size][head_dim], 16-byte aligned,
// scale * log2(e) * q, rotated if the format is improved. out: fragment_words words, 16-byte
// aligned. No barriers inside.
__device__ __forceinline__ void write_fragments(const SummaryFormat& format, const float* rotated,
                                                int group_size, int head_dim, std::uint32_t* out) {
#pragma unroll 1
  for (int first = 0; first < group_size; first += kFragmentHeads) {
    const int num_heads = min(group_size - first, kFragmentHeads);
    const float* heads = rotated + first * head_dim;
#pragma unroll
    for (int bits = 4; bits <= 8; bits += 4) {
      if (!has_rows_of(format, bits)) continue;
      write_fragment_width(bits, heads, num_heads, head_dim, out);
      out += fragment_width_words(head_dim);
    }
  }
}

#endif

}  // namespace locks::detail
