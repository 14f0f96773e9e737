"""What a budget may be, and how many tokens it allows."""

import math
from decimal import Decimal

import numpy as np
import pytest
from locks.budget import MAX_TOKENS, budget_tokens, parse_budget


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", math.inf),
        (1, 1.0),
        (512, 512.0),
        (512.0, 512.0),
        ("512", 512.0),
        ("1", 1.0),
        (0.02, 0.02),
        ("0.02", 0.02),
        ("2e-2", 0.02),
        (np.int64(512), 512.0),
        (np.float64(0.5), 0.5),
        (MAX_TOKENS, float(MAX_TOKENS)),
    ],
)
def test_parse_budget_takes(value, expected):
    assert parse_budget(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        0, 0.0, "0", "-0.0", -1, -0.5, "-3", 1.5, "511.5", math.nan, "nan", math.inf, -math.inf, "inf", "-inf",
        True, False, None, "", "half", "2%", "ALL", b"512", [512], Decimal("0.5"), 1 + 0j, MAX_TOKENS + 1, 10**400,
    ],
    ids=repr,
)
def test_parse_budget_refuses(value):
    with pytest.raises(ValueError) as refusal:
        parse_budget(value)
    message = str(refusal.value)
    assert message.startswith(f"budget = {value!r}, expected \"all\", a whole number of tokens >= 1, or a fraction")
    assert "\n" not in message


@pytest.mark.parametrize("value", [1.0, "1.0", "1e0", np.float64(1)], ids=repr)
def test_parse_budget_refuses_one_as_a_float_in_favour_of_all(value):
    with pytest.raises(ValueError, match='for the whole context write "all", for one token write 1$'):
        parse_budget(value)


@pytest.mark.parametrize(
    ("budget", "length", "page_tokens", "expected"),
    [
        (512.0, 8192, 4, 512),
        (511.0, 8192, 4, 508),  # whole pages
        (511.0, 8192, 16, 496),
        (0.02, 8192, 4, 164),  # 40.96 pages
        (0.02, 8192, 8, 160),  # 20.48 pages
        (2.5 / 64, 1024, 16, 96),  # 2.5 pages to the even 2, then up to the always-read set
        (6.5 / 64, 1024, 16, 96),  # 6.5 pages to the even 6
        (7.5 / 64, 1024, 16, 128),  # 7.5 pages to the even 8
        (1.0, 8192, 4, 84),  # never below 16 + 64 tokens and a page
        (1.0, 8192, 16, 96),
        (100000.0, 8192, 4, 8192),  # never above what there is
        (math.inf, 8191, 4, 8188),
        (math.inf, 3, 4, 0),
        (512.0, 50, 16, 48),
    ],
)
def test_budget_tokens(budget, length, page_tokens, expected):
    assert budget_tokens(budget, length, page_tokens) == expected
