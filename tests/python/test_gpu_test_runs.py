"""tools/run_gpu_tests.py without a GPU: what it makes of a program's words, and that its filters meet tests."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
try:
    import run_gpu_tests
finally:
    sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize(
    ("text", "status", "outcome"),
    [
        ("[  PASSED  ] 12 tests.\n", 0, {"passed": 12, "failed": 0, "skipped": 0}),
        (
            "[  PASSED  ] 1 test.\n[  SKIPPED ] 2 tests, listed below:\n[  FAILED  ] 3 tests, listed below:\n",
            1,
            {"passed": 1, "failed": 3, "skipped": 2},
        ),
        (
            "[  PASSED  ] 4 tests.\n========= ERROR SUMMARY: 2 errors\n",
            9,
            {"passed": 4, "failed": 1, "skipped": 0, "note": "ERROR SUMMARY: 2 errors"},
        ),
        ("", -11, {"passed": 0, "failed": 1, "skipped": 0, "note": "exit status -11"}),
        ("[  PASSED  ] 0 tests.\n", 0, {"passed": 0, "failed": 1, "skipped": 0, "note": "no test ran"}),
        ("", None, {"passed": 0, "failed": 1, "skipped": 0, "note": "no result: ended at the limit of time"}),
    ],
)
def test_an_outcome_is_read_of_what_gtest_and_the_sanitizer_say(text, status, outcome):
    assert run_gpu_tests.read_outcome(text, status) == outcome


def test_every_program_runs_plain_and_under_each_sanitizer():
    commands = run_gpu_tests.commands(run_gpu_tests.TOOLS)
    for prefix in ("", *(f"compute-sanitizer --tool {tool}" for tool in run_gpu_tests.TOOLS)):
        assert sorted(program for begin, program, _ in commands if begin == prefix) == sorted(run_gpu_tests.PROGRAMS)
    for _, program, chosen in commands:
        text = (ROOT / "tests" / "cpp" / f"{program}.cpp").read_text()
        for pattern in filter(None, chosen.split(":")):
            if name := re.fullmatch(r"\*?(\w+)\*", pattern):  # of a test, not of a case
                assert re.search(rf"TEST(_\w)?\(\w*{name[1]}|TEST(_\w)?\(\w+, \w*{name[1]}", text), (program, pattern)
