// The GPU's records against the CPU's, byte for byte, over the shared table of edge cases. Needs a
// device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "locks/cuda.h"
#include "locks/locks.h"
#include "support/device_array.h"
#include "support/device_stage.h"
#include "support/device_timing.h"
#include "support/edge_cases.h"
#include "support/paged_fixture.h"

namespace locks::testing {
namespace {

// A fixture's caches and tables on the device.
struct DeviceBatch {
  explicit DeviceBatch(const PagedFixture& fixture)
      : keys(static_cast<const std::uint8_t*>(fixture.keys().data), extent_bytes(fixture.keys())),
        records(fixture.records().data, extent_bytes(fixture.records())),
        lengths(fixture.seqs().lengths, fixture.num_seqs()),
        cache_ids(fixture.seqs().cache_blocks.ids,
                  table_entries(fixture.seqs().cache_blocks, fixture.num_seqs())),
        record_ids(fixture.seqs().record_blocks.ids,
                   table_entries(fixture.seqs().record_blocks, fixture.num_seqs())),
        reference(fixture.summary().reference_keys,
                  fixture.summary().reference_keys == nullptr
                      ? 0
                      : std::int64_t{fixture.keys().num_kv_heads} * fixture.keys().head_dim) {}

  Status summarise(const PagedFixture& fixture, const std::int32_t* begin, std::int64_t* built,
                   cudaStream_t stream = nullptr) const {
    return summarise_blocks_cuda(params_of(fixture), keys_of(fixture), seqs_of(fixture), begin,
                                 records_of(fixture), built, stream);
  }
  Status verify(const PagedFixture& fixture, const std::uint8_t* rows, std::int64_t* built) const {
    return verify_blocks_cuda(params_of(fixture), keys_of(fixture), seqs_of(fixture), rows,
                              records_of(fixture), built, nullptr);
  }

  SummaryParams params_of(const PagedFixture& fixture) const {
    SummaryParams params = fixture.summary();
    if (params.reference_keys != nullptr) params.reference_keys = reference.get();
    return params;
  }
  PagedTensor keys_of(const PagedFixture& fixture) const {
    PagedTensor tensor = fixture.keys();
    tensor.data = keys.get();
    return tensor;
  }
  RecordCache records_of(const PagedFixture& fixture) const {
    RecordCache cache = fixture.records();
    cache.data = records.get();
    return cache;
  }
  SequenceBatch seqs_of(const PagedFixture& fixture) const {
    SequenceBatch seqs = fixture.seqs();
    seqs.lengths = lengths.get();
    seqs.cache_blocks.ids = cache_ids.get();
    seqs.record_blocks.ids = record_ids.get();
    return seqs;
  }

  DeviceArray<std::uint8_t> keys, records;
  DeviceArray<std::int32_t> lengths, cache_ids, record_ids;
  DeviceArray<float> reference;
};

class SummaryCuda : public ::testing::TestWithParam<EdgeCase> {};

TEST_P(SummaryCuda, Records_EqualTheCpuByteForByte) {
  PagedFixture fixture(GetParam());
  const DeviceBatch device(fixture);
  const std::vector<std::int32_t> begin(static_cast<std::size_t>(fixture.num_seqs()), 0);
  const DeviceArray<std::int32_t> device_begin(begin.data(), fixture.num_seqs());
  const std::int64_t zero = 0;
  const DeviceArray<std::int64_t> built(&zero, 1);
  const Status status = device.summarise(fixture, device_begin.get(), built.get());
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_CUDA(cudaDeviceSynchronize());

  std::int64_t expected_built = 0;
  ASSERT_TRUE(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), begin.data(),
                               fixture.records(), &expected_built, serial_executor())
                  .ok());
  EXPECT_EQ(built.download()[0], expected_built);
  const std::vector<std::uint8_t> actual = device.records.download();
  const std::uint8_t* expected = fixture.records().data;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(int{actual[i]}, int{expected[i]}) << "byte " << i << " of the record pool";
  }
}

