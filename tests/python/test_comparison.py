"""`locks quality` over several traces, selectors, formats and budgets: pooling, files, report."""

import csv
import json

import numpy as np
import pytest
import torch
from locks.comparison import SCOPES, Comparison, Plan, check_distinct
from locks.formats import Format
from locks.quality import measure_steps
from locks.trace import LayerTrace, Trace, write_trace

pytest.importorskip("matplotlib", reason="the report's figures")
from locks.report import figures, sections  # noqa: E402


def write(path, seed, model="small", kv_heads=(0, 1), spans=((200, 201), (390, 400)), depth="0.5"):
    draw = torch.Generator().manual_seed(seed)
    positions = torch.tensor([500, 600, 639], dtype=torch.int32)
    heads = [
        LayerTrace(
            layer, torch.randn(2, 3, 64, generator=draw).half(), torch.randn(640, 64, generator=draw).half(),
            torch.randn(640, 64, generator=draw).half(), positions, 0.125, head,
        )
        for layer in (0, 4) for head in kv_heads
    ]  # fmt: skip
    metadata = {"model": model} | ({"depth": depth} if depth else {})
    write_trace(path, heads, metadata, spans)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return [
        write(folder / "one.safetensors", 1),
        write(folder / "two.safetensors", 2, depth="0.2"),
        write(folder / "other.safetensors", 3, model="other", kv_heads=(5,), spans=(), depth=None),
    ]


@pytest.fixture(scope="module")
def result(paths):
    plan = Plan.parse("locks,oracle,quest", "fine,fine8,wide", "128,0.25", energy=True, chain=True)
    comparison = Comparison(plan)
    for path in paths:
        comparison.add(Trace(path), lambda: None)
    return json.loads(json.dumps({"about": {"machine": "here"}} | comparison.as_dict()))


def rows_of(result, **wanted):
    return [row for row in result["rows"] if all(row[name] == value for name, value in wanted.items())]


def test_a_plan_takes_a_page_size_once_where_the_rest_of_the_format_does_not_matter():
    plan = Plan.parse("locks,quest,shared_low_rank", "fine,fine8,wide", "all")
    assert [(selector, form.name) for selector, form in plan.cases()] == [
        ("locks", "fine"), ("locks", "fine8"), ("locks", "wide"), ("quest", "fine"), ("quest", "wide"),
        ("shared_low_rank", "fine"), ("shared_low_rank", "fine8"), ("shared_low_rank", "wide"),
    ]  # fmt: skip
    assert plan.window == 0 and not plan.is_single() and Plan.parse("locks", "fine", "512").is_single()
    assert Plan.parse("locks,snapkv", "fine", "512").window == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("locks,best", "fine", "512"), 'selector = "best"'),
        (("locks", "fine,best", "512"), "'best'"),
        (("locks", "fine", "512,0"), "budget = '0'"),
        (("locks,locks", "fine", "512"), "selector = 'locks,locks', expected one, or several different ones"),
        (("locks", "fine,", "512"), "format = 'fine,', expected one"),
    ],
)
def test_a_plan_refuses(arguments, message):
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        Plan.parse(*arguments)
    assert message in str(refusal.value)


def test_there_is_a_row_for_each_scope_and_case(result):
    cases = 3 + 2 + 2  # selectors with formats
    count = {scope: len(rows_of(result, scope=scope)) for scope in SCOPES}
    rows = {"head": 8 + 2, "layer": 4, "trace": 3, "model": 2}
    assert count == {scope: number * cases * 2 for scope, number in rows.items()}
    for row in result["rows"]:
        assert [row[name] is not None for name in ("model", "trace", "layer", "kv_head")] == [
            name in SCOPES[row["scope"]] for name in ("model", "trace", "layer", "kv_head")
        ]


