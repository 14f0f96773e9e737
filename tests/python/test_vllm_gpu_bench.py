"""`locks bench` without a GPU: its arguments, its arithmetic, and what it makes of the answers of an engine."""

import json
import sys
from types import SimpleNamespace

import pytest

from locks.commands import CommandError, bench
from locks.commands.bench import BACKENDS, Bench, EngineError, compare, run_engine
from locks.commands.bench_engine import EngineJob, engine_arguments, summary
from locks.commands.shapes import load_shape

MACHINE = {"machine": "GPU", "driver": "1", "versions": {}, "commit": None, "date": ""}


def a_bench(**changes):
    arguments = {
        "shape": "qwen2.5-7b-1m", "backends": "flash_attn,locks", "budget": "2048", "options": "{}", "engine": "{}",
        "json_file": None,
    }  # fmt: skip
    return Bench(**arguments | changes)


def a_row(context, batch=1, median_us=5000.0, **more):
    times = {"median_us": median_us, "p10_us": 1.0, "p90_us": 2.0, "steps": 50}
    return {"context": context, "batch": batch} | times | more


@pytest.mark.parametrize("name", ["qwen2.5-7b-1m", "llama-3.1-8b"])
def test_shapes_come_with_the_package(name):
    config = load_shape(name)
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    assert config["max_position_embeddings"] >= 2**20


