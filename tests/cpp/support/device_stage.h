// Single launches of a decode step on the GPU: device copies of a fixture, a plan made on the host,
// and a poisoned workspace whose parts can be read.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "decode/step_cuda.h"
#include "score/query_fragments.cuh"
#include "support/device_array.h"
#include "support/new_tokens.h"
#include "support/paged_fixture.h"

namespace locks::testing {

// The edge cases that fit a device (the big pool needs 16 GiB of sparse host memory), and those of
// 32-bit caches also with 16-bit ones in aligned rows, which kernels read in other ways.
inline std::vector<EdgeCase> device_cases() {
  std::vector<EdgeCase> cases;
  for (const EdgeCase& edge : edge_cases()) {
    if (edge.top_of_big_pool) continue;
    cases.push_back(edge);
    if (edge.type != ScalarType::kFloat32 && edge.padding == 0) continue;
    cases.push_back(edge);
    cases.back().name += "_aligned";
    if (edge.type == ScalarType::kFloat32) cases.back().type = ScalarType::kBFloat16;
    if (edge.padding != 0) cases.back().padding = 8;
  }
  return cases;
}

class DeviceStage {
 public:
  explicit DeviceStage(const PagedFixture& fixture)
      : fixture_(fixture),
        keys_(bytes(fixture.keys().data), extent_bytes(fixture.keys())),
        records_(fixture.records().data, extent_bytes(fixture.records())),
        cache_ids_(fixture.seqs().cache_blocks.ids,
                   table_entries(fixture.seqs().cache_blocks, fixture.num_seqs())),
        record_ids_(fixture.seqs().record_blocks.ids,
                    table_entries(fixture.seqs().record_blocks, fixture.num_seqs())),
        reference_(fixture.summary().reference_keys,
                   fixture.summary().reference_keys == nullptr
                       ? 0
                       : std::int64_t{fixture.keys().num_kv_heads} * fixture.keys().head_dim),
        query_(bytes(fixture.query().data),
               extent_bytes(fixture.query(), fixture.num_seqs(), fixture.edge().head_dim)),
        plan_(fixture.num_seqs() + 1, kPoison),
        rotated_(heads() * fixture.edge().head_dim, kPoison),
        fragments_(std::int64_t{fixture.num_seqs()} * fixture.edge().num_kv_heads *
                       fragment_words_of(fixture),
                   kPoison),
        base_(heads(), kPoison),
        tail_(heads(), kPoison),
        masses_(tiles(fixture) * fixture.num_query_heads() * detail::kTileBlocks *
                    fixture.edge().format.pages_per_block(),
                kPoison),
        sums_(tiles(fixture) * fixture.num_query_heads(), kPoison),
        shifts_(tiles(fixture) * fixture.num_query_heads(), kPoison),
        counters_(kNumCudaCounters, 0) {}

  // Fills first_tile and uploads.
  void set_plan(std::vector<RowPlan> rows) {
    std::int32_t tile = 0;
    for (RowPlan& row : rows) {
      row.first_tile = tile;
      tile += detail::num_tiles(row.scored_blocks);
    }
    RowPlan end{};
    end.first_tile = tile;
    rows.push_back(end);
    plan_.upload(rows.data());
    host_plan_ = rows;
  }
  const std::vector<RowPlan>& plan() const { return host_plan_; }
  void set_records(const std::uint8_t* pool) { records_.upload(pool); }
  // Takes the tokens out of the cache, which serves as keys and values: prepare is to write them.
  void set_added(const DeviceNewTokens& tokens) {
    keys_.upload(tokens.without(fixture_.keys()).data());
    added_ = tokens.view();
    added_.values = added_.keys;
    added_.value_seq_stride = added_.key_seq_stride;
    added_.value_head_stride = added_.key_head_stride;
  }

  detail::StepArguments arguments() const {
    detail::StepArguments a{};
    const SummaryParams summary = fixture_.summary();
    a.attention = fixture_.attention();
    a.layout = record_layout(summary.format, a.attention.head_dim);
    a.format_code = encode_format(summary.format);
    const bool has_reference = summary.format.improved && summary.reference_keys != nullptr;
    a.reference_keys = has_reference ? reference_.get() : nullptr;
    a.query = fixture_.query();
    a.query.data = query_.get();
    a.keys = fixture_.keys();
    a.keys.data = keys_.get();
    a.values = a.keys;
    a.records = fixture_.records();
    a.records.data = records_.get();
    a.seqs = fixture_.seqs();
    a.seqs.lengths = nullptr;
    a.seqs.cache_blocks.ids = cache_ids_.get();
    a.seqs.record_blocks.ids = record_ids_.get();
    a.plan = plan_.get();
    a.counters = counters_.get();
    a.workspace = {rotated_.get(), fragments_.get(), base_.get(),  tail_.get(),
                   masses_.get(),  sums_.get(),      shifts_.get()};
    a.added = added_;
    return a;
  }

  std::vector<std::uint8_t> records() const { return records_.download(); }
  std::vector<std::uint8_t> keys() const { return keys_.download(); }
  std::vector<float> rotated() const { return rotated_.download(); }
  std::vector<std::uint32_t> fragments() const { return fragments_.download(); }
  std::vector<float> base() const { return base_.download(); }
  std::vector<float> tail() const { return tail_.download(); }
  std::vector<__nv_bfloat16> masses() const { return masses_.download(); }
  std::vector<float> sums() const { return sums_.download(); }
  std::vector<std::int32_t> shifts() const { return shifts_.download(); }
  std::vector<unsigned long long> counters() const { return counters_.download(); }

 private:
  static const std::uint8_t* bytes(const void* data) {
    return static_cast<const std::uint8_t*>(data);
  }
  static std::int64_t tiles(const PagedFixture& fixture) {
    std::int64_t count = 0;
    for (int length : fixture.edge().lengths) count += detail::num_tiles(length / kBlockTokens);
    return std::max<std::int64_t>(count, 1);
  }
  static int fragment_words_of(const PagedFixture& fixture) {
    const EdgeCase& edge = fixture.edge();
    if (!detail::has_fragments(edge.format, edge.group_size, edge.head_dim)) return 1;
    return (edge.group_size + detail::kFragmentHeads - 1) / detail::kFragmentHeads *
           detail::one_fragment_words(edge.format, edge.head_dim);
  }
  std::int64_t heads() const {
    return std::int64_t{fixture_.num_seqs()} * fixture_.num_query_heads();
  }

  const PagedFixture& fixture_;
  DeviceArray<std::uint8_t> keys_, records_;
  DeviceArray<std::int32_t> cache_ids_, record_ids_;
  DeviceArray<float> reference_;
  DeviceArray<std::uint8_t> query_;
  DeviceArray<RowPlan> plan_;
  DeviceArray<float> rotated_;
  DeviceArray<std::uint32_t> fragments_;
  DeviceArray<float> base_, tail_;
  DeviceArray<__nv_bfloat16> masses_;
  DeviceArray<float> sums_;
  DeviceArray<std::int32_t> shifts_;
  DeviceArray<unsigned long long> counters_;
  NewTokens added_;
  std::vector<RowPlan> host_plan_;
};

}  // namespace locks::testing
