"""The selectors of tokens in `locks quality`: on a real trace, and what the command says of them."""

import json

import pytest
from locks.formats import Format
from locks.quality import measure, measure_steps
from locks.trace import Trace
from trace_case import write_real_trace

WINDOW = 32


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_real_trace(tmp_path_factory.mktemp("trace") / "real.safetensors")


def test_they_keep_more_with_more_budget_and_cost_what_they_say(path):
    real, wide = Trace(path).read(9), Format.parse("wide")
    length = int(real.positions[-1]) + 1
    for selector in ("shadowkv", "rocketkv", "snapkv"):
        results = measure_steps(real, selector, wide, [128.0, 256.0, 512.0, 1024.0, float("inf")], WINDOW)
        kept = [result.retained.mean() for result in results]
        assert kept == sorted(kept) and 0.1 < kept[0] < kept[2] < 1 and kept[-1] == pytest.approx(1)
        last = results[2]
        assert last.tokens_read[-1] == 512
        evicted = last.resident_bytes[-1] < length * 256
        assert evicted == (selector != "shadowkv")
    snapkv = measure_steps(real, "snapkv", wide, [512.0], WINDOW)[0]
    assert snapkv.resident_bytes[-1] == snapkv.bytes_read[-1] == 512 * 256


def test_the_command_judges_behind_the_window_and_says_so(path, call_locks):
    said = call_locks("quality", path, "--selector", "snapkv", "--format", "wide")
    assert said.returncode == 0, said.stderr
    assert "judged on the last 32 steps" in " ".join(said.stdout.split())
    rows = json.loads(call_locks("quality", path, "--selector", "snapkv", "--format", "wide", "--json", "-").stdout)
    expected = measure(Trace(path).read(9), "snapkv", Format.parse("wide"), 512.0, WINDOW)
    assert rows == [expected.as_dict()] and rows[0]["judged_steps"] == 32
    assert "judged" not in call_locks("quality", path, "--selector", "shadowkv").stdout


def test_the_command_names_what_kvzip_lacks(path, call_locks):
    refused = call_locks("quality", path, "--selector", "kvzip")
    assert refused.returncode == 2 and refused.stdout == ""
    assert "selector = kvzip" in refused.stderr and "`locks capture --repeat-context`" in refused.stderr
