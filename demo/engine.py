"""One vLLM engine with LOCKS in it, and what the demo measures with it.

The document is read once; every later request finds it in the prefix cache, where its records lie beside
its keys and values, and only computes the last, incomplete cache block again. The budget changes
between requests.
"""

import base64
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

ENVIRONMENT = {
    # Engine and worker run in this process: fewer processes to start, and each call of
    # step() is one step of the model.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the document needs 0.2
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CHUNK_TOKENS = 1024  # of the prompt, read in one step

OnStep = Callable[[int], None]


@dataclass(frozen=True)
class Generation:
    token_ids: list[int]
    step_seconds: list[float]  # of each token after the first, which ends the prompt's last step


@dataclass(frozen=True)
class Counts:
    """What decode steps read, per step, summed over layers and KV heads."""

    records: float
    record_bytes: float
    pages: float
    bytes: float
    dense_bytes: float
    prompt_tokens: int  # of the prompt, computed again: the rest was in the prefix cache

    @property
    def kv_bytes(self) -> float:
        return self.bytes - self.record_bytes


@dataclass(frozen=True)
class Trace:
    """An evaluation pass: what each layer read in each decode step, and the attention mass in it."""

    page_tokens: int
    retained: np.ndarray  # float64 [steps, layers], exact, mean over query heads
    pages: list[np.ndarray]  # of each step, bool [layers, kv_heads, pages]: 1 where the page was read

    def read_share(self, begin: int, end: int) -> np.ndarray:
        """[steps, layers]: the share of the pages of tokens [begin, end) that was read, over KV heads."""
        first, last = begin // self.page_tokens, -(-end // self.page_tokens)
        return np.stack([step[:, :, first:last].mean((1, 2)) for step in self.pages])

    def density(self, tokens: int) -> np.ndarray:
        """[layers, bins of `tokens` tokens]: the share of steps, KV heads and pages read."""
        width = tokens // self.page_tokens
        count = self.pages[0].shape[2] // width
        bins = [step[:, :, : count * width].reshape(*step.shape[:2], count, width) for step in self.pages]
        return np.mean([one.mean((1, 3)) for one in bins], 0)

    def steps_by_position(self, layer: int, tokens: int) -> np.ndarray:
        """[steps, bins of `tokens` tokens] of one layer: the share of KV heads and pages read."""
        width = tokens // self.page_tokens
        count = self.pages[0].shape[2] // width
        rows = [step[layer, :, : count * width].reshape(-1, count, width).mean((0, 2)) for step in self.pages]
        return np.stack(rows)


@dataclass(frozen=True)
class Measurement:
    """One row of the demo: the budget in tokens (None: all), the text generated and what it took."""

    budget: int | None
    generation: Generation
    counts: Counts
    step_seconds: list[float]  # of all timed passes
    trace: Trace

    @property
    def tokens_per_second(self) -> float:
        return 1 / median(self.step_seconds)

    def tokens_per_second_at(self, share: float) -> float:
        """The speed that `share` of the steps stay below."""
        return float(1 / np.quantile(self.step_seconds, 1 - share))

    @property
    def mode(self) -> str:
        return "dense" if self.budget is None else "locks"


class Engine:
    """vLLM with the LOCKS plug-in."""

    def __init__(self, model: Path, format_name: str) -> None:
        for name, value in ENVIRONMENT.items():  # before vLLM is imported, which reads it
            os.environ.setdefault(name, value)
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            max_model_len=8192,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK_TOKENS,
            enable_prefix_caching=True,
            enforce_eager=True,  # compiling costs a minute and changes nothing that is shown here
            seed=0,
            additional_config={"locks": {"budget": "all", "formats": format_name}},
            worker_extension_cls="locks_vllm.worker.LocksWorkerExtension",
        )
        self._requests = 0

    def generate(self, prompt: list[int], num_tokens: int, on_step: OnStep = lambda step: None) -> Generation:
        """Greedy, exactly `num_tokens`, past the end of the answer: every pass takes as many steps."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        self._requests += 1
        engine.add_request(
            f"demo-{self._requests}",
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False),
        )
        token_ids: list[int] = []
        seconds: list[float] = []
        step = 0
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            outputs = engine.step()
            elapsed = time.perf_counter() - begin
            step += 1
            on_step(step)
            if outputs:
                if token_ids:
                    seconds.append(elapsed)
                token_ids = list(outputs[0].outputs[0].token_ids)
        return Generation(token_ids, seconds)

    def measure_speed(
        self, prompt: list[int], budget: int | None, num_tokens: int
    ) -> tuple[Generation, Counts]:
        self._call("locks_set_budget", "all" if budget is None else budget)
        self._call("locks_reset_counters")
        generation = self.generate(prompt, num_tokens)
        return generation, self._counts(num_tokens - 1)

    def evaluate(self, prompt: list[int], budget: int | None, num_tokens: int) -> tuple[Generation, Trace]:
        """The same pass, slower: each step also attends densely, and masses and selections are kept."""
        self._call("locks_set_budget", "all" if budget is None else budget)
        self._call("locks_evaluation")  # clears
        self._call("locks_set_evaluation", True)
        try:
            generation = self.generate(prompt, num_tokens)
        finally:
            self._call("locks_set_evaluation", False)
        return generation, _trace(_by_layer(self._call("locks_evaluation")))

    def _counts(self, steps: int) -> Counts:
        described, counters = _by_layer(self._call("locks_describe")), _by_layer(self._call("locks_counters"))
        for layer in counters:
            if layer["steps"] != steps:
                raise RuntimeError(f"locks_counters: steps = {layer['steps']}, expected {steps}")
        record_bytes = [
            layer["records_read"] * about["record_bytes"]
            for layer, about in zip(counters, described, strict=True)
        ]
        return Counts(
            records=sum(layer["records_read"] for layer in counters) / steps,
            record_bytes=sum(record_bytes) / steps,
            pages=sum(layer["pages_read"] for layer in counters) / steps,
            bytes=sum(layer["bytes_read"] for layer in counters) / steps,
            dense_bytes=sum(layer["bytes_dense"] for layer in counters) / steps,
            prompt_tokens=counters[0]["prefill_tokens"],
        )

    def _call(self, method: str, *args):
        return self.llm.collective_rpc(method, args=args)[0]  # one worker


def measure_all(
    engine: Engine,
    prompt: list[int],
    budgets: list[int | None],
    num_tokens: int,
    repeats: int,
    on_pass: OnStep,
) -> list[Measurement]:
    """Speed of all budgets in turn, so that a busy moment hits none alone; then masses."""
    done = 0
    generations, counts = {}, {}
    seconds: dict[int | None, list[float]] = {budget: [] for budget in budgets}
    for _ in range(repeats):
        for budget in budgets:
            generations[budget], counts[budget] = engine.measure_speed(prompt, budget, num_tokens)
            seconds[budget] += generations[budget].step_seconds
            done += 1
            on_pass(done)
    measurements = []
    for budget in budgets:
        evaluated, trace = engine.evaluate(prompt, budget, num_tokens)
        if evaluated.token_ids != generations[budget].token_ids:
            raise RuntimeError(
                f"budget {budget}: the evaluation pass generated other tokens than the timed one"
            )
        measurements.append(Measurement(budget, generations[budget], counts[budget], seconds[budget], trace))
        done += 1
        on_pass(done)
    return measurements


def _by_layer(answer: dict[str, dict]) -> list[dict]:
    """The layers' entries in the model's order."""
    return [answer[name] for name in sorted(answer, key=lambda name: int("".join(filter(str.isdigit, name))))]


def _trace(layers: list[dict]) -> Trace:
    steps = len(layers[0]["steps"])
    page_tokens, heads = layers[0]["page_tokens"], layers[0]["num_kv_heads"]
    pages = []
    for step in range(steps):
        count = -(-layers[0]["steps"][step]["lengths"][0] // page_tokens)
        masks = [np.frombuffer(base64.b64decode(layer["steps"][step]["pages"][0]), np.uint8) for layer in layers]
        bits = [np.unpackbits(mask, count=heads * count).reshape(heads, count).astype(bool) for mask in masks]
        pages.append(np.stack(bits))
    retained = np.array([[layer["steps"][step]["retained"][0] for layer in layers] for step in range(steps)])
    return Trace(page_tokens, retained, pages)
