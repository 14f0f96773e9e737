#include "support/edge_cases.h"

#include <algorithm>

namespace locks::testing {

const std::vector<SummaryFormat>& all_formats() {
  static const std::vector<SummaryFormat> formats = {
      kFine,
      kFine8,
      kCompact,
      kWide,
      kPaper,
      {4, 1, 4, 4, 8, true},
      {4, 2, 4, 4, 4, true},
      {4, 2, 8, 8, 8, false},
      {8, 1, 8, 4, 8, false},
      {8, 2, 8, 4, 4, true},
      {8, 4, 4, 8, 4, true},
      {16, 1, 4, 4, 4, false},
      {16, 2, 8, 8, 4, true},
      {16, 4, 4, 4, 8, true},
      {16, 8, 8, 8, 8, true},
      {16, 8, 4, 4, 4, false},
  };
  return formats;
}

namespace {

// Around a page, a block, the always-read set of 80 tokens, and a run of 2,048 tokens.
std::vector<int> boundary_lengths(int page_tokens) {
  std::vector<int> lengths = {0,
                              1,
                              page_tokens - 1,
                              page_tokens,
                              page_tokens + 1,
                              15,
                              16,
                              17,
                              79,
                              80,
                              81,
                              95,
                              97,
                              200,
                              2047,
                              2048,
                              2049};
  std::sort(lengths.begin(), lengths.end());
  return lengths;
}

std::string identifier(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
}

void add_formats(std::vector<EdgeCase>& cases) {
  for (const SummaryFormat& preset : {kFine, kFine8, kCompact, kWide, kPaper}) {
    cases.push_back({.name = "lengths_" + identifier(format_name(preset)),
                     .format = preset,
                     .lengths = boundary_lengths(preset.page_tokens),
                     .num_kv_heads = 1,
                     .group_size = 2,
                     .reference_key = preset == kFine8});
  }
  for (const SummaryFormat& format : all_formats()) {
    cases.push_back({.name = "format_" + identifier(format_name(format)),
                     .format = format,
                     .lengths = {37, 0, 400},
                     .type = ScalarType::kBFloat16,
                     .reference_key = true});
  }
}

void add_shapes(std::vector<EdgeCase>& cases) {
  for (int head_dim : {64, 80, 96, 128, 192, 256}) {
    for (const SummaryFormat& format : {kFine, kCompact, kWide}) {
      cases.push_back({.name = "head_dim_" + std::to_string(head_dim) + "_" + format_name(format),
                       .format = format,
                       .lengths = {333, 16, 90},
                       .head_dim = head_dim,
                       .group_size = 2,
                       .type = ScalarType::kFloat16});
    }
  }
  for (int group_size : {1, 3, 4, 5, 6, 7, 8, 16, 71}) {
    cases.push_back({.name = "group_" + std::to_string(group_size),
                     .format = group_size % 2 == 0 ? kWide : kFine,
                     .lengths = {300, 0, 33},
                     .group_size = group_size,
                     .type = ScalarType::kBFloat16});
  }
  cases.push_back({.name = "many_kv_heads",
                   .lengths = {250, 129},
                   .num_kv_heads = 9,
                   .group_size = 1,
                   .type = ScalarType::kBFloat16});
}

void add_caches(std::vector<EdgeCase>& cases) {
  const ScalarType types[] = {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16};
  const char* type_names[] = {"f32", "bf16", "f16"};
  const CacheLayout layouts[] = {CacheLayout::kHeadMajor, CacheLayout::kTokenMajor,
                                 CacheLayout::kInterleaved};
  const char* layout_names[] = {"head_major", "token_major", "interleaved"};
  int n = 0;
  for (int block_tokens : {16, 32, 48, 128}) {
    for (int layout = 0; layout < 3; ++layout, ++n) {
      cases.push_back({.name = std::string("cache_") + layout_names[layout] + "_" +
                               std::to_string(block_tokens) + "_" + type_names[n % 3],
                       .format = n % 2 == 0 ? kFine : kCompact,
                       .lengths = {block_tokens - 1, block_tokens, block_tokens + 1, 401},
                       .type = types[n % 3],
                       .block_tokens = block_tokens,
                       .record_block_tokens = n % 4 == 3 ? 16 : block_tokens,
                       .layout = layouts[layout],
                       .padding = n % 2 == 0 ? 0 : 5});  // odd: rows are aligned to elements only
    }
  }
  cases.push_back({.name = "big_pool_f16",
                   .lengths = {40, 200},
                   .type = ScalarType::kFloat16,
                   .top_of_big_pool = true});
  cases.push_back({.name = "big_pool_token_major_bf16",
                   .format = kWide,
                   .lengths = {161},
                   .type = ScalarType::kBFloat16,
                   .block_tokens = 32,
                   .record_block_tokens = 32,
                   .layout = CacheLayout::kTokenMajor,
                   .top_of_big_pool = true});
}

void add_patterns(std::vector<EdgeCase>& cases) {
  const KeyPattern patterns[] = {KeyPattern::kBiased, KeyPattern::kHuge,   KeyPattern::kConstant,
                                 KeyPattern::kZero,   KeyPattern::kNanKey, KeyPattern::kInfKey};
  const char* names[] = {"biased", "huge", "constant", "zero", "nan_key", "inf_key"};
  for (int n = 0; n < 6; ++n) {
    for (const SummaryFormat& format : {kFine, kFine8, kWide, kPaper}) {
      cases.push_back({.name = std::string("keys_") + names[n] + "_" + format_name(format),
                       .format = format,
                       .lengths = {410, 160},
                       .keys = patterns[n],
                       .reference_key = n == 0});
    }
  }
}

}  // namespace

const std::vector<EdgeCase>& edge_cases() {
  static const std::vector<EdgeCase> cases = [] {
    std::vector<EdgeCase> all;
    add_formats(all);
    add_shapes(all);
    add_caches(all);
    add_patterns(all);
    return all;
  }();
  return cases;
}

std::vector<EdgeCase> finite_edge_cases() {
  std::vector<EdgeCase> cases = edge_cases();
  std::erase_if(cases, [](const EdgeCase& edge) {
    return edge.keys == KeyPattern::kNanKey || edge.keys == KeyPattern::kInfKey;
  });
  return cases;
}

}  // namespace locks::testing