@pytest.mark.parametrize("scope", SCOPES)
def test_rows_pool_the_steps_of_their_scope(paths, result, scope):
    trace_head = {"head": [(0, 4, 1)], "layer": [(t, 4, h) for t in (0, 1) for h in (0, 1)],
                  "trace": [(0, layer, h) for layer in (0, 4) for h in (0, 1)],
                  "model": [(t, layer, h) for t in (0, 1) for layer in (0, 4) for h in (0, 1)]}[scope]
    place = {"model": "small", "trace": "one", "layer": 4, "kv_head": 1}
    (row,) = rows_of(result, scope=scope, selector="quest", format="wide", budget="0.25",
                     **{name: place[name] for name in SCOPES[scope]})
    pooled = []
    for trace, layer, head in trace_head:
        captured = Trace(paths[trace]).heads(layer)[head]
        pooled += measure_steps(captured, "quest", Format.parse("wide"), [0.25], spans=[(200, 201), (390, 400)])
    retained, oracle = (np.concatenate([getattr(q, name).ravel() for q in pooled]) for name in
                        ("retained", "retained_oracle"))
    assert row["num_heads"] == len(trace_head) and (row["budget_tokens"], row["raised"]) == (160, False)
    assert (row["retained"], row["retained_p5"], row["retained_p1"]) == pytest.approx(
        (retained.mean(), np.percentile(retained, 5), np.percentile(retained, 1)))
    assert row["gap"] == pytest.approx(oracle.mean() - retained.mean())
    for name, field in (("recall", "recall"), ("carriers_read", "carriers_read"), ("output_error", "output_error"),
                        ("tokens_read", "tokens_read"), ("bytes_per_step", "bytes_read"),
                        ("resident_bytes", "resident_bytes")):
        assert row[name] == pytest.approx(np.mean([getattr(q, field) for q in pooled])), name
    assert row["bytes_per_page"] == 256
    wanted, read = (np.concatenate([getattr(q, name).ravel() for q in pooled]) for name in
                    ("carriers_wanted", "carriers_read"))
    assert row["carriers_wanted"] == pytest.approx(wanted.mean()) and 0 < wanted.sum() < len(wanted)
    assert row["carriers_kept"] == pytest.approx((read * wanted).sum() / wanted.sum())


def test_what_a_trace_does_not_tell_is_not_made_up(result):
    assert all(row[f"carriers_{name}"] is None for row in rows_of(result, model="other") for name in ("read", "kept"))
    assert [(t["trace"], t["depth"], t["answer_spans"]) for t in result["traces"]] == [
        ("one", 0.5, [[200, 201], [390, 400]]), ("two", 0.2, [[200, 201], [390, 400]]), ("other", None, []),
    ]  # fmt: skip


def test_a_file_counts_once_and_a_name_is_one_traces(paths, call_locks, tmp_path, monkeypatch):
    monkeypatch.setattr(Comparison, "add", lambda *_: pytest.fail("work was done"))
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    first, second = (write(tmp_path / folder / "t.safetensors", seed) for seed, folder in enumerate("ab"))
    other = write(tmp_path / "c" / "t.safetensors", 3, model="other")
    link = tmp_path / "link.safetensors"
    link.symlink_to(first)
    for given, reason in (
        ((first, second), f"{str(first)!r} and {str(second)!r} are both named 't' and of 'small'"),
        ((first, paths[0], first), f"{str(first)!r} and {str(first)!r} are one file"),
        ((first, link), f"{str(first)!r} and {str(link)!r} are one file"),
    ):
        result = call_locks("quality", *given)
        assert result.returncode == 2 and reason in result.stderr and result.stderr.count("\n") == 1, result.stderr
    check_distinct([Trace(path) for path in (first, other, *paths)])


def test_files_that_would_overwrite_each_other_are_refused(paths, call_locks, tmp_path, monkeypatch):
    monkeypatch.setattr(Comparison, "add", lambda *_: pytest.fail("work was done"))
    monkeypatch.chdir(tmp_path)
    for given, names in (
        (("--json", "same", "--csv", "same"), ("--json = 'same'", "--csv = 'same'")),
        (("--csv", "same", "--html", "./same"), ("--csv = 'same'", "--html = './same'")),
        (("--json", "same", "--csv", "x", "--html", tmp_path / "same"), ("--json = 'same'", "--html = ")),
        (("--json", "-", "--csv", "-"), ("--json = '-'", "--csv = '-'")),
    ):
        result = call_locks("quality", paths[0], *given)
        assert result.returncode == 2 and "are one file, expected one for each" in result.stderr, result.stderr
        assert all(name in result.stderr for name in names)
    assert list(tmp_path.iterdir()) == []
    kept = paths[0].read_bytes()
    result = call_locks("quality", paths[0], "--json", paths[0])
    assert result.returncode == 2 and "is a trace that is to be read" in result.stderr, result.stderr
    assert paths[0].read_bytes() == kept


