"""The `locks` command, run as a user runs it."""

import json
import re
import subprocess
import sys

import pytest
import torch
from trace_case import small_tensors, write_small_trace

ROW_KEYS = [
    "layer", "kv_head", "selector", "format", "budget_tokens", "judged_steps", "retained_oracle", "retained",
    "output_error", "bytes_per_record",
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_small_trace(tmp_path_factory.mktemp("trace") / "small.safetensors")


def assert_one_line_refusal(result, *parts):
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"locks: [^\n]+; see `locks[a-z ]* --help`\n", result.stderr), result.stderr
    for part in parts:
        assert part in result.stderr


def test_quality_prints_a_row_for_each_layer(run_locks, trace):
    result = run_locks("quality", trace, "--budget", "128")
    assert result.returncode == 0 and result.stderr == ""
    assert "small.safetensors: locks, format fine, budget 128" in result.stdout
    for heading in ("retained", "oracle", "gap", "output", "record"):
        assert heading in result.stdout
    number = r" +(-?[\d.]+) │"
    rows = re.findall("│" + 7 * number, result.stdout)
    assert [(row[0], row[1], row[6]) for row in rows] == [("0", "128", "288"), ("4", "128", "288")]
    for _, _, oracle, retained, gap, _, _ in rows:
        assert float(gap) == pytest.approx(100 * (float(oracle) - float(retained)), abs=0.02)


def test_quality_json_on_stdout_is_only_json(run_locks, trace):
    result = run_locks("quality", trace, "--selector", "quest", "--budget", "0.25", "--format", "wide", "--json", "-")
    assert result.returncode == 0 and result.stderr == ""
    rows = json.loads(result.stdout)
    assert [row["layer"] for row in rows] == [0, 4]
    for row in rows:
        assert list(row) == ROW_KEYS
        assert (row["selector"], row["format"], row["budget_tokens"]) == ("quest", "wide", 160)
        assert row["bytes_per_record"] == 256
        assert 0 < row["retained"] <= 1


def test_quality_writes_json_beside_the_table(call_locks, trace, tmp_path):
    target = tmp_path / "rows.json"
    result = call_locks("quality", trace, "--json", target)
    assert result.returncode == 0 and "retained" in result.stdout
    assert [list(row) for row in json.loads(target.read_text())] == [ROW_KEYS, ROW_KEYS]


def test_quality_does_not_depend_on_threads(call_locks, threads, trace):
    one, two = (call_locks("quality", trace, "--threads", count, "--json", "-") for count in (1, 2))
    assert one.returncode == 0 and one.stdout == two.stdout


def test_formats_lists_the_presets_with_their_bytes(run_locks):
    result = run_locks("formats")
    assert result.returncode == 0 and result.stderr == ""
    assert "The default is fine." in result.stdout
    for row in ("fine .* yes .* 288/544/1056", "fine8 .* 544/1056/2080", "compact .* 160/288/544",
                "wide .* 416/736/1376", "paper .* no .* 480/800/1440"):
        assert re.search(row, result.stdout), row


def test_version(run_locks):
    result = run_locks("version")
    assert result.returncode == 0
    assert re.fullmatch(r"locks 0\.\d+\.\d+, torch \S+, CPU kernels: (baseline|avx2|avx512)\n", result.stdout)


def test_formats_and_version_as_json(call_locks, tmp_path):
    rows = json.loads(call_locks("formats", "--json", "-").stdout)
    assert [row["format"] for row in rows if row["default"]] == ["fine"]
    assert rows[0]["record_bytes"]["128"] == 544 and 0.066 < rows[0]["share_of_bf16_cache"]["128"] < 0.067
    assert set(json.loads(call_locks("version", "--json", "-").stdout)) == {"locks", "torch", "cpu_kernels"}
    target = tmp_path / "version.json"
    assert "CPU kernels" in call_locks("version", "--json", target).stdout and json.loads(target.read_text())
    for command in ("formats", "version", "doctor"):
        assert_one_line_refusal(call_locks(command, "--json", "no/such/folder/x"), "a folder that exists")
        assert_one_line_refusal(call_locks(command, "--json", tmp_path), "is a folder, expected a file that you may")


@pytest.mark.parametrize("command", [(), ("capture",), ("quality",), ("formats",), ("version",), ("doctor",)])
def test_help(call_locks, command):
    result = call_locks(*command, "--help")
    assert result.returncode == 0 and "Usage: locks" in result.stdout


