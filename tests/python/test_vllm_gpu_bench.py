"""`locks bench` without a GPU: its arguments, its arithmetic, and what it makes of the answers of an engine."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_cli import assert_one_line_refusal

from locks.commands import CommandError, bench, bench_process
from locks.commands.bench import BACKENDS, Bench, compare
from locks.commands.bench_append import earlier_rows
from locks.commands.bench_engine import SPARSE, WHOLE, Case, EngineJob, Measurement, engine_arguments, summary
from locks.commands.bench_process import Engine, EngineError
from locks.commands.bench_report import crossovers
from locks.commands.shapes import cut_layers, load_shape

MACHINE = {"machine": "GPU", "driver": "1", "versions": {"vllm": "0.26.0"}, "commit": None, "date": ""}


def a_bench(**changes):
    arguments = {
        "command": "locks bench serve", "shape": "qwen2.5-7b-1m", "backends": "flash_attn,locks", "budget": "2048",
        "options": "{}", "engine": "{}", "json_file": None,
    } | changes  # fmt: skip
    return Bench(config=load_shape(arguments["shape"]), **arguments)


def a_row(context, batch=1, median_us=5000.0, kind="serve", **more):
    times = {"median_us": median_us, "p10_us": 0.9 * median_us, "p90_us": 1.1 * median_us, "steps": 50}
    return {"kind": kind, "context": context, "batch": batch} | times | more


def a_locks_row(context, batch=1, **more):
    """What LOCKS counted, here for contexts that it reads whole."""
    dense = batch * context * 57_344
    return a_row(
        context, batch, **{"bytes": dense, "bytes_dense": dense, "sparse_share": 0.0, "invalid_records": 0} | more
    )


@pytest.mark.parametrize("name", ["qwen2.5-7b-1m", "llama-3.1-8b"])
def test_shapes_come_with_the_package(name):
    config = load_shape(name)
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    assert config["max_position_embeddings"] >= 2**20


def test_a_shape_may_be_a_folder(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_shape(str(tmp_path)) == config
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CommandError, match="config.json has no 'num_attention_heads'"):
        a_bench(shape=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("serve", "no-such-shape"), "expected llama-3.1-8b, qwen2.5-7b-1m, or a folder"),
        (("prefill", "--layers", "29"), "--layers = 29, expected at most 28, the model's"),
    ],
)
def test_shapes_that_are_not_there_are_named(call_locks, arguments, reason):
    result = call_locks("bench", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("locks: ") and result.stderr.count("\n") == 1
    assert reason in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("serve", "--cases", "1000"), "expected tokens of context x sequences"),
        (("serve", "--cases", "1000x0"), "--cases: '1000x0', expected tokens of context x sequences"),
        (("serve", "--cases", ","), "expected at least one"),
        (("serve", "--backends", "fa4"), "expected flash_attn, locks, flashinfer"),
        (("serve", "--budget", "1.0"), "budget = '1.0', expected"),
        (("serve", "--options", "[1]"), "expected a JSON object"),
        (("serve", "--engine", "{"), "--engine = '{'"),
        (("serve", "--json", "/no/such/folder/x.json"), "expected a file in a folder that exists"),
        (("serve", "--crossover", "4096"), "--crossover: '4096', expected tokens of context x sequences"),
        (("serve", "--append"), "--append: --json = None, expected a file that an earlier run wrote"),
        (("prefill", "--prompts", "many"), "--prompts: 'many', expected a number of tokens >= 2"),
        (("prefill", "--prompts", "1"), "--prompts: '1', expected a number of tokens >= 2"),
        (("serve", "--cases", "9" * 5000 + "x1"), "expected tokens of context x sequences"),
        (("serve", "--crossover", "1024x" + "9" * 5000), "expected tokens of context x sequences"),
        (("prefill", "--prompts", "9" * 5000), "expected a number of tokens >= 2, of at most 12 digits"),
        (("serve", "--backends", "locks, locks"), "--backends: 'locks' is there twice"),
        (("serve", "--cases", "1024x1,8192x1,01024x1"), "--cases: '01024x1' is there twice"),
        (("serve", "--crossover", "1024x1,1024x1"), "--crossover: '1024x1' is there twice"),
        (("prefill", "--prompts", "32,32"), "--prompts: '32' is there twice"),
        (("serve", "--options", '{"budget": 5}'), "'budget' has an option of its own, --budget"),
        (("prefill", "--options", '{"dense_layer": [1]}'), "'dense_layer'; did you mean 'dense_layers'?"),
        (("serve", "--options", '{"dense_layers": [28]}'), "layer 28, expected 0 to 27, the model's layers"),
        (("serve", "--options", '{"formats": ' + "[" * 900 + "]" * 900 + "}"), "formats"),
        (("serve", "--json", "tests"), "--json = 'tests' is a folder, expected a file that you may write, or -"),
        (("serve", "--append", "--json", "-"), "--append: --json = '-', expected a file that an earlier run wrote"),
        (("serve",), "vLLM for CUDA is not installed here"),
        (("prefill", "--engine", "{"), "--engine = '{'"),
    ],
)
def test_refusals_name_the_command(call_locks, monkeypatch, arguments, reason):
    monkeypatch.chdir(Path(__file__).parents[2])
    result = call_locks("bench", *arguments)
    assert_one_line_refusal(result, reason)
    assert result.stderr.endswith(f"; see `locks bench {arguments[0]} --help`\n")
    assert len(result.stderr) < 2500


def test_a_machine_without_a_gpu_is_told(monkeypatch, call_locks):
    import importlib.metadata

    result = call_locks("bench", "serve")
    assert result.returncode == 2 and "vLLM for CUDA is not installed here" in result.stderr
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.26.0" if name == "vllm" else version(name))
    assert "torch sees no CUDA device" in call_locks("bench", "serve").stderr


def test_an_engine_gets_a_full_cache_and_graphs_of_its_batch():
    job = EngineJob({}, "CUSTOM", [Case("serve", 1000), Case("serve", 2000, 7)], locks={"budget": 512}, steps=40)
    arguments = engine_arguments(job, "MODEL")
    assert arguments["max_num_seqs"] == 8
    assert arguments["max_model_len"] == 2041
    assert arguments["kv_transfer_config"]["kv_connector"] == "DecodeBenchConnector"
    assert arguments["kv_transfer_config"]["kv_connector_extra_config"]["fill_std"] == 1.0
    assert arguments["additional_config"] == {"locks": {"budget": 512}}
    plain = engine_arguments(
        EngineJob({}, "FLASH_ATTN", [Case("prefill", 9)], prefill=True, engine={"seed": 3}), "MODEL"
    )
    assert "kv_transfer_config" not in plain and "additional_config" not in plain
    assert plain["seed"] == 3


def test_times_are_told_in_microseconds():
    told = summary([seconds / 1000 for seconds in range(1, 12)])
    assert told == {"median_us": 6000.0, "p10_us": 2000.0, "p90_us": 10000.0, "steps": 11}
    with pytest.raises(RuntimeError, match="--steps"):
        summary([])


def test_bytes_agree_with_arithmetic_or_the_row_tells():
    read = 28 * 4 * (62_500 * 544 + 2048 * 512)
    sparse = a_locks_row(1_000_000, bytes=read, sparse_share=1.0)
    row = a_bench()._row(BACKENDS["locks"], sparse)
    assert row["bytes_expected"] == row["bytes"]
    assert row["tokens_per_second"] == 200
    assert (row["name"], row["format"], row["budget"]) == ("serve:qwen2.5-7b-1m", "fine", "2048")
    assert "problem" not in row and "kind" not in row
    row = a_bench()._row(BACKENDS["locks"], {**sparse, "bytes": 1.02 * read})
    assert row["problem"].startswith("1000000x1: a step read")
    row = a_bench()._row(BACKENDS["locks"], {**sparse, "bytes_dense": 0.98 * sparse["bytes_dense"]})
    assert row["problem"].startswith("1000000x1: a step counted")
    row = a_bench()._row(BACKENDS["locks"], {**sparse, "invalid_records": 3.0})
    assert "3.0 invalid records a step" in row["problem"]


def test_dense_rows_read_all_keys_and_values():
    row = a_bench()._row(BACKENDS["flash_attn"], a_row(131_072, 8))
    assert row["bytes"] == 8 * 131_072 * 57_344
    half = a_bench()._row(BACKENDS["flash_attn_fp8"], a_row(131_072, 8))
    assert half["bytes"] == row["bytes"] / 2
    short = a_bench()._row(BACKENDS["locks"], a_locks_row(1024, bytes=1054 * 57_344, bytes_dense=1054 * 57_344))
    assert short["bytes_expected"] == 1024 * 57_344 and "problem" not in short


def test_crossovers_are_timed_whole_and_by_records_and_by_others_once():
    cases = [Case("serve", 5), Case("crossover", 9, 1, WHOLE), Case("crossover", 9, 1, SPARSE)]
    settings = {"steps": 40}
    assert a_bench()._job(BACKENDS["locks"], cases, settings).cases == cases
    assert a_bench()._job(BACKENDS["flash_attn"], cases, settings).cases == [Case("serve", 5), Case("crossover", 9)]


def test_a_crossover_is_the_context_from_which_records_win():
    times = {
        (1, 4096): (10.0, 11.0), (1, 8192): (12.0, 12.0), (1, 16384): (16.0, 13.0), (8, 4096): (9.0, 10.0),
    }  # fmt: skip
    rows = [
        a_row(context, batch, time, reads=reads)
        for (batch, context), pair in times.items()
        for reads, time in zip((WHOLE, SPARSE), pair, strict=True)
    ]
    assert crossovers(rows) == {1: 8192, 8: None}
    assert crossovers([a_row(1000)]) == {}


def test_fewer_layers_of_a_model():
    config = cut_layers(load_shape("qwen2.5-7b-1m") | {"layer_types": ["full_attention"] * 28}, 4)
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 4
    assert cut_layers({"text_config": config}, 2)["text_config"]["num_hidden_layers"] == 2


def test_rows_are_set_beside_flash_attention():
    rows = [
        a_row(1000, 1, 900.0, backend="flash_attn", name="a"),
        a_row(1000, 1, 300.0, backend="locks", name="a"),
        a_row(2000, 1, 300.0, backend="locks", name="a"),
    ]
    compare(rows)
    assert [row["speedup"] for row in rows] == [1.0, 3.0, None]
    assert [row["dense_us"] for row in rows] == [900.0, 900.0, None]


def engine_that(monkeypatch, tmp_path, body):
    """Replaces the engine's process by a script."""
    script = tmp_path / "engine.py"
    script.write_text(body)
    popen = bench_process.subprocess.Popen

    def start(command, **settings):
        return popen([sys.executable, str(script)], **settings)

    monkeypatch.setattr(bench_process.subprocess, "Popen", start)


