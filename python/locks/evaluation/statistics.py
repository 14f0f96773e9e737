"""What two arms of one run differ by, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
_INTERVAL = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
_SEED = 20_240_613


@dataclass(frozen=True)
class Difference:
    """The mean of the pairs' differences and its interval.

    method "bootstrap": percentiles of the means of RESAMPLES resamples of the pairs, with a fixed seed. Where no pair
    differs there is nothing to resample; "exact": if a share p of all pairs did differ by one whole point, n equal
    pairs would be seen with probability (1 - p) ** n, which is 5 % at the bound given (for scores in [0, 1])."""

    n: int
    mean: float
    low: float
    high: float
    method: str
    better: int  # pairs in which the arm is above
    worse: int
    sign_p: float  # exact two-sided sign test over the pairs that differ

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired(arm: Sequence[float], base: Sequence[float]) -> Difference:
    """arm - base, for scores of the same documents in the same order."""
    if len(arm) != len(base) or not len(arm):
        raise ValueError(f"paired: {len(arm)} scores and {len(base)} of the base, expected pairs")
    differences = np.asarray(arm, dtype=float) - np.asarray(base, dtype=float)
    count, mean = differences.size, float(differences.mean())
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    if better == worse == 0:
        bound = 1 - (1 - CONFIDENCE) ** (1 / count)
        return Difference(count, 0.0, -bound, bound, "exact", 0, 0, 1.0)
    draw = np.random.default_rng(_SEED)
    means = [differences[draw.integers(0, count, count)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, _INTERVAL)
    return Difference(count, mean, float(low), float(high), "bootstrap", better, worse, sign_test(better, worse))


def paired_over_tasks(arm: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Difference:
    """The mean over tasks of their mean differences, as suites are scored: every task counts the same, however many
    documents it has. Documents are resampled within each task."""
    pooled = paired(np.concatenate([*map(np.asarray, arm)]), np.concatenate([*map(np.asarray, base)]))
    if pooled.method == "exact":
        return pooled
    differences = [np.subtract(one, other) for one, other in zip(arm, base, strict=True)]
    draw = np.random.default_rng(_SEED)
    means = np.mean(
        [some[draw.integers(0, some.size, (RESAMPLES, some.size))].mean(axis=1) for some in differences], axis=0
    )
    low, high = np.quantile(means, _INTERVAL)
    mean = float(np.mean([some.mean() for some in differences]))
    return replace(pooled, mean=mean, low=float(low), high=float(high))


def sign_test(better: int, worse: int) -> float:
    """How likely so uneven a split, or one more uneven, is if either way is as likely."""
    count, least = better + worse, min(better, worse)
    return min(1.0, 2 * sum(math.comb(count, few) for few in range(least + 1)) / 2**count)


def first_divergence(tokens: Sequence[int], base: Sequence[int]) -> int | None:
    """The first place where two answers differ, None if they are the same."""
    for place, (one, other) in enumerate(zip(tokens, base, strict=False)):
        if one != other:
            return place
    return None if len(tokens) == len(base) else min(len(tokens), len(base))


def agreement(arm: Sequence[Sequence[int]], base: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of greedy answers: the share that is the same token for token, and where the others part."""
    places = [first_divergence(one, other) for one, other in zip(arm, base, strict=True)]
    parted = sorted(place for place in places if place is not None)
    return {
        "n": len(places),
        "identical": (len(places) - len(parted)) / len(places) if places else None,
        "first_divergence_median": float(np.median(parted)) if parted else None,
        "first_divergence_least": parted[0] if parted else None,
    }


# A loop: the last tokens repeat with some period, but for single tokens such as a counter.
_TAIL_TOKENS = 512
_LONGEST_PERIOD = 128
_SAME_SHARE = 0.9


def loop_period(tokens: Sequence[int]) -> int | None:
    """The shortest period with which a generation's tail repeats itself, None if it does not: degeneration."""
    tail = np.asarray(tokens[-_TAIL_TOKENS:])
    for period in range(1, min(_LONGEST_PERIOD, tail.size // 2) + 1):
        if (tail[period:] == tail[:-period]).mean() >= _SAME_SHARE:
            return period
    return None


def distinct_share(tokens: Sequence[int], size: int = 4) -> float:
    """Different runs of `size` tokens among all of the tail."""
    tail = list(tokens[-2 * _TAIL_TOKENS :])
    runs = [tuple(tail[begin : begin + size]) for begin in range(len(tail) - size + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0
