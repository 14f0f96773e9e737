// What sets of tokens keep of a trace's attention, from the trace alone and in double: the stages
// read whole pages.
#pragma once

#include <vector>

#include "locks/executor.h"
#include "locks/quality.h"
#include "locks/tokens.h"
#include "quality/trace_run.h"

namespace locks::detail {

// Fills what hangs on the tokens read: all but the oracle's mass. `best` are the oracle's pages.
void measure_tokens(const AttentionTrace& trace, const TraceRun& run, int page_tokens,
                    const TokenSets& sets, const TraceRun::Sets& best,
                    std::span<const TokenSpan> spans, const Executor& executor,
                    StepQuality& quality);

}  // namespace locks::detail
