"""The tables that tools/update_tables.py makes of the result files of `locks bench`."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import keep_comparison as keep
import tables as made
from tables import gpu, quality


@pytest.fixture
def results(monkeypatch, tmp_path):
    """The folder that result files are read from: one of this test."""
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    return tmp_path


def row(backend, context, batch, median_us, kind="serve", **more):
    told = {
        "name": f"{kind}:shape", "backend": backend, "context": context, "batch": batch, "median_us": median_us,
        "p10_us": median_us, "p90_us": median_us, "steps": 30, "speedup": None,
    }  # fmt: skip
    if backend == "locks":
        told |= {"budget": "2048", "format": "fine", "tokens_per_second": 1e6 * batch / median_us}
        told |= {"bytes": 1e9, "bytes_dense": 14e9, "reads": "as set"}
    return told | more


def write(results, name, rows, gpus=1, **more):
    result = {
        "machine": "NVIDIA H200", "driver": "580", "versions": {"vllm": "0.26.0", "torch": "2.11"},
        "date": "2026-11-30", "settings": {"tensor_parallel": gpus, "layers": 28}, "rows": rows,
    }  # fmt: skip
    (results / f"{name}.json").write_text(json.dumps(result | more))


def test_shapes_of_several_files_stand_in_one_table(results):
    write(results, "serve_qwen", [row("flash_attn", 1000, 1, 9000.0), row("locks", 1000, 1, 3000.0, speedup=3.0)])
    write(results, "serve_llama", [row("flash_attn", 1000, 2, 8000.0), row("locks", 1000, 2, 4000.0, speedup=2.0)])
    text = gpu.serve_table()
    assert "| Qwen2.5-7B-1M, 1,000 x 1 | 9.00 ms (9.00 to 9.00) | 3.00 ms (3.00 to 3.00) | **3.00x** | 333 |" in text
    assert "| Llama-3.1-8B, 1,000 x 2 |" in text and "14.0x less" in text
    assert text.count("NVIDIA H200") == 1


def test_what_was_not_measured_is_told_and_machines_that_differ_too(results):
    dense = [row("flash_attn", 1000, 1, 9000.0), row("flash_attn_fp8", 1000, 1, 6000.0)]
    write(results, "serve_qwen", [*dense, row("locks", 1000, 1, 3000.0, speedup=3.0)])
    write(results, "serve_llama_tp2", [row("locks", 1000, 1, 2000.0)], gpus=2, versions={"vllm": "1", "torch": "2"})
    text = gpu.serve_table()
    assert "| 9.00 ms (9.00 to 9.00) | 6.00 ms (6.00 to 6.00) | 3.00 ms (3.00 to 3.00) |" in text
    assert "two GPUs, 1,000 x 1 | not measured | not measured | 2.00 ms (2.00 to 2.00) |  |" in text
    assert "Qwen2.5-7B-1M: one NVIDIA H200, driver 580, vLLM 0.26.0, torch 2.11" in text
    assert "Llama-3.1-8B, two GPUs: two NVIDIA H200, driver 580, vLLM 1, torch 2" in text


def test_crossovers_have_a_table_of_their_own(results):
    assert gpu.crossover_table() == "Not measured yet.\n"
    rows = [row("locks", 8192, 1, time, "crossover", reads=reads) for reads, time in (("whole", 2e3), ("sparse", 1e3))]
    write(results, "serve_qwen", [row("flash_attn", 8192, 1, 3000.0, "crossover"), *rows])
    assert "8,192 x 1 | 3.00 ms (3.00 to 3.00) | 2.00 ms (2.00 to 2.00) | 1.00 ms (1.00 to 1.00) |" in (
        gpu.crossover_table()
    )


def test_records_cost_prompts_a_share(results):
    assert gpu.prefill_table() == "Not measured yet.\n"
    rows = [row(backend, 32768, 1, time, "prefill") for backend, time in (("flash_attn", 1e6), ("locks", 1.015e6))]
    write(results, "prefill_qwen", rows)
    text = gpu.prefill_table()
    assert "Qwen2.5-7B-1M, 32,768 |" in text and "| +1.5 % |" in text and "28 layers of Qwen2.5-7B-1M" in text


def test_kernels_stand_beside_flash_attention_where_it_was_timed(results):
    kernel = {
        "name": "chain:1000000x1", "format": "fine", "context": 1_000_000, "batch": 1, "median_us": 50.0,
        "p10_us": 49.0, "p90_us": 51.0, "bytes": 140e6, "percent_of_peak": 61.0, "dense_us": 450.0, "speedup": 9.0,
    }  # fmt: skip
    shape = {"layers": 28, "query_heads": 28, "kv_heads": 4, "head_dim": 128}
    more = {"shape": shape, "budget": 2048, "replays": 11, "read_ceiling_tb_per_s": 4.6, "commit": "0123456789"}
    score = {**kernel, "name": "score:1000000x1", "dense_us": None, "speedup": None}
    write(results, "kernels", [kernel, score], **more)
    text = gpu.kernels_table()
    assert "| chain | `fine` | 1,000,000 x 1 | 50.0 (49.0 to 51.0) | 140.0 | 61 % | 450.0 (9.0x) |" in text
    assert "| score | `fine` | 1,000,000 x 1 | 50.0 (49.0 to 51.0) | 140.0 | 61 % |  |" in text
    write(results, "kernels", [{**kernel, "dense_us": None}], **more)
    assert "FlashAttention-3" not in gpu.kernels_table()


def comparison(tmp_path):
    """A result of `locks quality --json`, of one model, as the tool that keeps it finds it."""
    base = {"model": "m", "trace": None, "layer": None, "kv_head": None, "selector": "locks", "format": "fine"}
    numbers = {"page_tokens": 4, "retained": 0.9, "retained_p5": 0.61234567, "gap": 0.0125, "bytes_per_step": 276480.0}
    rows = [
        base | numbers | {"scope": "model", "budget": budget, "carriers_kept": kept, "output_error": 0.1}
        for budget, kept in (("0.02", None), ("256", 0.5), ("512", 0.75), ("1024", 1.0), ("2048", 1.0))
    ]
    ratios = {"residual_to_tail": {"median": 0.5, "max": 0.8}}
    pages, steps = (dict.fromkeys(names, [0.5]) for names in (keep.SHOWN_OF_PAGES, keep.SHOWN_OF_STEPS))
    chain = {"model": "m", "layer": 0, "format": "fine", "budget": "512", "ratios": ratios}
    chain |= {"pages": pages | {"other": [1.0]}, "steps": steps}
    bases = {"page_basis": 0.6, "sequence_basis": 0.2, "layer_basis": 0.1}
    energy = {"model": "m", "layer": 0, "page_tokens": 4, "rank": 1}
    result = {
        "about": {"machine": "here", "torch": "2.11", "date": "2026-11-30T00:00:00"},
        "traces": [{"model": "m", "trace": "t", "tokens": 8160, "layers": 30}],
        "rows": [*rows, base | numbers | {"scope": "head", "budget": "512"}],
        "energy": [energy | bases | {"kv_head": 0}, energy | bases | {"kv_head": 1, "page_basis": 0.8}],
        "chain": [chain | {"kv_head": 0}, chain | {"kv_head": 1}],
    }
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    return path


def test_a_comparison_is_kept_without_its_heads_and_stands_in_a_table(tmp_path, monkeypatch):
    (tmp_path / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(keep, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["keep_comparison.py", str(comparison(tmp_path)), "comparison"])
    assert keep.main() == 0
    kept = json.loads((tmp_path / "bench" / "results" / "comparison.json").read_text())
    assert [row["scope"] for row in kept["rows"]] == ["model"] * 5 and kept["rows"][0]["retained_p5"] == 0.61235
    assert "carriers_kept" not in kept["rows"][0] and "trace" not in kept["rows"][0]
    assert [row["page_basis"] for row in kept["energy"]] == [pytest.approx(0.7)]
    (samples,) = kept["chain_samples"]
    assert samples["pages"] == dict.fromkeys(keep.SHOWN_OF_PAGES, [0.5]) and "kv_head" not in samples
    assert kept["chain"][0]["num_heads"] == 2 and kept["chain"][0]["residual_to_tail"]["max"] == 0.8
    monkeypatch.setattr(made, "RESULTS", tmp_path / "bench" / "results")
    monkeypatch.setattr(quality, "COMPARISONS", {"comparison": "M"})
    text = quality.comparison_table()
    assert "| M: `fine` | 90.00 / 61.2 | 90.00 / 61.2 |" in text and "| 1.25 | 270 | 0.75 | 0.100 |" in text
    assert "M (m): t; 8,160 tokens, 30 layers." in text
