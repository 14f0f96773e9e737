// Times the launches of a decode step on this GPU, layer by layer as a model runs them: a CUDA
// graph of all layers, each with caches of its own, so that nothing but the workspace is warm.
// Prints a table, and writes the rows as JSON.
#include <cuda_runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode/step_cuda.h"
#include "graph_timing.cuh"
#include "locks/cuda.h"

namespace locks::bench {
namespace {

__device__ std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// About normal: the sum of four uniform numbers, scaled.
__global__ void fill_normal_kernel(__nv_bfloat16* to, std::size_t count, std::uint64_t seed,
                                   float deviation) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    const std::uint64_t bits = mix(i * 0x9E3779B97F4A7C15u + seed);
    float sum = -2.0f;
    for (int part = 0; part < 4; ++part) {
      sum += static_cast<float>((bits >> (16 * part)) & 0xFFFF) / 65536.0f;
    }
    to[i] = __float2bfloat16(sum * 1.7320508f * deviation);
  }
}

struct Shape {
  int kv_heads = 4;
  int group = 7;
  int head_dim = 128;
  int layers = 28;
};

struct Case {
  SummaryFormat format;
  std::int32_t context = 0;
  int batch = 0;
  int padding = 0;  // empty rows behind those, as an engine pads a batch to a captured size

  int rows() const { return batch + padding; }
  std::string shape() const {
    const std::string text = std::to_string(context) + "x" + std::to_string(batch);
    return padding == 0 ? text : text + "+" + std::to_string(padding);
  }
};

// One batch's caches, all layers: keys and values of a token side by side, as vLLM keeps them.
class Batch {
 public:
  Batch(const Shape& shape, const Case& c, double budget_tokens)
      : shape_(shape),
        case_(c),
        blocks_per_row_(c.context / kBlockTokens + 1),
        num_blocks_(std::int64_t{blocks_per_row_} * c.batch + 1),
        layout_(record_layout(c.format, shape.head_dim)),
        plan_(DecodePlan::create({shape.kv_heads * shape.group, shape.kv_heads, shape.head_dim,
                                  1.0f / std::sqrt(static_cast<float>(shape.head_dim))},
                                 {c.format, nullptr})
                  .value()),
        max_tiles_(static_cast<std::int32_t>(c.batch * (c.context / 256 + 1))),
        table_(static_cast<std::size_t>(blocks_per_row_) * static_cast<std::size_t>(c.rows())),
        lengths_(static_cast<std::size_t>(c.rows())),
        begin_(static_cast<std::size_t>(c.rows())),
        rows_(static_cast<std::size_t>(c.rows()) + 1),
        slots_(static_cast<std::size_t>(c.rows())),
        query_(static_cast<std::size_t>(c.rows() * shape.kv_heads * shape.group * shape.head_dim)),
        output_(query_.size()),
        added_(static_cast<std::size_t>(2 * c.rows() * shape.kv_heads * shape.head_dim)),
        counters_(kNumCudaCounters),
        workspace_(decode_workspace_bytes_cuda(plan_, c.rows(), max_tiles_)) {
    const auto block_elements = static_cast<std::size_t>(shape.kv_heads * 16 * 2 * shape.head_dim);
    for (int layer = 0; layer < shape.layers; ++layer) {
      caches_.push_back(std::make_unique<DeviceBuffer<__nv_bfloat16>>(
          static_cast<std::size_t>(num_blocks_) * block_elements));
      records_.push_back(std::make_unique<DeviceBuffer<std::uint8_t>>(
          static_cast<std::size_t>(num_blocks_ * shape.kv_heads * layout_.record_bytes)));
      fill(*caches_.back(), static_cast<std::uint64_t>(layer) + 11, 1.0f);
    }
    fill(query_, 5, 2.2f);  // page shares then spread by about 2 nats
    fill(added_, 7, 1.0f);
    shuffle_table();
    check(cudaMemset(begin_.get(), 0, begin_.size() * sizeof(std::int32_t)), "memset");
    check(cudaMemset(counters_.get(), 0, counters_.size() * sizeof(std::int64_t)), "memset");
    budget_ = budget_tokens == 0 ? Budget::all()
                                 : Budget::tokens(static_cast<std::int64_t>(budget_tokens));
    set_lengths(c.context);
    for (int layer = 0; layer < shape.layers; ++layer) summarise(layer, nullptr);
    check(cudaDeviceSynchronize(), "summarise");
  }

