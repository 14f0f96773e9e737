"""What a layer's reference key and automatic format come from: calibration file, key bias, neither."""

import math
from types import SimpleNamespace

import pytest
import torch

from locks import ops
from locks_vllm import key_bias
from locks_vllm.auto_format import automatic_format
from locks_vllm.reference_keys import reference_key
from safetensors.torch import save_file

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SHAPE = (KV_HEADS, HEAD_DIM)


@pytest.fixture(autouse=True)
def _vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def config(folder, load_format="auto", theta=10000.0):
    text = SimpleNamespace(max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": theta})
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None, hf_text_config=text),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def of(folder, calibration=None, improved=True, layer=1, load_format="auto"):
    return reference_key(config(folder, load_format), layer, HEADS, SHAPE, calibration, improved)


def mean_of_rotary(bias, positions=512, theta=10000.0):
    """The mean over positions of the rotary embedding, neox style, from its formula in double."""
    half = HEAD_DIM // 2
    angles = torch.arange(positions).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().mean(0), angles.sin().mean(0)
    first, second = bias.double()[:, :half], bias.double()[:, half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), 1)


def rotate(keys):
    rows = keys.clone()
    ops.rotate(rows)
    return rows


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_rotation_is_orthonormal(head_dim):
    matrix = rotate(torch.eye(head_dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), atol=1e-6, rtol=0)
    run = head_dim & -head_dim
    assert torch.equal(matrix != 0, torch.block_diag(*[torch.ones(run, run)] * (head_dim // run)) != 0)


def test_rotation_is_that_of_the_records():
    # The rotation cannot be seen from outside but through a record: with the rotated constant key as the reference,
    # nothing is left of the centroid of a block of that key, and its header describes the same keys.
    from locks.formats import Format

    key = torch.randn(1, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    fine = Format.parse("fine")
    records = []
    for reference in (None, rotate(key).contiguous(), key.contiguous()):
        record = torch.zeros(1, 1, 1, fine.record_bytes(HEAD_DIM), dtype=torch.uint8)
        table = torch.zeros(1, 1, dtype=torch.int32)
        torch.ops.locks.summarise_blocks(
            key.expand(1, 1, 16, HEAD_DIM).contiguous(),
            table,
            torch.zeros(1, dtype=torch.int32),
            torch.full((1,), 16, dtype=torch.int32),
            fine.code,
            reference,
            table,
            record,
            None,
        )
        # Scales follow four pages of a centroid row and a basis row of 32 bytes each; the first is a centroid's.
        records.append(float(record[0, 0, 0, 256:258].clone().view(torch.float16)))
    none, rotated, unrotated = records
    assert rotated < 1e-5 * none
    assert unrotated > 0.1 * none


def test_no_bias_means_no_reference_key(tmp_path):
    save_file({"model.layers.1.self_attn.k_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert of(tmp_path) is None


def test_plain_formats_and_dummy_weights_have_none(tmp_path):
    save_file({"model.layers.1.self_attn.k_proj.bias": torch.ones(128)}, tmp_path / "model.safetensors")
    assert of(tmp_path, improved=False) is None
    assert of(tmp_path, load_format="dummy") is None
    assert of(tmp_path) is not None
    assert of(tmp_path, layer=11) is None


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_key_bias_is_averaged_under_the_rotary_embedding(tmp_path, merged, sharded):
    bias = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    tensors = {"model.layers.1.self_attn.k_proj.bias": bias.flatten().to(torch.float32)}
    if merged:
        parts = (torch.full((HEADS * HEAD_DIM,), 7.0), bias.flatten(), torch.full((KV_HEADS * HEAD_DIM,), 9.0))
        tensors = {"model.layers.1.self_attn.qkv_proj.bias": torch.cat(parts)}
    if sharded:
        import json

        save_file(tensors, tmp_path / "part-2.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "part-2.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    want = rotate(mean_of_rotary(bias).float())
    torch.testing.assert_close(of(tmp_path), want, atol=1e-5, rtol=1e-4)


def test_a_bias_that_cannot_be_used_is_told_once_and_serves_without(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(key_bias.logger, "warning_once", lambda text, *values: told.append(text % values))
    save_file({"model.layers.1.self_attn.k_proj.bias": torch.ones(100)}, tmp_path / "model.safetensors")
    assert of(tmp_path) is None
    assert "it is taken for zero" in told[0] and "has 100 values, expected 128" in told[0]


def test_calibration_file_comes_first(tmp_path):
    key = torch.randn(SHAPE)
    save_file({"layer1.reference_key": key}, tmp_path / "keys.safetensors")
    save_file({"model.layers.1.self_attn.k_proj.bias": torch.ones(128)}, tmp_path / "model.safetensors")
    torch.testing.assert_close(of(tmp_path, tmp_path / "keys.safetensors"), rotate(key))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ({"layer0.reference_key": torch.ones(SHAPE)}, "no tensor 'layer1.reference_key'"),
        ({"layer1.reference_key": torch.ones(2, 32)}, r"shape \(2, 32\), expected \(2, 64\)"),
        ({"layer1.reference_key": torch.full(SHAPE, math.nan)}, "NaN or infinity"),
    ],
)
def test_bad_calibration_is_refused(tmp_path, tensor, reason):
    save_file(tensor, tmp_path / "keys.safetensors")
    with pytest.raises(ValueError, match=reason):
        of(tmp_path, tmp_path / "keys.safetensors")


def auto(folder, calibration=None, layer=1, load_format="auto"):
    return automatic_format(config(folder, load_format), layer, HEADS, SHAPE, calibration)


@pytest.mark.parametrize(("size", "name"), [(0.0, "fine"), (9.9, "fine"), (10.1, "fine8")])
def test_auto_takes_8_bits_for_a_large_key_bias(tmp_path, size, name):
    bias = torch.zeros(SHAPE)
    bias[1] = size  # one KV head is enough
    save_file({"model.layers.1.self_attn.k_proj.bias": bias.flatten()}, tmp_path / "model.safetensors")
    assert auto(tmp_path) == name
    assert auto(tmp_path, layer=2) == "fine"
    assert auto(tmp_path, load_format="dummy") == "fine"


@pytest.mark.parametrize(("gap", "name"), [(1.9, "fine"), (2.1, "fine8")])
def test_auto_believes_the_calibrated_gap_before_the_bias(tmp_path, gap, name):
    save_file({"model.layers.1.self_attn.k_proj.bias": torch.full((128,), 40.0)}, tmp_path / "model.safetensors")
    save_file({"layer1.gap": torch.tensor(gap)}, tmp_path / "keys.safetensors")
    assert auto(tmp_path, tmp_path / "keys.safetensors") == name
    assert auto(tmp_path, tmp_path / "keys.safetensors", layer=2) == "fine"


@pytest.mark.parametrize(
    ("gap", "reason"), [(torch.tensor(math.nan), "NaN or infinity"), (torch.ones(2), "2 values, expected one number")]
)
def test_auto_refuses_a_gap_that_is_no_number(tmp_path, gap, reason):
    save_file({"layer1.gap": gap}, tmp_path / "keys.safetensors")
    with pytest.raises(ValueError, match=rf"keys\.safetensors: layer1\.gap .*{reason}"):
        auto(tmp_path, tmp_path / "keys.safetensors")


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 64])
def test_a_calibration_file_that_is_none_is_named(tmp_path, content):
    (tmp_path / "keys.safetensors").write_bytes(content)
    for read in (of, auto):
        with pytest.raises(ValueError, match=r"locks\.reference_keys: .*keys\.safetensors: not a readable"):
            read(tmp_path, tmp_path / "keys.safetensors")