// One capture serves any lengths and contents: a decode loop that completes a block now and then.
TEST_P(SummaryCuda, CapturedOnce_ReplaysWithNewLengths) {
  PagedFixture fixture(GetParam());
  const DeviceBatch device(fixture);
  const auto count = static_cast<std::size_t>(fixture.num_seqs());
  std::vector<std::int32_t> begin(count, 0), zeros(count, 0);
  const DeviceArray<std::int32_t> device_begin(begin.data(), fixture.num_seqs());
  const std::vector<std::int32_t> full(fixture.seqs().lengths, fixture.seqs().lengths + count);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(device.summarise(fixture, device_begin.get(), nullptr, stream).ok());
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  // Three replays that grow the sequences by thirds, then a CPU build in one call.
  std::vector<std::int32_t> length = zeros;
  for (int third = 1; third <= 3; ++third) {
    begin = length;
    for (std::size_t i = 0; i < count; ++i) length[i] = full[i] * third / 3;
    const_cast<DeviceArray<std::int32_t>&>(device_begin).upload(begin.data());
    const_cast<DeviceArray<std::int32_t>&>(device.lengths).upload(length.data());
    ASSERT_CUDA(cudaGraphLaunch(replay, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
  }
  ASSERT_TRUE(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), zeros.data(),
                               fixture.records(), nullptr, serial_executor())
                  .ok());
  const std::vector<std::uint8_t> actual = device.records.download();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(int{actual[i]}, int{fixture.records().data[i]}) << "byte " << i;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Records that came from elsewhere: missing, of other keys or of another format. Those whose header
// fits are believed.
TEST_P(SummaryCuda, Verify_RebuildsWhatDoesNotFit) {
  PagedFixture fixture(GetParam());
  const EdgeCase& edge = fixture.edge();
  const std::vector<std::int32_t> begin(static_cast<std::size_t>(fixture.num_seqs()), 0);
  const auto summarise_on_cpu = [&] {
    ASSERT_TRUE(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), begin.data(),
                                 fixture.records(), nullptr, serial_executor())
                    .ok());
  };
  summarise_on_cpu();
  const int header = record_layout(edge.format, edge.head_dim).header_offset;
  std::vector<std::uint8_t> rows;
  std::vector<std::int64_t> kept;  // bytes that stay as they were spoiled
  std::int64_t expected_built = 0;
  for (int i = 0; i < fixture.num_seqs(); ++i) {
    rows.push_back(i % 3 == 1 ? 0 : 1);
    for (int h = 0; h < edge.num_kv_heads; ++h) {
      for (int b = 0; b < edge.lengths[static_cast<std::size_t>(i)] / kBlockTokens; ++b) {
        const int offsets[] = {0, header, header + 2, header + 3, header + 4, header + 7};
        const int kind = (b + 5 * h) % 7;
        if (kind == 6) continue;
        std::uint8_t* byte = fixture.record(i, h, b) + offsets[kind];
        *byte ^= 0x5A;
        if (kind == 0 || rows.back() == 0) {
          kept.push_back(byte - fixture.records().data);
        } else {
          ++expected_built;
        }
      }
    }
  }
  const DeviceBatch device(fixture);
  const DeviceArray<std::uint8_t> device_rows(rows.data(), fixture.num_seqs());
  const std::int64_t zero = 0;
  const DeviceArray<std::int64_t> built(&zero, 1);
  const Status status = device.verify(fixture, device_rows.get(), built.get());
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(built.download()[0], expected_built);
  summarise_on_cpu();
  for (const std::int64_t byte : kept) fixture.records().data[byte] ^= 0x5A;
  const std::vector<std::uint8_t> actual = device.records.download();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(int{actual[i]}, int{fixture.records().data[i]}) << "byte " << i;
  }
}

