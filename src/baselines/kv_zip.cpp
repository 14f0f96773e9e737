#include "baselines/kv_zip.h"

#include <cmath>
#include <cstddef>

#include "baselines/page_keys.h"
#include "core/work_queue.h"

namespace locks::detail {

namespace {

struct Chunk {
  std::int32_t begin, end;   // tokens of the context
  std::int32_t first, last;  // rows that repeat them
  std::int32_t tokens() const { return end - begin; }
};

Chunk chunk_of(const Reconstruction& pass, std::int64_t index) {
  const std::int32_t* four = pass.chunks + index * 4;
  return {four[0], four[1], four[2], four[3]};
}

// One head's part in the importance of one chunk.
void mark(const AttentionTrace& trace, const Chunk& chunk, std::int32_t sink, int head,
          std::vector<double>& importance) {
  const Reconstruction& pass = trace.reconstruction;
  const auto d = static_cast<std::size_t>(trace.head_dim);
  const auto logit = [&](const float* query, const float* keys, std::int32_t row) {
    const float* key = keys + static_cast<std::size_t>(row) * d;
    return static_cast<double>(trace.scale * dot(query, key, trace.head_dim));
  };
  const auto skipped = static_cast<std::size_t>(sink);
  std::vector<double> shares;
  for (std::int32_t row = chunk.first; row < chunk.last; ++row) {
    const float* query =
        pass.queries + (static_cast<std::size_t>(head) * static_cast<std::size_t>(pass.num_rows) +
                        static_cast<std::size_t>(row)) *
                           d;
    shares.clear();
    for (std::int32_t t = 0; t < sink; ++t) shares.push_back(logit(query, trace.keys, t));
    for (std::int32_t t = chunk.begin; t < chunk.end; ++t) {
      shares.push_back(logit(query, trace.keys, t));
    }
    for (std::int32_t r = chunk.first; r <= row; ++r) shares.push_back(logit(query, pass.keys, r));
    softmax(shares);
    for (std::size_t t = 0; t < importance.size(); ++t) {
      importance[t] = std::max(importance[t], shares[skipped + t]);
    }
  }
}

}  // namespace

std::vector<double> reconstruction_importance(const AttentionTrace& trace,
                                              const Executor& executor) {
  const Reconstruction& pass = trace.reconstruction;
  const std::int32_t sink = chunk_of(pass, 0).begin;
  const std::int64_t items = static_cast<std::int64_t>(pass.num_chunks) * trace.group_size;
  std::vector<std::vector<double>> parts(static_cast<std::size_t>(items));
  for_each_item(executor, items, [&](std::int64_t item, int) {
    const Chunk chunk = chunk_of(pass, item / trace.group_size);
    std::vector<double>& part = parts[static_cast<std::size_t>(item)];
    part.resize(static_cast<std::size_t>(chunk.tokens()));
    mark(trace, chunk, sink, static_cast<int>(item % trace.group_size), part);
  });
  std::vector<double> importance;
  for (std::int64_t item = 0; item < items; ++item) {
    const std::vector<double>& part = parts[static_cast<std::size_t>(item)];
    if (item % trace.group_size == 0) importance.resize(importance.size() + part.size());
    double* own = importance.data() + (importance.size() - part.size());
    for (std::size_t t = 0; t < part.size(); ++t) own[t] = std::max(own[t], part[t]);
  }
  return importance;
}

KvZip::KvZip(const AttentionTrace& trace, const Executor& executor)
    : begin_(chunk_of(trace.reconstruction, 0).begin),
      end_(chunk_of(trace.reconstruction, trace.reconstruction.num_chunks - 1).end),
      order_(ranking(reconstruction_importance(trace, executor))) {}

}  // namespace locks::detail
