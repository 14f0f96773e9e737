// eigensolver.h on a GPU: the same operations on the same numbers, hence the same bits, spread over
// lanes. 4 x 4 matrices stay in registers, four lanes each; larger ones lie in shared memory, a
// warp each. (Zeros may differ in sign, which no comparison or rounding behind them tells apart.)
#pragma once

#include <cuda_runtime.h>

#include "summary/eigensolver.h"
#include "summary/warp.cuh"

namespace locks::detail {

// One index's rotation, see find_rotations: from its own and its partner's diagonal entry and the
// entry above the diagonal that they share.
struct LaneRotation {
  float cosine, sine, diagonal;
};

__device__ __forceinline__ LaneRotation find_rotation(float own, float other, float off,
                                                      bool is_first) {
  const float theta = (other - own) / (2 * off);
  const float direction = theta == 0 ? (is_first ? 1.0f : -1.0f) : theta;
  const float root = magnitude(theta) + square_root(theta * theta + 1);
  const float inverse = 1 / root;
  const float tangent = off == 0 ? 0.0f : (direction < 0 ? -inverse : inverse);
  const float cosine = 1 / square_root(tangent * tangent + 1);
  return {cosine, -tangent * cosine, own - tangent * off};
}

// A 4 x 4 matrix over four lanes. Lane i holds row i of `vectors`, and of the matrix either row i,
// a[k] = A[i][i ^ k], or column i, a[k] = A[i ^ k][i]. Each round turns one into the other, and so
// needs no transposition; partners in all rounds are i ^ 3, i ^ 2, i ^ 1.
struct Quad {
  float a[4];
  float vectors[4];
};

template <int kMask, bool kRows>
__device__ __forceinline__ void turn_quad(Quad& q, int i) {
  constexpr int kOther = kMask == 1 ? 2 : 1;  // leads to a lane of the other pair
  const bool is_first = i < (i ^ kMask);
  const float across = __shfl_xor_sync(kEveryLane, q.a[kMask], kMask);
  const float off = is_first == kRows ? q.a[kMask] : across;
  const LaneRotation own =
      find_rotation(q.a[0], __shfl_xor_sync(kEveryLane, q.a[0], kMask), off, is_first);
  // The rotation of index i ^ kOther; its partner's differs in the sign of the sine.
  const float cosine = __shfl_xor_sync(kEveryLane, own.cosine, kOther);
  const float sine = __shfl_xor_sync(kEveryLane, own.sine, kOther);
  float half[4];
  if constexpr (kRows) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float partner = __shfl_xor_sync(kEveryLane, q.a[k ^ kMask], kMask);
      half[k] = own.cosine * q.a[k] + own.sine * partner;
    }
    q.a[kOther] = cosine * half[kOther] + sine * half[kOther ^ kMask];
    q.a[kOther ^ kMask] = cosine * half[kOther ^ kMask] + -sine * half[kOther];
  } else {
    half[0] = own.cosine * q.a[0] + own.sine * q.a[kMask];
    half[kMask] = own.cosine * q.a[kMask] + -own.sine * q.a[0];
    half[kOther] = cosine * q.a[kOther] + sine * q.a[kOther ^ kMask];
    half[kOther ^ kMask] = cosine * q.a[kOther ^ kMask] + -sine * q.a[kOther];
    const float low = __shfl_xor_sync(kEveryLane, half[kOther ^ kMask], kMask);
    const float high = __shfl_xor_sync(kEveryLane, half[kOther], kMask);
    q.a[kOther] = own.cosine * half[kOther] + own.sine * low;
    q.a[kOther ^ kMask] = own.cosine * half[kOther ^ kMask] + own.sine * high;
  }
  q.a[kMask] = 0;
  q.a[0] = own.diagonal;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float partner = __shfl_xor_sync(kEveryLane, q.vectors[j], kMask);
    q.vectors[j] = own.cosine * q.vectors[j] + own.sine * partner;
  }
}

template <bool kRows>
__device__ __forceinline__ void sweep_quad(Quad& q, int i, float enough, bool& active) {
  float largest = fmaxf(fmaxf(fabsf(q.a[1]), fabsf(q.a[2])), fabsf(q.a[3]));
  largest = fmaxf(largest, __shfl_xor_sync(kEveryLane, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kEveryLane, largest, 2));
  active = active && largest > enough;
  if (!__any_sync(kEveryLane, active)) return;
  Quad turned = q;
  turn_quad<3, kRows>(turned, i);
  turn_quad<2, !kRows>(turned, i);
  turn_quad<1, kRows>(turned, i);
  if (active) q = turned;
}

// Eight matrices a warp, or fewer with copies; called by whole warps. `row` [4] is row lane % 4 of
// the matrix in natural order.
__device__ __forceinline__ Quad solve_quad(const float (&row)[4]) {
  const int i = static_cast<int>(threadIdx.x) % 4;
  float largest = fmaxf(fmaxf(fabsf(row[0]), fabsf(row[1])), fmaxf(fabsf(row[2]), fabsf(row[3])));
  largest = fmaxf(largest, __shfl_xor_sync(kEveryLane, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kEveryLane, largest, 2));
  const float scale = power_of_two_near_inverse(largest);
  Quad q;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    // row[i ^ k] without an index into registers
    const float even = (i & 2) != 0 ? row[k ^ 2] : row[k];
    const float odd = (i & 2) != 0 ? row[k ^ 3] : row[k ^ 1];
    q.a[k] = ((i & 1) != 0 ? odd : even) * scale;
    q.vectors[k] = i == k ? 1.0f : 0.0f;
  }
  const float enough = kConverged * largest * scale;
  bool active = true;
  for (int sweep = 0; sweep < kMaxSweeps; sweep += 2) {
    sweep_quad<true>(q, i, enough, active);
    sweep_quad<false>(q, i, enough, active);
    if (!__any_sync(kEveryLane, active)) break;
  }
  return q;
}

