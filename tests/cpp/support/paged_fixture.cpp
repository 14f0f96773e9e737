#include "support/paged_fixture.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/scalar.h"
#include "support/edge_cases.h"

namespace locks::testing {

Pool::Pool(std::size_t bytes, bool sparse) : bytes_(bytes), sparse_(sparse) {
  if (sparse) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    data_ = static_cast<std::uint8_t*>(memory);
  } else {
    if (posix_memalign(reinterpret_cast<void**>(&data_), 64, std::max<std::size_t>(bytes, 1)) !=
        0) {
      std::abort();
    }
    std::memset(data_, kPoison, bytes);
  }
}

Pool::Pool(Pool&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_), sparse_(other.sparse_) {}

Pool::~Pool() {
  if (data_ == nullptr) return;
  if (sparse_) {
    munmap(data_, bytes_);
  } else {
    std::free(data_);
  }
}

double round_to(ScalarType type, double value) {
  float result = 0;
  std::uint32_t bits = 0;
  detail::store_scalar(&bits, type, 0, static_cast<float>(value));
  result = detail::load_scalar(&bits, type, 0);
  return result;
}

namespace {

constexpr std::int64_t kSpareBlocks = 3;
// With 32,768 elements a block these ids lie past 2^32 elements, and past 65,536.
constexpr std::int64_t kBigPoolBlocks = 140'000;
constexpr std::int64_t kBigPoolFirstUsed = 139'900;
constexpr std::int64_t kBigPoolStride = 32'768;

double normal(std::mt19937_64& random) {
  return std::normal_distribution<double>(0.0, 1.0)(random);
}

std::int64_t blocks_for(const std::vector<int>& lengths, int block_tokens) {
  std::int64_t blocks = 0;
  for (int length : lengths) blocks += (length + block_tokens - 1) / block_tokens;
  return blocks;
}

}  // namespace

PagedFixture::PagedFixture(const EdgeCase& edge, std::uint64_t seed)
    : edge_(edge), random_(seed), lengths_(edge.lengths.begin(), edge.lengths.end()) {
  pools_.reserve(4);
  lay_out_cache();
  lay_out_records();
  for (int h = 0; h < edge_.num_kv_heads; ++h) {
    Vector reference;
    for (int c = 0; c < edge_.head_dim && edge_.reference_key; ++c) {
      const double bias = edge_.keys == KeyPattern::kBiased ? 20 : 0;
      reference.push_back(static_cast<float>(bias + normal(random_)));
      reference_rows_.push_back(static_cast<float>(reference.back()));
    }
    if (edge_.keys == KeyPattern::kBiased) {  // near the rotated bias, as calibration would have it
      reference = ref::rotate(reference);
      for (int c = 0; c < edge_.head_dim; ++c) {
        float& stored = reference_rows_[static_cast<std::size_t>(h * edge_.head_dim + c)];
        stored = static_cast<float>(reference[static_cast<std::size_t>(c)]);
        reference[static_cast<std::size_t>(c)] = stored;
      }
    }
    references_.push_back(std::move(reference));
  }
  for (int i = 0; i < num_seqs(); ++i) {
    for (int h = 0; h < edge_.num_kv_heads; ++h) {
      dense_keys_.push_back(make_keys(edge_.lengths[static_cast<std::size_t>(i)]));
      Vector values(dense_keys_.back().size());
      for (double& value : values) value = normal(random_);
      dense_values_.push_back(std::move(values));
      write_tokens(keys_, i, h, dense_keys_.back());
      write_tokens(values_, i, h, dense_values_.back());
    }
  }
  make_queries();
}

