"""Each metric of `locks quality` against plain numpy, on a small random trace."""

import math

import numpy as np
import pytest
import torch
from locks import ops
from locks.comparison import chain_of
from locks.formats import Format
from locks.key_structure import HeadEnergy, energy_shares, ideal_keys
from locks.quality import measure_steps
from locks.trace import LayerTrace

SCALE, BUDGET = 0.125, 120.0
SPANS = [(30, 41), (200, 203), (318, 320)]


@pytest.fixture(scope="module")
def head():
    """Queries that resemble keys, so that some pages matter."""
    draw = torch.Generator().manual_seed(3)
    keys = torch.randn(320, 64, generator=draw)
    alike = keys[torch.randint(320, (3, 5), generator=draw)]
    queries = alike + torch.randn(3, 5, 64, generator=draw)
    positions = torch.tensor([250, 257, 300, 311, 319], dtype=torch.int32)
    return LayerTrace(0, queries, keys, torch.randn(320, 64, generator=draw), positions, SCALE)


class Plain:
    """One step, by numpy alone."""

    def __init__(self, head, step, page_tokens):
        self.length, self.page_tokens = int(head.positions[step]) + 1, page_tokens
        self.keys, self.values = (part[: self.length].double().numpy() for part in (head.keys, head.values))
        self.queries = head.queries[:, step].double().numpy()
        weights = np.exp(self.queries @ self.keys.T * SCALE)
        self.weights = weights / weights.sum(1, keepdims=True)
        self.page_of = np.arange(self.length) // page_tokens
        self.num_pages = self.page_of[-1] + 1
        self.mass = np.stack([self.weights[:, self.page_of == page].sum(1) for page in range(self.num_pages)], 1)
        whole = self.length // page_tokens
        pages = np.arange(self.num_pages)
        self.always = (pages < 16 // page_tokens) | (pages >= whole - 64 // page_tokens)

    def choose(self, merit, tokens):
        count = int(tokens) // self.page_tokens
        order = sorted(np.flatnonzero(~self.always), key=lambda page: (-merit[page], page))
        return np.sort(np.r_[np.flatnonzero(self.always), order[: count - self.always.sum()]]).astype(int)

    def quest(self, keys):
        """Of whole pages, also where the step has only begun one."""
        pages = keys[: self.num_pages * self.page_tokens].numpy().reshape(self.num_pages, self.page_tokens, -1)
        low, high = (pages.min(1).astype(np.float16), pages.max(1).astype(np.float16))
        bounds = [np.maximum(q * low, q * high).sum(1) for q in self.queries]
        return np.max(bounds, axis=0)

    def output_error(self, chosen):
        kept = np.isin(self.page_of, chosen)
        sparse = self.weights * kept / (self.weights * kept).sum(1, keepdims=True)
        difference = np.linalg.norm((sparse - self.weights) @ self.values, axis=1)
        return difference / np.linalg.norm(self.weights @ self.values, axis=1)


@pytest.mark.parametrize(
    ("format_name", "budget"), [("fine", BUDGET), ("compact", BUDGET), ("wide", 144.0), ("fine", 0.5)]
)
def test_every_metric_is_that_of_plain_numpy(head, format_name, budget):
    form = Format.parse(format_name)
    (quality,) = measure_steps(head, "quest", form, [budget], spans=SPANS)
    for step in range(5):
        plain = Plain(head, step, form.page_tokens)
        if budget < 1:
            wanted = round(budget * plain.length / form.page_tokens) * form.page_tokens
        else:
            wanted = budget
        best = plain.choose(plain.mass.mean(0), wanted)
        chosen = plain.choose(plain.quest(head.keys), wanted)
        assert quality.retained_oracle[step] == pytest.approx(plain.mass[:, best].sum(1), abs=1e-6)
        assert quality.retained[step] == pytest.approx(plain.mass[:, chosen].sum(1), abs=1e-6)
        assert quality.output_error[step] == pytest.approx(plain.output_error(chosen), abs=1e-5)
        free = [page for page in best if not plain.always[page]]
        assert quality.recall[step] == pytest.approx(np.isin(free, chosen).mean())
        tokens = np.isin(plain.page_of, chosen).sum()
        kept = plain.length // 16 * ops.selector_bytes("quest", form.code, 64)
        assert quality.tokens_read[step] == tokens
        assert quality.bytes_read[step] == kept + tokens * 64 * 4
        assert quality.resident_bytes[step] == kept + plain.length * 64 * 4
        carriers = [set(range(begin // form.page_tokens, (min(end, plain.length) - 1) // form.page_tokens + 1))
                    if begin < plain.length else set() for begin, end in SPANS]
        assert quality.carriers_read[step].tolist() == [float(pages <= set(chosen.tolist())) for pages in carriers]
        assert quality.carriers_wanted[step].tolist() == [float(pages <= set(best.tolist())) for pages in carriers]


def test_budgets_do_not_touch_each_other(head):
    fine = Format.parse("fine")
    together = measure_steps(head, "locks", fine, [120.0, 200.0, math.inf], spans=SPANS)
    for budget, quality in zip((120.0, 200.0, math.inf), together, strict=True):
        (alone,) = measure_steps(head, "locks", fine, [budget], spans=SPANS)
        for name in ("retained", "output_error", "recall", "bytes_read", "carriers_read"):
            assert np.array_equal(getattr(quality, name), getattr(alone, name)), name
    assert (together[2].retained == 1).all() and (together[2].carriers_read == 1).all()


def test_energy_is_that_of_singular_values(head):
    second = torch.randn(320, 64, generator=torch.Generator().manual_seed(9)) * torch.linspace(0.1, 2, 64)
    heads = [head.keys, second]
    rows = energy_shares([HeadEnergy.of(keys, 8) for keys in heads])
    pages = [keys.double().numpy().reshape(40, 8, 64) for keys in heads]
    centred = [part - part.mean(1, keepdims=True) for part in pages]
    layer = np.linalg.svd(np.concatenate([part.reshape(320, 64) for part in centred]))[2]
    for part, head_rows in zip(centred, rows, strict=True):
        total = (part**2).sum()
        own = (np.linalg.svd(part, compute_uv=False) ** 2).sum(0).cumsum()
        sequence = (np.linalg.svd(part.reshape(320, 64), compute_uv=False) ** 2).cumsum()
        along = ((part.reshape(320, 64) @ layer.T) ** 2).sum(0).cumsum()
        assert [row["rank"] for row in head_rows] == [1, 2, 4]
        for row in head_rows:
            rank = row["rank"] - 1
            assert row["page_basis"] == pytest.approx(own[rank] / total)
            assert row["sequence_basis"] == pytest.approx(sequence[rank] / total)
            assert row["layer_basis"] == pytest.approx(along[rank] / total)


@pytest.mark.parametrize(("page_tokens", "rank"), [(4, 1), (8, 4), (16, 8)])
def test_ideal_keys_leave_the_spectral_tail(head, page_tokens, rank):
    back, tail = ideal_keys(head.keys[:310], page_tokens, rank)
    whole = 310 // page_tokens * page_tokens
    assert torch.equal(back[whole:], head.keys[whole:310])
    for page in range(whole // page_tokens):
        keys = head.keys[page * page_tokens : (page + 1) * page_tokens].double().numpy()
        centred = keys - keys.mean(0)
        left, singular, right = np.linalg.svd(centred, full_matrices=False)
        expected = (left[:, :rank] * singular[:rank]) @ right[:rank] + keys.mean(0)
        assert back[page * page_tokens : (page + 1) * page_tokens].numpy() == pytest.approx(expected, abs=1e-5)
        assert float(tail[page]) == pytest.approx((singular[rank:] ** 2).sum(), rel=1e-9, abs=1e-9)


def chain_tensors(head, format_name, budget=BUDGET):
    form = Format.parse(format_name)
    ideal, _ = ideal_keys(head.keys, form.page_tokens, form.rank)
    pages = torch.empty(320 // form.page_tokens, len(ops.CHAIN_PAGE_VALUES), dtype=torch.float64)
    steps = torch.empty(5, len(ops.CHAIN_STEP_VALUES), dtype=torch.float64)
    ops.measure_chain(
        head.queries, head.keys, head.values, head.positions, SCALE, 0, form.code, budget, ideal, pages, steps
    )
    return (dict(zip(names, table.T.numpy(), strict=True)) for names, table in (
        (ops.CHAIN_PAGE_VALUES, pages), (ops.CHAIN_STEP_VALUES, steps)
    ))


def test_the_ideal_links_of_the_chain_are_those_of_plain_numpy(head):
    pages, steps = chain_tensors(head, "compact")
    ideal, tail = ideal_keys(head.keys, 8, 1)
    residual = (head.keys - ideal).double().norm(dim=1).view(40, 8).amax(1).numpy()
    assert pages["ideal_residual"] == pytest.approx(residual, rel=1e-5)
    assert (residual <= np.sqrt(tail.numpy()) * (1 + 1e-6)).all()
    error, bound = np.zeros(40), np.zeros(40)
    for step in range(5):
        plain = Plain(head, step, 8)
        recorded = plain.length // 16 * 2
        reach = np.linalg.norm(plain.queries, axis=1).max() * SCALE
        stand_in = plain.keys.copy()
        stand_in[: recorded * 8] = ideal[: recorded * 8].numpy()
        scores = [np.log(np.exp(plain.queries @ part.T * SCALE) @ np.eye(plain.num_pages)[plain.page_of])
                  for part in (plain.keys, stand_in)]
        error[:recorded] = np.maximum(error[:recorded], np.abs(scores[0] - scores[1]).max(0)[:recorded])
        bound[:recorded] = np.maximum(bound[:recorded], reach * residual[:recorded])
        shares = np.exp(scores[1]) / np.exp(scores[1]).sum(1, keepdims=True)
        chosen = plain.choose(shares.mean(0), BUDGET)
        best = plain.choose(plain.mass.mean(0), BUDGET)
        assert steps["ideal_delta"][step] == pytest.approx(reach * residual[:recorded].max(), rel=1e-5)
        assert steps["ideal_retained"][step] == pytest.approx(plain.mass[:, chosen].sum(1).mean(), abs=1e-6)
        assert steps["oracle_retained"][step] == pytest.approx(plain.mass[:, best].sum(1).mean(), abs=1e-6)
    assert pages["ideal_score_error"] == pytest.approx(error, abs=1e-5)
    assert pages["ideal_score_bound"] == pytest.approx(bound, rel=1e-5)


def test_the_output_link_is_that_of_the_choice(head):
    _, steps = chain_tensors(head, "fine")
    (quality,) = measure_steps(head, "locks", Format.parse("fine"), [BUDGET])
    diameter = 2 * (head.values - head.values.mean(0)).norm(dim=1).max().item()
    for step in range(5):
        plain = Plain(head, step, 4)
        dense = np.linalg.norm(plain.weights @ plain.values, axis=1)
        assert steps["stored_retained"][step] == pytest.approx(quality.retained[step].mean(), abs=1e-9)
        assert steps["output_error"][step] == pytest.approx((quality.output_error[step] * dense).mean(), rel=1e-4)
        assert steps["output_bound"][step] == pytest.approx((1 - quality.retained[step]).mean() * diameter, rel=1e-4)


@pytest.mark.parametrize("format_name", ["fine", "fine8", "compact", "wide", "paper", "b16r1m4v4c4"])
def test_no_truth_is_above_its_bound(head, format_name):
    pages, steps = chain_tensors(head, format_name, 144.0)
    slack = 1e-3  # nats: queries are scored with 16 bits
    for khat in ("ideal", "stored"):
        assert (pages[f"{khat}_score_error"] <= pages[f"{khat}_score_bound"] + slack).all()
        bound = np.exp(-4 * steps[f"{khat}_delta"]) * steps["oracle_retained"]
        assert (steps[f"{khat}_retained"] >= bound).all()
    assert (steps["output_error"] <= steps["output_bound"]).all()
    data = chain_of(head, Format.parse(format_name), 144.0, window=0)
    assert data["ratios"]["residual_to_tail"]["max"] <= 1 + 1e-6
    assert all(ratio["max"] <= 1 + 1e-2 for ratio in data["ratios"].values())
    assert {len(values) for values in data["pages"].values()} == {16}
