// Measures and writes a page whose format uses differences.h, by the team's warps of that page and
// operation by operation as the CPU does. Compiled with --fmad=false: no product is fused with a
// sum.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "locks/summary.h"
#include "summary/differences.h"
#include "summary/record_job.cuh"
#include "summary/record_team.cuh"
#include "summary/rotation.h"
#include "summary/warp.cuh"
#include "summary/write_page.cuh"

namespace locks::detail {

// K products of rows at base + a[k] and base + b[k] by the half warp that calls it, in the order of
// the CPU's dot_by_fours; every lane of the half gets them.
template <int K>
__device__ __forceinline__ void dots_by_fours(const float* base, const int (&a)[K],
                                              const int (&b)[K], int d, float (&sum)[K]) {
  float low[K] = {}, high[K] = {};
  for (int c = lane_index() % kLanes; c < d; c += 2 * kLanes) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      low[k] += base[a[k] + c] * base[b[k] + c];
      if (c + kLanes < d) high[k] += base[a[k] + c + kLanes] * base[b[k] + c + kLanes];
    }
  }
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      low[k] += __shfl_xor_sync(kEveryLane, low[k], apart);
      high[k] += __shfl_xor_sync(kEveryLane, high[k], apart);
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) sum[k] = low[k] + high[k];
#pragma unroll
  for (int apart = 8; apart >= 4; apart /= 2) {
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] += __shfl_xor_sync(kEveryLane, sum[k], apart);
  }
}

// Sums and differences of kFactor elements of a row that lie `step` apart.
template <int kFactor>
__device__ __forceinline__ void turn_strided(float* first, int step) {
  float x[kFactor];
#pragma unroll
  for (int k = 0; k < kFactor; ++k) x[k] = first[k * step];
  butterflies(x);
#pragma unroll
  for (int k = 0; k < kFactor; ++k) first[k * step] = x[k];
}

// The rotation of a row in shared memory, without signs and scale, in the order of the CPU's
// turn_row. The page's warps; they meet behind it.
template <int B, int kWarps>
__device__ void turn_row(float* row, int d, int page) {
  constexpr int kThreads = TeamShape<B, kWarps>::kPageThreads;
  const int thread = page_thread<B, kWarps>(), run = rotation_run(d);
  for (int c = 4 * thread; c < d; c += 4 * kThreads) turn_strided<4>(row + c, 1);
  sync_page<B, kWarps>(page);
  if (run > 32) {
    const int factor = run / 32;
    for (int task = thread; task < d / factor; task += kThreads) {
      float* first = row + task / 32 * run + task % 32;
      if (factor == 2) turn_strided<2>(first, 32);
      if (factor == 4) turn_strided<4>(first, 32);
      if (factor == 8) turn_strided<8>(first, 32);
    }
    sync_page<B, kWarps>(page);
  }
  const int near = run < 32 ? run : 32, factor = near / 4;
  for (int task = thread; task < d / factor; task += kThreads) {
    float* first = row + task / 4 * near + task % 4;
    if (factor == 4) {
      turn_strided<4>(first, 4);
    } else {
      turn_strided<8>(first, 4);
    }
  }
  sync_page<B, kWarps>(page);
}

// Turns a page's keys into their sum and differences, in place, and fills its Gram matrix: entries
// as DifferenceGram has them. The page's warps.
template <int B, int kWarps>
__device__ void measure_differences(const TeamMemory<B, kWarps>& m, int page, int d) {
  using S = TeamShape<B, kWarps>;
  const int thread = page_thread<B, kWarps>();
  float* x = m.keys + page * B * m.stride;
  for (int c = thread; c < d; c += S::kPageThreads) {
    float* y = x + c;
    const float a = y[0] + y[m.stride], b = y[0] - y[m.stride];
    const float e = y[2 * m.stride] + y[3 * m.stride], f = y[2 * m.stride] - y[3 * m.stride];
    y[0] = a + e;
    y[m.stride] = a - e;
    y[2 * m.stride] = b + f;
    y[3 * m.stride] = b - f;
  }
  sync_page<B, kWarps>(page);
  constexpr int kEach = (kGramEntries + S::kHalves - 1) / S::kHalves;
  const int half = thread / kLanes;
  int entry[kEach], a[kEach], b[kEach];
  float sum[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    entry[k] = min(half + k * S::kHalves, kGramEntries - 1);
    a[k] = (entry[k] < 3 ? entry[k] + 1 : entry[k] == 5 ? 2 : 1) * m.stride;
    b[k] = (entry[k] < 3 ? entry[k] + 1 : entry[k] == 3 ? 2 : 3) * m.stride;
  }
  dots_by_fours<kEach>(x, a, b, d, sum);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (thread % kLanes == 0) m.gram[page * m.kGramFloats + entry[k]] = sum[k];
  }
  sync_page<B, kWarps>(page);
}

