"""tools/count_instructions.py: which counts fail. That valgrind counts is tested by ctest's instruction_counts."""

from __future__ import annotations

import argparse

import pytest

from tools.count_instructions import STAGES, compare

ARGUMENTS = argparse.Namespace(program="hot_loops", compiler="GNU 12.2.0")
KEPT = {"tolerance": 0.02, "instructions": dict.fromkeys(STAGES, 1000)}


@pytest.mark.parametrize(("count", "code"), [(1000, 0), (1019, 0), (981, 0), (1021, 1), (979, 1)])
def test_more_than_the_tolerance_in_either_direction_fails(
    count: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(KEPT["instructions"] | {"score_pages": count}, KEPT, ARGUMENTS) == code
    told = capsys.readouterr().out
    assert ("score_pages: " in told) and ("<-- beyond" in told) == bool(code)
    assert ("hot_loops --compiler 'GNU 12.2.0' --update" in told) == bool(code)