TEST(SummaryCuda, BadShapes_AreRefusedBeforeAnyWork) {
  PagedFixture fixture(finite_edge_cases().front());
  const DeviceBatch device(fixture);
  SummaryParams params = fixture.summary();
  params.format.rank = 3;
  EXPECT_EQ(summarise_blocks_cuda(params, fixture.keys(), fixture.seqs(), nullptr,
                                  fixture.records(), nullptr, nullptr)
                .code(),
            StatusCode::kInvalidArgument);
}

// More records than all warps take in 32 rounds, over rows of which some have none: a pool of a few
// blocks stands in for many. All are built, and none is written wrongly. Rows end with their blocks:
// the header of an incomplete block would be cleared in a block that another row builds.
TEST(SummaryCuda, ManyRounds_BuildEveryRecord) {
  constexpr int kBlocks = 64, kHeads = 5, kDim = 64;
  const std::int32_t lengths[] = {300'000, 0, 32, 16, 500'000, 160'032}, begin[6] = {};
  constexpr std::int64_t kMost = 500'000 / kBlockTokens;
  const RecordLayout layout = record_layout(kFine, kDim);
  std::vector<std::uint16_t> keys(std::size_t{kBlocks} * kHeads * kBlockTokens * kDim);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<std::uint16_t>(0x3F00 + i * 40503 % 0x100 + i / 7 % 2 * 0x8000);
  }
  std::vector<std::int32_t> ids(kMost);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 7 % kBlocks);
  const std::int64_t pool = std::int64_t{kBlocks} * kHeads * layout.record_bytes;
  const DeviceArray<std::uint16_t> device_keys(keys.data(), static_cast<std::int64_t>(keys.size()));
  const DeviceArray<std::int32_t> device_ids(ids.data(), kMost), device_lengths(lengths, 6);
  const DeviceArray<std::int32_t> device_begin(begin, 6);
  const DeviceArray<std::uint8_t> records(pool, 0xA5);
  const std::int64_t zero = 0;
  const DeviceArray<std::int64_t> built(&zero, 1);
  const auto batch = [&](const std::int32_t* l, const std::int32_t* i, int rows) {
    return SequenceBatch{rows, l, {i, 0, kMost}, {i, 0, kMost}};
  };
  const auto tensor = [&](const void* data) {
    constexpr std::int64_t kHead = std::int64_t{kBlockTokens} * kDim;
    return PagedTensor{data, ScalarType::kBFloat16, kBlocks, kBlockTokens, kHeads,
                       kDim, kHeads * kHead,        kHead,   kDim};
  };
  const auto cache = [&](std::uint8_t* data) {
    const std::int64_t bytes = layout.record_bytes;
    return RecordCache{data,           kBlocks, kBlockTokens, kHeads, layout.record_bytes,
                       kHeads * bytes, bytes};
  };
  const SummaryParams params{kFine, nullptr};
  const Status status = summarise_blocks_cuda(
      params, tensor(device_keys.get()), batch(device_lengths.get(), device_ids.get(), 6),
      device_begin.get(), cache(records.get()), built.get(), nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_CUDA(cudaDeviceSynchronize());
  std::int64_t expected_built = 0;
  for (const std::int32_t length : lengths) expected_built += length / kBlockTokens * kHeads;
  EXPECT_EQ(built.download()[0], expected_built);
  std::vector<std::uint8_t> expected(static_cast<std::size_t>(pool), 0xA5);
  const std::int32_t all = kBlocks * kBlockTokens;
  ASSERT_TRUE(summarise_blocks(params, tensor(keys.data()), batch(&all, ids.data(), 1), begin,
                               cache(expected.data()), nullptr, serial_executor())
                  .ok());
  EXPECT_TRUE(records.download() == expected);
}

