// What select.cpp asks of its kernels.
#pragma once

#include <cstdint>

#include "locks/select.h"

namespace locks::detail {

// The rank of a page that is read whatever its score; above every rank of a score.
inline constexpr std::uint32_t kForcedRank = 0xFFFFFFFFu;

// The scores of one sequence's group of query heads.
struct PageRanking {
  const float* scores;  // [group_size, num_pages]
  int group_size;
  std::int64_t num_pages;
  std::int64_t run_pages;  // pages of a run of sums, a multiple of 16
  float* masses;           // [num_pages], scratch
  float* values;           // [num_pages], scratch: what pages are ranked by
  std::uint32_t* ranks;    // [num_pages], result: grows with the value; kForcedRank if not finite
};

struct SelectKernels {
  // Each returns the number of pages whose score is NaN or infinite for some head.
  std::int64_t (*rank_by_mean_of_shares)(const PageRanking& ranking);
  std::int64_t (*rank_by_max_of_scores)(const PageRanking& ranking);
};

}  // namespace locks::detail
