// A paged cache for one EdgeCase: random data at random block ids, NaN everywhere else, and the
// same data as dense arrays that never went through a block table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "locks/locks.h"
#include "summary/summary_ref.h"
#include "support/edge_cases.h"
#include "support/executors.h"

namespace locks::testing {

using ref::Vector;

// Every byte, so that a read of it is a NaN in f32, bf16 and fp16 and no valid record header.
inline constexpr std::uint8_t kPoison = 0xFF;

// Memory of exactly `bytes` bytes, poisoned, so that a sanitizer sees the first byte read past it;
// a sparse pool is reserved address space instead, zero where nothing is written.
class Pool {
 public:
  Pool(std::size_t bytes, bool sparse);
  Pool(Pool&& other) noexcept;
  Pool& operator=(Pool&&) = delete;
  ~Pool();

  std::uint8_t* data() const { return data_; }  // 64-byte aligned
  std::size_t bytes() const { return bytes_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool sparse_ = false;
};

class PagedFixture {
 public:
  explicit PagedFixture(const EdgeCase& edge, std::uint64_t seed = 1);

  const EdgeCase& edge() const { return edge_; }
  int num_seqs() const { return static_cast<int>(edge_.lengths.size()); }
  int num_query_heads() const { return edge_.num_kv_heads * edge_.group_size; }

  AttentionParams attention() const;
  SummaryParams summary() const;
  PagedTensor keys() const { return keys_; }
  PagedTensor values() const { return values_; }
  RecordCache records() const { return records_; }
  SequenceBatch seqs() const;
  QueryTensor query() const;
  PageIndex pages();  // of the format's pages, over a buffer that the fixture owns

  // What memory holds, exactly.
  const Vector& dense_keys(int seq, int kv_head) const {
    return dense_keys_[head_idx(seq, kv_head)];
  }
  const Vector& dense_values(int seq, int kv_head) const {
    return dense_values_[head_idx(seq, kv_head)];
  }
  const Vector& dense_query(int seq, int head) const {
    return dense_queries_[static_cast<std::size_t>(seq * num_query_heads() + head)];
  }
  const Vector& reference(int kv_head) const {
    return references_[static_cast<std::size_t>(kv_head)];
  }

  std::uint8_t* record(int seq, int kv_head, int block) const;
  void poison_records();
  // Bytes of the record pool that differ from kPoison; not for sparse pools.
  std::size_t num_touched_record_bytes() const;
  // Fills the record of every complete block by the reference and a random hash.
  void write_reference_records();

 private:
  std::size_t head_idx(int seq, int kv_head) const {
    return static_cast<std::size_t>(seq * edge_.num_kv_heads + kv_head);
  }
  void lay_out_cache();
  void lay_out_records();
  void deal_blocks(int block_tokens, std::int64_t num_blocks, std::int64_t lowest,
                   std::vector<std::int32_t>& table, std::int64_t& max_blocks);
  Vector make_keys(int length);
  void write_tokens(const PagedTensor& tensor, int seq, int kv_head, Vector& dense);
  void make_queries();

  EdgeCase edge_;
  std::mt19937_64 random_;
  std::vector<Pool> pools_;
  PagedTensor keys_, values_;
  RecordCache records_;
  std::size_t record_pool_ = 0;
  std::vector<std::int32_t> lengths_, cache_table_, record_table_;
  std::int64_t max_cache_blocks_ = 0, max_record_blocks_ = 0;
  std::vector<Vector> dense_keys_, dense_values_, dense_queries_, references_;
  std::vector<float> reference_rows_;
  std::int64_t query_head_stride_ = 0, query_seq_stride_ = 0;
  std::size_t query_pool_ = 0;
  std::vector<std::int64_t> page_begin_;
};

// Bytes from the first element to the last, and a table's entries for `num_seqs` rows.
std::int64_t extent_bytes(const PagedTensor& tensor);
std::int64_t extent_bytes(const RecordCache& records);
std::int64_t extent_bytes(const QueryTensor& query, int num_seqs, int head_dim);
std::int64_t table_entries(const BlockTable& table, int num_seqs);

// `value` as the type stores it.
double round_to(ScalarType type, double value);

}  // namespace locks::testing
