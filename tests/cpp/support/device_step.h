// A fixture's decode step on the GPU: device copies of its caches, tables and queries, poisoned
// outputs, and calls of the public functions.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/scalar.h"
#include "locks/cuda.h"
#include "support/device_array.h"
#include "support/new_tokens.h"
#include "support/paged_fixture.h"

namespace locks::testing {

// The edge cases as the GPU takes them: 16-bit caches whose rows are aligned to 16 bytes.
inline std::vector<EdgeCase> gpu_edge_cases(std::vector<EdgeCase> cases) {
  for (EdgeCase& edge : cases) {
    if (edge.type == ScalarType::kFloat32) edge.type = ScalarType::kBFloat16;
    if (edge.padding != 0) edge.padding = 8;
  }
  return cases;
}

class DeviceStep {
 public:
  explicit DeviceStep(const PagedFixture& fixture)
      : fixture_(fixture),
        num_rows_(fixture.num_seqs()),
        max_tiles_(all_tiles(fixture)),
        mask_pages_(most_pages(fixture) + 3),
        keys_(bytes_of(fixture.keys()), extent_bytes(fixture.keys())),
        values_(bytes_of(fixture.values()), extent_bytes(fixture.values())),
        records_(fixture.records().data, extent_bytes(fixture.records())),
        lengths_(fixture.seqs().lengths, num_rows_),
        cache_ids_(fixture.seqs().cache_blocks.ids,
                   table_entries(fixture.seqs().cache_blocks, num_rows_)),
        record_ids_(fixture.seqs().record_blocks.ids,
                    table_entries(fixture.seqs().record_blocks, num_rows_)),
        reference_(fixture.summary().reference_keys,
                   fixture.summary().reference_keys == nullptr
                       ? 0
                       : std::int64_t{fixture.keys().num_kv_heads} * fixture.keys().head_dim),
        query_(static_cast<const std::uint8_t*>(fixture.query().data),
               extent_bytes(fixture.query(), num_rows_, fixture.edge().head_dim)),
        rows_(num_rows_ + 1, kPoison),
        output_(num_rows_ * seq_stride() * scalar_bytes(fixture.edge().type), kPoison),
        lse_(std::int64_t{num_rows_} * fixture.num_query_heads(), kPoison),
        mask_(std::int64_t{num_rows_} * fixture.edge().num_kv_heads * mask_pages_, kPoison),
        counters_(kNumCudaCounters, 0),
        workspace_(workspace_bytes(), kPoison) {}

  DecodePlan plan() const {
    SummaryParams params = fixture_.summary();
    if (params.reference_keys != nullptr) params.reference_keys = reference_.get();
    return DecodePlan::create(fixture_.attention(), params).value();
  }

