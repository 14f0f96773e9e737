// What the score stage's kernels and their dot products share: the 16 pages that they take at a
// time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/cpu_namespace.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {

// For array bounds that depend on template arguments, where -Wsign-conversion insists.
constexpr std::size_t extent(int count) { return static_cast<std::size_t>(count); }

inline constexpr int kBatchPages = 16;

// The sums of one query head: [centroid, then basis rows][page].
template <int kRank>
using HeadSums = std::int32_t[extent(1 + kRank)][kBatchPages];

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