def answers_of(cases):
    said = []
    with Engine() as engine:
        return list(engine.measure(EngineJob({}, "X", cases), said.append)), said


def test_answers_of_an_engine_come_one_by_one(monkeypatch, tmp_path):
    engine_that(
        monkeypatch, tmp_path,
        "import json, sys\njob = json.load(sys.stdin)\nprint(json.dumps({'doing': 'work'}))\n"
        "for case in job['cases']: print(json.dumps({'row': case}))",
    )  # fmt: skip
    rows, said = answers_of([Case("serve", 5), Case("crossover", 6, 2, WHOLE)])
    assert [row["row"]["context"] for row in rows] == [5, 6] and said == ["work"]
    assert rows[1]["row"] == {"kind": "crossover", "context": 6, "batch": 2, "reads": WHOLE}


@pytest.mark.parametrize("reads_its_job", ["sys.stdin.read(); ", ""])
def test_an_engine_that_fails_is_told_with_its_reason(monkeypatch, tmp_path, capsys, reads_its_job):
    engine_that(monkeypatch, tmp_path, f"import sys; {reads_its_job}raise ValueError('no room')")
    with pytest.raises(EngineError, match="code 1: ValueError: no room"):
        answers_of([Case("serve", 5)])
    assert "Traceback" in capsys.readouterr().err


