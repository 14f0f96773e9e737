// A fixture's KV head as the references of a decode step take it, and the mass that a set keeps.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/decode_ref.h"
#include "support/paged_fixture.h"

namespace locks::testing {

inline ref::HeadInput head_input(const PagedFixture& fixture, int seq, int kv_head) {
  const EdgeCase& edge = fixture.edge();
  ref::HeadInput input{edge.format,
                       edge.head_dim,
                       edge.lengths[static_cast<std::size_t>(seq)],
                       static_cast<double>(fixture.attention().scale),
                       fixture.dense_keys(seq, kv_head),
                       fixture.dense_values(seq, kv_head),
                       {},
                       fixture.reference(kv_head)};
  for (int g = 0; g < edge.group_size; ++g) {
    input.queries.push_back(fixture.dense_query(seq, kv_head * edge.group_size + g));
  }
  return input;
}

// The share of exact attention mass that `pages` hold, mean over the heads of the group.
inline double kept_mass(const ref::HeadInput& input, const std::vector<std::int32_t>& pages) {
  double mass = 0;
  for (const ref::Vector& query : input.queries) {
    mass += ref::retained_mass(ref::scaled(query, input.scale), input.keys.data(),
                               ref::token_mask(pages, input.format.page_tokens, input.length)) /
            static_cast<double>(input.queries.size());
  }
  return mass;
}

}  // namespace locks::testing
