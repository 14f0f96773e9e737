// Runs each stage of a step once, on one small case of the tests' fixtures, at one instruction-set
// level: what tools/count_instructions.py counts under valgrind. Times nothing.
#include <cstdio>
#include <cstring>
#include <vector>

#include "support/stage_calls.h"

namespace locks::bench {
namespace {

using namespace testing;

// Two sequences, one with an incomplete block; heads as most models have them.
EdgeCase hot_case() {
  EdgeCase edge;
  edge.name = "hot_loops";
  edge.lengths = {2048, 1003};
  edge.head_dim = 128;
  edge.num_kv_heads = 2;
  edge.group_size = 4;
  edge.type = ScalarType::kBFloat16;
  return edge;
}

bool succeeded(const Status& status) {
  if (!status.ok()) std::fprintf(stderr, "hot_loops: %s\n", status.message().c_str());
  return status.ok();
}

bool run_stages() {
  PagedFixture fixture(hot_case());
  const Executor executor = serial_executor();
  const std::vector<std::int32_t> begin(static_cast<std::size_t>(fixture.num_seqs()), 0);
  if (!succeeded(summarise_blocks(fixture.summary(), fixture.keys(), fixture.seqs(), begin.data(),
                                  fixture.records(), nullptr, executor))) {
    return false;
  }
  const Scores scores = call_score(fixture, true, executor);
  Sets sets =
      call_select(fixture, scores.values, Budget::tokens(256), GroupRule::kMeanOfShares, executor);
  const PageIndex pages = fixture.pages();
  const Workspace workspace(
      attend_workspace_bytes(fixture.attention(), fixture.seqs(), pages, executor.num_workers));
  Output output(fixture);
  return succeeded(attend_pages(fixture.attention(), fixture.query(), fixture.keys(),
                                fixture.values(), fixture.seqs(), pages, sets.view(), output.view(),
                                workspace.data(), executor));
}

bool set_level(const char* name) {
  for (const CpuLevel level : {CpuLevel::kBaseline, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (std::strcmp(name, cpu_level_name(level)) == 0) return succeeded(set_cpu_level(level));
  }
  std::fprintf(stderr, "hot_loops: level = %s, expected baseline, avx2 or avx512\n", name);
  return false;
}

}  // namespace
}  // namespace locks::bench

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: hot_loops LEVEL\n");
    return 2;
  }
  return locks::bench::set_level(argv[1]) && locks::bench::run_stages() ? 0 : 1;
}
