"""The tests that tell whether LOCKS works in an environment, and what their report says."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .environments import ROOT

FULL_BUDGET = "engine/test_full_budget.py::"


@dataclass(frozen=True)
class Check:
    """One column of the table: tests by file or by file and name, under tests/python."""

    name: str
    tests: tuple[str, ...]
    vllm: bool = True  # whether it needs vLLM


CHECKS = (
    Check("operators", ("test_ops.py", "test_ops_refusals.py"), vllm=False),
    Check(
        "registration",
        (
            "test_vllm_options.py::test_register_is_idempotent_and_overrides_the_cpu_backend",
            "test_vllm_gpu.py::test_on_cuda_the_plugin_registers_its_backend_as_custom",
        ),
    ),
    Check("GPU code, emulated", ("test_compat.py", "test_vllm_gpu.py")),
    Check(
        "refusals",
        ("test_vllm_refusals.py", "engine/test_start.py::test_refusal_is_told_when_the_engine_starts[option]"),
    ),
    Check(
        "whole budget equals vLLM",
        (
            FULL_BUDGET + "test_a_batch_of_different_lengths_in_chunks_equals_vllm",
            FULL_BUDGET + "test_a_prefix_hit_rebuilds_nothing_and_equals_vllm",
        ),
    ),
    Check(
        "sparse budgets",
        (
            FULL_BUDGET + "test_a_sparse_budget_runs_sparse_and_the_counters_say_so",
            FULL_BUDGET + "test_short_contexts_run_dense_under_a_sparse_budget_and_equal_vllm",
            FULL_BUDGET + "test_evaluation_measures_the_mass_that_was_kept",
        ),
    ),
)
IMPORTS = "import"  # the columns that are no tests of the tree
INTERFACES = "interfaces"


@dataclass
class Outcome:
    """What came of a check."""

    passed: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)  # the first line of each thing that went wrong

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


# Run by the environment's Python: a line for each module, "ok NAME" or "no NAME: ERROR". What an extra of LOCKS brings
# may be missing, and the library of the operators is no module.
_IMPORT_ALL = """
import importlib, importlib.util, pkgutil
for package in ["locks", "locks_vllm"][: 2 if importlib.util.find_spec("vllm") else 1]:
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if found.name == "locks.liblocks_torch":
            continue
        try:
            importlib.import_module(found.name)
            print("ok", found.name)
        except Exception as error:
            if getattr(error, "name", None) not in ("lm_eval", "matplotlib", "jinja2"):
                print("no", f"{found.name}: {type(error).__name__}: {error}".splitlines()[0])
"""


def import_everything(python: Path) -> Outcome:
    """Every module of the command, and of the plug-in where vLLM is."""
    done = subprocess.run([python, "-c", _IMPORT_ALL], capture_output=True, text=True, check=False, cwd="/")
    lines = done.stdout.splitlines()
    wrong = [line[3:] for line in lines if line.startswith("no ")]
    if done.returncode:  # a library that crashes says nothing
        wrong.append((done.stderr.strip() or f"Python ended with {done.returncode}").splitlines()[-1])
    return Outcome(sum(line.startswith("ok ") for line in lines), len(wrong), wrong)


def run_tests(python: Path, vllm: bool, wrap: list[str], tell: Callable[[str], None]) -> dict[str, Outcome]:
    """The checks of an environment, in one run of pytest. wrap: a command in front, `nice` for example."""
    checks = [check for check in CHECKS if vllm or not check.vllm]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        nodes = [f"tests/python/{test}" for check in checks for test in check.tests]
        command = [*wrap, python, "-m", "pytest", "-v", "--no-header", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        with subprocess.Popen(
            list(map(str, [*command, *nodes])), cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            said = []
            for line in process.stdout:
                said.append(line.rstrip())
                if line.startswith("tests/") and "::" in line:
                    tell(line.split("::", 1)[1].split(" ")[0])
        if not report.is_file():
            last = next((line for line in reversed(said) if line.strip()), f"pytest ended with {process.returncode}")
            return {check.name: Outcome(0, 1, [last]) for check in checks}
        return sort_cases(report, checks)


def sort_cases(report: Path, checks: list[Check]) -> dict[str, Outcome]:
    """A JUnit report by checks. A check of which no test ran has failed."""
    outcomes = {check.name: Outcome() for check in checks}
    for case in ElementTree.parse(report).iter("testcase"):
        # A file that cannot be collected is reported as a case whose name is the module's.
        module = case.get("classname") or case.get("name")
        place = module.replace(".", "/").removeprefix("tests/python/") + ".py"
        wrong = [part for part in case if part.tag in ("failure", "error")]
        for check in checks:
            if any(_is_of(test, place, case.get("name")) for test in check.tests):
                outcome = outcomes[check.name]
                if wrong:
                    outcome.failed += 1
                    texts = [wrong[0].get("message", ""), *(part.text or "" for part in case)]
                    outcome.errors.append(f"{case.get('name')}: {first_error(texts)}")
                elif not any(part.tag == "skipped" for part in case):
                    outcome.passed += 1
    for outcome in outcomes.values():
        if not outcome.passed and not outcome.failed:
            outcome.failed, outcome.errors = 1, ["no test ran"]
    return outcomes


def _is_of(test: str, place: str, name: str) -> bool:
    file, _, only = test.partition("::")
    return place == file and (not only or name == only or name.split("[")[0] == only)


# How an exception's last line looks, also behind what vLLM's processes put in front of it, and the exceptions of its
# front end that only say that another process has told why.
_ERROR = re.compile(r"^(?:E\s+|\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$")
_NOT_THE_CAUSE = re.compile(r"Engine core initialization failed|Worker failed with error|object at 0x|Tokenizer not")


def first_error(texts: list[str]) -> str:
    """The line of a failed test's report that names the cause: of the first process that failed, if there are many."""
    for text in (*texts[1:], texts[0]):
        for line in text.splitlines():
            found = _ERROR.match(line)
            if found and not _NOT_THE_CAUSE.search(line):
                return found[1][:300]
    return (texts[0].splitlines() or ["no message"])[0][:300]
