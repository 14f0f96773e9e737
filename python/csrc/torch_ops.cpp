// LOCKS as torch operators, on the stable ABI of torch 2.11. Each op checks its arguments,
// describes them to the core as plain structs, and turns a failed Status into one exception. Shapes
// and meanings are in python/locks/ops.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "calls.h"
#include "checks.h"
#include "executor.h"
#include "locks/locks.h"

namespace locks::binding {

namespace {

static_assert(std::is_trivially_copyable_v<DecodeCounters>);

std::int64_t parse_format_op(const std::string& name) {
  return encode_format(Checks("parse_format").value(parse_format(name)));
}

std::string format_name_op(std::int64_t format) {
  return format_name(format_of(Checks("format_name"), format));
}

std::int64_t record_bytes_op(std::int64_t format, std::int64_t head_dim) {
  const Checks checks("record_bytes");
  const SummaryFormat summary_format = format_of(checks, format);
  const AttentionParams attention{1, 1, checks.to_int("head_dim", head_dim), 1.0f};
  checks.ok(validate(attention));
  return record_layout(summary_format, attention.head_dim).record_bytes;
}

std::string cpu_level_op() { return cpu_level_name(cpu_level()); }

void set_cpu_level_op(const std::string& name) {
  const Checks checks("set_cpu_level");
  for (const CpuLevel level : {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (name == cpu_level_name(level)) return checks.ok(set_cpu_level(level));
  }
  checks.fail("level: expected baseline, avx2 or avx512, got ", name);
}

void rotate_op(const Tensor& rows) {
  const Checks checks("rotate");
  checks.tensor("rows", rows, {"num_rows", "head_dim"}, kFloat32, Strides::kContiguous);
  const int head_dim = checks.to_int("rows", rows.size(1));
  checks.ok(validate(AttentionParams{1, 1, head_dim, 1.0f}));
  for (std::int64_t row = 0; row < rows.size(0); ++row) {
    rotate(mutable_data<float>(rows) + row * head_dim, head_dim);
  }
}

void check_slots(const Checks& checks, const std::int64_t* slots, std::int64_t num_tokens,
                 std::int64_t num_slots) {
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    if (slots[i] < -1 || slots[i] >= num_slots) {
      checks.fail("slot_mapping: expected -1 (skip) to ", num_slots - 1, ", got ", slots[i],
                  " for token ", i);
    }
  }
}

void write_cache_op(const Tensor& key, const Tensor& value, const Tensor& slot_mapping,
                    const Tensor& cache) {
  const Checks checks("write_cache");
  checks.tensor("cache", cache, {"num_blocks", "kv_heads", 2, "block_tokens", "head_dim"},
                kFloating, Strides::kOwnRows);
  const ScalarType dtype = cache.scalar_type();
  const std::int64_t num_heads = cache.size(1);
  const std::int64_t block_tokens = cache.size(3);
  const std::int64_t head_dim = cache.size(4);
  checks.tensor("key", key, {"num_tokens", num_heads, head_dim}, {&dtype, 1}, Strides::kRows);
  const std::int64_t num_tokens = key.size(0);
  checks.tensor("value", value, {num_tokens, num_heads, head_dim}, {&dtype, 1}, Strides::kRows);
  checks.tensor("slot_mapping", slot_mapping, {num_tokens}, kInt64, Strides::kContiguous);
  const std::int64_t* slots = const_data<std::int64_t>(slot_mapping);
  check_slots(checks, slots, num_tokens, cache.size(0) * block_tokens);
  if (key.numel() == 0) return;

  const auto element = static_cast<std::int64_t>(cache.element_size());
  const auto row_bytes = static_cast<std::size_t>(head_dim * element);
  auto* rows = mutable_data<std::byte>(cache);
  // One item a head of keys or of values: it takes its tokens in order, so that of two tokens for
  // one slot the later one stays, whatever the number of threads.
  const auto copy_head = [&](std::int64_t head, int which) {
    const Tensor& source = which == 0 ? key : value;
    const auto* from = const_data<std::byte>(source) + head * stride_or(source, 1, 0) * element;
    std::byte* to = rows + (head * stride_or(cache, 1, 0) + which * cache.stride(2)) * element;
    const std::int64_t from_step = stride_or(source, 0, 0) * element;
    const std::int64_t block_step = stride_or(cache, 0, 0) * element;
    const std::int64_t token_step = stride_or(cache, 3, 0) * element;
    for (std::int64_t i = 0; i < num_tokens; ++i) {
      if (slots[i] < 0) continue;
      std::memcpy(to + slots[i] / block_tokens * block_step + slots[i] % block_tokens * token_step,
                  from + i * from_step, row_bytes);
    }
  };
  for_each_parallel(2 * num_heads, num_tokens * head_dim,
                    [&](std::int64_t item) { copy_head(item / 2, static_cast<int>(item % 2)); });
}

void summarise_blocks_op(const Tensor& keys, const Tensor& block_table, const Tensor& begin_tokens,
                         const Tensor& lengths, std::int64_t format,
                         const std::optional<Tensor>& reference_keys, const Tensor& record_table,
                         const Tensor& records, const std::optional<Tensor>& counters) {
  const Checks checks("summarise_blocks");
  const SummariseCall call =
      describe_summarise(checks, keys, block_table, begin_tokens, lengths, format, reference_keys,
                         record_table, records, counters);
  checks.ok(summarise_blocks(call.summary, call.keys, call.seqs, call.begin_tokens, call.records,
                             call.num_built, torch_executor()));
}

std::int64_t decode_workspace_bytes_op(const Tensor& lengths, std::int64_t num_query_heads,
                                       std::int64_t num_kv_heads, std::int64_t head_dim,
                                       std::int64_t format) {
  const Checks checks("decode_workspace_bytes");
  const DecodePlan plan = plan_of(checks, num_query_heads, num_kv_heads, head_dim, format);
  SequenceBatch seqs;
  seqs.lengths = checked_lengths(checks, lengths, "num_seqs");
  seqs.num_seqs = checks.to_int("lengths", lengths.size(0));
  return static_cast<std::int64_t>(plan.workspace_bytes(seqs, torch_executor().num_workers));
}

// The pages that a call read, as the core lists them and as the op reports them. Evaluation only:
// the one part of decode that allocates.
class SelectedPages {
 public:
  SelectedPages(const Checks& checks, const Tensor& selected, const SequenceBatch& seqs,
                int num_kv_heads, int page_tokens)
      : selected_(selected), num_seqs_(seqs.num_seqs), num_kv_heads_(num_kv_heads) {
    checks.tensor("selected", selected, {num_seqs_, num_kv_heads_, "pages"}, kUInt8,
                  Strides::kContiguous);
    begin_.resize(static_cast<std::size_t>(num_seqs_) + 1);
    index_ = build_page_index(seqs, page_tokens, begin_.data());
    for (int i = 0; i < num_seqs_; ++i) {
      if (index_.pages(i) > selected.size(2)) {
        checks.fail("selected: expected at least ", index_.pages(i), " pages for sequence ", i,
                    ", got ", selected.size(2));
      }
    }
    ids_.resize(static_cast<std::size_t>(begin_.back() * num_kv_heads_));
    counts_.resize(static_cast<std::size_t>(num_seqs_) * static_cast<std::size_t>(num_kv_heads_));
    sets_ = {ids_.data(), counts_.data()};
  }
  SelectedPages(const SelectedPages&) = delete;

