// A step of a layer with lengths, block tables, begin tokens, records and a budget of any content:
// it is refused with a message, or stays within the caches, attends to finite numbers and tells
// sets and counters that add up. The caches are real and exactly as large as they say, so the
// sanitizer sees every access beyond them.
#include <algorithm>
#include <cmath>
#include <memory>

#include "input.h"
#include "locks/locks.h"

namespace locks::fuzz {

namespace {

constexpr std::size_t kLargestWorkspace = 1 << 20;

// What the input decides.
struct Scene {
  SummaryFormat format;
  int head_dim = 0, kv_heads = 0, group = 0;
  int key_block_tokens = 0, record_block_tokens = 0;
  std::int64_t key_blocks = 0, record_blocks = 0;
  int num_seqs = 0;
  std::int64_t max_blocks = 0;
  std::vector<std::int32_t> lengths, begin_tokens, key_table, record_table;
  Budget budget;
  std::vector<std::uint8_t> payload;
};

std::vector<std::int32_t> any_ints(FuzzedDataProvider& input, std::size_t count, int high) {
  std::vector<std::int32_t> values(count);
  for (std::int32_t& value : values) value = any_int(input, 0, high);
  return values;
}

Scene read_scene(FuzzedDataProvider& input) {
  Scene scene;
  const Result<SummaryFormat> format = decode_format(input.ConsumeIntegralInRange(0, 143));
  scene.format = format.value();
  scene.head_dim = input.ConsumeBool() ? 64 : 80;
  scene.kv_heads = input.ConsumeIntegralInRange(1, 2);
  scene.group = input.ConsumeIntegralInRange(1, 3);
  scene.key_block_tokens = kBlockTokens * input.ConsumeIntegralInRange(1, 3);
  scene.record_block_tokens = kBlockTokens * input.ConsumeIntegralInRange(1, 3);
  scene.key_blocks = input.ConsumeIntegralInRange(0, 9);
  scene.record_blocks = input.ConsumeIntegralInRange(0, 9);
  scene.num_seqs = input.ConsumeIntegralInRange(0, 4);
  scene.max_blocks = input.ConsumeIntegralInRange(0, 12);
  const auto rows = static_cast<std::size_t>(scene.num_seqs);
  const std::size_t entries = rows * static_cast<std::size_t>(scene.max_blocks);
  scene.lengths = any_ints(input, rows, 200);
  scene.begin_tokens = any_ints(input, rows, 200);
  scene.key_table = any_ints(input, entries, 9);
  scene.record_table = any_ints(input, entries, 9);
  scene.budget = {static_cast<Budget::Kind>(input.ConsumeIntegralInRange(0, 2)),
                  input.ConsumeBool() ? input.ConsumeFloatingPointInRange<double>(0, 1)
                                      : any_int(input, 0, 200)};
  scene.payload = input.ConsumeRemainingBytes<std::uint8_t>();
  return scene;
}

// The caches of a scene, filled from its payload, and the arguments that point into them.
class Step {
 public:
  explicit Step(const Scene& scene)
      : scene_(scene),
        layout_(record_layout(scene.format, scene.head_dim)),
        attention_{scene.kv_heads * scene.group, scene.kv_heads, scene.head_dim, 0.125F},
        keys_(numbers(scene.payload, cache_size(), 0)),
        values_(numbers(scene.payload, cache_size(), 3)),
        query_(numbers(scene.payload, query_size(), 5)),
        output_(query_size(), NAN),
        lse_(rows() * static_cast<std::size_t>(attention_.num_query_heads), NAN),
        // One more, so that there is an address where there is no block.
        records_(new std::uint8_t[record_bytes() + 1]) {
    for (std::size_t i = 0; i < record_bytes(); ++i) {
      records_[i] =
          scene.payload.empty() ? std::uint8_t{0} : scene.payload[i % scene.payload.size()];
    }
  }

  Status summarise() {
    std::int64_t built = 0;
    const Status status =
        summarise_blocks({scene_.format, nullptr}, cache(keys_), seqs(), scene_.begin_tokens.data(),
                         records(), &built, serial_executor());
    FUZZ_CHECK(status.ok() == status.message().empty());
    FUZZ_CHECK(built >= 0 && (status.ok() || built == 0));
    return status;
  }

