// The one table of shapes and data that every stage's tests join.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "locks/page.h"
#include "locks/summary.h"

namespace locks::testing {

enum class CacheLayout {
  kHeadMajor,    // [block, head, token, channel]
  kTokenMajor,   // [block, token, head, channel]
  kInterleaved,  // head-major, keys and values of a block side by side in one pool
};

enum class KeyPattern {
  kWalk,      // neighbouring tokens are alike, as in text: pages differ in mass and have a main
              // direction
  kBiased,    // a large common offset on all keys
  kHuge,      // logits in the hundreds
  kConstant,  // all keys equal
  kZero,
  kNanKey,  // one key of each sequence has a NaN channel
  kInfKey,  // ... an infinite channel
};

struct EdgeCase {
  std::string name;
  SummaryFormat format = kFine;
  std::vector<int> lengths;
  int head_dim = 64;
  int num_kv_heads = 2;
  int group_size = 3;
  ScalarType type = ScalarType::kFloat32;
  int block_tokens = 16;
  int record_block_tokens = 16;
  CacheLayout layout = CacheLayout::kHeadMajor;
  int padding = 0;  // elements between rows, and between blocks
  KeyPattern keys = KeyPattern::kWalk;
  bool reference_key = false;
  // Blocks sit at the top of a pool past block id 65,536 and past element 2^32.
  bool top_of_big_pool = false;
};

inline std::ostream& operator<<(std::ostream& stream, const EdgeCase& edge) {
  return stream << edge.name;
}

const std::vector<EdgeCase>& edge_cases();
// Those without a NaN or infinite key.
std::vector<EdgeCase> finite_edge_cases();

// For INSTANTIATE_TEST_SUITE_P.
template <class ParamInfo>
std::string edge_name(const ParamInfo& tested) {
  return tested.param.name;
}

// Formats of the closed list with every (page size, rank), and each width at least once.
const std::vector<SummaryFormat>& all_formats();

}  // namespace locks::testing