  void set_lengths(std::int32_t length, std::int32_t dense_tokens = 0) {
    std::vector<std::int32_t> lengths(lengths_.size(), 0);
    std::fill_n(lengths.begin(), case_.batch, length);
    lengths_.upload(lengths);
    std::vector<std::int64_t> slots(lengths.size(), -1);
    for (int row = 0; row < case_.batch; ++row) {
      const int block = row * blocks_per_row_ + (length - 1) / kBlockTokens;
      slots[static_cast<std::size_t>(row)] =
          std::int64_t{ids_[static_cast<std::size_t>(block)]} * kBlockTokens +
          (length - 1) % kBlockTokens;
    }
    slots_.upload(slots);
    check(plan_rows_cuda(lengths_.get(), nullptr, case_.rows(), budget_, case_.format.page_tokens,
                         {dense_tokens, max_tiles_}, rows_.get(), nullptr));
    check(cudaDeviceSynchronize(), "plan");
  }

  void summarise(int layer, cudaStream_t stream) {
    check(summarise_blocks_cuda(plan_.summary(), keys(layer, 0), seqs(), begin_.get(),
                                records(layer), nullptr, stream));
  }
  detail::StepArguments step(int layer) {
    detail::StepArguments step{};
    step.attention = plan_.attention();
    step.layout = layout_;
    step.format_code = encode_format(case_.format);
    step.query = query();
    step.keys = keys(layer, 0);
    step.values = keys(layer, shape_.head_dim);
    step.records = records(layer);
    step.seqs = seqs();
    step.plan = rows_.get();
    step.output = output();
    step.counters = reinterpret_cast<unsigned long long*>(counters_.get());
    step.workspace = detail::cut_step_workspace(workspace_.get(), plan_, case_.rows(), max_tiles_);
    step.added = added();
    return step;
  }
  void decode(int layer, cudaStream_t stream) {
    check(decode_cuda(plan_, query(), keys(layer, 0), keys(layer, shape_.head_dim), added(),
                      records(layer), seqs(), rows_.get(), max_tiles_, output(), {},
                      counters_.get(), workspace_.get(), workspace_.size(), stream));
  }

  std::int64_t record_bytes_read() const {
    return std::int64_t{case_.batch} * (case_.context / kBlockTokens) * shape_.kv_heads *
           layout_.record_bytes;
  }
  std::int64_t key_bytes() const {
    return std::int64_t{case_.batch} * case_.context * shape_.kv_heads * shape_.head_dim * 2;
  }
  std::vector<std::int64_t> counters() const { return counters_.download(); }

 private:
  void fill(const DeviceBuffer<__nv_bfloat16>& buffer, std::uint64_t seed, float deviation) {
    fill_normal_kernel<<<132 * 16, 256>>>(buffer.get(), buffer.size(), seed, deviation);
    check(cudaGetLastError(), "fill");
  }
  // Blocks of a cache that has served many requests lie in no order. Block 0 is padding's alone.
  void shuffle_table() {
    ids_.resize(static_cast<std::size_t>(num_blocks_) - 1);
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int32_t>(i) + 1;
    std::uint64_t state = 88172645463325252u;
    for (std::size_t i = ids_.size() - 1; i > 0; --i) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      std::swap(ids_[i], ids_[state % (i + 1)]);
    }
    ids_.resize(table_.size(), 0);
    table_.upload(ids_);
  }
  PagedTensor keys(int layer, int channel) {
    const int d = shape_.head_dim;
    return {caches_[static_cast<std::size_t>(layer)]->get() + channel,
            ScalarType::kBFloat16,
            num_blocks_,
            kBlockTokens,
            shape_.kv_heads,
            d,
            std::int64_t{shape_.kv_heads} * kBlockTokens * 2 * d,
            std::int64_t{kBlockTokens} * 2 * d,
            std::int64_t{2} * d};
  }
  // The step's new tokens, as the model's projections give them.
  NewTokens added() {
    const std::int64_t row = std::int64_t{shape_.kv_heads} * shape_.head_dim;
    const __nv_bfloat16* keys = added_.get();
    return {keys, keys + case_.rows() * row, row,         shape_.head_dim,
            row,  shape_.head_dim,           slots_.get()};
  }
  RecordCache records(int layer) {
    return {records_[static_cast<std::size_t>(layer)]->get(),
            num_blocks_,
            kBlockTokens,
            shape_.kv_heads,
            layout_.record_bytes,
            std::int64_t{shape_.kv_heads} * layout_.record_bytes,
            layout_.record_bytes};
  }
  SequenceBatch seqs() {
    const BlockTable table{table_.get(), blocks_per_row_, blocks_per_row_};
    return {case_.rows(), lengths_.get(), table, table};
  }
  QueryTensor query() {
    const int heads = shape_.kv_heads * shape_.group;
    return {query_.get(), ScalarType::kBFloat16, heads, std::int64_t{heads} * shape_.head_dim,
            shape_.head_dim};
  }
  AttentionOutput output() {
    const int heads = shape_.kv_heads * shape_.group;
    return {output_.get(), ScalarType::kBFloat16, std::int64_t{heads} * shape_.head_dim,
            shape_.head_dim, nullptr};
  }

  Shape shape_;
  Case case_;
  std::int32_t blocks_per_row_;
  std::int64_t num_blocks_;
  RecordLayout layout_;
  DecodePlan plan_;
  std::int32_t max_tiles_;
  Budget budget_;
  std::vector<std::unique_ptr<DeviceBuffer<__nv_bfloat16>>> caches_;
  std::vector<std::unique_ptr<DeviceBuffer<std::uint8_t>>> records_;
  std::vector<std::int32_t> ids_;  // of table_
  DeviceBuffer<std::int32_t> table_, lengths_, begin_;
  DeviceBuffer<RowPlan> rows_;
  DeviceBuffer<std::int64_t> slots_;
  DeviceBuffer<__nv_bfloat16> query_, output_, added_;
  DeviceBuffer<std::int64_t> counters_;
  DeviceBuffer<std::uint8_t> workspace_;
};