  Status decode() {
    const DecodePlan plan = DecodePlan::create(attention_, {scene_.format, nullptr}).value();
    const bool lengths_hold = std::all_of(scene_.lengths.begin(), scene_.lengths.end(),
                                          [](std::int32_t n) { return n >= 0; });
    const std::size_t asked = lengths_hold ? plan.workspace_bytes(seqs(), 1) : 0;
    const std::size_t given = std::min(asked, kLargestWorkspace);
    const auto workspace = std::make_unique<std::byte[]>(given + 1);
    const Status status =
        locks::decode(plan, query(), cache(keys_), cache(values_), records(), seqs(), scene_.budget,
                      output(), nullptr, &counters_, workspace.get(), given, serial_executor());
    FUZZ_CHECK(status.ok() == status.message().empty());
    if (status.ok()) {
      FUZZ_CHECK(given == asked);
      check_results();
    }
    return status;
  }

 private:
  std::size_t rows() const { return static_cast<std::size_t>(scene_.num_seqs); }
  std::size_t query_size() const {
    return rows() * static_cast<std::size_t>(attention_.num_query_heads * scene_.head_dim);
  }
  std::size_t cache_size() const {
    return static_cast<std::size_t>(scene_.key_blocks * scene_.kv_heads * scene_.key_block_tokens *
                                    scene_.head_dim);
  }
  std::int64_t record_head_bytes() const {
    return std::int64_t{scene_.record_block_tokens / kBlockTokens} * layout_.record_bytes;
  }
  std::size_t record_bytes() const {
    return static_cast<std::size_t>(scene_.record_blocks * scene_.kv_heads * record_head_bytes());
  }

  PagedTensor cache(const std::vector<float>& data) const {
    static const float kNothing = 0;
    const std::int64_t head = std::int64_t{scene_.key_block_tokens} * scene_.head_dim;
    return {data.empty() ? &kNothing : data.data(),
            ScalarType::kFloat32,
            scene_.key_blocks,
            scene_.key_block_tokens,
            scene_.kv_heads,
            scene_.head_dim,
            scene_.kv_heads * head,
            head,
            scene_.head_dim};
  }
  RecordCache records() {
    return {records_.get(),     scene_.record_blocks, scene_.record_block_tokens,
            scene_.kv_heads,    layout_.record_bytes, scene_.kv_heads * record_head_bytes(),
            record_head_bytes()};
  }
  SequenceBatch seqs() const {
    return {scene_.num_seqs,
            scene_.lengths.data(),
            {scene_.key_table.data(), scene_.max_blocks, scene_.max_blocks},
            {scene_.record_table.data(), scene_.max_blocks, scene_.max_blocks}};
  }
  QueryTensor query() const {
    static const float kNothing = 0;
    return {query_.empty() ? &kNothing : query_.data(), ScalarType::kFloat32,
            attention_.num_query_heads, std::int64_t{attention_.num_query_heads} * scene_.head_dim,
            scene_.head_dim};
  }
  AttentionOutput output() {
    static float nothing = 0;
    return {output_.empty() ? &nothing : output_.data(), ScalarType::kFloat32,
            std::int64_t{attention_.num_query_heads} * scene_.head_dim, scene_.head_dim,
            lse_.data()};
  }

  void check_results() const {
    for (float value : output_) FUZZ_CHECK(std::isfinite(value));
    std::int64_t whole = 0;
    for (std::size_t i = 0; i < rows(); ++i) {
      const bool padded = scene_.lengths[i] == 0;
      whole += padded ? 0 : 1;
      const float lse = lse_[i * static_cast<std::size_t>(attention_.num_query_heads)];
      FUZZ_CHECK(padded ? lse == -INFINITY : std::isfinite(lse));
    }
    FUZZ_CHECK(counters_.sparse_rows + counters_.dense_rows == whole);
    FUZZ_CHECK(counters_.invalid_records <= counters_.records_read);
    // Beside keys and values a sparse row reads its records.
    FUZZ_CHECK(counters_.bytes_read <=
               counters_.bytes_dense + counters_.records_read * layout_.record_bytes);
  }

  const Scene& scene_;
  RecordLayout layout_;
  AttentionParams attention_;
  std::vector<float> keys_, values_, query_, output_, lse_;
  std::unique_ptr<std::uint8_t[]> records_;
  DecodeCounters counters_;
};

}  // namespace

}  // namespace locks::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  const locks::fuzz::Scene scene = locks::fuzz::read_scene(input);
  locks::fuzz::Step step(scene);
  const bool built = step.summarise().ok();
  const bool decoded = step.decode().ok();
  // What a step may write, it may also read, unless the budget is none.
  FUZZ_CHECK(!built || decoded || !locks::validate(scene.budget).ok());
  return 0;
}
