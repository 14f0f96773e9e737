"""locks bench cpu on small cases, and the operators that it times."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cache_case import CacheCase

from locks import ops
from locks.commands import bench_cpu
from locks.commands.bench_cpu import fit_line


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locks.cli", "bench", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_stage_is_timed_beside_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    file = tmp_path / "cpu.json"
    result = run("--tokens", "2048", "--lengths", "1024,4096", "--kv-heads", "2", "--repeats", "5", "--json", str(file))
    assert result.returncode == 0, result.stderr  # vLLM's output was LOCKS's
    told = json.loads(file.read_text())
    rows = {row["name"]: row for row in told["rows"]}
    assert set(rows) == {
        "score:1024x1", "chain:1024x1", "score:2048x1", "chain:2048x1", "summarise:2048x1", "vllm:2048x1",
        "score:4096x1", "chain:4096x1",
    }
    assert told["read_peak_gb_per_s"] > 0.5 and told["not_measured"] == []
    assert rows["score:2048x1"]["bytes"] == 2048 // 16 * 2 * 544
    assert rows["vllm:2048x1"]["bytes"] == 2048 * 2 * 128 * 2 * 2
    chain = rows["chain:2048x1"]
    assert rows["score:2048x1"]["bytes"] < chain["bytes"] < rows["vllm:2048x1"]["bytes"]
    assert chain["speedup"] == pytest.approx(rows["vllm:2048x1"]["median_us"] / chain["median_us"])
    for row in rows.values():
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
    assert "of read" in result.stdout and "per 1,000 tokens" in result.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--head-dim", "100"), "--head-dim = 100, expected 64, 80, 96, 128, 192, 256"),
        (("--budget", "2"), "--budget = 2.0, expected a fraction"),
        (("--lengths", "8192,many"), "--lengths: 'many', expected numbers of tokens"),
        (("--lengths", "9" * 5000), "expected numbers of tokens"),
        (("--threads", "9999"), "--threads = 9999, expected 1 to"),
        (("--tokens", str(2**50)), f"{2**50} tokens, expected at most"),
        (("--lengths", "64,999999999999"), "999999999999 tokens, expected at most"),
        (("--format", "coarse"), "coarse"),
        (("--group", "72", "--tokens", "64", "--lengths", "64"), "71"),  # which a decode step would refuse
        (("--json", "no/such/folder/x.json"), "expected a file in a folder that exists"),
    ],
)
def test_refusals_come_first(options: tuple[str, ...], reason: str) -> None:
    result = run(*options)
    assert result.returncode == 2 and result.stdout == ""
    assert reason in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.endswith("; see `locks bench cpu --help`\n")


def test_the_largest_group_is_that_of_the_kernels() -> None:
    header = (Path(__file__).parents[2] / "include/locks/score.h").read_text()
    assert f"kMaxGroupSize = {bench_cpu.MOST_GROUP};" in header


def test_a_line_is_fitted_through_all_contexts() -> None:
    rows = [{"name": f"chain:{n}x1", "context": n, "median_us": 40 + 0.002 * n} for n in (1000, 8000, 64000)]
    fit = fit_line(rows, "chain")
    assert fit is not None
    assert fit["at_zero_us"] == pytest.approx(40) and fit["per_1000_tokens_us"] == pytest.approx(2)
    assert fit["largest_deviation"] < 1e-9
    rows[2]["median_us"] *= 2
    assert fit_line(rows, "chain")["largest_deviation"] > 0.1
    assert fit_line(rows[:1], "chain") is None


def on_lines(keys: torch.Tensor) -> torch.Tensor:
    """Keys like these whose pages of four tokens each lie on one line, as a summary of rank 1 can say."""
    pages = keys.reshape(-1, 4, *keys.shape[1:])
    places = torch.tensor([-1.0, 0.0, 0.5, 0.5])[None, :, None, None]
    return (pages[:, :1] + places * 0.3 * pages[:, 1:2]).reshape(keys.shape)


def test_score_pages_estimates_the_log_mass_of_each_page() -> None:
    case = CacheCase(lengths=(64, 32), format_name="fine8")
    case.keys_of = [on_lines(keys) for keys in case.keys_of]
    for i, keys in enumerate(case.keys_of):
        ops.write_cache(keys, case.values_of[i], case.slots(i), case.cache)
    case.summarise()
    heads = case.query.shape[1]
    counts = [n // 4 for n in case.lengths]
    scores = torch.full((sum(counts) * heads,), math.nan)
    ops.score_pages(
        case.query, case.lens, case.records, case.table, case.kv_heads, case.form.code, case.scale, scores
    )
    for i, mine in enumerate(scores.split([count * heads for count in counts])):
        keys = case.keys_of[i].repeat_interleave(case.group, 1)  # [token, query head, channel]
        logits = torch.einsum("hc,thc->ht", case.query[i], keys) * case.scale
        exact = logits.reshape(heads, counts[i], 4).logsumexp(2)
        # Scores spread by about 4; int8 rows and int4 places on the line are off by some hundredths.
        torch.testing.assert_close(mine.reshape(heads, counts[i]), exact, atol=0.2, rtol=0)
        assert exact.std() > 2


def test_score_pages_checks_its_arguments() -> None:
    case = CacheCase()
    total = sum(math.ceil(n / 4) for n in case.lengths) * case.query.shape[1]
    arguments = (case.query, case.lens, case.records, case.table, case.kv_heads, case.form.code, case.scale)
    with pytest.raises(RuntimeError, match=rf"score_pages: scores: expected \[{total}\]"):
        ops.score_pages(*arguments, torch.empty(total + 1))
    with pytest.raises(RuntimeError, match="score_pages: lengths"):
        ops.score_pages(case.query, case.lens[:2], *arguments[2:], torch.empty(total))


def test_read_words_adds_all_words() -> None:
    words = torch.arange(1 << 17)
    assert ops.read_words(words) == int(words.sum())
    assert ops.read_words(words[:0]) == 0
    with pytest.raises(RuntimeError, match="words: expected a multiple of 64, got 12"):
        ops.read_words(words[:12])
