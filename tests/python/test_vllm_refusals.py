"""What the plug-in refuses when vLLM starts, without an engine."""

from types import SimpleNamespace

import pytest

from locks_vllm import refusals
from locks_vllm.compat import cpu_block_tokens
from locks_vllm.room import slot_bytes_for


def engine_config(**changes):
    """A configuration of vLLM that LOCKS serves, but for `changes` as `section__field`."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=False, is_mm_prefix_lm=False, rswa_window=None, is_hybrid=False, dtype=None
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=128),
        speculative_config=None,
        kv_transfer_config=None,
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            setattr(getattr(config, section), field, value)
        else:
            setattr(config, section, value)
    return config


def attention_layer(**changes):
    """An attention layer that LOCKS serves, but for `changes`."""
    layer = SimpleNamespace(
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        head_size=64,
        head_size_v=64,
        impl=SimpleNamespace(alibi_slopes=None, logits_soft_cap=0, sinks=None),
    )
    for name, value in changes.items():
        setattr(layer.impl if hasattr(layer.impl, name) else layer, name, value)
    return layer


def test_a_plain_decoder_is_served():
    for platform in ("cpu", "cuda"):
        refusals.refuse_engine(engine_config(), platform)
    refusals.refuse_layer(attention_layer(), "model.layers.0.self_attn.attn")


ENGINE_CASES = {
    "model_config.use_mla": {"model_config__use_mla": True},
    "model_config.is_mm_prefix_lm": {"model_config__is_mm_prefix_lm": True},
    "model_config.rswa_window": {"model_config__rswa_window": 512},
    "model_config.is_hybrid": {"model_config__is_hybrid": True},
    "--dtype": {"model_config__dtype": "torch.float32"},
    "VLLM_KV_CACHE_LAYOUT": {},
    "--tensor-parallel-size": {"parallel_config__tensor_parallel_size": 2},
    "--decode-context-parallel-size": {"parallel_config__decode_context_parallel_size": 2},
    "--prefill-context-parallel-size": {"parallel_config__prefill_context_parallel_size": 4},
    "--enable-dbo": {"parallel_config__use_ubatching": True},
    "--speculative-config": {"speculative_config": SimpleNamespace(method="ngram")},
    "--kv-cache-dtype": {"cache_config__cache_dtype": "fp8_e4m3"},
    "--kv-transfer-config": {"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
    "--block-size": {"cache_config__block_size": 24},
}
LAYER_CASES = {
    "attn_type": {"attn_type": "encoder_decoder"},
    "kv_sharing_target_layer_name": {"kv_sharing_target_layer_name": "model.layers.3.self_attn.attn"},
    "alibi_slopes": {"alibi_slopes": [0.5]},
    "logits_soft_cap": {"logits_soft_cap": 50.0},
    "sinks": {"sinks": [0.1]},
    "head_size_v": {"head_size_v": 128},
    "head_size": {"head_size": 112, "head_size_v": 112},
}


ONE_PLATFORM = {
    "--tensor-parallel-size": "cpu",
    "model_config.is_hybrid": "cuda",
    "--dtype": "cuda",
    "VLLM_KV_CACHE_LAYOUT": "cuda",
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("setting", ENGINE_CASES)
def test_engine_setting_is_refused_by_name(setting, platform, monkeypatch):
    if setting == "VLLM_KV_CACHE_LAYOUT":
        monkeypatch.setenv(setting, "NHD")
    config = engine_config(**ENGINE_CASES[setting])
    if ONE_PLATFORM.get(setting, platform) != platform:
        refusals.refuse_engine(config, platform)
        return
    with pytest.raises(NotImplementedError, match="not supported") as error:
        refusals.refuse_engine(config, platform)
    assert setting in str(error.value)


def test_other_connectors_are_served():
    connector = SimpleNamespace(kv_connector="OffloadingConnector")
    refusals.refuse_engine(engine_config(kv_transfer_config=connector), "cuda")


@pytest.mark.parametrize("name", ["HND", "LBHNC"])
def test_a_head_major_layout_may_be_asked_for(name, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", name)
    refusals.refuse_engine(engine_config(), "cuda")


def test_cache_blocks_must_suit_the_cpu_kernels_of_the_installed_vllm(monkeypatch):
    refusals.refuse_engine(engine_config(cache_config__block_size=cpu_block_tokens()), "cpu")
    monkeypatch.setattr(refusals, "cpu_block_tokens", lambda: 32)
    refusals.refuse_engine(engine_config(cache_config__block_size=48), "cuda")
    with pytest.raises(NotImplementedError, match="--block-size = 48 is not supported; use a multiple of 32"):
        refusals.refuse_engine(engine_config(cache_config__block_size=48), "cpu")


@pytest.mark.parametrize("setting", LAYER_CASES)
def test_layer_is_refused_by_name(setting):
    with pytest.raises(NotImplementedError, match="not supported") as error:
        refusals.refuse_layer(attention_layer(**LAYER_CASES[setting]), "model.layers.7.self_attn.attn")
    assert setting in str(error.value)
    assert "model.layers.7" in str(error.value)


def test_every_refusal_has_a_case_here():
    assert {refusal.setting for refusal in refusals.ENGINE_REFUSALS} == set(ENGINE_CASES)
    assert {refusal.setting for refusal in refusals.LAYER_REFUSALS} == set(LAYER_CASES)


@pytest.mark.parametrize("refusal", refusals.ENGINE_REFUSALS + refusals.LAYER_REFUSALS, ids=lambda item: item.what)
def test_every_refusal_tells_the_value_and_a_way_out(refusal):
    text = refusal.message("VALUE")
    assert refusal.what in text
    assert "VALUE" in text
    assert refusal.way_out in text


def test_the_documentation_has_a_row_for_everything_that_is_refused():
    rows = refusals.table_rows()
    assert len(rows) == len(refusals.ENGINE_REFUSALS) + len(refusals.LAYER_REFUSALS) + 1
    what, setting, way_out = rows[-1]
    assert f"LOCKS: {what} in {setting}; {way_out}" == refusals.NO_LAYER and "no layer to serve" in what
    assert any("NixlConnector" in what for what, *_ in rows)


def test_records_keep_their_size_where_all_layers_attend_fully():
    assert slot_bytes_for(288, 16 * 2 * 64 * 2, mixed=False) == 288


@pytest.mark.parametrize(("record", "room"), [(288, 512), (512, 512), (544, 1024), (4096, 4096)])
def test_records_get_room_that_divides_a_page_where_kinds_of_attention_mix(record, room):
    assert slot_bytes_for(record, 4096, mixed=True) == room


def test_records_larger_than_keys_and_values_are_refused_where_kinds_of_attention_mix():
    with pytest.raises(NotImplementedError, match="a record takes 4128 bytes, expected at most 4096"):
        slot_bytes_for(4128, 4096, mixed=True)
