"""Starts real vLLM engines for the tests, and compares what they generate.

An engine takes about a minute to start on two cores, so tests share engines through fixtures of module or session
scope; only one engine runs at a time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXTENSION = "locks_vllm.worker.LocksWorkerExtension"
# Two correct runs may choose different tokens where the best two logits lie closer than this, in nats: another order
# of summation moves float32 logits of these models by less than 1e-3 (the tests hold them to that as well).
MARGIN = 1e-2
LOGPROB_TOLERANCE = 2e-3

# Tokens that the equality tests generate, and how the engine runs that serves without LOCKS.
MAX_TOKENS = 24
PLAIN_ARGUMENTS = {"max_model_len": 1024, "block_size": 32, "max_num_batched_tokens": 1024}


class ClassNames:
    """A worker extension that tells which classes serve the attention layers."""

    def class_names(self) -> list[str]:
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        impls = [type(layer.impl) for layer in layers.values() if hasattr(layer, "impl")]
        return sorted({f"{impl.__module__}.{impl.__qualname__}" for impl in impls})

    def num_cache_layers(self) -> int:
        return len(self.model_runner.kv_caches)  # type: ignore[attr-defined]


@contextmanager
def environment_of(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables, for as long as the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@contextmanager
def engine(model: Path, *, plugin: bool = True, locks: dict[str, Any] | None = None, **changes: Any) -> Iterator[Any]:
    """A running `LLM` in float32; `plugin=False` keeps vLLM from loading the plug-in at all."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not plugin:
        environment["VLLM_PLUGINS"] = ""
    with environment_of(environment):
        from vllm import LLM

        if locks is not None:
            changes = {"additional_config": {"locks": locks}, "worker_extension_cls": EXTENSION, **changes}
        llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            seed=0,
            **changes,
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


@dataclass(frozen=True)
class Generated:
    """Greedy tokens of one request; of each, its log probability and its distance to the runner-up."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    cached_tokens: int


def greedy(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Generated]:
    """Generates exactly `max_tokens` for each prompt, all in one batch."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, detokenize=False)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [_generated(output) for output in llm.generate(requests, params, use_tqdm=False)]


def _generated(output: Any) -> Generated:
    tokens = list(output.outputs[0].token_ids)
    logprobs, gaps = [], []
    for token, candidates in zip(tokens, output.outputs[0].logprobs, strict=True):
        best, second = sorted((item.logprob for item in candidates.values()), reverse=True)[:2]
        logprobs.append(candidates[token].logprob)
        gaps.append(best - second)
    return Generated(tokens, logprobs, gaps, output.num_cached_tokens or 0)


@dataclass(frozen=True)
class PlainRun:
    """What an engine that serves without LOCKS generates."""

    alone: list[Generated]  # of some prompts one after the other, which is the same to the bit in each run
    batch: list[Generated]  # of all prompts at once; which of them share a step is a matter of timing

    @classmethod
    def of(cls, llm: Any, prompts: Sequence[Sequence[int]]) -> PlainRun:
        alone = [greedy(llm, [prompts[index]], MAX_TOKENS)[0] for index in (0, 5, 10, 12)]
        return cls(alone, greedy(llm, prompts, MAX_TOKENS))


def assert_same(
    got: Sequence[Generated],
    want: Sequence[Generated],
    least_share: float = 0.9,
    margin: float = MARGIN,
    tolerance: float = LOGPROB_TOLERANCE,
) -> list[float]:
    """The same tokens wherever the top two differ by more than `margin`, with the same log probabilities.

    A request is compared up to the first token at which both runs may differ and do; at least `least_share` of all
    tokens must have been compared. Returns how far apart the log probabilities are.
    """
    assert len(got) == len(want)
    distances: list[float] = []
    total = 0
    for request, (one, other) in enumerate(zip(got, want, strict=True)):
        total += len(other.tokens)
        assert len(one.tokens) == len(other.tokens)
        for step, token in enumerate(other.tokens):
            if one.tokens[step] != token:
                assert other.gaps[step] <= margin, f"request {request}, token {step}: gap {other.gaps[step]:.4f}"
                break
            distance = abs(one.logprobs[step] - other.logprobs[step])
            assert distance < tolerance, f"request {request}, token {step}: log probabilities {distance:.4f} apart"
            distances.append(distance)
    assert len(distances) >= least_share * total, f"only {len(distances)} of {total} tokens could be compared"
    return distances


def text_prompts(model: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths, cut from one text that a model continues with confidence."""
    from transformers import AutoTokenizer

    draw = random.Random(7)
    places = ("Lisbon", "Oslo", "Quito", "Dakar", "Perth", "Lima", "Turin", "Kyoto", "Malmo", "Accra", "Leeds", "Tunis")
    things = ("violin", "compass", "lantern", "telescope", "ladder", "kettle", "mirror", "hammer", "clock", "basket")
    lines = (
        f"{number}. The {draw.choice(things)} from {draw.choice(places)} was sold for {draw.randrange(10, 999)} coins"
        f" in {draw.choice(places)}, and nobody asked why."
        for number in range(1, 200)
    )
    text = AutoTokenizer.from_pretrained(model).encode(" ".join(lines))
    return [text[start : start + length] for start, length in zip(range(0, 600, 41), lengths, strict=False)]


def only(answers: Sequence[Any]) -> Any:
    """The answer of the one worker."""
    (answer,) = answers
    return answer


def metric(llm: Any, name: str) -> float:
    return sum(item.value for item in llm.get_metrics() if item.name == f"vllm:{name}")


def assert_records_match_keys(llm: Any) -> int:
    """Every record in the pool equals a fresh build from the keys beside it; tells how many there are."""
    answer = only(llm.collective_rpc("locks_verify_records"))
    assert answer["mismatched"] == 0, answer
    assert answer["checked"] > 0, "no record was built"
    return answer["checked"]


def counters(llm: Any) -> dict[str, dict[str, int]]:
    return only(llm.collective_rpc("locks_counters"))


def reset_counters(llm: Any) -> None:
    llm.collective_rpc("locks_reset_counters")
