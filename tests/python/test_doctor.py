"""locks doctor: what it finds on a machine, and what records take of a model's cache."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from locks.commands.doctor import costs, environment
from locks.commands.shapes import load_shape
from locks.formats import Format

FINE = Format.parse("fine")


def found(findings):
    return {finding.what: finding.found for finding in findings}


def advice(findings):
    return {finding.what: finding.advice for finding in findings if finding.advice}


def test_a_machine_without_a_gpu_is_well(call_locks, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    result = call_locks("doctor")
    assert result.returncode == 0
    assert "none that torch sees" in result.stdout and "known to vLLM" in result.stdout


def test_plugins_that_leave_locks_out_are_told(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "add locks to the list" in advice(environment())["VLLM_PLUGINS"]
    monkeypatch.setenv("VLLM_PLUGINS", "other,locks")
    assert advice(environment()) == {}


def test_a_plugin_that_vllm_does_not_know_is_told(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [SimpleNamespace(name="other")])
    assert "install the package with pip" in advice(environment())["plug-in"]


@pytest.mark.parametrize(
    ("capability", "compiled", "problems"),
    [((9, 0), True, {}), ((7, 5), True, {"GPU"}), ((8, 0), False, {"CUDA operators"})],
)
def test_a_gpu_needs_its_capability_and_operators(monkeypatch, capability, compiled, problems):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: compiled)
    assert set(advice(environment())) == set(problems)


def test_records_take_their_share_of_the_cache():
    told = found(costs(load_shape("qwen2.5-7b-1m"), FINE))
    assert told["layers"] == "28 of 28 with full attention, 4 KV heads of 128 channels"
    assert told["records"] == "fine: 544 bytes for 16 tokens of a KV head"
    assert told["cache of full attention"].startswith("17558 tokens a GiB, 1166 fewer")


def mixed(**changes):
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    shape = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 256, "layer_types": kinds}
    return {"text_config": shape | changes}


def test_models_that_mix_kinds_of_attention_need_room_that_divides():
    told = found(costs(mixed(), FINE))
    assert told["layers"].startswith("1 of 6")
    assert told["records"] == (
        "fine: 288 bytes for 16 tokens of a KV head, in 512 bytes since vLLM's pages must divide each other"
    )
    assert "expected at most 4096" not in str(told)


def test_what_cannot_be_served_is_told():
    assert "no layer to serve" in advice(costs(mixed(layer_types=["sliding_attention"] * 6), FINE))["layers"]
    assert "supported are 64" in advice(costs(mixed(head_dim=112), FINE))["head size"]


def test_bad_arguments_are_named(call_locks, tmp_path):
    assert "expected llama-3.1-8b" in call_locks("doctor", "no-such-model").stderr
    assert "expected" in call_locks("doctor", "--format", "finest").stderr
    (tmp_path / "config.json").write_text("{")
    assert "not readable as JSON" in call_locks("doctor", tmp_path).stderr