// The index of the largest eigenvalue, the first of equals, `taken` (-1: none) left out.
__device__ __forceinline__ int best_of_quad(const Quad& q, int taken) {
  const int first_lane = static_cast<int>(threadIdx.x) % 32 / 4 * 4;
  int best = -1;
  float value = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float other = __shfl_sync(kEveryLane, q.a[0], first_lane + j);
    if (j != taken && (best < 0 || other > value)) {
      best = j;
      value = other;
    }
  }
  return best;
}

// Leaves the unit vectors of the `rank` largest eigenvalues (1 or 2), largest first, in
// vectors[k * 4 + i], written by one lane of the four, unless the matrix is a copy.
__device__ inline void top_eigenvectors_quad(const float (&row)[4], int rank, bool is_copy,
                                             float* vectors) {
  const Quad q = solve_quad(row);
  int best = -1;
  for (int k = 0; k < rank; ++k) {
    best = best_of_quad(q, best);
    if (static_cast<int>(threadIdx.x) % 4 == best && !is_copy) {
#pragma unroll
      for (int j = 0; j < 4; ++j) vectors[k * 4 + j] = q.vectors[j];
    }
  }
}

template <int N>
inline constexpr int kMatrixStride = N + 1;  // floats: rows and columns then meet different banks

// kWarps warps for one matrix a[N][N + 1] in shared memory, which is destroyed; work: as much
// again. thread: within those warps; sync: a barrier of theirs. vectors: shared memory, `rank` unit
// rows of N, largest eigenvalue first.
template <int N, int kWarps, class Sync>
__device__ void top_eigenvectors(float* a, float* work, int rank, float* vectors, int thread,
                                 Sync sync) {
  constexpr int kStride = kMatrixStride<N>;
  constexpr int kRowStep = kWarps * 32 / N;               // rows that all threads take at once
  constexpr int kEach = kRowStep < N ? N / kRowStep : 1;  // elements of a thread
  const int lane = thread % 32, column = thread % N;
  const bool is_active = thread / N < N;
  const int first_row = is_active ? thread / N : 0;
  // The largest magnitude, on or off the diagonal; each warp looks at the whole matrix.
  const auto find_largest = [a, lane](bool with_diagonal) {
    float largest = 0;
#pragma unroll
    for (int e = lane; e < N * N; e += 32) {
      const int i = e / N, j = e % N;
      if (with_diagonal || i != j) largest = fmaxf(largest, fabsf(a[i * kStride + j]));
    }
    return __uint_as_float(__reduce_max_sync(kEveryLane, __float_as_uint(largest)));
  };
  const float largest = find_largest(true);
  const float scale = power_of_two_near_inverse(largest);
  sync();
  if (is_active) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = first_row + e * kRowStep;
      a[i * kStride + column] *= scale;
      work[i * kStride + column] = i == column ? 1.0f : 0.0f;
    }
  }
  const float enough = kConverged * largest * scale;
  sync();
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    if (!(find_largest(false) > enough)) break;
    for (int round = 0; round < N - 1; ++round) {
      const int partner = round_partner<N>(column, round);
      const int low = min(column, partner), high = max(column, partner);
      const LaneRotation own =
          find_rotation(a[column * kStride + column], a[partner * kStride + partner],
                        a[low * kStride + high], column < partner);
      float half[kEach], turned[kEach], cosine[kEach], sine[kEach];
      int other[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int i = first_row + e * kRowStep;
        other[e] = round_partner<N>(i, round);
        cosine[e] = __shfl_sync(kEveryLane, own.cosine, i);
        sine[e] = __shfl_sync(kEveryLane, own.sine, i);
        half[e] = cosine[e] * a[i * kStride + column] + sine[e] * a[other[e] * kStride + column];
        turned[e] =
            cosine[e] * work[i * kStride + column] + sine[e] * work[other[e] * kStride + column];
      }
      sync();
      if (is_active) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const int at = (first_row + e * kRowStep) * kStride + column;
          a[at] = half[e];
          work[at] = turned[e];
        }
      }
      sync();
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int i = first_row + e * kRowStep;
        half[e] = cosine[e] * a[column * kStride + i] + sine[e] * a[column * kStride + other[e]];
        if (i == column) half[e] = own.diagonal;
        if (i == partner) half[e] = 0;
      }
      sync();
      if (is_active) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          a[(first_row + e * kRowStep) * kStride + column] = half[e];
        }
      }
      sync();
    }
  }
  unsigned taken = 0;
  for (int k = 0; k < rank; ++k) {
    int best = -1;
    for (int i = 0; i < N; ++i) {
      if ((taken >> i & 1u) == 0 && (best < 0 || a[i * kStride + i] > a[best * kStride + best])) {
        best = i;
      }
    }
    taken |= 1u << best;
    if (thread < N) vectors[k * N + thread] = work[best * kStride + thread];
  }
  sync();
}

}  // namespace locks::detail
