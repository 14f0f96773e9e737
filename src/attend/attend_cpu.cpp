// Attention of one KV head's query group over one split: tiles of 16 tokens, online softmax.
//
// A tile's keys and values are converted to float once and serve all heads of the group. Scores are
// dot products along the channels, kLanes tokens at a time, whose lanes one transposing tree sums:
// 30 shuffles for 16 tokens and a head, where transposing the keys would take 4 * head_dim of them.
// Reads 2 * head_dim scalars a token. The limit is memory with up to about 8 heads a group, and
// multiply-adds above.
//
// Vectors are the compilers' own (GCC vector extensions) at the level's native width. Results are
// the same on every run of a level; levels differ in the order of sums and in fused multiply-adds,
// which this file asks for: unlike records and scores, outputs are not compared bit by bit across
// machines.
#include <cstddef>
#include <cstdint>

#include "attend/attend_kernels.h"
#include "core/cpu_namespace.h"
#include "core/fast_math.h"
#include "core/scalar.h"

namespace locks::detail {
inline namespace LOCKS_CPU_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kTileVecs = kTileTokens / kLanes;

using FloatVec [[gnu::vector_size(kLanes * 4)]] = float;

constexpr float kMinusInfinity = -__builtin_inff();

inline FloatVec load(const float* source) {
  FloatVec vec;
  __builtin_memcpy(&vec, source, sizeof vec);
  return vec;
}

inline void store(float* target, FloatVec vec) { __builtin_memcpy(target, &vec, sizeof vec); }

inline FloatVec splat(float value) { return FloatVec{} + value; }

template <int... kIdx>
struct LaneList {};

template <int kCount, int... kIdx>
struct MakeLanes : MakeLanes<kCount - 1, kCount - 1, kIdx...> {};
template <int... kIdx>
struct MakeLanes<0, kIdx...> {
  using type = LaneList<kIdx...>;
};
using Lanes = MakeLanes<kLanes>::type;

// Adds lanes kStride apart within a and within b; the result holds a's sums where lane & kStride is
// 0, b's elsewhere.
template <int kStride, int... kLane>
inline FloatVec fold(FloatVec a, FloatVec b, LaneList<kLane...>) {
  return __builtin_shufflevector(a, b, ((kLane & kStride) ? kLanes + kLane - kStride : kLane)...) +
         __builtin_shufflevector(a, b, ((kLane & kStride) ? kLanes + kLane : kLane + kStride)...);
}

// Lane t of the result is the sum of all lanes of rows[t].
template <int kStride = 1>
inline FloatVec sum_rows(const FloatVec* rows) {
  if constexpr (kStride == kLanes) {
    return rows[0];
  } else {
    constexpr std::size_t kHalf = kLanes / (2 * kStride);
    FloatVec halved[kHalf];
    for (std::size_t i = 0; i < kHalf; ++i) {
      halved[i] = fold<kStride>(rows[2 * i], rows[2 * i + 1], Lanes{});
    }
    return sum_rows<2 * kStride>(halved);
  }
}

template <int kStride, int... kLane>
inline FloatVec swap_lanes(FloatVec vec, LaneList<kLane...>) {
  return __builtin_shufflevector(vec, vec, (kLane ^ kStride)...);
}

inline FloatVec maximum(FloatVec a, FloatVec b) { return a > b ? a : b; }

template <int kStride = kLanes / 2>
inline float max_lane(FloatVec vec) {
  if constexpr (kStride == 0) {
    return vec[0];
  } else {
    return max_lane<kStride / 2>(maximum(vec, swap_lanes<kStride>(vec, Lanes{})));
  }
}

// Scores of kLanes tokens whose keys are rows of `head_dim` floats.
inline FloatVec score_tokens(const float* query, const float* keys, int head_dim) {
  FloatVec sums[kLanes] = {};
  for (int c = 0; c < head_dim; c += kLanes) {
    const FloatVec q = load(query + c);
    for (int t = 0; t < kLanes; ++t) sums[t] += q * load(keys + t * head_dim + c);
  }
  return sum_rows(sums);
}

// output[kHeads][kVecs * kLanes channels] += weights * values over the tile, all sums in registers.
template <std::size_t kHeads, std::size_t kVecs>
inline void add_values(const float* weights, const float* values, int head_dim, float* output) {
  const auto row = static_cast<std::size_t>(head_dim);
  FloatVec sums[kHeads][kVecs];
  for (std::size_t h = 0; h < kHeads; ++h) {
    for (std::size_t v = 0; v < kVecs; ++v) sums[h][v] = load(output + h * row + v * kLanes);
  }
  for (std::size_t t = 0; t < kTileTokens; ++t) {
    for (std::size_t v = 0; v < kVecs; ++v) {
      const FloatVec value = load(values + t * row + v * kLanes);
      for (std::size_t h = 0; h < kHeads; ++h) {
        sums[h][v] += splat(weights[h * kTileTokens + t]) * value;
      }
    }
  }
  for (std::size_t h = 0; h < kHeads; ++h) {
    for (std::size_t v = 0; v < kVecs; ++v) store(output + h * row + v * kLanes, sums[h][v]);
  }
}

template <std::size_t kHeads>
inline void add_values(const float* weights, const float* values, int head_dim, float* output) {
  constexpr int kVecs = kLanes == 16 ? 4 : 2;  // kHeads * kVecs sums fit in the registers there are
  int c = 0;
  for (; c + kVecs * kLanes <= head_dim; c += kVecs * kLanes) {
    add_values<kHeads, kVecs>(weights, values + c, head_dim, output + c);
  }
  for (; c < head_dim; c += kLanes) {  // 80 and 96 channels in vectors of 16
    add_values<kHeads, 1>(weights, values + c, head_dim, output + c);
  }
}

void add_values(const SplitTask& task) {
  const int head_dim = task.head_dim;
  const float* weights = task.scratch.weights;
  float* output = task.partial.output;
  int head = 0;
  for (; head + 4 <= task.group_size; head += 4) {
    add_values<4>(weights + head * kTileTokens, task.scratch.values, head_dim,
                  output + head * head_dim);
  }
  for (; head < task.group_size; ++head) {
    add_values<1>(weights + head * kTileTokens, task.scratch.values, head_dim,
                  output + head * head_dim);
  }
}

// The running sums of `head` move to a new maximum.
void rescale(const SplitTask& task, int head, float new_max) {
  const float factor = fast_exp2(task.partial.max[head] - new_max);
  float* sums = task.scratch.sums + head * kTileTokens;
  for (int t = 0; t < kTileTokens; ++t) sums[t] *= factor;
  float* output = task.partial.output + head * task.head_dim;
  for (int c = 0; c < task.head_dim; c += kLanes) store(output + c, load(output + c) * factor);
  task.partial.max[head] = new_max;
}

// Softmax weights of one head for a tile of `count` tokens; the rest get 0.
inline void weigh_tile(const SplitTask& task, int head, int count) {
  const float* query = task.scratch.query + head * task.head_dim;
  FloatVec scores[kTileVecs];
  for (int v = 0; v < kTileVecs; ++v) {
    scores[v] = score_tokens(query, task.scratch.keys + v * kLanes * task.head_dim, task.head_dim);
  }
  if (count < kTileTokens) {
    for (int t = count; t < kTileTokens; ++t) scores[t / kLanes][t % kLanes] = kMinusInfinity;
  }
  FloatVec best = scores[0];
  for (int v = 1; v < kTileVecs; ++v) best = maximum(best, scores[v]);
  // The maximum rises in about log(tiles) of the tiles: the sums are touched only then.
  if (const float tile_max = max_lane(best); tile_max > task.partial.max[head]) {
    rescale(task, head, tile_max);
  }
  // Nothing finite so far: any base does, but infinity minus infinity would give NaN.
  const float max = task.partial.max[head];
  const float base = max == kMinusInfinity ? 0.0f : max;
  float* weights = task.scratch.weights + head * kTileTokens;
  float* sums = task.scratch.sums + head * kTileTokens;
  for (int v = 0; v < kTileVecs; ++v) store(weights + v * kLanes, scores[v]);
  for (int t = 0; t < kTileTokens; ++t) weights[t] = fast_exp2(weights[t] - base);
  for (int t = 0; t < kTileTokens; ++t) sums[t] += weights[t];
}

// Where a tile's rows lie.
struct Tile {
  int count = 0;
  const std::byte* keys[kTileTokens];
  const std::byte* values[kTileTokens];
};

// The rows of the pages from `page` of the chosen list on, prefetched: chosen pages are scattered,
// which the hardware does not foresee.
void gather_tile(const SplitTask& task, int page, Tile& tile) {
  const int key_row = task.head_dim * static_cast<int>(scalar_bytes(task.keys.type));
  const int value_row = task.head_dim * static_cast<int>(scalar_bytes(task.values.type));
  const int end_page = page + kTileTokens / task.page_tokens;
  tile.count = 0;
  for (; page < end_page && page < task.num_pages; ++page) {
    const auto first = static_cast<std::uint32_t>(task.page_ids[page]) *
                       static_cast<std::uint32_t>(task.page_tokens);
    const std::uint32_t entry = first / task.block_tokens;
    const std::int64_t block = task.block_ids[entry];
    const std::int64_t slot = first - entry * task.block_tokens;
    const std::byte* key =
        task.keys.data + block * task.keys.block_bytes + slot * task.keys.token_bytes;
    const std::byte* value =
        task.values.data + block * task.values.block_bytes + slot * task.values.token_bytes;
    const std::int64_t left = task.length - static_cast<std::int64_t>(first);
    const int rows = left < task.page_tokens ? static_cast<int>(left) : task.page_tokens;
    for (int t = 0; t < rows; ++t) {
      for (int line = 0; line < key_row; line += 64) __builtin_prefetch(key + line);
      for (int line = 0; line < value_row; line += 64) __builtin_prefetch(value + line);
      tile.keys[tile.count] = key;
      tile.values[tile.count] = value;
      ++tile.count;
      key += task.keys.token_bytes;
      value += task.values.token_bytes;
    }
  }
}

// Rows as floats; absent ones are zero, so that the tile's loops have a fixed length.
void load_rows(const std::byte* const* rows, int count, ScalarType type, int head_dim, float* out) {
  for (int t = 0; t < count; ++t) load_floats(rows[t], type, 0, head_dim, out + t * head_dim);
  for (int i = count * head_dim; i < kTileTokens * head_dim; ++i) out[i] = 0;
}

void start(const SplitTask& task) {
  const float to_log2 = task.scale * kLog2E;
  for (int head = 0; head < task.group_size; ++head) {
    float* query = task.scratch.query + head * task.head_dim;
    load_floats(task.query, task.query_type, task.query_offset + head * task.query_head_stride,
                task.head_dim, query);
    for (int c = 0; c < task.head_dim; ++c) query[c] *= to_log2;
    task.partial.max[head] = kMinusInfinity;
  }
  for (int i = 0; i < task.group_size * kTileTokens; ++i) task.scratch.sums[i] = 0;
  for (int i = 0; i < task.group_size * task.head_dim; ++i) task.partial.output[i] = 0;
}

void finish(const SplitTask& task) {
  for (int head = 0; head < task.group_size; ++head) {
    const float* sums = task.scratch.sums + head * kTileTokens;
    float sum = 0;
    for (int t = 0; t < kTileTokens; ++t) sum += sums[t];
    task.partial.sum[head] = sum;
  }
}

void attend_split(const SplitTask& task) {
  start(task);
  const int tile_pages = kTileTokens / task.page_tokens;
  Tile tiles[2];  // the next tile's rows are on their way while this one is worked on
  if (task.num_pages > 0) gather_tile(task, 0, tiles[0]);
  for (int page = 0, now = 0; page < task.num_pages; page += tile_pages, now ^= 1) {
    if (page + tile_pages < task.num_pages) gather_tile(task, page + tile_pages, tiles[now ^ 1]);
    const Tile& tile = tiles[now];
    load_rows(tile.keys, tile.count, task.keys.type, task.head_dim, task.scratch.keys);
    for (int head = 0; head < task.group_size; ++head) weigh_tile(task, head, tile.count);
    load_rows(tile.values, tile.count, task.values.type, task.head_dim, task.scratch.values);
    add_values(task);
  }
  finish(task);
}

}  // namespace

const AttendKernels& attend_kernels() {
  static constexpr AttendKernels kKernels{attend_split};
  return kKernels;
}

}  // namespace LOCKS_CPU_NAMESPACE
}  // namespace locks::detail
