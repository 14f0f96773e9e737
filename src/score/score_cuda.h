// The two scorers of a decode step on the GPU. launch_score (decode/step_cuda.h) takes the tuned one
// where there is one for the shape and the device, else this one.
#pragma once

#include "decode/step_cuda.h"

namespace locks::detail {

// Any format, head size and group; any device from sm_80.
cudaError_t launch_score_any(const StepArguments& arguments, cudaStream_t stream);

}  // namespace locks::detail
