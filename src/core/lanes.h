// Sums over rows of channels or pages, in 16 lanes.
//
// Element c of a row belongs to lane c % 16 at every instruction-set level, and lanes are added by
// one fixed tree. So all levels, and a GPU that follows this order, round alike. The loops are
// plain; each level's compiler maps 16 lanes to one, two or four registers.
#pragma once

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {
namespace {  // one copy a file, as in scalar.h

inline constexpr int kLanes = 16;  // divides every head_dim

LOCKS_HD inline float sum_lanes(const float (&lane)[kLanes]) {
  float eight[8], four[4];
  for (int l = 0; l < 8; ++l) eight[l] = lane[l] + lane[l + 8];
  for (int l = 0; l < 4; ++l) four[l] = eight[l] + eight[l + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

LOCKS_HD inline float dot(const float* a, const float* b, int d) {
  float sum[kLanes] = {};
  for (int c = 0; c < d; c += kLanes) {
    for (int l = 0; l < kLanes; ++l) sum[l] += a[c + l] * b[c + l];
  }
  return sum_lanes(sum);
}

}  // namespace
}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
