// One low-rank basis for all pages of a sequence and KV head: what a page's own basis is weighed
// against. The principal components of the keys, as in Loki (Singhania et al. 2024, arXiv
// 2406.02542), which takes them from calibration data; here they are the sequence's own, which fit
// better. Everything else is as in the format that it is compared with: rotation, code widths, one
// scale a component and page. The basis is paid once a sequence, so a page has bytes for more
// components.
#pragma once

#include <vector>

#include "baselines/page_keys.h"
#include "locks/summary.h"

namespace locks::detail {

// As many components as a page can have within the format's record: its header and padding count.
int shared_rank(const SummaryFormat& format, int head_dim);
// Bytes a page: the centroid's codes and fp16 scale; for each component a code a token and an fp16
// scale. Not counted: the basis and the reference key, (rank + 1) * head_dim floats a sequence and
// KV head.
std::int64_t shared_page_bytes(const SummaryFormat& format, int head_dim);

struct SharedBasis {
  SummaryFormat format;
  int rank = 0;
  std::vector<float> reference;  // [d]: the sequence's mean key if the format has a reference key
  std::vector<float> rows;       // [rank, d], unit length; zero where the keys have no more energy
};

// Gathers the sequence's keys page by page, then finds its basis.
class SharedBasisFit {
 public:
  SharedBasisFit(const SummaryFormat& format, int head_dim);

  // A page with a NaN or infinite key is left out: it is read in any case, and must not spoil the
  // others.
  void add(const PageKeys& keys);
  SharedBasis finish();

 private:
  SummaryFormat format_;
  int head_dim_;
  std::int64_t num_tokens_ = 0;
  std::vector<double> sum_;      // [d]: of all keys
  std::vector<double> scatter_;  // [d, d], upper triangle: of the keys about their page's centroid
};

// Scored as it is read back, like any page of codes.
struct SharedLowRankPage {
  PageKeys restored;

  SharedLowRankPage(const PageKeys& keys, const SharedBasis& basis);

  float score(const float* query) const { return log_mass(restored, query); }
};

}  // namespace locks::detail
