// A decode step as the chain of the stages' references, and dense attention. Tests only.
#pragma once

#include "attend/attend_ref.h"
#include "select/select_ref.h"

namespace locks::ref {

// One KV head of one sequence, as dense arrays.
struct HeadInput {
  SummaryFormat format;
  int head_dim = 0;
  int length = 0;
  double scale = 0;
  Vector keys;                  // [length, head_dim]
  Vector values;                // [length, head_dim]
  std::vector<Vector> queries;  // of the group's heads, unscaled
  Vector reference;             // rotated, empty for zero
};

struct HeadOutput {
  Selection selection;
  std::vector<Attention> heads;
};

// scores [group, pages]: of pages in complete blocks from a quantised summary, of the others exact.
std::vector<float> page_scores(const HeadInput& input);
// scores [group, pages]: the exact log mass of every page.
std::vector<float> exact_scores(const HeadInput& input);

HeadOutput decode_head(const HeadInput& input, const Budget& budget);
std::vector<Attention> dense_attention(const HeadInput& input);

}  // namespace locks::ref