  // Builds the records of all complete blocks, as prefill does.
  void summarise_all() const {
    const DeviceArray<std::int32_t> begin(num_rows_, 0);
    const Status status = summarise_blocks_cuda(plan().summary(), keys(), seqs(), begin.get(),
                                                records(), nullptr, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
  }

  Status plan_rows(const Budget& budget, std::int32_t dense_tokens = 0,
                   const std::uint8_t* flags = nullptr, cudaStream_t stream = nullptr) {
    return plan_rows_cuda(lengths_.get(), flags, num_rows_, budget,
                          fixture_.edge().format.page_tokens, {dense_tokens, max_tiles_},
                          rows_.get(), stream);
  }
  Status decode(cudaStream_t stream = nullptr) {
    QueryTensor query = fixture_.query();
    query.data = query_.get();
    const AttentionOutput output{output_.get(), fixture_.edge().type, seq_stride(),
                                 fixture_.edge().head_dim, lse_.get()};
    return decode_cuda(
        plan(), query, keys(), values(), added_, records(), seqs(), rows_.get(), max_tiles_, output,
        wants_mask_ ? SelectionMask{mask_.get(), mask_pages_} : SelectionMask{}, counters_.get(),
        workspace_.get(), static_cast<std::size_t>(workspace_bytes()), stream);
  }
  // Both, to the end.
  void run(const Budget& budget, std::int32_t dense_tokens = 0,
           const std::uint8_t* flags = nullptr) {
    Status status = plan_rows(budget, dense_tokens, flags);
    ASSERT_TRUE(status.ok()) << status.message();
    status = decode();
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
  }

  void set_lengths(const std::vector<std::int32_t>& lengths) { lengths_.upload(lengths.data()); }
  void set_records(const std::uint8_t* pool) { records_.upload(pool); }
  void set_max_tiles(std::int32_t max_tiles) { max_tiles_ = max_tiles; }
  // Without it the step is what an engine asks for: masses are dropped, and more warps may attend.
  void set_wants_mask(bool wants) { wants_mask_ = wants; }
  // Takes the tokens out of the caches; the steps to come write them.
  void set_added(const DeviceNewTokens& tokens) {
    keys_.upload(tokens.without(fixture_.keys()).data());
    values_.upload(tokens.without(fixture_.values()).data());
    added_ = tokens.view();
  }

  void poison_results() {
    output_.fill(kPoison);
    lse_.fill(kPoison);
    mask_.fill(kPoison);
  }

  // Fetches the results; the functions below read what was fetched last.
  void fetch() {
    host_output_ = output_.download();
    host_lse_ = lse_.download();
    host_mask_ = mask_.download();
  }
  std::vector<float> output_row(int seq, int head) const {
    const int d = fixture_.edge().head_dim;
    std::vector<float> row(static_cast<std::size_t>(d));
    detail::load_floats(host_output_.data(), fixture_.edge().type, seq * seq_stride() + head * d, d,
                        row.data());
    return row;
  }
  float lse(int seq, int head) const {
    return host_lse_[static_cast<std::size_t>(seq * fixture_.num_query_heads() + head)];
  }
  std::vector<std::int32_t> selected(int seq, int kv_head) const {
    const std::uint8_t* run =
        host_mask_.data() + (seq * fixture_.edge().num_kv_heads + kv_head) * mask_pages_;
    std::vector<std::int32_t> pages;
    for (std::int64_t p = 0; p < mask_pages_; ++p) {
      EXPECT_LE(int{run[p]}, 1) << "the mask was not written at page " << p;
      if (run[p] != 0) pages.push_back(static_cast<std::int32_t>(p));
    }
    return pages;
  }
  const std::vector<std::uint8_t>& output_bytes() const { return host_output_; }
  const std::vector<float>& lses() const { return host_lse_; }
  const std::vector<std::uint8_t>& mask_bytes() const { return host_mask_; }

  std::vector<std::int64_t> counters() const { return counters_.download(); }
  std::vector<RowPlan> row_plans() const { return rows_.download(); }
  std::vector<std::uint8_t> record_pool() const { return records_.download(); }
  std::vector<std::uint8_t> key_pool() const { return keys_.download(); }
  std::vector<std::uint8_t> value_pool() const { return values_.download(); }

 private:
  static const std::uint8_t* bytes_of(const PagedTensor& tensor) {
    return static_cast<const std::uint8_t*>(tensor.data);
  }
  static std::int64_t most_pages(const PagedFixture& fixture) {
    int longest = 0;
    for (int length : fixture.edge().lengths) longest = std::max(longest, length);
    return num_pages(longest, fixture.edge().format.page_tokens);
  }
  static std::int32_t all_tiles(const PagedFixture& fixture) {
    std::int32_t tiles = 0;
    for (int length : fixture.edge().lengths) tiles += length / 256 + 1;
    return tiles;
  }

  std::int64_t seq_stride() const {
    return std::int64_t{fixture_.num_query_heads()} * fixture_.edge().head_dim;
  }
  std::int64_t workspace_bytes() const {
    return static_cast<std::int64_t>(decode_workspace_bytes_cuda(plan(), num_rows_, max_tiles_));
  }

  static PagedTensor at(PagedTensor tensor, const DeviceArray<std::uint8_t>& memory) {
    tensor.data = memory.get();
    return tensor;
  }
  PagedTensor keys() const { return at(fixture_.keys(), keys_); }
  PagedTensor values() const { return at(fixture_.values(), values_); }
  RecordCache records() const {
    RecordCache cache = fixture_.records();
    cache.data = records_.get();
    return cache;
  }
  SequenceBatch seqs() const {
    SequenceBatch seqs = fixture_.seqs();
    seqs.lengths = lengths_.get();
    seqs.cache_blocks.ids = cache_ids_.get();
    seqs.record_blocks.ids = record_ids_.get();
    return seqs;
  }

  const PagedFixture& fixture_;
  int num_rows_;
  std::int32_t max_tiles_;
  std::int64_t mask_pages_;
  bool wants_mask_ = true;
  NewTokens added_;
  DeviceArray<std::uint8_t> keys_, values_, records_;
  DeviceArray<std::int32_t> lengths_, cache_ids_, record_ids_;
  DeviceArray<float> reference_;
  DeviceArray<std::uint8_t> query_;
  DeviceArray<RowPlan> rows_;
  DeviceArray<std::uint8_t> output_;
  DeviceArray<float> lse_;
  DeviceArray<std::uint8_t> mask_;
  DeviceArray<std::int64_t> counters_;
  DeviceArray<std::uint8_t> workspace_;
  std::vector<std::uint8_t> host_output_, host_mask_;
  std::vector<float> host_lse_;
};

}  // namespace locks::testing
