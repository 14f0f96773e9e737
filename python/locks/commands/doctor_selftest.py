"""locks doctor --self-test: the installed vLLM, without LOCKS and with it, on the same prompts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from locks.commands import CommandError
from locks.commands.bench_process import Engine, EngineError
from locks.commands.doctor_engine import BUDGET, MAX_TOKENS, PROMPTS, SelfTestJob
from locks.commands.finding import Finding

ENGINE = "locks.commands.doctor_engine"
# How far the log probabilities of two correct runs may lie apart, in nats, and how close two tokens must be for them to
# part there. float32: another order of summation, which moves logits by less than 1e-3.
_FLOAT32_BOUND = 2e-3
# 16 bits: each of about 8 roundings a layer is off by 2^-9 / sqrt(3) in the mean square, so logits that spread by about
# 4 nats by 4 sqrt(8 layers) times that, and a difference by sqrt(2) more. Five times this is the bound.
_BITS16_BOUND_OF_A_LAYER = 5 * math.sqrt(2) * 4 * math.sqrt(8) * 2**-9 / math.sqrt(3)
# At least this share of the tokens is compared: behind a token at which two runs may part, they are not.
_LEAST_SHARE = 0.5
_REPORT = "please report it with the output of `locks doctor --self-test --json -`"


def self_test(model: str | None, say: Callable[[str], None]) -> Iterator[Finding]:
    """Runs it; the findings come as they are known. model: a folder with weights; None: a random one is made.
    Raises CommandError where an engine does not run."""
    with tempfile.TemporaryDirectory(prefix="locks-doctor-") as scratch:
        folder = model or scratch
        plain, served = (_answer(SelfTestJob(locks, folder, model is None), say) for locks in (False, True))
        yield Finding(
            "runs",
            f"{model or 'a random model'} of {plain['num_layers']} layers in {plain['dtype']} on {plain['device']},"
            f" {len(PROMPTS)} prompts of {' and '.join(map(str, PROMPTS))} tokens",
        )
        yield equality(plain, served)
        yield from judge_whole(served)
        yield from judge_sparse(served)


def _answer(job: SelfTestJob, say: Callable[[str], None]) -> dict[str, Any]:
    try:
        with Engine(ENGINE) as engine:
            (answer,) = engine.measure(job, say)
            return answer
    except EngineError as error:
        kind = "with" if job.locks else "without"
        raise CommandError(f"self-test: vLLM {kind} LOCKS: {error}; its last lines are above") from None


def bound(dtype: str, num_layers: int) -> float:
    """How far log probabilities may lie apart, in nats."""
    return _FLOAT32_BOUND if dtype == "float32" else _BITS16_BOUND_OF_A_LAYER * math.sqrt(num_layers)


def equality(plain: dict[str, Any], served: dict[str, Any]) -> Finding:
    """Whether LOCKS with the whole budget generates what vLLM generates without it."""
    what, allowed = 'budget "all" equals vLLM', bound(plain["dtype"], plain["num_layers"])
    compared, furthest = 0, 0.0
    for request, (want, got) in enumerate(zip(plain["generated"], served["generated"], strict=True)):
        for place, token in enumerate(want["tokens"]):
            if got["tokens"][place] != token:
                if want["leads"][place] <= 2 * allowed:
                    break
                found = f"prompt {request}, token {place}: {got['tokens'][place]}, expected {token}"
                return Finding(what, found, _REPORT)
            furthest = max(furthest, abs(want["logprobs"][place] - got["logprobs"][place]))
            compared += 1
    total = len(PROMPTS) * MAX_TOKENS
    found = f"{compared} of {total} tokens, log probabilities {furthest:.2g} apart (at most {allowed:.2g})"
    good = furthest <= allowed and compared >= _LEAST_SHARE * total
    numbers = {"compared_tokens": compared, "furthest": furthest, "bound": allowed}
    return Finding(what, found, None if good else _REPORT, numbers)


def judge_whole(served: dict[str, Any]) -> Iterator[Finding]:
    """With the whole budget, every row is read whole."""
    layers = served["whole"].values()
    rows = min((layer["dense_rows"] for layer in layers), default=0)
    good = rows >= len(PROMPTS) * (MAX_TOKENS - 1) and all(
        layer["sparse_rows"] == 0 and layer["bytes_read"] == layer["bytes_dense"] for layer in layers
    )
    yield Finding("its rows are read whole", f"{rows} in each of {len(layers)} layers", None if good else _REPORT)


def judge_sparse(served: dict[str, Any]) -> Iterator[Finding]:
    """Within the budget, the counters say that the sparse path ran and read what it should."""
    counted, steps = served["sparse"], MAX_TOKENS - 1
    lengths = [PROMPTS[-1] + step for step in range(1, MAX_TOKENS)]
    rows = {layer["sparse_rows"] for layer in counted.values()}
    found = f"{min(rows)} of {steps} rows in each of {len(counted)} layers, counted where they ran"
    yield Finding(f"budget {BUDGET} runs sparse", found, None if rows == {steps} else _REPORT)
    good = True
    for name, layer in counted.items():
        about = served["layers"][name]
        good &= layer["pages_read"] == about["kv_heads"] * steps * (BUDGET // about["page_tokens"])
        good &= layer["records_read"] == about["kv_heads"] * sum(length // 16 for length in lengths)
        good &= layer["bytes_read"] < layer["bytes_dense"]
    total = {name: sum(layer[name] for layer in counted.values()) for name in next(iter(counted.values()))}
    share = total["bytes_read"] / max(total["bytes_dense"], 1)
    found = f"{total['records_read']} records, {total['pages_read']} pages, {100 * share:.1f} % of the bytes of dense"
    numbers = {name: total[name] for name in ("records_read", "pages_read", "bytes_read", "bytes_dense")}
    yield Finding("it reads what arithmetic says", found, None if good else _REPORT, numbers)
    faults = total["nonfinite_pages"] + total["invalid_records"]
    found = f"{total['nonfinite_pages']} scores NaN or infinite, {total['invalid_records']} records invalid"
    yield Finding("scores and records", found, _REPORT if faults else None)
    if "records" not in served:
        yield Finding("records fit their keys", f"not checked: {served['records_not_verified']}")
        return
    checked, wrong = served["records"]["checked"], served["records"]["mismatched"]
    good = checked > 0 and wrong == 0
    yield Finding("records fit their keys", f"{checked} built again, {wrong} differ", None if good else _REPORT)
