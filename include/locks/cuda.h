// The CUDA backend: the same stages on device memory. Present in builds with LOCKS_HAVE_CUDA.
//
// Every pointer within the arguments (cache, tables, lengths, records, reference keys) is a device
// pointer, the structs themselves live on the host. Work is enqueued on `stream` (a cudaStream_t)
// of the current device; nothing is allocated and nothing waits, launch shapes do not depend on
// data: a call can be captured into a graph and replayed with other lengths and contents.
#pragma once

#include <cstdint>

#include "locks/summary.h"

namespace locks {

// summarise_blocks on the GPU: the same bytes as on the CPU. Nobody can check lengths, begin_tokens
// and block ids here: they must not be negative, and lengths lie within the tables. A block whose
// id is outside its cache is skipped and not counted; begin_tokens past the length build nothing.
// *num_records_built (device memory, may be null) grows by the records written.
// Reads 16 * head_dim * scalar_bytes(keys.type) bytes a record and writes record_bytes.
// Errors: kInvalidArgument for formats, shapes and strides; kUnsupported with CUDA's own words.
Status summarise_blocks_cuda(const SummaryParams& params, const PagedTensor& keys,
                             const SequenceBatch& seqs, const std::int32_t* begin_tokens,
                             const RecordCache& records, std::int64_t* num_records_built,
                             void* stream);

}  // namespace locks
