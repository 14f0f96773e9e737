// Writes a page of a record: the team's warps of that page turn what they measured of it (centroid,
// centred keys, weights of the eigenvectors) into rows, scales and coefficients, operation by
// operation as quantise.h does. Compiled with --fmad=false: no product is fused with a sum.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/lanes.h"
#include "core/scalar.h"
#include "locks/summary.h"
#include "summary/eigensolver.h"
#include "summary/quantise.h"
#include "summary/record_job.cuh"
#include "summary/record_team.cuh"
#include "summary/warp.cuh"

namespace locks::detail {

// The scale of a row that the page's warps are about to round in place.
template <int B, int kWarps>
__device__ Quantised find_row_scale(const float* row, int d, float limit, int page) {
  std::uint32_t largest = 0;  // each warp looks at the whole row
  for (int c = lane_index(); c < d; c += kWarpSize) {
    largest = max(largest, __float_as_uint(row[c]) & 0x7FFFFFFFu);
  }
  const Quantised q = find_scale(max_magnitude_warp(largest), limit);
  if constexpr (TeamShape<B, kWarps>::kPageWarps > 1) sync_page<B, kWarps>(page);
  return q;
}

// Quantises and packs a row with the page's warps; leaves its rounded values in `row` if asked to.
template <int B, int kWarps>
__device__ Quantised write_row(float* row, int d, int bits, bool keep_rounded, int page,
                               std::uint8_t* out) {
  using S = TeamShape<B, kWarps>;
  const int thread = page_thread<B, kWarps>();
  const float limit = code_limit(bits);
  const Quantised q = find_row_scale<B, kWarps>(row, d, limit, page);
  const bool finite = is_finite(q.scale);
  const auto code_of = [&](int c) { return finite ? round_to_code(row[c], q.scale, limit) : 0; };
  const auto rounded = [&](int code) { return static_cast<float>(code) * q.scale; };
  if (bits == 8) {
    for (int c = thread; c < d; c += S::kPageThreads) {
      const int code = code_of(c);
      out[c] = static_cast<std::uint8_t>(code);
      if (keep_rounded) row[c] = rounded(code);
    }
  } else {
    for (int b = thread; b < d / 2; b += S::kPageThreads) {
      const int low = code_of(b), high = code_of(b + d / 2);
      out[b] = static_cast<std::uint8_t>(16 * high + low + 8);
      if (keep_rounded) {
        row[b] = rounded(low);
        row[b + d / 2] = rounded(high);
      }
    }
  }
  sync_page<B, kWarps>(page);
  return q;
}

// Where the parts of a page lie in its record.
struct PagePlace {
  std::uint8_t *rows, *scales, *coefficients;
};

__device__ inline PagePlace find_page(const RecordLayout& layout, std::uint8_t* record, int page) {
  return {record + page * layout.page_rows_bytes,
          record + layout.scales_offset + page * (1 + layout.format.rank) * 2,
          record + layout.coefficients_offset + page * layout.page_coefficient_bytes};
}

__device__ inline void write_unscorable_page(const RecordLayout& layout, const PagePlace& out,
                                             int thread, int num_threads) {
  const SummaryFormat& format = layout.format;
  for (int b = thread; b < layout.page_rows_bytes; b += num_threads) {
    const int bits = b < layout.centroid_row_bytes ? format.centroid_bits : format.basis_bits;
    out.rows[b] = bits == 4 ? 8 : 0;
  }
  if (thread <= format.rank) store_fp16(out.scales, thread, kFp16Nan);
  for (int b = thread; b < layout.page_coefficient_bytes; b += num_threads) {
    out.coefficients[b] = format.coefficient_bits == 4 ? 0x88 : 0x80;
  }
}

// solve_refit for the right-hand side that this lane holds, operation by operation; the factors are
// found by each lane for itself.
template <int kRank>
__device__ void refit(const float* overlap, int rank, float (&c)[kRank]) {
  float gram[kRank][kRank];
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    if (k >= rank) break;
    float pivot = overlap[k * kRank + k] + kRidge;
#pragma unroll
    for (int m = 0; m < k; ++m) pivot -= gram[k][m] * gram[k][m];
    pivot = square_root(pivot > kRidge ? pivot : kRidge);
    gram[k][k] = pivot;
#pragma unroll
    for (int i = k + 1; i < kRank; ++i) {
      if (i >= rank) break;
      float entry = overlap[i * kRank + k];
#pragma unroll
      for (int m = 0; m < k; ++m) entry -= gram[i][m] * gram[k][m];
      gram[i][k] = entry / pivot;
    }
    float entry = c[k];
#pragma unroll
    for (int m = 0; m < k; ++m) entry -= gram[k][m] * c[m];
    c[k] = entry / pivot;
  }
#pragma unroll
  for (int k = kRank - 1; k >= 0; --k) {
    if (k >= rank) continue;
    float entry = c[k];
#pragma unroll
    for (int m = k + 1; m < kRank; ++m) {
      if (m < rank) entry -= gram[m][k] * c[m];
    }
    c[k] = entry / gram[k][k];
  }
}

