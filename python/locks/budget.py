"""How much of the context a decode step may read."""

from __future__ import annotations

import math
import numbers

# Always read, and counted in the budget: the first tokens, the last ones in complete pages, and one page more.
ALWAYS_READ_TOKENS = 16 + 64
# Budgets travel as float64, which holds each whole number up to here.
MAX_TOKENS = 2**53
ALLOWED = "\"all\", a whole number of tokens >= 1, or a fraction of the length in (0, 1) such as 0.02"


def parse_budget(value: str | int | float) -> float:
    """The budget as the operators take it: tokens (>= 1), a fraction of the length (in (0, 1)), or inf for all.

    Takes "all", an integer of tokens, a fraction as a float, or either of them as text ("512", "0.02").
    A float of tokens must be whole. 1.0 is refused: it may be meant as one token or as everything, which
    "all" says.

    Raises ValueError, naming the value and what is allowed, for anything else: zero, negative numbers, NaN,
    infinities, booleans.
    """
    budget = _number(value)
    if budget is None:
        raise _refusal(value)
    if isinstance(budget, int):
        if not 1 <= budget <= MAX_TOKENS:
            raise _refusal(value, f"; at most {MAX_TOKENS} tokens" if budget > 0 else "")
        return float(budget)
    if math.isinf(budget) and value == "all":
        return budget
    if budget == 1.0:
        raise _refusal(value, "; for the whole context write \"all\", for one token write 1")
    if 0 < budget < 1 or (1 < budget <= MAX_TOKENS and budget.is_integer()):
        return budget
    raise _refusal(value)


def budget_tokens(budget: float, length: int, page_tokens: int) -> int:
    """Tokens in the whole pages that `budget`, as parse_budget returns it, allows a context of `length` tokens.

    Tokens are rounded down to pages, fractions to the nearest page (ties to even). Never less than what is
    always read, never more than the whole pages there are.
    """
    pages = length // page_tokens
    if math.isinf(budget):
        return pages * page_tokens
    return min(pages, max(_wanted_pages(budget, length, page_tokens), _always_read_pages(page_tokens))) * page_tokens


def is_raised(budget: float, length: int, page_tokens: int) -> bool:
    """Whether a budget is less than what is always read, and so not what a step reads."""
    return not math.isinf(budget) and _wanted_pages(budget, length, page_tokens) < _always_read_pages(page_tokens)


def _wanted_pages(budget: float, length: int, page_tokens: int) -> int:
    return round(budget * length / page_tokens) if budget < 1 else int(budget) // page_tokens


def _always_read_pages(page_tokens: int) -> int:
    return ALWAYS_READ_TOKENS // page_tokens + 1


def _number(value: object) -> int | float | None:
    """The value as an int or a float; "all" as infinity, and None for what is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # a Fraction beyond float64
            return None
    if not isinstance(value, str):
        return None
    if value == "all":
        return math.inf
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return None


def _refusal(value: object, advice: str = "") -> ValueError:
    return ValueError(f"budget = {value!r}, expected {ALLOWED}{advice}")
