// The bytes of a record, whoever wrote them: reading one back agrees with the description of the
// format, and scoring one gives the same bits at every instruction-set level and NaN where the
// header is not the layout's.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "input.h"
#include "locks/locks.h"
#include "summary/summary_ref.h"

namespace locks::fuzz {

namespace {

// 16-byte aligned and exactly as long as the layout says: the sanitizer sees the first byte beyond
// it.
struct Record {
  std::unique_ptr<std::uint8_t[]> bytes;
  RecordLayout layout;
};

Record read_record(FuzzedDataProvider& input) {
  const Result<SummaryFormat> format = decode_format(input.ConsumeIntegral<std::uint8_t>());
  if (!format.ok()) return {};
  const RecordLayout layout = record_layout(format.value(), input.PickValueInArray(kHeadDims));
  const bool with_header = input.ConsumeBool();
  const auto size = static_cast<std::size_t>(layout.record_bytes);
  Record record{std::make_unique<std::uint8_t[]>(size), layout};
  const std::vector<std::uint8_t> given = input.ConsumeBytes<std::uint8_t>(size);
  std::copy(given.begin(), given.end(), record.bytes.get());
  if (with_header) {
    std::uint8_t* header = record.bytes.get() + layout.header_offset;
    std::memcpy(header, &kRecordMagic, sizeof kRecordMagic);
    header[2] = kRecordVersion;
    header[3] = encode_format(format.value());
  }
  return record;
}

bool same(float value, double expected) {
  return (std::isnan(value) && std::isnan(expected)) || value == static_cast<float>(expected);
}

void check_unpack(const Record& record) {
  const SummaryFormat& format = record.layout.format;
  const int pages = format.pages_per_block(), d = record.layout.head_dim;
  const auto rows = static_cast<std::size_t>(pages * format.rank);
  std::vector<float> centroid(static_cast<std::size_t>(pages * d));
  std::vector<float> basis(rows * static_cast<std::size_t>(d));
  std::vector<float> coefficients(rows * static_cast<std::size_t>(format.page_tokens));
  const Status status = unpack_record(record.layout, record.bytes.get(), centroid.data(),
                                      basis.data(), coefficients.data());
  FUZZ_CHECK(status.ok() == header_matches(record.layout, record.bytes.get()));
  FUZZ_CHECK(status.ok() == status.message().empty());
  if (!status.ok()) return;

  const ref::Record expected = ref::parse_record(format, d, record.bytes.get());
  const float *mu = centroid.data(), *v = basis.data(), *c = coefficients.data();
  for (const ref::QuantisedPage& codes : expected.pages) {
    const ref::PageSummary page = ref::dequantise(format, d, codes);
    for (double value : page.centroid) FUZZ_CHECK(same(*mu++, value));
    for (double value : page.basis) FUZZ_CHECK(same(*v++, value));
    for (double value : page.coefficients) FUZZ_CHECK(same(*c++, value));
  }
}

struct Scores {
  std::vector<float> values;
  std::int64_t invalid = 0;
};

// The record as the one complete block of a sequence of 16 tokens.
Scores score(const Record& record, const std::vector<float>& query,
             const std::vector<float>& reference, int heads) {
  const RecordLayout& layout = record.layout;
  const AttentionParams attention{heads, 1, layout.head_dim, 0.125F};
  const SummaryParams summary{layout.format, reference.empty() ? nullptr : reference.data()};
  const QueryTensor queries{query.data(), ScalarType::kFloat32, heads, heads * layout.head_dim,
                            layout.head_dim};
  const RecordCache records{
      record.bytes.get(), 1, kBlockTokens, 1, layout.record_bytes, layout.record_bytes,
      layout.record_bytes};
  const std::int32_t length = kBlockTokens, id = 0;
  const BlockTable table{&id, 1, 1};
  const SequenceBatch seqs{1, &length, table, table};
  std::int64_t begin[2];
  const PageIndex pages = build_page_index(seqs, layout.format.page_tokens, begin);
  std::vector<std::byte> prepared(prepared_query_bytes(attention, 1));
  FUZZ_CHECK(
      prepare_queries(attention, summary, queries, 1, prepared.data(), serial_executor()).ok());
  Scores scores{std::vector<float>(static_cast<std::size_t>(begin[1] * heads)), 0};
  FUZZ_CHECK(score_pages(attention, summary, prepared.data(), records, seqs, pages,
                         scores.values.data(), &scores.invalid, serial_executor())
                 .ok());
  return scores;
}

void check_score(FuzzedDataProvider& input, const Record& record) {
  const auto d = static_cast<std::size_t>(record.layout.head_dim);
  const int heads = input.ConsumeIntegralInRange(1, 9);
  const bool with_reference = input.ConsumeBool();
  const std::vector<std::uint8_t> payload = input.ConsumeRemainingBytes<std::uint8_t>();
  const std::vector<float> query = numbers(payload, static_cast<std::size_t>(heads) * d, 0);
  const std::vector<float> reference =
      with_reference ? numbers(payload, d, 1) : std::vector<float>();
  const bool valid = header_matches(record.layout, record.bytes.get());
  Scores first;
  for (CpuLevel level : {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (!set_cpu_level(level).ok()) continue;
    Scores scores = score(record, query, reference, heads);
    FUZZ_CHECK(scores.invalid == (valid ? 0 : 1));
    for (float value : scores.values) FUZZ_CHECK(valid || std::isnan(value));
    if (first.values.empty())
      first = std::move(scores);
    else
      for (std::size_t i = 0; i < first.values.size(); ++i)
        FUZZ_CHECK(same(scores.values[i], first.values[i]));
  }
}

}  // namespace

}  // namespace locks::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  const locks::fuzz::Record record = locks::fuzz::read_record(input);
  if (record.bytes == nullptr) return 0;
  locks::fuzz::check_unpack(record);
  locks::fuzz::check_score(input, record);
  return 0;
}