  const PageSets* sets() const { return &sets_; }

  void write() const {
    auto* row = mutable_data<std::uint8_t>(selected_);
    std::memset(row, 0, static_cast<std::size_t>(selected_.numel()));
    for (int i = 0; i < num_seqs_; ++i) {
      for (int kv_head = 0; kv_head < num_kv_heads_; ++kv_head, row += selected_.size(2)) {
        const std::int32_t* ids = sets_.ids + index_.offset(i, kv_head, num_kv_heads_);
        const std::int32_t count = sets_.counts[std::int64_t{i} * num_kv_heads_ + kv_head];
        for (std::int32_t n = 0; n < count; ++n) row[ids[n]] = 1;
      }
    }
  }

 private:
  const Tensor& selected_;
  int num_seqs_;
  int num_kv_heads_;
  std::vector<std::int64_t> begin_;
  PageIndex index_;
  std::vector<std::int32_t> ids_;
  std::vector<std::int32_t> counts_;
  PageSets sets_;
};

void decode_op(const Tensor& query, const Tensor& keys, const Tensor& values,
               const Tensor& block_table, const Tensor& lengths, const Tensor& records,
               const Tensor& record_table, std::int64_t format,
               const std::optional<Tensor>& reference_keys, double scale, double budget,
               const Tensor& workspace, const Tensor& output, const Tensor& lse,
               const Tensor& counters, const std::optional<Tensor>& selected) {
  const Checks checks("decode");
  DecodeCall call = describe_decode(checks, query, keys, values, block_table, records, record_table,
                                    format, reference_keys, scale, output, lse);
  SequenceBatch& seqs = call.seqs;
  seqs.lengths = checked_lengths(checks, lengths, seqs.num_seqs);
  const Budget page_budget = budget_of(checks, budget);

  checks.tensor("workspace", workspace, {"bytes"}, kUInt8, Strides::kContiguous);
  checks.tensor("counters", counters, {kNumCounters}, kInt64, Strides::kContiguous);
  std::optional<SelectedPages> pages;
  if (selected.has_value()) {
    pages.emplace(checks, *selected, seqs, call.plan.attention().num_kv_heads,
                  call.plan.layout().format.page_tokens);
  }

  DecodeCounters totals;
  std::memcpy(&totals, counters.const_data_ptr(), sizeof(totals));
  checks.ok(decode(call.plan, call.query, call.keys, call.values, call.records, seqs, page_budget,
                   call.output, pages.has_value() ? pages->sets() : nullptr, &totals,
                   workspace.mutable_data_ptr(), static_cast<std::size_t>(workspace.numel()),
                   torch_executor()));
  std::memcpy(counters.mutable_data_ptr(), &totals, sizeof(totals));
  if (pages.has_value()) pages->write();
}

// The sum of `count` words, a multiple of kReadWords. Compiled for the widest registers as well: a
// core that loads eight bytes at a time keeps too few lines on their way to reach what memory
// gives.
constexpr std::int64_t kReadWords = 64;
#ifdef LOCKS_HAVE_X86_LEVELS
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
std::uint64_t
sum_words(const std::uint64_t* words, std::int64_t count) {
  std::uint64_t lanes[kReadWords] = {};
  for (std::int64_t begin = 0; begin < count; begin += kReadWords) {
    for (std::int64_t i = 0; i < kReadWords; ++i) lanes[i] += words[begin + i];
  }
  return std::accumulate(lanes, lanes + kReadWords, std::uint64_t{0});
}

// What reading memory costs at best: a sum, which no compiler can leave out.
std::int64_t read_words_op(const Tensor& words) {
  const Checks checks("read_words");
  checks.tensor("words", words, {"count"}, kInt64, Strides::kContiguous);
  if (words.numel() % kReadWords != 0) {
    checks.fail("words: expected a multiple of ", kReadWords, ", got ", words.numel());
  }
  constexpr std::int64_t kChunk = std::int64_t{1} << 16;
  const auto* data = const_data<std::uint64_t>(words);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>((words.numel() + kChunk - 1) / kChunk));
  for_each_parallel(static_cast<std::int64_t>(sums.size()), kChunk, [&](std::int64_t chunk) {
    const std::int64_t begin = chunk * kChunk;
    sums[static_cast<std::size_t>(chunk)] =
        sum_words(data + begin, std::min(kChunk, words.numel() - begin));
  });
  return static_cast<std::int64_t>(std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}));
}