INSTANTIATE_TEST_SUITE_P(Edge, SummaryCuda, ::testing::ValuesIn(device_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

// A prefill batch: 131,072 tokens in a head-major cache with rows of keys and values side by side.
void time_prefill(const SummaryFormat& format, int head_dim, int kv_heads) {
  constexpr int kTokens = 131'072, kBlocks = kTokens / kBlockTokens, kLayers = 2;
  const std::int64_t block_elements = std::int64_t{kv_heads} * kBlockTokens * 2 * head_dim;
  const RecordLayout layout = record_layout(format, head_dim);
  const std::int64_t record_block = std::int64_t{kv_heads} * layout.record_bytes;
  std::vector<std::uint16_t> random(static_cast<std::size_t>(kBlocks * block_elements));
  std::uint64_t state = 1;
  for (std::uint16_t& x : random) {  // about normal, in [-4, 4]
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto bits = state >> 40;
    const float value =
        static_cast<float>((bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255)) / 96.0f - 4.0f;
    x = static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, value) >> 16);
  }
  std::vector<std::int32_t> ids(kBlocks);
  for (int i = 0; i < kBlocks; ++i) ids[static_cast<std::size_t>(i)] = i * 4099 % kBlocks;
  const DeviceArray<std::uint16_t> first(random.data(), kBlocks * block_elements);
  const DeviceArray<std::uint16_t> second(random.data(), kBlocks * block_elements);
  const DeviceArray<std::uint8_t> records(kLayers * kBlocks * record_block, 0);
  const DeviceArray<std::int32_t> table(ids.data(), kBlocks);
  const std::int32_t length = kTokens;
  const DeviceArray<std::int32_t> lengths(&length, 1), begin(1, 0);
  const auto run = [&](int layer, bool verify, cudaStream_t stream) {
    const PagedTensor keys{layer % kLayers == 0 ? first.get() : second.get(),
                           ScalarType::kBFloat16,
                           kBlocks,
                           kBlockTokens,
                           kv_heads,
                           head_dim,
                           block_elements,
                           std::int64_t{kBlockTokens} * 2 * head_dim,
                           std::int64_t{2} * head_dim};
    const RecordCache cache{records.get() + layer % kLayers * kBlocks * record_block,
                            kBlocks,
                            kBlockTokens,
                            kv_heads,
                            layout.record_bytes,
                            record_block,
                            layout.record_bytes};
    const SequenceBatch seqs{
        1, lengths.get(), {table.get(), kBlocks, kBlocks}, {table.get(), kBlocks, kBlocks}};
    const SummaryParams params{format, nullptr};
    const Status status =
        verify ? verify_blocks_cuda(params, keys, seqs, nullptr, cache, nullptr, stream)
               : summarise_blocks_cuda(params, keys, seqs, begin.get(), cache, nullptr, stream);
    EXPECT_TRUE(status.ok()) << status.message();
  };
  for (const bool verify : {false, true}) {
    const double us = time_launch(4, [&](int i, cudaStream_t stream) { run(i, verify, stream); });
    const double num_records = static_cast<double>(kBlocks) * kv_heads;
    const double bytes =
        num_records * (kBlockTokens * head_dim * 2.0 + (verify ? 8 : layout.record_bytes));
    std::printf("%s %-8s d=%d %d x %d KV heads: %9.1f us, %6.1f GB/s, %5.1f %% of 4570\n",
                verify ? "verify   " : "summarise", format_name(format).c_str(), head_dim, kTokens,
                kv_heads, us, bytes / us * 1e-3, bytes / us * 1e-3 / 45.70);
  }
}

TEST(SummaryCudaTime, DISABLED_Prefill) {
  time_prefill(kFine, 128, 4);
  time_prefill(kFine, 128, 8);
  time_prefill(kFine, 64, 8);
  time_prefill(kFine8, 128, 4);
  time_prefill(kCompact, 128, 4);
  time_prefill(kWide, 128, 4);
}

}  // namespace
}  // namespace locks::testing