class FakeEngine:
    """Answers as `answers` of the class tells, by vLLM's name of the backend."""

    answers: dict = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def measure(self, job, say):
        answer = self.answers[job.backend]
        if isinstance(answer, Exception):
            raise answer
        yield from answer


@pytest.fixture
def fake_engines(monkeypatch):
    monkeypatch.setattr(bench, "describe_machine", lambda command: MACHINE)
    monkeypatch.setattr(bench, "Engine", FakeEngine)

    def answering(**answers):
        monkeypatch.setattr(FakeEngine, "answers", answers)

    return answering


def test_what_one_backend_cannot_do_the_others_still_do(fake_engines, tmp_path, capsys):
    fake_engines(FLASH_ATTN=[{"row": a_row(1000, 1, 900.0)}], FLASHINFER=EngineError("not installed"))
    target = tmp_path / "out.json"
    with pytest.raises(CommandError, match="flashinfer: not installed"):
        a_bench(backends="flash_attn,flashinfer", json_file=str(target)).run([Case("serve", 1000)])
    told = json.loads(target.read_text())
    assert [row["backend"] for row in told["rows"]] == ["flash_attn"]
    assert told["not_measured"] == ["flashinfer: not installed"]
    out, err = capsys.readouterr()
    assert "1000 x 1" in out and "serve:qwen2.5-7b-1m flash_attn 1000 x 1: 0.900 ms" in err


