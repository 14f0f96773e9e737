"""The arms of an evaluation: a selector, what it is built of, and a budget. One engine serves them all in turn."""

from __future__ import annotations

from dataclasses import dataclass

from locks.budget import parse_budget

DENSE, LOCKS = "dense", "locks"
PAGE_TOKENS = ("4", "8", "16")


@dataclass(frozen=True)
class Arm:
    """Spelled `dense`, `locks@512`, `locks:paper@0.02` (a format), `oracle:16@512` (tokens of a page)."""

    selector: str
    variant: str | None = None
    budget: str = "all"

    @property
    def name(self) -> str:
        if self.selector == DENSE:
            return DENSE
        variant = "" if self.variant is None else f":{self.variant}"
        return f"{self.selector}{variant}@{self.budget}"

    @property
    def call(self) -> tuple[str, str | None, int | None, str]:
        """The arguments of the worker's `locks_arm_start`."""
        if self.selector in (DENSE, LOCKS):
            return self.selector, self.variant, None, self.budget
        return self.selector, None, int(self.variant) if self.variant else None, self.budget

    @property
    def product(self) -> bool:
        """Whether the product itself decodes, in the engine's own format: it tells what it retains only if asked."""
        return self.selector == LOCKS and self.variant is None


def parse_arms(selectors: str, budgets: str) -> list[Arm]:
    """Every selector with every budget; `NAME@BUDGET` among the selectors has that budget alone, and dense has none.

    Raises ValueError, naming the value and what is allowed."""
    from locks_vllm.selectors import SELECTORS

    allowed = (DENSE, LOCKS, *SELECTORS)
    common = [text.strip() for text in budgets.split(",")]
    for budget in common:
        parse_budget(budget)
    arms: list[Arm] = []
    for text in selectors.split(","):
        spelled, _, own = text.strip().partition("@")
        name, _, variant = spelled.partition(":")
        if name not in allowed:
            raise ValueError(f"selector = {name!r}, expected one of {', '.join(allowed)}")
        _check_variant(name, variant)
        if own:
            parse_budget(own)
        if name == DENSE:
            if own:
                raise ValueError(f"selector = {text.strip()!r}, expected dense alone, which has no budget")
            arms.append(Arm(DENSE))
            continue
        arms.extend(Arm(name, variant or None, budget) for budget in ([own] if own else common))
    return list(dict.fromkeys(arms))


def _check_variant(name: str, variant: str) -> None:
    if not variant:
        return
    if name == DENSE:
        raise ValueError(f"selector = 'dense:{variant}', expected dense alone")
    if name == LOCKS:
        from locks.formats import Format

        Format.parse(variant)
    elif variant not in PAGE_TOKENS:
        sizes = ", ".join(PAGE_TOKENS)
        raise ValueError(f"selector = '{name}:{variant}', expected {name} with pages of {sizes} tokens")