void PagedFixture::lay_out_cache() {
  const std::int64_t d = edge_.head_dim, heads = edge_.num_kv_heads, tokens = edge_.block_tokens;
  const std::int64_t row = d + edge_.padding;
  PagedTensor tensor{nullptr, edge_.type, 0, edge_.block_tokens, edge_.num_kv_heads, edge_.head_dim,
                     0,       0,          0};
  if (edge_.layout == CacheLayout::kTokenMajor) {
    tensor.head_stride = row;
    tensor.token_stride = heads * row;
    tensor.block_stride = tokens * heads * row + edge_.padding;
  } else {
    tensor.token_stride = row;
    tensor.head_stride = tokens * row;
    tensor.block_stride = heads * tokens * row + edge_.padding;
  }
  const bool interleaved = edge_.layout == CacheLayout::kInterleaved;
  const std::int64_t values_offset = interleaved ? tensor.block_stride : 0;
  if (interleaved) tensor.block_stride *= 2;
  if (edge_.top_of_big_pool) tensor.block_stride = kBigPoolStride;
  tensor.num_blocks = edge_.top_of_big_pool
                          ? kBigPoolBlocks
                          : blocks_for(edge_.lengths, edge_.block_tokens) + kSpareBlocks;
  deal_blocks(edge_.block_tokens, tensor.num_blocks, edge_.top_of_big_pool ? kBigPoolFirstUsed : 0,
              cache_table_, max_cache_blocks_);

  const std::int64_t last = (tensor.num_blocks - 1) * tensor.block_stride +
                            (heads - 1) * tensor.head_stride + (tokens - 1) * tensor.token_stride;
  const std::int64_t elements = values_offset + last + d;
  const auto bytes = static_cast<std::size_t>(elements * scalar_bytes(edge_.type));
  keys_ = values_ = tensor;
  pools_.emplace_back(bytes, edge_.top_of_big_pool);
  keys_.data = pools_.back().data();
  if (!interleaved) pools_.emplace_back(bytes, edge_.top_of_big_pool);
  values_.data = pools_.back().data() + values_offset * scalar_bytes(edge_.type);
}

void PagedFixture::lay_out_records() {
  records_.record_bytes = ref::record_bytes(edge_.format, edge_.head_dim);
  records_.block_tokens = edge_.record_block_tokens;
  records_.num_kv_heads = edge_.num_kv_heads;
  // A gap of one alignment unit between heads and between blocks, if there is padding at all.
  const std::int64_t gap = edge_.padding > 0 ? 16 : 0;
  records_.head_stride = edge_.record_block_tokens / kBlockTokens * records_.record_bytes + gap;
  records_.block_stride = edge_.num_kv_heads * records_.head_stride + gap;
  if (edge_.top_of_big_pool) records_.block_stride = kBigPoolStride;
  records_.num_blocks = edge_.top_of_big_pool
                            ? kBigPoolBlocks
                            : blocks_for(edge_.lengths, edge_.record_block_tokens) + kSpareBlocks;
  deal_blocks(edge_.record_block_tokens, records_.num_blocks,
              edge_.top_of_big_pool ? kBigPoolFirstUsed : 0, record_table_, max_record_blocks_);
  const std::int64_t bytes = (records_.num_blocks - 1) * records_.block_stride +
                             edge_.num_kv_heads * records_.head_stride - gap;
  record_pool_ = pools_.size();
  pools_.emplace_back(static_cast<std::size_t>(bytes), edge_.top_of_big_pool);
  records_.data = pools_.back().data();
}

// Random ids from [lowest, num_blocks), the last one among them: behind it memory ends. Unused
// table entries are out of range.
void PagedFixture::deal_blocks(int block_tokens, std::int64_t num_blocks, std::int64_t lowest,
                               std::vector<std::int32_t>& table, std::int64_t& max_blocks) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks - lowest));
  std::iota(ids.begin(), ids.end(), static_cast<std::int32_t>(lowest));
  std::shuffle(ids.begin(), ids.end(), random_);
  std::swap(ids.back(), *std::max_element(ids.begin(), ids.end()));
  max_blocks = 2;
  for (int length : edge_.lengths) {
    max_blocks = std::max<std::int64_t>(max_blocks, (length + block_tokens - 1) / block_tokens);
  }
  table.assign(static_cast<std::size_t>(max_blocks * num_seqs()), -1);
  for (int i = 0; i < num_seqs(); ++i) {
    const int length = edge_.lengths[static_cast<std::size_t>(i)];
    for (std::int64_t n = 0; n < (length + block_tokens - 1) / block_tokens; ++n) {
      table[static_cast<std::size_t>(i * max_blocks + n)] = ids.back();
      ids.pop_back();
    }
  }
}

