"""The calls of an evaluation in a worker where the plug-in's GPU code runs over emulated operators."""

import emulated_gpu  # noqa: F401  (puts the emulation in place)
from locks_vllm.evaluation import LocksEvaluationExtension


class EmulatedEvaluationWorker(LocksEvaluationExtension):
    """Under a name of its own: vLLM adds the class that it is told to the worker."""
