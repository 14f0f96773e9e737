"""The options of the vLLM plug-in, without an engine."""

import json
import math
import subprocess
import sys

import pytest

from locks_vllm.options import LocksOptions, options_of, parse_options


def test_no_option_means_no_locks():
    assert options_of({}) is None
    assert options_of(None) is None
    assert options_of({"other": 1}) is None


def test_empty_object_means_the_defaults():
    options = options_of({"locks": {}})
    assert options.budget == 2048
    assert options.format_of(0) == options.format_of(31) == "fine"
    assert options.dense_layers == ()
    assert options.reference_keys is None
    assert options.evaluate is False


@pytest.mark.parametrize(
    ("value", "expected"), [("all", math.inf), (1, 1.0), (512, 512.0), (0.05, 0.05), ("0.25", 0.25), ("4096", 4096.0)]
)
def test_budget_takes_all_tokens_or_a_fraction(value, expected):
    assert parse_options({"budget": value}).budget == expected


@pytest.mark.parametrize("value", [0, -1, 1.0, 1.5, -0.5, "half", "", None, True, [512], {}, math.nan])
def test_bad_budget_is_refused_by_value(value):
    with pytest.raises(ValueError, match=r"locks\.budget: .*expected") as error:
        parse_options({"budget": value})
    assert repr(value) in str(error.value)


def test_formats_by_name_and_by_layer():
    assert parse_options({"formats": "compact"}).format_of(3) == "compact"
    assert parse_options({"formats": {"default": "auto", "1": "wide"}}).format_of(0) == "auto"
    options = parse_options({"formats": {"0": "fine8", "12": "b8r2m8v4c4"}})
    assert [options.format_of(layer) for layer in (0, 1, 12)] == ["fine8", "fine", "b8r2m8v4c4"]
    options = parse_options({"formats": {"default": "wide", "07": "fine"}})
    assert [options.format_of(layer) for layer in (0, 7)] == ["wide", "fine"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("finest", "finest"),
        ({"default": "b16r1m5v4c4"}, "centroid_bits = 5, expected 4 or 8"),
        ({"first": "fine"}, "'first'"),
        ({"-1": "fine"}, "'-1'"),
        ({"0": 8}, "8"),
        ({"0": "fine", "00": "fine8"}, "'0' and '00': layer 0 is there twice, expected once"),
        (["fine"], "['fine']"),
    ],
)
def test_bad_format_is_refused_by_value(value, named):
    with pytest.raises(ValueError, match=r"locks\.formats: ") as error:
        parse_options({"formats": value})
    assert named in str(error.value)


@pytest.mark.parametrize("value", [[-1], [1.0], ["0"], [True], 3, "0,1", {"0": 1}])
def test_bad_dense_layers_are_refused(value):
    with pytest.raises(ValueError, match=r"locks\.dense_layers: .*expected"):
        parse_options({"dense_layers": value})


@pytest.mark.parametrize("value", [1, "true", None, []])
def test_evaluate_is_a_boolean(value):
    with pytest.raises(ValueError, match=r"locks\.evaluate: .*expected true or false"):
        parse_options({"evaluate": value})


def test_counts_of_tokens_on_the_gpu():
    options = parse_options({"dense_tokens": 0, "score_tokens": 2**20})
    assert (options.dense_tokens, options.score_tokens) == (0, 2**20)
    assert parse_options({"dense_tokens": "auto"}).dense_tokens == parse_options({}).dense_tokens == 10240


@pytest.mark.parametrize("field", ["dense_tokens", "score_tokens"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "all", None, 2**31])
def test_bad_counts_of_tokens_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"locks\.{field}: .*expected a number of tokens"):
        parse_options({field: value})


def test_reference_keys_is_a_file_that_exists(tmp_path):
    missing = tmp_path / "keys.safetensors"
    with pytest.raises(ValueError, match=r"locks\.reference_keys: .*expected an existing \.safetensors file"):
        parse_options({"reference_keys": str(missing)})
    missing.write_bytes(b"")
    assert parse_options({"reference_keys": str(missing)}).reference_keys == missing
    with pytest.raises(ValueError, match="expected the path"):
        parse_options({"reference_keys": 7})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("buget", "budget"), ("format", "formats"), ("dense_layer", "dense_layers"), ("eval", "evaluate")],
)
def test_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(ValueError, match=f"unknown option '{key}'; did you mean '{nearest}'"):
        parse_options({key: 1})


def test_unknown_key_without_a_neighbour_lists_what_is_allowed():
    with pytest.raises(ValueError, match="unknown option 'zzz'; allowed are budget, formats"):
        parse_options({"zzz": 1})


@pytest.mark.parametrize("value", [True, 512, "all", [], None])
def test_the_option_is_an_object(value):
    with pytest.raises(ValueError, match="expected an object"):
        options_of({"locks": value})


def test_a_misspelt_option_does_not_pass_silently():
    with pytest.raises(ValueError, match="key 'LOCKS', expected 'locks'"):
        options_of({"LOCKS": {}})


def test_all_errors_are_told_at_once():
    with pytest.raises(ValueError, match=r"locks\.budget: .*; locks\.evaluate: "):
        parse_options({"budget": 0, "evaluate": 1})


def test_layers_that_the_model_lacks_are_refused():
    parse_options({"formats": {"29": "fine8"}, "dense_layers": [29]}).check_layers(30)
    with pytest.raises(ValueError, match=r"locks\.formats: layer 30, expected 0 to 29"):
        parse_options({"formats": {"30": "fine8"}}).check_layers(30)
    with pytest.raises(ValueError, match=r"locks\.dense_layers: layer 99, expected 0 to 29"):
        parse_options({"dense_layers": [0, 99]}).check_layers(30)


def test_options_survive_json_as_the_command_line_gives_them():
    text = (
        '{"locks": {"budget": 0.1, "formats": {"default": "wide", "0": "fine8"}, '
        '"dense_layers": [1], "evaluate": true}}'
    )
    options = options_of(json.loads(text))
    assert isinstance(options, LocksOptions)
    assert (options.budget, options.dense_layers, options.evaluate) == (0.1, (1,), True)


def test_importing_the_package_imports_neither_torch_nor_vllm():
    code = "import sys, locks_vllm; assert not {'torch', 'vllm', 'locks'} & set(sys.modules); print('cheap')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "cheap\n", done.stderr


def test_register_is_idempotent_and_overrides_the_cpu_backend():
    import locks_vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    try:
        locks_vllm.register()
        locks_vllm.register()
        backend = AttentionBackendEnum.CPU_ATTN.get_class()
        assert backend.__name__ == "LocksCpuBackend"
        assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CPU_ATTN
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()


def test_a_key_that_nearly_names_the_option_is_warned_of(caplog):
    with caplog.at_level("WARNING", logger="vllm.locks"):
        assert options_of({"lock": {"budget": 1}}) is None
        assert options_of({"quantization_plugin": 1}) is None
    assert [record.getMessage() for record in caplog.records] == [
        "additional_config: key 'lock' is not LOCKS's; did you mean 'locks'?"
    ]
