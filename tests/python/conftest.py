"""Fixtures of several test files."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def threads():
    """Sets the number of torch's threads; the old number is back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def run_locks():
    """Runs the `locks` command as a user would, in a process of its own."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "locks.cli", *map(str, arguments)], capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture
def call_locks(monkeypatch, capsys):
    """The same within this process: much faster, for the many ways to be refused."""

    def call(*arguments: object) -> SimpleNamespace:
        from locks import cli

        monkeypatch.setattr(sys, "argv", ["locks", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=out, stderr=err)

    return call