// Rounds a row as write_row does, but by products with the scale's inverse, and packs it; leaves
// the codes in it as floats.
template <int B, int kWarps>
__device__ Quantised write_row_by_inverse(float* row, int d, int bits, int page,
                                          std::uint8_t* out) {
  using S = TeamShape<B, kWarps>;
  const int thread = page_thread<B, kWarps>();
  const float limit = code_limit(bits);
  const Quantised q = find_row_scale<B, kWarps>(row, d, limit, page);
  const bool finite = is_finite(q.scale);
  const float inverse = 1.0f / q.scale;
  const auto take_code = [&](int c) {
    const int code = finite ? round_product_to_code(row[c], inverse, limit) : 0;
    row[c] = static_cast<float>(code);
    return code;
  };
  if (bits == 8) {
    for (int c = thread; c < d; c += S::kPageThreads) {
      out[c] = static_cast<std::uint8_t>(take_code(c));
    }
  } else {
    for (int b = thread; b < d / 2; b += S::kPageThreads) {
      const int low = take_code(b), high = take_code(b + d / 2);
      out[b] = static_cast<std::uint8_t>(16 * high + low + 8);
    }
  }
  sync_page<B, kWarps>(page);
  return q;
}

// Coefficients of a page from the codes in m.basis, which are rotated backwards for it.
template <int B, int kWarps>
__device__ void write_difference_coefficients(const RecordLayout& layout,
                                              const TeamMemory<B, kWarps>& m, int page,
                                              float basis_scale, const PagePlace& out) {
  const int d = layout.head_dim;
  float squared[1];
  dots_by_fours<1>(m.basis, {0}, {0}, d, squared);  // exact, as all sums of codes
  sync_page<B, kWarps>(page);
  turn_row<B, kWarps>(m.basis, d, page);
  const float* x = m.keys + page * B * m.stride;
  const int basis = static_cast<int>(m.basis - x);
  float product[kDifferences];
  dots_by_fours<kDifferences>(x, {basis, basis, basis}, {m.stride, 2 * m.stride, 3 * m.stride}, d,
                              product);
  const float c = combine_differences(product, lane_index() % B) *
                  refit_factor(basis_scale, squared[0], rotation_scale(d));
  if (page_thread<B, kWarps>() >= kWarpSize) return;
  const float scale = pack_component<B>(c, layout.format.coefficient_bits, 0, out.coefficients);
  if (lane_index() == 0) store_fp16(out.scales, 1, float_to_fp16(basis_scale * scale));
}

// A page that measure_differences went over. The page's warps.
template <int B, int kWarps>
__device__ void write_differences(const RecordJob& job, const TeamMemory<B, kWarps>& m, int page,
                                  int head, std::uint8_t* record) {
  using S = TeamShape<B, kWarps>;
  const RecordLayout& layout = job.layout;
  const int d = layout.head_dim, thread = page_thread<B, kWarps>();
  const PagePlace out = find_page(layout, record, page);
  float* y = m.keys + page * B * m.stride;
  DifferenceGram gram;
#pragma unroll
  for (int i = 0; i < kGramEntries; ++i) gram.entry[i] = m.gram[page * m.kGramFloats + i];
  const Direction direction = find_direction(gram, rotation_scale(d));
  if (!direction.is_scorable) {
    write_unscorable_page(layout, out, thread, S::kPageThreads);
    sync_page<B, kWarps>(page);
    return;
  }
  for (int c = thread; c < d; c += S::kPageThreads) {
    m.basis[c] =
        (y[m.stride + c] * direction.weight[0] + y[2 * m.stride + c] * direction.weight[1]) +
        y[3 * m.stride + c] * direction.weight[2];
  }
  turn_row<B, kWarps>(y, d, page);
  const float* reference =
      job.reference_keys == nullptr ? nullptr : job.reference_keys + std::int64_t{head} * d;
  const float scale = 0.25f * rotation_scale(d);
  for (int c = thread; c < d; c += S::kPageThreads) {
    const float mean = y[c] * scale;
    y[c] = reference == nullptr ? mean : mean - reference[c];
  }
  sync_page<B, kWarps>(page);
  const Quantised centroid =
      write_row_by_inverse<B, kWarps>(y, d, layout.format.centroid_bits, page, out.rows);
  if (thread == 0) store_fp16(out.scales, 0, centroid.scale_bits);
  turn_row<B, kWarps>(m.basis, d, page);
  const Quantised basis = write_row_by_inverse<B, kWarps>(
      m.basis, d, layout.format.basis_bits, page, out.rows + layout.centroid_row_bytes);
  write_difference_coefficients<B, kWarps>(layout, m, page, basis.scale, out);
  sync_page<B, kWarps>(page);
}

}  // namespace locks::detail