def test_rows_are_appended_beside_the_dense_ones(fake_engines, tmp_path):
    target = tmp_path / "out.json"
    fake_engines(FLASH_ATTN=[{"row": a_row(1000, 1, 900.0)}], FLASHINFER=[{"row": a_row(1000, 1, 450.0)}])
    a_bench(backends="flash_attn", json_file=str(target)).run([Case("serve", 1000)], steps=40)
    more = a_bench(backends="flashinfer", json_file=str(target), append=True)
    for _ in range(2):  # a second time takes the place of the first
        more.run([Case("serve", 1000)], steps=40)
    told = json.loads(target.read_text())
    assert [(row["backend"], row["speedup"]) for row in told["rows"]] == [("flash_attn", 1.0), ("flashinfer", 2.0)]
    with pytest.raises(CommandError, match="another machine, version, commit or setting"):
        more.run([Case("serve", 1000)], steps=60)
    target.write_text("[]")
    with pytest.raises(CommandError, match="expected what an earlier run wrote"):
        more.run([Case("serve", 1000)], steps=40)


def test_json_on_stdout_is_only_json(fake_engines, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    fake_engines(FLASH_ATTN=[{"row": a_row(1000, 1, 900.0)}])
    a_bench(backends="flash_attn", json_file="-").run([Case("serve", 1000)])
    assert [row["backend"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["flash_attn"]
    assert list(tmp_path.iterdir()) == []


GOOD_ROW = {
    "name": "serve:x", "backend": "locks", "context": 1000, "batch": 1, "median_us": 5.0, "p10_us": 4.0, "p90_us": 6.0,
    "bytes": 7, "bytes_dense": 70.0, "tokens_per_second": 9.0, "reads": "whole",
}  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        [],
        "rows",
        {"rows": {}, "not_measured": []},
        {"rows": [1], "not_measured": []},
        {"rows": [{}], "not_measured": []},
        {"rows": [], "not_measured": [7]},
        {"rows": [], "not_measured": [], "versions": [1]},
        *({"rows": [GOOD_ROW | {name: [1]}], "not_measured": []} for name in GOOD_ROW),
        *({"rows": [GOOD_ROW | {name: 10**400}], "not_measured": []} for name in ("bytes_dense", "p90_us")),
        {"rows": [{name: value for name, value in GOOD_ROW.items() if name != "bytes"}], "not_measured": []},
        "[" * 100_000,
    ],
    ids=lambda told: str(told)[:60],
)
def test_what_no_run_wrote_is_not_appended_to(fake_engines, tmp_path, told):
    fake_engines(FLASH_ATTN=[{"row": a_row(1000, 1, 900.0)}])
    target = tmp_path / "out.json"
    text = json.dumps(MACHINE | {"settings": {"layers": 28}} | told if isinstance(told, dict) else told)
    target.write_text(told if isinstance(told, str) else text)
    again = a_bench(backends="flash_attn", json_file=str(target), append=True)
    with pytest.raises(CommandError, match=r"--append: '.*out.json'.* what an earlier run wrote.*; see `locks bench"):
        again.run([Case("serve", 1000)])
    assert target.read_text() == (told if isinstance(told, str) else text)


def test_results_that_are_kept_can_be_appended_to():
    results = Path(__file__).parents[2] / "bench/results"
    files = [*results.glob("serve_*.json"), *results.glob("prefill_*.json")]
    for file in files:
        told = json.loads(file.read_text())
        assert earlier_rows("locks bench serve", str(file), told, set()) == (told["rows"], told["not_measured"]), file
    assert files


def test_a_row_with_a_problem_stays_and_ends_the_command(fake_engines, tmp_path):
    fake_engines(CUSTOM=[{"row": a_locks_row(1_000_000, bytes=5.0, sparse_share=1.0)}, {"skipped": "2x2 needs more"}])
    target = tmp_path / "out.json"
    with pytest.raises(CommandError, match="locks: 1000000x1: a step read 5 bytes.*; locks: 2x2 needs more"):
        a_bench(backends="locks", json_file=str(target)).run([Case("serve", 1_000_000), Case("serve", 2, 2)])
    assert len(json.loads(target.read_text())["rows"]) == 1


def a_measurement(num_blocks, **job):
    """An engine with so many blocks of cache, whose calls into its worker are kept in a list."""
    cache = SimpleNamespace(num_gpu_blocks=num_blocks, block_size=16)
    calls = []
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache)),
        collective_rpc=lambda name, args=(): calls.append((name, *args)),
    )
    return Measurement(EngineJob({}, "X", [], **job), llm, lambda message: None), calls


def test_a_case_that_does_not_fit_is_left_out():
    measurement, _ = a_measurement(10)
    assert measurement.time(Case("serve", 100, 2)) == {"skipped": "100x2 needs 320 tokens of cache, the engine has 160"}


def test_the_length_up_to_which_locks_reads_whole_is_set_for_each_case():
    measurement, calls = a_measurement(10, locks={"dense_tokens": 5000})
    for reads in (WHOLE, SPARSE, "as set"):
        measurement.set_reads(reads)
    assert [call[1] for call in calls] == [2**31 - 1, 0, 5000]
