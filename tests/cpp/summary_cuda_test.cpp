// The GPU's records against the CPU's, byte for byte, over the shared table of edge cases. Needs a
// device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "locks/cuda.h"
#include "locks/locks.h"
#include "support/device_array.h"
#include "support/edge_cases.h"
#include "support/paged_fixture.h"

namespace locks::testing {
namespace {

std::int64_t extent_bytes(const PagedTensor& t) {
  return ((t.num_blocks - 1) * t.block_stride + (t.num_kv_heads - 1) * t.head_stride +
          (t.block_tokens - 1) * t.token_stride + t.head_dim) *
         scalar_bytes(t.type);
}

std::int64_t extent_bytes(const RecordCache& r) {
  return (r.num_blocks - 1) * r.block_stride + (r.num_kv_heads - 1) * r.head_stride +
         r.block_tokens / kBlockTokens * r.record_bytes;
}

// A fixture's caches and tables on the device.
struct DeviceBatch {
  explicit DeviceBatch(const PagedFixture& fixture)
      : keys(static_cast<const std::uint8_t*>(fixture.keys().data), extent_bytes(fixture.keys())),
        records(fixture.records().data, extent_bytes(fixture.records())),
        lengths(fixture.seqs().lengths, fixture.num_seqs()),
        cache_ids(fixture.seqs().cache_blocks.ids,
                  table_size(fixture.seqs().cache_blocks, fixture)),
        record_ids(fixture.seqs().record_blocks.ids,
                   table_size(fixture.seqs().record_blocks, fixture)),
        reference(fixture.summary().reference_keys,
                  fixture.summary().reference_keys == nullptr
                      ? 0
                      : std::int64_t{fixture.keys().num_kv_heads} * fixture.keys().head_dim) {}

  static std::int64_t table_size(const BlockTable& table, const PagedFixture& fixture) {
    return (fixture.num_seqs() - 1) * table.seq_stride + table.max_blocks;
  }

  Status summarise(const PagedFixture& fixture, const std::int32_t* begin, std::int64_t* built,
                   cudaStream_t stream = nullptr) const {
    SummaryParams params = fixture.summary();
    if (params.reference_keys != nullptr) params.reference_keys = reference.get();
    PagedTensor tensor = fixture.keys();
    tensor.data = keys.get();
    RecordCache cache = fixture.records();
    cache.data = records.get();
    SequenceBatch seqs = fixture.seqs();
    seqs.lengths = lengths.get();
    seqs.cache_blocks.ids = cache_ids.get();
    seqs.record_blocks.ids = record_ids.get();
    return summarise_blocks_cuda(params, tensor, seqs, begin, cache, built, stream);
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

// The big pool needs 16 GiB of sparse host memory, which a device copy cannot be.
std::vector<EdgeCase> device_cases() {
  std::vector<EdgeCase> cases;
  for (const EdgeCase& edge : edge_cases()) {
    if (!edge.top_of_big_pool) cases.push_back(edge);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Edge, SummaryCuda, ::testing::ValuesIn(device_cases()),
                         edge_name<::testing::TestParamInfo<EdgeCase>>);

}  // namespace
}  // namespace locks::testing