def test_a_shape_may_be_a_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_shape(str(tmp_path)) == {"model_type": "llama"}
    with pytest.raises(CommandError, match="config.json has no 'num_attention_heads'"):
        a_bench(shape=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("serve", "no-such-shape"), "expected llama-3.1-8b, qwen2.5-7b-1m, or a folder"),
        (("serve", "--cases", "1000"), "expected tokens of context x sequences"),
        (("serve", "--cases", "1000x0"), "--cases: '1000x0', expected tokens of context x sequences"),
        (("serve", "--cases", ","), "expected at least one"),
        (("serve", "--backends", "fa4"), "expected flash_attn, locks, flashinfer"),
        (("serve", "--budget", "1.0"), "budget = '1.0', expected"),
        (("serve", "--options", "[1]"), "expected a JSON object"),
        (("serve", "--engine", "{"), "--engine = '{'"),
        (("serve", "--json", "/no/such/folder/x.json"), "expected a file in a folder that exists"),
        (("prefill", "--prompts", "many"), "--prompts: 'many', expected a number of tokens >= 2"),
    ],
)
def test_bad_arguments_are_named(call_locks, arguments, reason):
    result = call_locks("bench", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("locks: ") and result.stderr.count("\n") == 1
    assert reason in result.stderr


def test_a_machine_without_a_gpu_is_told(monkeypatch, call_locks):
    import importlib.metadata

    result = call_locks("bench", "serve")
    assert result.returncode == 2 and "vLLM for CUDA is not installed here" in result.stderr
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.26.0" if name == "vllm" else version(name))
    assert "torch sees no CUDA device" in call_locks("bench", "serve").stderr


def test_an_engine_gets_a_full_cache_and_graphs_of_its_batch():
    job = EngineJob({}, "CUSTOM", [(1000, 1), (2000, 7)], locks={"budget": 512}, steps=40)
    arguments = engine_arguments(job, "MODEL")
    assert arguments["max_num_seqs"] == 8
    assert arguments["max_model_len"] == 2041
    assert arguments["kv_transfer_config"]["kv_connector"] == "DecodeBenchConnector"
    assert arguments["kv_transfer_config"]["kv_connector_extra_config"]["fill_std"] == 1.0
    assert arguments["additional_config"] == {"locks": {"budget": 512}}
    plain = engine_arguments(EngineJob({}, "FLASH_ATTN", [(9, 1)], prefill=True, engine={"seed": 3}), "MODEL")
    assert "kv_transfer_config" not in plain and "additional_config" not in plain
    assert plain["seed"] == 3


def test_times_are_told_in_microseconds():
    told = summary([seconds / 1000 for seconds in range(1, 12)])
    assert told == {"median_us": 6000.0, "p10_us": 2000.0, "p90_us": 10000.0, "steps": 11}
    with pytest.raises(RuntimeError, match="--steps"):
        summary([])


def test_bytes_agree_with_arithmetic_or_the_row_tells():
    sparse = a_row(1_000_000, bytes=28 * 4 * (62_500 * 544 + 2048 * 512), sparse_share=1.0, invalid_records=0)
    row = a_bench()._row("serve", BACKENDS["locks"], sparse)
    assert row["bytes_expected"] == row["bytes"]
    assert row["tokens_per_second"] == 200
    assert (row["name"], row["format"], row["budget"]) == ("serve:qwen2.5-7b-1m", "fine", "2048")
    assert "problem" not in row
    row = a_bench()._row("serve", BACKENDS["locks"], {**sparse, "bytes": 1.02 * sparse["bytes"]})
    assert row["problem"].startswith("1000000x1: a step read")
    row = a_bench()._row("serve", BACKENDS["locks"], {**sparse, "invalid_records": 3.0})
    assert "3.0 invalid records a step" in row["problem"]


def test_dense_rows_read_all_keys_and_values():
    row = a_bench()._row("serve", BACKENDS["flash_attn"], a_row(131_072, 8))
    assert row["bytes"] == 8 * 131_072 * 57_344
    half = a_bench()._row("serve", BACKENDS["flash_attn_fp8"], a_row(131_072, 8))
    assert half["bytes"] == row["bytes"] / 2
    short = a_row(1024, bytes=1054 * 57_344, sparse_share=0.0, invalid_records=0)
    assert a_bench()._row("serve", BACKENDS["locks"], short)["bytes_expected"] == 1024 * 57_344


def test_rows_are_set_beside_flash_attention():
    rows = [
        a_row(1000, 1, 900.0, backend="flash_attn"),
        a_row(1000, 1, 300.0, backend="locks"),
        a_row(2000, 1, 300.0, backend="locks"),
    ]
    compare(rows)
    assert [row["speedup"] for row in rows] == [1.0, 3.0, None]
    assert [row["dense_us"] for row in rows] == [900.0, 900.0, None]


def engine_that(monkeypatch, tmp_path, body):
    """Replaces the engine's process by a script."""
    script = tmp_path / "engine.py"
    script.write_text(body)
    popen = bench.subprocess.Popen

    def start(command, **settings):
        return popen([sys.executable, str(script)], **settings)

    monkeypatch.setattr(bench.subprocess, "Popen", start)


def test_rows_of_an_engine_come_one_by_one(monkeypatch, tmp_path):
    engine_that(
        monkeypatch, tmp_path,
        "import json, sys\njob = json.load(sys.stdin)\nprint(json.dumps({'doing': 'work'}))\n"
        "for case in job['cases']: print(json.dumps({'row': {'context': case[0]}}))",
    )  # fmt: skip
    said = []
    rows = list(run_engine(EngineJob({}, "X", [(5, 1), (6, 1)]), said.append))
    assert rows == [{"context": 5}, {"context": 6}] and said == ["work"]


def test_an_engine_that_fails_is_told_with_its_reason(monkeypatch, tmp_path, capsys):
    engine_that(monkeypatch, tmp_path, "import sys; sys.stdin.read(); raise ValueError('no room')")
    with pytest.raises(EngineError, match="code 1: ValueError: no room"):
        list(run_engine(EngineJob({}, "X", [(5, 1)]), lambda text: None))
    assert "Traceback" in capsys.readouterr().err


def test_what_one_backend_cannot_do_the_others_still_do(monkeypatch, tmp_path, capsys):
    def engine(job, say):
        if job.backend == "FLASHINFER":
            raise EngineError("not installed")
        yield a_row(1000, 1, 900.0)

    monkeypatch.setattr(bench, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(bench, "run_engine", engine)
    target = tmp_path / "out.json"
    with pytest.raises(CommandError, match="flashinfer: not installed"):
        a_bench(backends="flash_attn,flashinfer", json_file=str(target)).run("serve", [(1000, 1)])
    told = json.loads(target.read_text())
    assert [row["backend"] for row in told["rows"]] == ["flash_attn"]
    assert told["not_measured"] == ["flashinfer: not installed"]
    out, err = capsys.readouterr()
    assert "1000 x 1" in out and "serve:qwen2.5-7b-1m flash_attn 1000 x 1: 0.900 ms" in err


def test_a_row_with_a_problem_stays_and_ends_the_command(monkeypatch, tmp_path):
    row = a_row(1_000_000, bytes=5.0, sparse_share=1.0, invalid_records=0)
    monkeypatch.setattr(bench, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(bench, "run_engine", lambda job, say: iter([row]))
    target = tmp_path / "out.json"
    with pytest.raises(CommandError, match="locks: 1000000x1: a step read 5 bytes"):
        a_bench(backends="locks", json_file=str(target)).run("serve", [(1_000_000, 1)])
    assert len(json.loads(target.read_text())["rows"]) == 1


def test_the_cache_must_hold_what_is_asked(monkeypatch):
    from locks.commands.bench_engine import Measurement

    cache = SimpleNamespace(num_gpu_blocks=10, block_size=16)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache)))
    measurement = Measurement(EngineJob({}, "X", [(100, 2)]), llm, lambda message: None)
    with pytest.raises(RuntimeError, match="100x2 needs 320 tokens of cache, the engine has 160"):
        measurement.decode(100, 2)
