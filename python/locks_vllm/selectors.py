"""Page selectors in torch, for evaluation: what LOCKS is compared with, in the engine.

Each is a function of the keys of a batch of sequences, gathered page by page; adding one to SELECTORS makes it usable.
They score as `locks::score_baseline` does (src/baselines), in the precision that each method stores, and the choice
among the scores, `choose_pages`, is that of `locks::select_pages`. Nothing here is on the decode path of the product:
every key is read to choose the few that may be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from locks.formats import BLOCK_TOKENS

# Always read (include/locks/select.h): the first tokens, and the last ones in complete pages.
FIRST_TOKENS = 16
LAST_TOKENS = 64


@dataclass
class PagedKeys:
    """Keys of sequences cut into pages, float32 [rows, kv_heads, pages, B, d]; what lies behind a sequence is zero."""

    rows: torch.Tensor
    lengths: torch.Tensor  # int64 [rows]

    @property
    def page_tokens(self) -> int:
        return self.rows.shape[3]

    def positions(self) -> torch.Tensor:
        """Of each token, [pages, B]."""
        pages, size = self.rows.shape[2:4]
        return torch.arange(pages * size, device=self.rows.device).view(pages, size)

    def present(self) -> torch.Tensor:
        """Whether the sequence has the token: bool [rows, 1, pages, B]."""
        return (self.positions() < self.lengths[:, None, None])[:, None]

    def counts(self) -> torch.Tensor:
        """Tokens of each page, at least 1 so that pages behind the sequence divide: float32 [rows, 1, pages, 1]."""
        return self.present().sum(-1, keepdim=True).clamp(min=1).float()


# Scores of pages [rows, kv_heads, group, pages] for queries [rows, kv_heads, group, d], which carry the softmax scale.
Score = Callable[[PagedKeys, torch.Tensor], torch.Tensor]


def _fp16(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()


def _times(queries: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """q . x for a vector x of each page, [rows, kv_heads, pages, d]."""
    return queries @ pages.transpose(-1, -2)


def _log_mass(keys: torch.Tensor, present: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Exact log-sum-exp of each page's logits, for keys [rows, kv_heads, pages, B, d]."""
    logits = (queries @ keys.flatten(2, 3).transpose(-1, -2)).unflatten(-1, keys.shape[2:4])
    return logits.masked_fill(~present[:, :, None], -math.inf).logsumexp(-1)


def score_oracle(keys: PagedKeys, queries: torch.Tensor) -> torch.Tensor:
    """The page's true log mass: what no estimate can beat at this page size."""
    return _log_mass(keys.rows, keys.present(), queries)


def score_quest(keys: PagedKeys, queries: torch.Tensor) -> torch.Tensor:
    """Quest (Tang et al. 2024, arXiv 2406.10774): the largest logit within the page's channel-wise bounds."""
    behind = ~keys.present()[..., None]
    low = _fp16(keys.rows.masked_fill(behind, math.inf).amin(3)).nan_to_num(posinf=0.0)
    high = _fp16(keys.rows.masked_fill(behind, -math.inf).amax(3)).nan_to_num(neginf=0.0)
    # max(q l, q h) summed over channels: positive parts of q meet the upper bound, negative ones the lower.
    return _times(queries.clamp(min=0), high) + _times(queries.clamp(max=0), low)


def _means(keys: PagedKeys) -> torch.Tensor:
    return keys.rows.sum(3) / keys.counts()


def score_centroid(keys: PagedKeys, queries: torch.Tensor) -> torch.Tensor:
    """The mean key alone, as the landmarks of ShadowKV (Sun et al. 2024, arXiv 2410.21465)."""
    return _times(queries, _fp16(_means(keys))) + keys.counts().log().transpose(-1, -2)


def score_mean_std(keys: PagedKeys, queries: torch.Tensor) -> torch.Tensor:
    """Mean and diagonal variance: the second-order cumulant estimate of the log mass."""
    residuals = (keys.rows - _means(keys)[:, :, :, None]) * keys.present()[..., None]
    variances = _fp16(residuals.square().sum(3) / keys.counts())
    return score_centroid(keys, queries) + _times(queries.square(), variances) / 2


def _quantise(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows as symmetric codes and one fp16 scale give them back; too large for a scale becomes NaN: read the page."""
    limit = 2 ** (bits - 1) - 1
    scale = (rows.abs().amax(-1, keepdim=True) / limit).half().double().clamp(min=2.0**-24)
    return (rows / scale).round().clamp(-limit, limit) * scale


def score_int3(keys: PagedKeys, queries: torch.Tensor) -> torch.Tensor:
    """Keys of 3 bits about their page's mean of 8 bits, in double so that codes hang on the keys alone."""
    means = _quantise(keys.rows.double().sum(3) / keys.counts(), 8)[:, :, :, None]
    restored = (means + _quantise(keys.rows - means, 3)).float()
    return _log_mass(restored, keys.present(), queries)


@dataclass(frozen=True)
class SelectorRule:
    """How a selector ranks pages: by its largest score over the heads of a group, or the mean of their shares."""

    score: Score
    max_of_scores: bool = False
    page_tokens: int = 16


SELECTORS = {
    "oracle": SelectorRule(score_oracle, page_tokens=4),
    "quest": SelectorRule(score_quest, max_of_scores=True),
    "mean_std": SelectorRule(score_mean_std),
    "centroid": SelectorRule(score_centroid),
    "int3": SelectorRule(score_int3),
}


def budget_pages(budget: float, length: int, page_tokens: int) -> int:
    """Pages that a budget allows (src/select/budget.h): never fewer than are always read, nor more than there are."""
    pages = -(-length // page_tokens)
    if math.isinf(budget):
        return pages
    wanted = round(budget * length / page_tokens) if budget < 1 else int(budget) // page_tokens
    return min(pages, max(wanted, (FIRST_TOKENS + LAST_TOKENS) // page_tokens + 1))


def choose_pages(
    scores: torch.Tensor, lengths: torch.Tensor, allowed: torch.Tensor, page_tokens: int, max_of_scores: bool
) -> torch.Tensor:
    """The pages to read, bool [rows, kv_heads, pages], for scores [rows, kv_heads, group, pages].

    Takes the always-read pages, then the best, until `allowed` (int64 [rows]) are taken; equal shares go to the lower
    page. A page with a score that is NaN or infinite is read as well and stays out of the sums.
    """
    page = torch.arange(scores.shape[-1], device=scores.device)
    length = lengths[:, None]
    exists = (page * page_tokens < length)[:, None]
    always = page < FIRST_TOKENS // page_tokens
    always = always | (page >= length // page_tokens - LAST_TOKENS // page_tokens)
    always = always | ((page + 1) * page_tokens > length // BLOCK_TOKENS * BLOCK_TOKENS)  # no record covers it
    finite = scores.isfinite().all(2)
    counted = exists & finite
    if max_of_scores:
        ranked = scores.amax(2)
    else:
        ranked = scores.masked_fill(~counted[:, :, None], -math.inf).softmax(-1).nan_to_num().mean(2)
    forced = exists & (always[:, None] | ~finite)
    ranked = ranked.masked_fill(~counted, -math.inf).masked_fill(forced, math.inf)
    places = ranked.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    taken = torch.maximum(allowed[:, None], forced.sum(-1))
    return exists & (places < taken[..., None])
