// Eigenvectors of the small symmetric matrices of the summary stage: 4 x 4, 8 x 8 and 16 x 16.
//
// Jacobi's method in rounds. A round pairs all N indices as in a tournament, so its N / 2 plane
// rotations touch disjoint pairs: their angles are found together and each element of the new
// matrix is a fixed expression of the old one. A GPU may give each element to a thread, a CPU each
// row to a register, and both compute the same bits. N - 1 rounds meet every pair once: a sweep.
#pragma once

#include <cstdint>

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

inline constexpr int kMaxOrder = 16;
using SmallMatrix = float[kMaxOrder][kMaxOrder];  // the first N rows and columns are in use

// Jacobi converges quadratically: 16 x 16 takes 5 to 7 sweeps in float, 4 x 4 takes 3 to 5. The
// bound is for matrices that hold NaN.
inline constexpr int kMaxSweeps = 12;
// Off-diagonal entries under this share of the largest entry rotate no eigenvector by more than
// float's rounding, unless two eigenvalues are tied, where any basis of their plane is right.
inline constexpr float kConverged = 1e-9f;

LOCKS_HD inline float square_root(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

LOCKS_HD constexpr float magnitude(float x) { return x < 0 ? -x : x; }

// Whom index i meets in a round: N - 1 stays in its seat, the others turn around it.
template <int N>
LOCKS_HD constexpr int round_partner(int i, int round) {
  if (i == N - 1) return round;
  if (i == round) return N - 1;
  return (2 * round - i + 2 * (N - 1)) % (N - 1);
}

// One round's rotations: new row i = cosine[i] * row i + sine[i] * row partner[i].
struct JacobiRound {
  float cosine[kMaxOrder];
  float sine[kMaxOrder];
  float diagonal[kMaxOrder];
  int partner[kMaxOrder];
};

// Each index finds its own rotation; the two of a pair agree up to the sign of the sine.
template <int N>
LOCKS_HD inline void find_rotations(const SmallMatrix& a, int round, JacobiRound& turn) {
  float off[kMaxOrder], theta[kMaxOrder], tie[kMaxOrder];
  for (int i = 0; i < N; ++i) {
    const int other = round_partner<N>(i, round);
    turn.partner[i] = other;
    off[i] = i < other ? a[i][other] : a[other][i];
    theta[i] = (a[other][other] - a[i][i]) / (2 * off[i]);
    tie[i] = i < other ? 1.0f : -1.0f;
    turn.diagonal[i] = a[i][i];
  }
  for (int i = 0; i < N; ++i) {
    // tan of the smaller angle that zeroes the pair; 0, rightly, for a ratio too large for float.
    const float direction = theta[i] == 0 ? tie[i] : theta[i];
    const float root = magnitude(theta[i]) + square_root(theta[i] * theta[i] + 1);
    const float tangent = off[i] == 0 ? 0.0f : (direction < 0 ? -1 / root : 1 / root);
    const float cosine = 1 / square_root(tangent * tangent + 1);
    turn.cosine[i] = cosine;
    turn.sine[i] = -tangent * cosine;
    turn.diagonal[i] -= tangent * off[i];
  }
}

template <int N>
LOCKS_HD inline void rotate_rows(const JacobiRound& turn, const SmallMatrix& __restrict in,
                                 SmallMatrix& __restrict out) {
  for (int i = 0; i < N; ++i) {
    const float* other = in[turn.partner[i]];
    const float cosine = turn.cosine[i], sine = turn.sine[i];
    for (int j = 0; j < N; ++j) out[i][j] = cosine * in[i][j] + sine * other[j];
  }
}

// a <- J^T a J and vectors <- J^T vectors. Rows are rotated, transposed and rotated again. What the
// pair's own entries become is known, so it is set rather than computed: rounding then never mixes
// a large diagonal entry into a small off-diagonal one, and convergence goes on below float's
// rounding of the diagonal.
template <int N>
LOCKS_HD inline void apply_round(int round, SmallMatrix& a, SmallMatrix& vectors) {
  JacobiRound turn;
  SmallMatrix half, turned;
  find_rotations<N>(a, round, turn);
  rotate_rows<N>(turn, a, half);
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) turned[i][j] = half[j][i];
  }
  rotate_rows<N>(turn, turned, a);
  for (int i = 0; i < N; ++i) {
    a[i][turn.partner[i]] = 0;
    a[i][i] = turn.diagonal[i];
  }
  rotate_rows<N>(turn, vectors, half);
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) vectors[i][j] = half[i][j];
  }
}

// A power of two that brings `largest` near 1 without overflow, whatever its size: entries then
// neither overflow nor vanish when squared, and scaling rounds nothing.
LOCKS_HD inline float power_of_two_near_inverse(float largest) {
  const auto exponent = static_cast<int>(__builtin_bit_cast(std::uint32_t, largest) >> 23);
  const int inverse = 253 - exponent < 1 ? 1 : 253 - exponent;
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(inverse) << 23);
}

template <int N>
LOCKS_HD inline float largest_off_diagonal(const SmallMatrix& a) {
  float column[kMaxOrder] = {};
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) {
      const float entry = i == j ? 0.0f : magnitude(a[i][j]);
      column[j] = entry > column[j] ? entry : column[j];
    }
  }
  float largest = 0;
  for (int j = 0; j < N; ++j) largest = column[j] > largest ? column[j] : largest;
  return largest;
}

// The eigenvectors of the `rank` largest eigenvalues of the symmetric `matrix` [N, N], largest
// first, as unit rows vectors[k * N + i]; values[k] (if not null) are the eigenvalues. Equal ones
// keep their order of discovery, so the result is a function of the bits of `matrix`. Rows of a
// zero matrix are unit vectors. NaN or infinite entries give rows without meaning, never a fault.
template <int N>
LOCKS_HD inline void top_eigenvectors(const float* matrix, int rank, float* vectors_out,
                                      float* values) {
  SmallMatrix a, vectors;
  float largest = 0;
  for (int i = 0; i < N * N; ++i) {
    largest = magnitude(matrix[i]) > largest ? magnitude(matrix[i]) : largest;
  }
  const float scale = power_of_two_near_inverse(largest);
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) {
      a[i][j] = matrix[i * N + j] * scale;
      vectors[i][j] = i == j ? 1.0f : 0.0f;
    }
  }
  const float enough = kConverged * largest * scale;
  for (int sweep = 0; sweep < kMaxSweeps && largest_off_diagonal<N>(a) > enough; ++sweep) {
    for (int round = 0; round < N - 1; ++round) apply_round<N>(round, a, vectors);
  }
  bool taken[kMaxOrder] = {};
  for (int k = 0; k < rank; ++k) {
    int best = -1;
    for (int i = 0; i < N; ++i) {
      if (!taken[i] && (best < 0 || a[i][i] > a[best][best])) best = i;
    }
    taken[best] = true;
    for (int i = 0; i < N; ++i) vectors_out[k * N + i] = vectors[best][i];
    if (values != nullptr) values[k] = a[best][best] / scale;
  }
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