// The score stage alone, queries prepared: for evaluation and benchmarks. Allocates.
void score_pages_op(const Tensor& query, const Tensor& lengths, const Tensor& records,
                    const Tensor& record_table, std::int64_t num_kv_heads, std::int64_t format,
                    double scale, const Tensor& scores) {
  const Checks checks("score_pages");
  checks.tensor("query", query, {"num_seqs", "q_heads", "head_dim"}, kFloating, Strides::kRows);
  const int num_seqs = checks.to_int("query", query.size(0));
  const AttentionParams attention{checks.to_int("query", query.size(1)),
                                  checks.to_int("num_kv_heads", num_kv_heads),
                                  checks.to_int("query", query.size(2)), static_cast<float>(scale)};
  checks.ok(validate(attention));
  const SummaryParams summary{format_of(checks, format), nullptr};
  const RecordCache cache = checked_records(
      checks, records, attention.num_kv_heads,
      record_layout(summary.format, attention.head_dim).record_bytes, Strides::kRows);
  SequenceBatch seqs;
  seqs.num_seqs = num_seqs;
  seqs.lengths = checked_lengths(checks, lengths, num_seqs);
  seqs.record_blocks = checked_table(checks, "record_table", record_table, num_seqs);
  checks.ok(validate(seqs, cache));

  std::vector<std::int64_t> begin(static_cast<std::size_t>(num_seqs) + 1);
  const PageIndex pages = build_page_index(seqs, summary.format.page_tokens, begin.data());
  checks.tensor("scores", scores, {begin.back() * attention.num_query_heads}, kFloat32,
                Strides::kContiguous);
  const QueryTensor queries{query.const_data_ptr(), core_type(query), attention.num_query_heads,
                            stride_or(query, 0, query.size(1) * query.size(2)),
                            stride_or(query, 1, query.size(2))};
  std::vector<std::byte> prepared(prepared_query_bytes(attention, num_seqs));
  checks.ok(
      prepare_queries(attention, summary, queries, num_seqs, prepared.data(), torch_executor()));
  checks.ok(score_pages(attention, summary, prepared.data(), cache, seqs, pages,
                        mutable_data<float>(scores), nullptr, torch_executor()));
}

