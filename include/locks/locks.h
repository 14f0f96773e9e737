// LOCKS: page-local compact key summaries for reading little of a long KV cache. The whole public
// API but for the GPU's part of it, locks/cuda.h.
//
// Data flows page -> summary -> score -> select -> attend; decode chains the last three.
// The caller owns memory, threads and workspace: nothing here throws or starts a thread, and
// nothing on the decode path allocates.
#pragma once

#include "locks/attend.h"     // IWYU pragma: export
#include "locks/baselines.h"  // IWYU pragma: export
#include "locks/cpu.h"        // IWYU pragma: export
#include "locks/decode.h"     // IWYU pragma: export
#include "locks/executor.h"   // IWYU pragma: export
#include "locks/page.h"       // IWYU pragma: export
#include "locks/quality.h"    // IWYU pragma: export
#include "locks/score.h"      // IWYU pragma: export
#include "locks/select.h"     // IWYU pragma: export
#include "locks/status.h"     // IWYU pragma: export
#include "locks/summary.h"    // IWYU pragma: export
#include "locks/tokens.h"     // IWYU pragma: export
#include "locks/trace.h"      // IWYU pragma: export

namespace locks {

const char* version();  // "0.1.0"

}  // namespace locks