@pytest.mark.parametrize("command", [("capture",), ("quality",), ("doctor",), ("serve",), ("eval",), ("bench", "cpu")])
def test_lines_of_help_end_where_the_next_word_does_not_fit(call_locks, command):
    lines = call_locks(*command, "--help").stdout.partition("╭")[0].splitlines()
    described = [line.rstrip() for line in lines]
    for line, following in zip(described, described[1:], strict=False):
        if line and following:
            assert len(line) + len(following.split()[0]) >= 79, f"{line!r} ends before {following!r}"


def test_help_shows_the_marks_of_a_prompt(call_locks):
    assert "<<answer>>...<</answer>>" in call_locks("capture", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--budget", "0"), ("budget = '0'", "a whole number of tokens >= 1")),
        (("--budget", "1.0"), ("budget = '1.0'", 'write "all"')),
        (("--budget", "nan"), ("budget = 'nan'",)),
        (("--budget", "-5"), ("budget = '-5'",)),
        (("--format", "best"), ("'best'", "fine, fine8, compact, wide, paper")),
        (("--selector", "best"), ('"best"', "locks, oracle, quest, mean_std, centroid, int3, shared_low_rank, ")),
        (("--selector", "locks,"), ("selector = 'locks,'", "with commas between")),
        (("--threads", "0"), ("'--threads'", "'0', expected 1 to 256")),
        (("--threads", "two"), ("'--threads'", "'two', expected 1 to 256")),
        (("--threads", "1000000"), ("'1000000', expected 1 to 256",)),
        (("--json", "no/such/folder/rows.json"), ("--json = 'no/such/folder/rows.json'", "a folder that exists")),
        (("--json", "."), ("--json = '.'",)),
        (("--buget", "5"), ("--buget", "--budget")),
    ],
)
def test_quality_refuses_an_option(call_locks, trace, arguments, parts):
    assert_one_line_refusal(call_locks("quality", trace, *arguments), *parts)


def test_quality_refuses_a_bad_trace(run_locks, call_locks, tmp_path):
    whole = write_small_trace(tmp_path / "whole.safetensors").read_bytes()
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(whole[:-1000])
    assert_one_line_refusal(
        run_locks("quality", truncated), "truncated.safetensors", "not a readable .safetensors file"
    )
    assert_one_line_refusal(call_locks("quality", tmp_path / "missing"), "missing: no such file")
    assert_one_line_refusal(call_locks("quality", tmp_path), "not a regular file")
    spoiled = small_tensors()["layer4.k"]
    spoiled[100, 0] = torch.nan
    nan = write_small_trace(tmp_path / "nan.safetensors", {"layer4.k": spoiled})
    assert_one_line_refusal(call_locks("quality", nan), "layer4.k has nan at [100, 0], expected finite numbers")
    bare = write_small_trace(tmp_path / "bare.safetensors", metadata={})
    assert_one_line_refusal(call_locks("quality", bare), 'metadata "layers" is missing')
    parts = [f"layer{layer}.{part}" for layer in (0, 4) for part in "kv"]
    short = {part: small_tensors()[part][:60] for part in parts}
    short |= {f"layer{layer}.pos": torch.tensor([10, 20, 59], dtype=torch.int32) for layer in (0, 4)}
    assert_one_line_refusal(
        call_locks("quality", write_small_trace(tmp_path / "short.safetensors", short)), "num_tokens = 60, expected"
    )


def test_wrong_use_is_refused(call_locks):
    assert_one_line_refusal(call_locks(), "Missing command")
    assert_one_line_refusal(call_locks("qualities"), "qualities")
    assert_one_line_refusal(call_locks("quality"), "Missing argument")


def test_names_and_paths_are_taken_as_they_are(call_locks, trace, tmp_path):
    marked = tmp_path / "[red]small.safetensors"
    marked.write_bytes(trace.read_bytes())
    assert "[red]small.safetensors: locks" in call_locks("quality", marked).stdout
    assert_one_line_refusal(call_locks("quality", "x" * 5000), "File name too long")
    assert_one_line_refusal(call_locks("quality", trace, "--json", "x" * 5000), "--json")


def test_attention_beyond_float_is_refused(call_locks, tmp_path):
    huge = {f"layer{layer}.k": torch.full(small_tensors()[f"layer{layer}.k"].shape, 3e38) for layer in (0, 4)}
    path = write_small_trace(tmp_path / "huge.safetensors", huge)
    assert_one_line_refusal(call_locks("quality", path), "attention is NaN or infinite")


@pytest.mark.parametrize("arguments", [["version"], ["formats"], ["--help"], ["quality"]], ids=" ".join)
def test_full_disk_is_one_line(trace, arguments):
    if arguments == ["quality"]:
        arguments = ["quality", trace, "--json", "-"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "locks.cli", *map(str, arguments)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 2
    assert re.fullmatch(r"locks: the output cannot be written: [^\n]+\n", result.stderr), result.stderr
