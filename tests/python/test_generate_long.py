"""The judgement of tools/generate_long.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import generate_long  # noqa: E402

VARIED = [7 * place % 1009 for place in range(1200)]
LOOPING = VARIED[:600] + [1, 2, 3, 4] * 150


def test_a_loop_that_dense_does_not_have_is_told():
    row = generate_long.judge("512", {"tokens": [VARIED, LOOPING], "sparse_rows": 9}, {"tokens": [VARIED, VARIED]})
    assert row["looping"] == row["looping_where_dense_is_not"] == [1]
    assert row["first_divergence"] == [None, 600]
    assert row["lengths"] == [1200, 1200] and row["sparse_rows"] == 9
    assert row["distinct_4_grams"] < 0.8


def test_a_loop_that_dense_has_too_is_not_held_against_locks():
    row = generate_long.judge("512", {"tokens": [LOOPING]}, {"tokens": [LOOPING]})
    assert row["looping"] == [0] and row["looping_where_dense_is_not"] == []


@pytest.mark.parametrize("budget", ["0.02", "512"])
def test_budgets_are_fractions_or_tokens(budget):
    assert isinstance(generate_long.budget_of(budget), float if "." in budget else int)