std::string today() {
  char text[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

class Report {
 public:
  explicit Report(double ceiling) : ceiling_(ceiling) {
    std::printf("read ceiling %.2f TB/s\n%-12s %-8s %14s %10s %17s %10s %6s\n", ceiling * 1e-12,
                "stage", "format", "context x rows", "us", "p10..p90", "MB", "peak");
  }
  void add(const char* stage, const Case& c, const Timing& t, std::int64_t bytes) {
    const double percent = 100 * static_cast<double>(bytes) / (t.median_us * 1e-6) / ceiling_;
    const std::string format = format_name(c.format);
    std::printf("%-12s %-8s %14s %10.2f %8.2f %8.2f %10.2f %5.1f%%\n", stage, format.c_str(),
                c.shape().c_str(), t.median_us, t.p10_us, t.p90_us,
                static_cast<double>(bytes) * 1e-6, percent);
    std::fflush(stdout);
    rows_.push_back({{"name", std::string(stage) + ":" + c.shape()},
                     {"format", format},
                     {"context", c.context},
                     {"batch", c.batch},
                     {"padding", c.padding},
                     {"median_us", t.median_us},
                     {"p10_us", t.p10_us},
                     {"p90_us", t.p90_us},
                     {"bytes", bytes},
                     {"percent_of_peak", percent},
                     {"dense_us", nullptr},
                     {"speedup", nullptr}});
  }
  void write(const std::string& path, const Shape& shape, std::int64_t budget, int replays,
             const std::string& commit) const {
    cudaDeviceProp device{};
    int driver = 0;
    check(cudaGetDeviceProperties(&device, 0), "device");
    check(cudaDriverGetVersion(&driver), "driver");
    const nlohmann::json file = {{"machine", device.name},
                                 {"cuda_driver", driver},
                                 {"read_ceiling_tb_per_s", ceiling_ * 1e-12},
                                 {"shape",
                                  {{"kv_heads", shape.kv_heads},
                                   {"query_heads", shape.kv_heads * shape.group},
                                   {"head_dim", shape.head_dim},
                                   {"layers", shape.layers}}},
                                 {"budget", budget},
                                 {"replays", replays},
                                 {"date", today()},
                                 {"commit", commit},
                                 {"rows", rows_}};
    std::ofstream(path) << file.dump(1) << "\n";
  }

 private:
  double ceiling_;
  nlohmann::json rows_ = nlohmann::json::array();
};

// Which stages are timed: those named, or all.
using Stages = std::vector<std::string>;

void run_case(const Shape& shape, const Case& c, std::int64_t budget, int replays,
              const Stages& stages, Report& report) {
  Batch batch(shape, c, static_cast<double>(budget));
  using Layer = std::function<void(int, cudaStream_t)>;
  const auto is_wanted = [&](const char* name) {
    return stages.empty() || std::find(stages.begin(), stages.end(), name) != stages.end();
  };
  const auto add = [&](const char* name, std::int64_t bytes, const Layer& layer) {
    if (is_wanted(name)) report.add(name, c, time_graph(shape.layers, replays, layer), bytes);
  };
  const auto add_behind_weights = [&](const char* name, std::int64_t bytes, const Layer& layer) {
    if (!is_wanted(name)) return;
    report.add(name, c, time_behind_weights(shape.layers, replays, layer), bytes);
  };
  using Launch = cudaError_t (*)(const detail::StepArguments&, cudaStream_t);
  const auto launches = [&](std::vector<Launch> all) {
    return [&batch, all](int layer, cudaStream_t stream) {
      for (const Launch launch : all) check(launch(batch.step(layer), stream), "launch");
    };
  };
  const auto decode = [&](int layer, cudaStream_t stream) { batch.decode(layer, stream); };
  const std::int64_t attended =
      std::min<std::int64_t>(budget, c.context) * c.batch * shape.kv_heads * shape.head_dim * 2 * 2;
  const std::int64_t records = batch.record_bytes_read();
  const auto add_whole = [&] {
    batch.set_lengths(c.context / kBlockTokens * kBlockTokens - 3, 1 << 30);
    add("whole", 2 * batch.key_bytes(), decode);
    add_behind_weights("weights+whole", 2 * batch.key_bytes(), decode);
  };
  if (c.context <= budget) return add_whole();
  add("summarise", batch.key_bytes() + records,
      [&](int layer, cudaStream_t stream) { batch.summarise(layer, stream); });
  // A step that completes a block in every row, then one that does not.
  batch.set_lengths(c.context / kBlockTokens * kBlockTokens);
  add("chain+block", records + attended, decode);
  batch.set_lengths(c.context / kBlockTokens * kBlockTokens - 3);
  const auto before = batch.counters();
  batch.decode(0, nullptr);
  check(cudaDeviceSynchronize(), "decode");
  if (batch.counters()[0] == before[0]) throw std::runtime_error("no row was read sparsely");
  add("chain", records + attended, decode);
  add_behind_weights("weights+chain", records + attended, decode);
  add("prepare", 0, launches({detail::launch_prepare}));
  add("front", records, launches({detail::launch_prepare, detail::launch_score}));
  add("score", records, launches({detail::launch_score}));
  add("select", attended, launches({detail::launch_select_attend}));
  // What published timings of a step leave out is what makes the queries' codes.
  add("score+select", records + attended,
      launches({detail::launch_score, detail::launch_select_attend}));
  add_whole();
}

// CONTEXTxBATCH or CONTEXTxBATCH+PADDING.
Case parse_case(const std::string& text, const std::string& format) {
  const std::size_t x = text.find('x');
  if (x == std::string::npos)
    throw CLI::ValidationError("--case", text + ": expected CONTEXTxBATCH[+PADDING]");
  const Result<SummaryFormat> parsed = parse_format(format);
  if (!parsed.ok()) throw CLI::ValidationError("--format", parsed.status().message());
  const std::size_t plus = text.find('+', x);
  return {parsed.value(), std::stoi(text.substr(0, x)), std::stoi(text.substr(x + 1)),
          plus == std::string::npos ? 0 : std::stoi(text.substr(plus + 1))};
}

}  // namespace
}  // namespace locks::bench