Vector PagedFixture::make_keys(int length) {
  const auto d = static_cast<std::size_t>(edge_.head_dim);
  const auto n = static_cast<std::size_t>(length);
  Vector keys(n * d, 0.0);
  if (edge_.keys == KeyPattern::kZero) return keys;
  constexpr double kMemory = 0.9;  // of an autoregressive walk with unit variance
  const double step = std::sqrt(1 - kMemory * kMemory);
  Vector state(d);
  for (double& x : state) x = normal(random_);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t c = 0; c < d; ++c) {
      if (edge_.keys != KeyPattern::kConstant) {
        state[c] = kMemory * state[c] + step * normal(random_);
      }
      const double bias = edge_.keys == KeyPattern::kBiased ? 20 : 0;
      const double size = edge_.keys == KeyPattern::kHuge ? 100 : 1;
      keys[i * d + c] = size * state[c] + bias;
    }
  }
  // Past the first 80 tokens, so that the page is not read anyway.
  const std::size_t bad = std::min<std::size_t>(85, n == 0 ? 0 : n - 1) * d + 3;
  if (edge_.keys == KeyPattern::kNanKey && n > 0) keys[bad] = NAN;
  if (edge_.keys == KeyPattern::kInfKey && n > 0) keys[bad] = INFINITY;
  return keys;
}

void PagedFixture::write_tokens(const PagedTensor& tensor, int seq, int kv_head, Vector& dense) {
  const std::int64_t d = edge_.head_dim;
  const auto length = static_cast<std::int64_t>(dense.size()) / d;
  for (std::int64_t i = 0; i < length; ++i) {
    const std::int64_t block =
        cache_table_[static_cast<std::size_t>(seq * max_cache_blocks_ + i / edge_.block_tokens)];
    const std::int64_t row = block * tensor.block_stride + kv_head * tensor.head_stride +
                             i % edge_.block_tokens * tensor.token_stride;
    for (std::int64_t c = 0; c < d; ++c) {
      double& value = dense[static_cast<std::size_t>(i * d + c)];
      value = round_to(edge_.type, value);
      detail::store_scalar(const_cast<void*>(tensor.data), edge_.type, row + c,
                           static_cast<float>(value));
    }
  }
}

void PagedFixture::make_queries() {
  query_head_stride_ = edge_.head_dim + edge_.padding;
  query_seq_stride_ = num_query_heads() * query_head_stride_ + edge_.padding;
  const std::int64_t elements = std::max<std::int64_t>(1, num_seqs()) * query_seq_stride_;
  query_pool_ = pools_.size();
  pools_.emplace_back(static_cast<std::size_t>(elements * scalar_bytes(edge_.type)), false);
  for (int i = 0; i < num_seqs(); ++i) {
    for (int h = 0; h < num_query_heads(); ++h) {
      Vector query;
      for (int c = 0; c < edge_.head_dim; ++c) {
        query.push_back(round_to(edge_.type, 2 * normal(random_)));
        detail::store_scalar(pools_[query_pool_].data(), edge_.type,
                             i * query_seq_stride_ + h * query_head_stride_ + c,
                             static_cast<float>(query.back()));
      }
      dense_queries_.push_back(std::move(query));
    }
  }
}

AttentionParams PagedFixture::attention() const {
  return {num_query_heads(), edge_.num_kv_heads, edge_.head_dim,
          static_cast<float>(1 / std::sqrt(edge_.head_dim))};
}