// pack_coefficients with lane t % B at token t; returns the scale.
template <int B>
__device__ float pack_component(float c, int bits, int component, std::uint8_t* packed) {
  const int t = lane_index();
  const float limit = code_limit(bits);
  const Quantised q = find_scale(max_magnitude_warp(__float_as_uint(c) & 0x7FFFFFFFu), limit);
  const int code = is_finite(q.scale) ? round_to_code(c, q.scale, limit) : 0;
  const int stored = code + (bits == 4 ? 8 : 128);
  const int next = __shfl_down_sync(kEveryLane, stored, 1);
  if (t < B) {
    if (bits == 8) {
      packed[component * B + t] = static_cast<std::uint8_t>(stored);
    } else if (t % 2 == 0) {
      packed[(component * B + t) / 2] = static_cast<std::uint8_t>(stored | next << 4);
    }
  }
  return q.scale;
}

// Basis rows, coefficients and scales of a centred page whose weights are known. The page's warps.
template <int B, int kWarps>
__device__ void write_components(const RecordLayout& layout, const TeamMemory<B, kWarps>& m,
                                 int page, const PagePlace& out) {
  using S = TeamShape<B, kWarps>;
  constexpr int kRank = TeamMemory<B, kWarps>::kLargestRank;
  constexpr int kDots = B / S::kHalves;  // tokens of a half warp
  const int thread = page_thread<B, kWarps>(), lane = lane_index(), half = thread / kLanes;
  const SummaryFormat& format = layout.format;
  const int d = layout.head_dim, rank = format.rank;
  const float* x = m.keys + page * B * m.stride;
  for (int k = 0; k < rank; ++k) {
    const float* weights = m.weights + (page * kRank + k) * B;
    float* row = m.basis + k * d;
    for (int c = thread; c < d; c += S::kPageThreads) {
      float sum = x[c] * weights[0];
#pragma unroll
      for (int t = 1; t < B; ++t) sum += x[t * m.stride + c] * weights[t];
      row[c] = sum;
    }
    sync_page<B, kWarps>(page);
    const float squared = dot_half_warp(row, row, d);
    const float factor = squared > kNoiseEnergy * m.energy[page] ? 1 / square_root(squared) : 0.0f;
    sync_page<B, kWarps>(page);
    for (int c = thread; c < d; c += S::kPageThreads) row[c] *= factor;
    sync_page<B, kWarps>(page);
    const Quantised q =
        write_row<B, kWarps>(row, d, format.basis_bits, format.improved, page,
                             out.rows + layout.centroid_row_bytes + k * layout.basis_row_bytes);
    if (thread == 0) m.scales[k] = q.scale;
    int a[kDots], b[kDots];
    float c[kDots];
#pragma unroll
    for (int n = 0; n < kDots; ++n) {
      a[n] = static_cast<int>(row - x);
      b[n] = (n * S::kHalves + half) * m.stride;
    }
    dots_half_warp<kDots>(x, a, b, d, c);
    if (thread % kLanes == 0) {
#pragma unroll
      for (int n = 0; n < kDots; ++n) {
        m.coefficients[k * kBlockTokens + n * S::kHalves + half] = c[n];
      }
    }
    if (format.improved) {
      for (int first = 0; first <= k; first += S::kHalves) {
        const int n = min(first + half, k);
        const float product = dot_half_warp(row, m.basis + n * d, d);
        if (thread % kLanes == 0 && first + half <= k) m.overlap[k * kRank + n] = product;
      }
    }
  }
  sync_page<B, kWarps>(page);
  float c[kRank] = {};
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    if (k < rank) c[k] = m.coefficients[k * kBlockTokens + lane % B];
  }
  if (format.improved) refit<kRank>(m.overlap, rank, c);
#pragma unroll
  for (int k = 0; k < kRank; ++k) {
    if (k >= rank) break;
    if (k % S::kPageWarps != thread / kWarpSize) continue;
    const float scale = pack_component<B>(c[k], format.coefficient_bits, k, out.coefficients);
    if (lane == 0) store_fp16(out.scales, 1 + k, float_to_fp16(m.scales[k] * scale));
  }
  sync_page<B, kWarps>(page);
}

// The page's warps.
template <int B, int kWarps>
__device__ void write_page(const RecordJob& job, const TeamMemory<B, kWarps>& m, int page, int head,
                           std::uint8_t* record) {
  using S = TeamShape<B, kWarps>;
  const int thread = page_thread<B, kWarps>();
  const RecordLayout& layout = job.layout;
  const int d = layout.head_dim;
  const PagePlace out = find_page(layout, record, page);
  // A NaN or infinite key is NaN once centred. Energy past float's range means a key past fp16's.
  if (!is_finite(m.energy[page])) {
    return write_unscorable_page(layout, out, thread, S::kPageThreads);
  }
  float* centroid = m.centroids + page * d;
  if (job.reference_keys != nullptr) {
    const float* reference = job.reference_keys + std::int64_t{head} * d;
    for (int c = thread; c < d; c += S::kPageThreads) centroid[c] -= reference[c];
    sync_page<B, kWarps>(page);
  }
  const Quantised q =
      write_row<B, kWarps>(centroid, d, layout.format.centroid_bits, false, page, out.rows);
  if (thread == 0) store_fp16(out.scales, 0, q.scale_bits);
  write_components<B, kWarps>(layout, m, page, out);
}

}  // namespace locks::detail