int main(int argc, char** argv) {
  using namespace locks::bench;
  CLI::App app{"Times the launches of a LOCKS decode step on this GPU"};
  Shape shape;
  std::vector<std::string> cases = {"1000000x1", "131072x1", "131072x8"}, formats = {"fine"};
  std::int64_t budget = 2048;
  int replays = 11;
  std::string json, commit;
  app.add_option("--case", cases, "CONTEXTxBATCH, any number; +N: with N empty rows behind those")
      ->capture_default_str();
  Stages stages;
  app.add_option("--stage", stages, "time these stages only");
  app.add_option("--format", formats, "summary formats")->capture_default_str();
  app.add_option("--budget", budget, "tokens a step may read")->capture_default_str();
  app.add_option("--kv-heads", shape.kv_heads)->capture_default_str();
  app.add_option("--group", shape.group, "query heads a KV head")->capture_default_str();
  app.add_option("--head-dim", shape.head_dim)->capture_default_str();
  app.add_option("--layers", shape.layers)->capture_default_str();
  app.add_option("--replays", replays)->capture_default_str()->check(CLI::Range(3, 1000));
  app.add_option("--json", json, "write the rows to this file");
  app.add_option("--commit", commit, "of the sources, for the file");
  CLI11_PARSE(app, argc, argv);
  try {
    Report report(read_ceiling());
    for (const std::string& format : formats) {
      for (const std::string& text : cases) {
        run_case(shape, parse_case(text, format), budget, replays, stages, report);
      }
    }
    if (!json.empty()) report.write(json, shape, budget, replays, commit);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_bench: %s\n", error.what());
    return 1;
  }
}