SummaryParams PagedFixture::summary() const {
  return {edge_.format, edge_.reference_key ? reference_rows_.data() : nullptr};
}

SequenceBatch PagedFixture::seqs() const {
  return {num_seqs(),
          lengths_.data(),
          {cache_table_.data(), max_cache_blocks_, max_cache_blocks_},
          {record_table_.data(), max_record_blocks_, max_record_blocks_}};
}

QueryTensor PagedFixture::query() const {
  return {pools_[query_pool_].data(), edge_.type, num_query_heads(), query_seq_stride_,
          query_head_stride_};
}

PageIndex PagedFixture::pages() {
  page_begin_.assign(static_cast<std::size_t>(num_seqs()) + 1, 0);
  for (std::size_t i = 0; i < lengths_.size(); ++i) {
    page_begin_[i + 1] = page_begin_[i] + num_pages(lengths_[i], edge_.format.page_tokens);
  }
  return {page_begin_.data(), edge_.format.page_tokens};
}

std::uint8_t* PagedFixture::record(int seq, int kv_head, int block) const {
  const int per_cache_block = edge_.record_block_tokens / kBlockTokens;
  const std::int64_t cache_block =
      record_table_[static_cast<std::size_t>(seq * max_record_blocks_ + block / per_cache_block)];
  return records_.data + cache_block * records_.block_stride + kv_head * records_.head_stride +
         block % per_cache_block * records_.record_bytes;
}

void PagedFixture::poison_records() {
  if (edge_.top_of_big_pool) return;
  std::memset(pools_[record_pool_].data(), kPoison, pools_[record_pool_].bytes());
}

std::size_t PagedFixture::num_touched_record_bytes() const {
  const Pool& pool = pools_[record_pool_];
  return pool.bytes() -
         static_cast<std::size_t>(std::count(pool.data(), pool.data() + pool.bytes(), kPoison));
}

void PagedFixture::write_reference_records() {
  const SummaryFormat& format = edge_.format;
  for (int i = 0; i < num_seqs(); ++i) {
    for (int h = 0; h < edge_.num_kv_heads; ++h) {
      for (int b = 0; b < edge_.lengths[static_cast<std::size_t>(i)] / kBlockTokens; ++b) {
        ref::Record record;
        for (int p = 0; p < format.pages_per_block(); ++p) {
          const std::ptrdiff_t token = b * kBlockTokens + p * format.page_tokens;
          record.pages.push_back(
              ref::summarise_page(format, dense_keys(i, h).data() + token * edge_.head_dim,
                                  edge_.head_dim, reference(h)));
        }
        record.header = {kRecordMagic, kRecordVersion, encode_format(format),
                         static_cast<std::uint32_t>(random_())};
        const auto bytes = ref::pack_record(format, edge_.head_dim, record);
        std::memcpy(this->record(i, h, b), bytes.data(), bytes.size());
      }
    }
  }
}

std::int64_t extent_bytes(const PagedTensor& t) {
  return ((t.num_blocks - 1) * t.block_stride + (t.num_kv_heads - 1) * t.head_stride +
          (t.block_tokens - 1) * t.token_stride + t.head_dim) *
         scalar_bytes(t.type);
}

std::int64_t extent_bytes(const RecordCache& r) {
  return (r.num_blocks - 1) * r.block_stride + (r.num_kv_heads - 1) * r.head_stride +
         r.block_tokens / kBlockTokens * r.record_bytes;
}

std::int64_t extent_bytes(const QueryTensor& q, int num_seqs, int head_dim) {
  return ((num_seqs - 1) * q.seq_stride + (q.num_query_heads - 1) * q.head_stride + head_dim) *
         scalar_bytes(q.type);
}

std::int64_t table_entries(const BlockTable& table, int num_seqs) {
  return (num_seqs - 1) * table.seq_stride + table.max_blocks;
}

}  // namespace locks::testing
