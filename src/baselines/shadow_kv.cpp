#include "baselines/shadow_kv.h"

#include <cmath>
#include <cstddef>

#include "baselines/page_keys.h"
#include "core/work_queue.h"

namespace locks::detail {

namespace {

// Mean of the chunk's keys, as it is stored.
void find_landmark(const float* keys, int d, float* landmark) {
  for (int c = 0; c < d; ++c) {
    double sum = 0;
    for (int t = 0; t < kShadowKvChunk; ++t) sum += static_cast<double>(keys[t * d + c]);
    landmark[c] = as_fp16(static_cast<float>(sum / kShadowKvChunk));
  }
}

// The least cosine between the landmark and a key of the chunk; zero vectors have none.
double least_cosine(const float* keys, int d, const float* landmark) {
  const auto length = [=](const float* row) {
    return std::sqrt(static_cast<double>(dot(row, row, d)));
  };
  double least = 1;
  for (int t = 0; t < kShadowKvChunk; ++t) {
    const float* key = keys + static_cast<std::ptrdiff_t>(t) * d;
    const double product = static_cast<double>(dot(key, landmark, d));
    // PyTorch's cosine_similarity, which the published code calls, has the same guard.
    least = std::min(least, product / std::max(length(key) * length(landmark), 1e-8));
  }
  return least;
}

}  // namespace

std::int32_t ShadowKv::chunks_of(std::int32_t length) {
  return std::max(length - kAlwaysReadLastTokens, 0) / kShadowKvChunk;
}

ShadowKv::ShadowKv(const AttentionTrace& trace, const Executor& executor) : trace_(trace) {
  const int d = trace.head_dim;
  const std::int32_t* last = trace.positions + trace.num_steps;
  const std::int32_t chunks =
      chunks_of(*std::max_element(trace.positions + trace.window, last) + 1);
  landmarks_.resize(static_cast<std::size_t>(chunks) * static_cast<std::size_t>(d));
  is_outlier_.resize(static_cast<std::size_t>(chunks));
  std::vector<double> unlike(static_cast<std::size_t>(chunks));
  for_each_item(executor, chunks, [&](std::int64_t chunk, int) {
    const float* keys = trace.keys + chunk * kShadowKvChunk * d;
    float* mean = landmarks_.data() + chunk * d;
    find_landmark(keys, d, mean);
    unlike[static_cast<std::size_t>(chunk)] = -least_cosine(keys, d, mean);
  });
  // Found once, when the prompt ends: in what is there at the first judged step.
  const std::int32_t* first = trace.positions + trace.window;
  unlike.resize(static_cast<std::size_t>(chunks_of(*std::min_element(first, last) + 1)));
  const std::size_t count = (unlike.size() * kShadowKvOutliers + 1023) / 1024;
  outliers_ = ranking(unlike);
  outliers_.resize(count);
  std::sort(outliers_.begin(), outliers_.end());
  for (std::int32_t chunk : outliers_) is_outlier_[static_cast<std::size_t>(chunk)] = true;
}

const float* ShadowKv::landmark(std::int32_t chunk) const {
  return landmarks_.data() + static_cast<std::ptrdiff_t>(chunk) * trace_.head_dim;
}

// Largest share over the heads of the group; outliers have none.
std::vector<double> ShadowKv::scores(int step, std::int32_t chunks) const {
  std::vector<double> best(static_cast<std::size_t>(chunks), -1);
  std::vector<double> shares;
  for (int head = 0; head < trace_.group_size; ++head) {
    const float* query = trace_.query(head, step);
    shares.clear();
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
      if (is_outlier_[static_cast<std::size_t>(chunk)]) continue;
      shares.push_back(
          static_cast<double>(trace_.scale * dot(query, landmark(chunk), trace_.head_dim)));
    }
    softmax(shares);
    auto share = shares.begin();
    for (std::size_t chunk = 0; chunk < best.size(); ++chunk) {
      if (!is_outlier_[chunk]) best[chunk] = std::max(best[chunk], *share++);
    }
  }
  return best;
}

void ShadowKv::choose(int step, StepTokens& tokens) const {
  const auto take_chunk = [&](std::int32_t chunk) {
    for (int t = 0; t < kShadowKvChunk; ++t) tokens.take(chunk * kShadowKvChunk + t);
  };
  const std::int32_t chunks = chunks_of(tokens.length());
  tokens.force(chunks * kShadowKvChunk, tokens.length());
  for (std::int32_t chunk : outliers_) take_chunk(chunk);
  for (std::int32_t chunk : ranking(scores(step, chunks))) take_chunk(chunk);
}

std::int64_t ShadowKv::statistics_bytes(std::int32_t length) const {
  const auto outliers = static_cast<std::int64_t>(outliers_.size());
  return (chunks_of(length) - outliers) * 2 * trace_.head_dim;
}

}  // namespace locks::detail