def test_energy_and_chain_have_each_head_once(result):
    places = {(row["trace"], row["layer"], row["kv_head"], row["page_tokens"], row["rank"]) for row in result["energy"]}
    assert len(places) == len(result["energy"]) == 10 * (2 + 4)  # ranks 1, 2 of 4-token pages; 1, 2, 4, 8 of 16
    for row in result["energy"]:
        assert 1 >= row["page_basis"] >= row["sequence_basis"] >= row["layer_basis"] - 1e-9 > 0
    places = {(row["trace"], row["layer"], row["kv_head"], row["format"]) for row in result["chain"]}
    assert len(places) == len(result["chain"]) == 10 * 3


def test_the_front_has_no_point_that_another_beats():
    points = [(3, 0.9), (1, 0.5), (2, 0.4), (2, 0.7), (4, 0.9), (3, 0.8)]
    assert front_points(points) == [(1, 0.5), (2, 0.7), (3, 0.9)]


def front_points(points):
    return [points[place] for place in figures.front_of(points)]


def test_bytes_far_away_are_arithmetic():
    row = {"tokens_read": 512, "head_dim": 64, "bytes_per_page": 72, "bytes_per_step": 512 * 256 + 8192 * 18}
    assert figures.far_bytes(row, 8192) == 512 * 256 + 2**20 * 18
    assert figures.far_bytes(row | {"bytes_per_page": 0}, 8192) == row["bytes_per_step"]


def test_the_report_has_a_figure_for_all_that_was_measured(result):
    titles = [section.title for section in sections.sections_of(result)]
    assert [title.split(",")[0] for title in titles] == [
        "Retained mass against bytes", "Gap to the oracle by layer", "Are the answer's pages read?",
        "Retained mass by depth of the answer", "How local the structure of keys is", "The theory's chain",
    ]  # fmt: skip
    bare = {key: value for key, value in result.items() if key not in ("energy", "chain")}
    bare["traces"] = [trace | {"depth": None} for trace in result["traces"]]
    assert len(sections.sections_of(bare)) == 3


def test_the_command_writes_csv_json_and_one_file_of_html(paths, call_locks, tmp_path):
    files = {name: tmp_path / f"q.{name}" for name in ("json", "csv", "html")}
    done = call_locks("quality", *paths, "--selector", "locks,quest", "--budget", "0.01,128", *(
        argument for name, file in files.items() for argument in (f"--{name}", file)))
    assert done.returncode == 0, done.stderr
    assert "small: 2 traces" in done.stdout and "other: 1 traces" in done.stdout and "0.01*" in done.stdout
    result = json.loads(files["json"].read_text())
    with files["csv"].open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["retained"]) for row in table] == [row["retained"] for row in result["rows"]]
    assert result["about"]["torch"] == torch.__version__
    page = files["html"].read_text()
    assert page.count("<svg") == 4 and "<!DOCTYPE svg" not in page
    for outside in ("<script", "<link", "src=", "@import"):
        assert outside not in page


def test_a_comparison_of_one_trace_is_an_object_and_one_case_a_list(paths, call_locks):
    one = call_locks("quality", paths[0], "--json", "-")
    assert [(row["layer"], row["kv_head"]) for row in json.loads(one.stdout)] == [(0, 0), (0, 1), (4, 0), (4, 1)]
    for more in (("--energy",), ("--chain",), ("--budget", "128,256"), ("--selector", "locks,oracle")):
        assert "rows" in json.loads(call_locks("quality", paths[0], "--json", "-", *more).stdout)


@pytest.mark.parametrize("option", ["--csv", "--html"])
def test_files_that_cannot_be_written_are_refused_before_the_work(paths, call_locks, option):
    done = call_locks("quality", paths[0], option, "no/such/folder/file")
    assert done.returncode == 2 and f"{option} = 'no/such/folder/file', expected a file in a folder" in done.stderr
