"""Starts vLLM on the GPU for the tests, and says how close two 16-bit runs of a model are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from engine_harness import Generated, assert_same, environment_of, only
from locks_vllm.worker import LocksWorkerExtension

# How far two correct runs in bf16 may lie apart, in nats of a token's log probability. Rounding to 8 bits is a relative
# error of 2^-9 at most, uniform: 2^-9 / sqrt(3) in the mean square. A model of 30 layers adds to its residual stream 60
# times and rounds about 4 values on the way to each addition, which are independent: sqrt(240) * 2^-9 / sqrt(3) = 1.7 %
# of the hidden state. Logits of this model spread by about 4 nats over the vocabulary, so their errors by 0.07, and a
# difference of two runs by 0.1. Five times that is the bound; the mean of |difference| is 0.8 times the spread.
MARGIN = TOLERANCE = 0.5
MEAN_TOLERANCE = 0.08
# Prompts of few tokens have many near ties, where runs part early.
LEAST_SHARE = 0.5

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 3, 64, 16
TOKEN_BYTES = 2 * HEAD_DIM * 2  # key and value of one KV head


class WatchedWorker(LocksWorkerExtension):
    """Counts how often Python runs a layer's decode step. A replayed graph runs no Python."""

    def watch_python_decodes(self) -> None:
        from locks_vllm.gpu_layer import GpuLayer

        decode, counts = GpuLayer.decode, self.__dict__.setdefault("python_decodes", [0])
        if hasattr(decode, "watched"):
            counts[0] = 0
            return

        def watched(*args: Any, **kwargs: Any) -> None:
            counts[0] += 1
            decode(*args, **kwargs)

        watched.watched = True  # type: ignore[attr-defined]
        GpuLayer.decode = watched  # type: ignore[method-assign]

    def count_python_decodes(self) -> int:
        return self.python_decodes[0]  # type: ignore[attr-defined]

    def runner_class(self) -> str:
        runner = type(self.model_runner)  # type: ignore[attr-defined]
        return f"{runner.__module__}.{runner.__qualname__}"

    def attention_classes(self) -> dict[str, str]:
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        return {name: type(layer.impl).__name__ for name, layer in layers.items() if hasattr(layer, "impl")}


@contextmanager
def gpu_engine(
    model: Path,
    *,
    locks: dict[str, Any] | None = None,
    backend: str | None = "CUSTOM",
    runner: int | None = None,
    **changes: Any,
) -> Iterator[Any]:
    """A running `LLM` in bf16. runner: 1 or 2, vLLM's model runner; its own choice if None."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if runner is not None:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = str(runner - 1)
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "block_size": BLOCK_SIZE,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 << 30,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "worker_extension_cls": "gpu_harness.WatchedWorker",
        "seed": 0,
    }
    if backend is not None:
        arguments["attention_backend"] = backend
    if locks is not None:
        arguments["additional_config"] = {"locks": locks}
    with environment_of(environment):
        from vllm import LLM

        llm = LLM(model=str(model), **arguments | changes)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def assert_close(got: Sequence[Generated], want: Sequence[Generated], least_share: float = LEAST_SHARE) -> None:
    """The same tokens where the best two lie apart, and log probabilities as close as bf16 lets them be."""
    distances = assert_same(got, want, least_share, MARGIN, TOLERANCE)
    print(f"{len(distances)} tokens, log probabilities {fmean(distances):.4f} apart, {max(distances):.4f} at most")
    assert fmean(distances) < MEAN_TOLERANCE


def python_decodes(llm: Any) -> int:
    return only(llm.collective_rpc("count_python_decodes"))