// All tensor ops but summarise_blocks.
void register_tensor_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("rotate", TORCH_BOX(&rotate_op));
  library.impl("write_cache", TORCH_BOX(&write_cache_op));
  library.impl("decode_workspace_bytes", TORCH_BOX(&decode_workspace_bytes_op));
  library.impl("decode", TORCH_BOX(&decode_op));
  library.impl("score_pages", TORCH_BOX(&score_pages_op));
  library.impl("read_words", TORCH_BOX(&read_words_op));
}

}  // namespace

}  // namespace locks::binding

STABLE_TORCH_LIBRARY(locks, library) {
  library.def("parse_format(str name) -> int");
  library.def("format_name(int format) -> str");
  library.def("record_bytes(int format, int head_dim) -> int");
  library.def("cpu_level() -> str");
  library.def("set_cpu_level(str level) -> ()");
  library.def("rotate(Tensor(a!) rows) -> ()");
  library.def("write_cache(Tensor key, Tensor value, Tensor slot_mapping, Tensor(a!) cache) -> ()");
  library.def(
      "summarise_blocks(Tensor keys, Tensor block_table, Tensor begin_tokens, Tensor lengths, "
      "int format, Tensor? reference_keys, Tensor record_table, Tensor(a!) records, "
      "Tensor(b!)? counters) -> ()");
  library.def(
      "decode_workspace_bytes(Tensor lengths, int num_query_heads, int num_kv_heads, "
      "int head_dim, int format) -> int");
  library.def(
      "decode(Tensor query, Tensor keys, Tensor values, Tensor block_table, Tensor lengths, "
      "Tensor records, Tensor record_table, int format, Tensor? reference_keys, float scale, "
      "float budget, Tensor(a!) workspace, Tensor(b!) output, Tensor(c!) lse, "
      "Tensor(d!) counters, Tensor(e!)? selected) -> ()");
  library.def(
      "score_pages(Tensor query, Tensor lengths, Tensor records, Tensor record_table, "
      "int num_kv_heads, int format, float scale, Tensor(a!) scores) -> ()");
  library.def("read_words(Tensor words) -> int");
  library.def(
      "verify_blocks(Tensor keys, Tensor block_table, Tensor lengths, Tensor? rows, int format, "
      "Tensor? reference_keys, Tensor record_table, Tensor(a!) records, Tensor(b!)? counters) -> "
      "()");
  library.def(
      "plan_decode(Tensor lengths, Tensor? row_flags, float budget, int page_tokens, "
      "int dense_tokens, int max_tiles, Tensor(a!) plan) -> ()");
  library.def(
      "decode_step_workspace_bytes(int num_rows, int num_query_heads, int num_kv_heads, "
      "int head_dim, int format, int max_tiles) -> int");
  library.def(
      "decode_step(Tensor query, Tensor(g!) keys, Tensor(h!) values, Tensor block_table, "
      "Tensor plan, Tensor(f!) records, Tensor record_table, int format, Tensor? reference_keys, "
      "float scale, int max_tiles, Tensor(a!) workspace, Tensor(b!) output, Tensor(c!)? lse, "
      "Tensor(d!) counters, Tensor(e!)? selected, Tensor? new_keys=None, Tensor? new_values=None, "
      "Tensor? slots=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(locks, CompositeExplicitAutograd, library) {
  using namespace locks::binding;
  library.impl("parse_format", TORCH_BOX(&parse_format_op));
  library.impl("format_name", TORCH_BOX(&format_name_op));
  library.impl("record_bytes", TORCH_BOX(&record_bytes_op));
  library.impl("cpu_level", TORCH_BOX(&cpu_level_op));
  library.impl("set_cpu_level", TORCH_BOX(&set_cpu_level_op));
}

STABLE_TORCH_LIBRARY_IMPL(locks, CPU, library) {
  locks::binding::register_tensor_ops(library);
  library.impl("summarise_blocks", TORCH_BOX(&locks::binding::summarise_blocks_op));
}

// A call with any CUDA tensor comes here. An operator without a CUDA kernel says so: its CPU
// function's checks name the tensor. Those with one are in cuda_ops.cpp.
STABLE_TORCH_LIBRARY_IMPL(locks, CUDA, library) {
  locks::binding::register_tensor_ops(library);
#ifndef LOCKS_HAVE_CUDA
  library.impl("summarise_blocks", TORCH_BOX(&locks::binding::summarise_blocks_op));
#endif
}
