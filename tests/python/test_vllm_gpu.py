"""The plug-in's GPU side without a GPU: how steps are split and planned, and a layer through its steps.

vLLM's own builder and metadata are used; the device's operators are emulated (gpu_emulation.py), and FlashAttention is
replaced by exact attention where prompts reach it.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gpu_emulation import SCORED_BLOCKS, emulate
from locks.formats import Format
from locks.ops import COUNTERS
from locks_vllm import gpu_backend, gpu_metadata, serving
from locks_vllm.capture import Capture
from locks_vllm.gpu_layer import GpuLayer
from locks_vllm.gpu_metadata import LocksBuilder, Rows
from locks_vllm.gpu_state import GpuState
from locks_vllm.options import LocksOptions, parse_options
from locks_vllm.prefill import attend_prompt
from locks_vllm.summary_cache import LocksSummaryBackend, LocksSummaryLayer, cache_share
from locks_vllm.worker import verify_records

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, NUM_BLOCKS = 6, 2, 64, 32, 64
SCALE = HEAD_DIM**-0.5
PREFIX = "model.layers.0.self_attn.attn"


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulate(monkeypatch)


def common_metadata(rows, table=None, padded_to=None):
    """vLLM's metadata for rows of (tokens in the cache before, tokens of this step, still in the prompt)."""
    count = padded_to or len(rows)
    rows = [*rows, *[(0, 0, False)] * (count - len(rows))]
    new_tokens = [row[1] for row in rows]
    starts = torch.tensor([0, *np.cumsum(new_tokens).tolist()], dtype=torch.int32)
    lengths = torch.tensor([row[0] + row[1] for row in rows], dtype=torch.int32)
    if table is None:
        table = torch.arange(1, 1 + 8 * count, dtype=torch.int32).reshape(count, 8)
    tokens = count if padded_to else sum(new_tokens)
    slots = [
        int(table[row, place // BLOCK_TOKENS]) * BLOCK_TOKENS + place % BLOCK_TOKENS
        for row, (before, new, _) in enumerate(rows)
        for place in range(before, before + new)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=count,
        num_actual_tokens=tokens,
        max_query_len=max(new_tokens),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots + [-1] * (tokens - len(slots))),
        is_prefilling=torch.tensor([row[2] for row in rows]),
        seq_lens_cpu_upper_bound=lengths,
    )


def fake_config(options=None, connector=None, layers=None, **parts):
    """As much of vLLM's configuration as the builder and the state look at."""
    values = {
        "additional_config": {} if options is None else {"locks": options},
        "kv_transfer_config": connector,
        "compilation_config": SimpleNamespace(
            static_forward_context={} if layers is None else layers,
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False),
            max_cudagraph_capture_size=0,
        ),
        "scheduler_config": SimpleNamespace(max_num_seqs=8),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1),
        "attention_config": None,
        "kernel_config": SimpleNamespace(enable_jit_warmup=False),
        "speculative_config": None,
        "cache_config": SimpleNamespace(num_gpu_blocks=NUM_BLOCKS, block_size=BLOCK_TOKENS, cache_dtype="auto"),
        "model_config": SimpleNamespace(
            max_model_len=1000,
            rswa_window=None,
            is_mm_prefix_lm=False,
            hf_config=SimpleNamespace(model_type="llama"),
            get_num_attention_heads=lambda _: QUERY_HEADS,
            get_num_kv_heads=lambda _: KV_HEADS,
            get_head_size=lambda: HEAD_DIM,
        ),
    }
    return SimpleNamespace(**values | parts)


class Case:
    """One LOCKS layer with its caches, its implementation and its builder, as vLLM would make them."""

    def __init__(self, monkeypatch, *, connector=None, name="fine", plain_layer=False, captured=False, **options):
        options = {"dense_tokens": 0} | options
        self.layers = {}
        config = fake_config(options, connector, self.layers)
        summary_format = Format.parse(name)
        record_bytes = summary_format.record_bytes(HEAD_DIM)
        records = LocksSummaryLayer(PREFIX + ".locks_summary", KV_HEADS, record_bytes, record_bytes)
        spec = records.get_kv_cache_spec(SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK_TOKENS)))
        shape = LocksSummaryBackend.get_kv_cache_shape(NUM_BLOCKS, BLOCK_TOKENS, KV_HEADS, spec.head_size)
        records.kv_cache = torch.randint(0, 255, (*shape[:-1], 2 * shape[-1]), dtype=torch.uint8).view(torch.bfloat16)
        self.kv_cache = torch.full((NUM_BLOCKS, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), math.nan)
        parsed = parse_options(options)
        self.state = GpuState(parsed, config, torch.device("cpu"), num_layers=1)
        self.layer = GpuLayer(
            records, QUERY_HEADS, HEAD_DIM, SCALE, summary_format, None, self.state, parsed.evaluate, captured
        )
        self.impl = object.__new__(gpu_backend.LocksImpl)
        self.impl.locks = self.layer
        self.impl.kv_sharing_target_layer_name = None
        self.layers[PREFIX] = SimpleNamespace(impl=self.impl)
        names = [PREFIX]
        if plain_layer:
            self.layers["model.layers.1.self_attn.attn"] = SimpleNamespace(impl=SimpleNamespace(locks=None))
            names.append("model.layers.1.self_attn.attn")
        monkeypatch.setattr(gpu_metadata, "cache_share", lambda *_: "")
        kv_spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
        )
        self.builder = LocksBuilder(kv_spec, names, config, torch.device("cpu"))
        monkeypatch.setattr(FlashAttentionImpl, "forward", self._exact_attention)
        monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", self._write_cache)
        self.vllm_writes = 0  # calls of vLLM's write to the cache

    def _write_cache(self, layer, key, value, kv_cache, slot_mapping):
        self.vllm_writes += 1
        used = slot_mapping >= 0
        block, place = slot_mapping[used] // BLOCK_TOKENS, slot_mapping[used] % BLOCK_TOKENS
        kv_cache[block, :, place] = torch.cat([key, value], -1)[: slot_mapping.shape[0]][used]

    def _exact_attention(self, layer, query, key, value, kv_cache, metadata, output, *no_scales):
        starts = metadata.query_start_loc.tolist()
        assert metadata.num_actual_tokens == starts[-1] == query.shape[0]
        for row, length in enumerate(metadata.seq_lens.tolist()):
            blocks = metadata.block_table[row].long()[: -(-length // BLOCK_TOKENS)]
            both = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            tokens = slice(starts[row], starts[row + 1])
            attend_prompt(query[tokens], both[..., :HEAD_DIM], both[..., HEAD_DIM:], SCALE, output[tokens])
        return output

    def run(self, monkeypatch, common, qkv, capture=False):
        """One step: the metadata, and the layer's forward pass, which writes to the cache too."""
        query, key, value = qkv
        build = self.builder.build_for_cudagraph_capture if capture else self.builder.build
        metadata = build(common_attn_metadata=common) if capture else build(0, common)
        tables = {self.layer.records.prefix: SimpleNamespace(block_table=common.block_table_tensor)}
        monkeypatch.setattr(serving, "get_forward_context", lambda: SimpleNamespace(attn_metadata=tables))
        output = torch.full_like(query, math.nan)
        self.impl.forward(None, query, key, value, self.kv_cache, metadata, output)
        return output, metadata


def tokens_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(count, QUERY_HEADS, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, count, KV_HEADS, HEAD_DIM, generator=generator)
    return query, key, value


def exact(qkv, last=1):
    """Exact attention of the last tokens of a sequence."""
    query, key, value = qkv
    output = torch.empty_like(query[-last:])
    attend_prompt(query[-last:], key.transpose(0, 1), value.transpose(0, 1), SCALE, output)
    return output


def test_rows_with_one_token_in_front_are_decodes():
    rows = Rows.of(common_metadata([(40, 1, False), (9, 1, True), (99, 5, False), (0, 7, True)]), False)
    assert rows.num_decodes == 2
    assert rows.exact.tolist() == [False, True]
    assert (rows.decoding, rows.prompt_tokens) == (1, 13)
    assert rows.flags(torch.device("cpu")).tolist() == [0, 1]
    assert not rows.rebuilt.any()


def test_a_single_token_behind_a_longer_prompt_is_a_prompt():
    rows = Rows.of(common_metadata([(40, 1, False), (0, 7, True), (0, 1, True)]), False)
    assert rows.num_decodes == 1 and rows.prompt_tokens == 8
    assert rows.flags(torch.device("cpu")) is None


def test_padded_rows_of_a_graph_are_decodes_of_nothing():
    common = common_metadata([(40, 1, False), (7, 1, False)], padded_to=4)
    common.is_prefilling = common.is_prefilling[:2]  # as vLLM's second runner has it
    rows = Rows.of(common, False)
    assert (rows.num_decodes, rows.decoding, rows.prompt_tokens) == (4, 2, 0)


def test_with_a_connector_a_prompt_with_context_is_rebuilt():
    rows = Rows.of(common_metadata([(86, 1, True), (86, 1, False), (0, 1, True), (50, 9, True), (0, 3, True)]), True)
    assert rows.rebuilt.tolist() == [True, False, False, True, False]
    assert rows.flags(torch.device("cpu")).tolist() == [3, 0, 1]


def test_metadata_that_does_not_tell_prompts_is_refused():
    common = common_metadata([(4, 1, False)])
    common.is_prefilling = None
    with pytest.raises(NotImplementedError, match="is_prefilling"):
        Rows.of(common, False)


def test_a_batch_of_decodes_has_no_schedule_of_flash_attention(monkeypatch):
    case = Case(monkeypatch)
    metadata = case.builder.build(0, common_metadata([(40, 1, False), (100, 1, False)], padded_to=3))
    assert metadata.prompts is None and metadata.num_decodes == 3
    assert metadata.scheduler_metadata is None
    assert metadata.num_actual_tokens == 3


def test_layers_left_to_flash_attention_get_its_metadata_for_the_whole_batch(monkeypatch):
    case = Case(monkeypatch, plain_layer=True)
    metadata = case.builder.build(0, common_metadata([(40, 1, False), (0, 7, True)]))
    assert (metadata.num_actual_tokens, metadata.num_decodes) == (8, 1)
    assert metadata.prompts.attention.num_actual_tokens == 7
    assert metadata.prompts.attention.query_start_loc.tolist() == [0, 7]
    assert metadata.prompts.attention is not metadata


def test_a_prompt_and_its_decodes_equal_exact_attention_at_full_budget(monkeypatch):
    case = Case(monkeypatch, budget="all")
    qkv = tokens_of(120, 1)
    table = torch.tensor([[5, 2, 9, 7]], dtype=torch.int32)
    output, _ = case.run(monkeypatch, common_metadata([(0, 100, True)], table), [part[:100] for part in qkv])
    torch.testing.assert_close(output, exact([part[:100] for part in qkv], 100), atol=1e-5, rtol=1e-5)
    for length in range(101, 121):
        step = [part[length - 1 : length] for part in qkv]
        output, _ = case.run(monkeypatch, common_metadata([(length - 1, 1, False)], table), step)
        torch.testing.assert_close(output, exact([part[:length] for part in qkv]), atol=1e-5, rtol=1e-5)
    assert verify_records(case.layer, case.kv_cache) == (KV_HEADS * 7, 0)
    counters = case.layer.read_counters()
    assert (counters["steps"], counters["prefill_tokens"]) == (20, 100)
    assert counters["records_built"] == KV_HEADS * 7
    assert counters["sparse_rows"] == 0 and counters["dense_rows"] == 20
    assert case.vllm_writes == 1  # of the prompt: decode steps write their tokens themselves


def test_a_mixed_step_serves_each_row_as_if_alone(monkeypatch):
    case = Case(monkeypatch, budget=96)
    decode, single, prompt = tokens_of(200, 1), tokens_of(150, 2), tokens_of(70, 3)
    tables = torch.arange(1, 25, dtype=torch.int32).reshape(3, 8)
    case.run(monkeypatch, common_metadata([(0, 199, True)], tables[:1]), [part[:199] for part in decode])
    case.run(monkeypatch, common_metadata([(0, 149, True)], tables[1:2]), [part[:149] for part in single])
    rows = [(199, 1, False), (149, 1, True), (0, 70, True)]
    step = [torch.cat([a[199:], b[149:], c]) for a, b, c in zip(decode, single, prompt, strict=True)]
    output, metadata = case.run(monkeypatch, common_metadata(rows, tables), step)
    assert metadata.num_decodes == 2 and metadata.exact_rows == (1,)
    torch.testing.assert_close(output[1:2], exact(single), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output[2:], exact(prompt, 70), atol=1e-5, rtol=1e-5)
    counters = case.layer.read_counters()
    assert counters["sparse_rows"] == counters["dense_rows"] == counters["steps"] == 1
    assert counters["pages_read"] == KV_HEADS * (96 // 4 + -(-150 // 4))
    assert case.vllm_writes == 3  # a step with prompts has one write of all its tokens
    assert verify_records(case.layer, case.kv_cache) == (KV_HEADS * (12 + 9 + 4), 0)


@pytest.mark.parametrize("last", [1, 40])
def test_records_of_loaded_keys_are_rebuilt_before_they_are_used(monkeypatch, last):
    case = Case(monkeypatch, budget=96, connector=object())
    qkv = tokens_of(180, 4)
    table = torch.tensor([[5, 2, 9, 7, 1, 3]], dtype=torch.int32)
    other = Case(monkeypatch, budget=96)
    other.run(monkeypatch, common_metadata([(0, 180 - last, True)], table), [part[: 180 - last] for part in qkv])
    case.kv_cache.copy_(other.kv_cache)  # the connector brings keys and values, and no records
    output, _ = case.run(
        monkeypatch, common_metadata([(180 - last, last, True)], table), [part[180 - last :] for part in qkv]
    )
    torch.testing.assert_close(output, exact(qkv, last), atol=1e-5, rtol=1e-5)
    assert verify_records(case.layer, case.kv_cache) == (KV_HEADS * 11, 0)
    assert case.layer.read_counters()["records_built"] == KV_HEADS * 11


def test_steps_run_to_be_captured_read_and_count_nothing(monkeypatch):
    case = Case(monkeypatch, captured=True)
    common = common_metadata([(0, 1, False)] * 3)
    common.slot_mapping.fill_(-1)  # as vLLM does
    output, metadata = case.run(monkeypatch, common, tokens_of(3, 1), capture=True)
    assert metadata.num_decodes == 3 and metadata.prompts is None
    assert (output == 0).all()
    assert case.kv_cache.isnan().all()
    assert not any(case.layer.read_counters().values())


def test_plans_lie_at_fixed_addresses_and_follow_the_budget(monkeypatch):
    case = Case(monkeypatch, budget="all")
    common = common_metadata([(200, 1, False), (30, 1, False)])
    plan = case.state.plans[4]
    case.builder.build(0, common)
    assert plan[:2, SCORED_BLOCKS].tolist() == [0, 0]
    case.layer.budget = 96.0
    case.builder.build(0, common)
    assert plan[:2, SCORED_BLOCKS].tolist() == [12, 0]
    assert case.state.plans[4] is plan


def test_contexts_up_to_dense_tokens_are_read_whole(monkeypatch):
    case = Case(monkeypatch, budget=96, dense_tokens=200)
    case.builder.build(0, common_metadata([(199, 1, False), (200, 1, False)]))
    assert case.state.plans[4][:2, SCORED_BLOCKS].tolist() == [0, 12]


def test_rows_beyond_the_room_for_scores_are_read_whole(monkeypatch):
    case = Case(monkeypatch, budget=96, score_tokens=300)
    assert case.state.max_tiles == 1
    case.builder.build(0, common_metadata([(200, 1, False), (200, 1, False)]))
    assert case.state.plans[4][:2, SCORED_BLOCKS].tolist() == [12, 0]


def test_room_is_made_for_the_largest_layer(monkeypatch):
    state = GpuState(LocksOptions(), fake_config(), torch.device("cpu"), num_layers=1)
    assert state.max_tiles == 8 * 4
    state.reserve(8, 2, 64, Format.parse("fine"))
    first = state.workspace
    state.reserve(4, 2, 64, Format.parse("wide"))
    assert state.workspace is first
    state.reserve(16, 2, 64, Format.parse("fine"))
    assert state.workspace.numel() > first.numel()
    assert sorted(state.plans) == [4, 16]


def test_counters_are_reset_in_place(monkeypatch):
    case = Case(monkeypatch)
    counters = case.layer.counters
    counters += 1
    case.layer.counts.add(1, 1)
    case.layer.reset_counters()
    assert case.layer.counters is counters and set(counters.tolist()) == {1}  # metrics read them on
    assert not any(case.layer.read_counters().values())
    counters += 2
    case.layer.counts.add(1, 3)
    assert case.layer.read_counters() == {"steps": 1, "prefill_tokens": 3} | dict.fromkeys(COUNTERS, 2)


def test_evaluation_tells_the_exact_mass_of_the_pages_read(monkeypatch):
    case = Case(monkeypatch, budget=96, evaluate=True)
    qkv = tokens_of(201, 4)
    table = torch.tensor([[5, 2, 9, 7, 1, 3, 8]], dtype=torch.int32)
    case.run(monkeypatch, common_metadata([(0, 200, True)], table), [part[:200] for part in qkv])
    case.run(monkeypatch, common_metadata([(200, 1, False)], table), [part[200:] for part in qkv])
    (evaluation,) = case.layer.evaluations
    assert evaluation.lengths == [201]
    mask = np.unpackbits(np.frombuffer(evaluation.pages[0], np.uint8), count=KV_HEADS * 51).reshape(KV_HEADS, 51)
    read = torch.from_numpy(mask).bool().repeat_interleave(4, 1)[:, :201].repeat_interleave(QUERY_HEADS // KV_HEADS, 0)
    keys = qkv[1].transpose(0, 1).double().repeat_interleave(QUERY_HEADS // KV_HEADS, 0)
    weights = (torch.einsum("hd,hld->hl", qkv[0][200].double(), keys) * SCALE).softmax(-1)
    assert evaluation.retained[0] == pytest.approx(float((weights * read).sum(-1).mean()), abs=1e-5)
    assert mask.sum() == case.layer.read_counters()["pages_read"]


def test_evaluation_and_graphs_exclude_each_other(monkeypatch):
    case = Case(monkeypatch, captured=True)
    with pytest.raises(RuntimeError, match="--enforce-eager"):
        case.layer.evaluate = True
    case.layer.evaluate = False
    support = gpu_metadata.LocksBuilder.get_cudagraph_support
    assert support(fake_config({"evaluate": True}), None).name == "NEVER"
    assert support(fake_config(), None).name == "UNIFORM_BATCH"


def test_layers_left_to_vllm_write_to_the_cache_before_they_attend(monkeypatch):
    case = Case(monkeypatch)
    case.impl.locks = None
    query, key, value = qkv = tokens_of(40, 5)
    metadata = case.builder.build(0, common_metadata([(0, 40, True)], torch.tensor([[3, 1]], dtype=torch.int32)))
    output = torch.full_like(query, math.nan)
    case.impl.forward(None, query, key, value, case.kv_cache, metadata, output)
    torch.testing.assert_close(output, exact(qkv, 40), atol=1e-5, rtol=1e-5)
    case.impl.kv_sharing_target_layer_name = "another"
    case.impl.forward(None, query, key, value, case.kv_cache, metadata, output)
    assert case.vllm_writes == 1


def test_a_profiling_run_writes_nothing(monkeypatch):
    case = Case(monkeypatch)
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self, *arguments: arguments[6].zero_())
    query, key, value = tokens_of(2, 5)
    case.impl.forward(None, query, key, value, torch.empty(0), None, torch.empty_like(query))
    assert case.vllm_writes == 0


def test_a_capture_sees_the_step_with_its_new_token(monkeypatch):
    case = Case(monkeypatch, budget="all")
    query, key, value = qkv = tokens_of(41, 6)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    case.layer.capture = Capture([1], group=QUERY_HEADS // KV_HEADS, first_query=39, length=41)
    case.run(monkeypatch, common_metadata([(0, 40, True)], table), [part[:40] for part in qkv])
    case.run(monkeypatch, common_metadata([(40, 1, False)], table), [part[40:] for part in qkv])
    captured = case.layer.capture.read()
    assert torch.equal(captured["keys"][0], key[:, 1]) and torch.equal(captured["values"][0], value[:, 1])
    assert torch.equal(captured["queries"].transpose(0, 1), query[39:, 3:])


def test_the_log_tells_what_the_records_take():
    records = LocksSummaryLayer("a", KV_HEADS, 288, 288)
    other = LocksSummaryLayer("b", KV_HEADS, 16 * HEAD_DIM * 4, 16 * HEAD_DIM * 4)
    other.__class__ = type("Keys", (LocksSummaryLayer.__mro__[1], LocksSummaryLayer.__mro__[2]), {
        "get_kv_cache_spec": LocksSummaryLayer.get_kv_cache_spec, "get_attn_backend": None,
    })  # fmt: skip
    text = cache_share([records, other, SimpleNamespace()], fake_config())
    assert "6.6 % of the KV cache, which holds 2048 tokens" in text
    assert "144 more" in text


def test_the_backend_is_flash_attention_in_a_head_major_layout():
    backend = gpu_backend.LocksBackend
    assert backend.get_name() == "CUSTOM"
    assert backend.get_impl_cls() is gpu_backend.LocksImpl
    assert backend.get_builder_cls() is LocksBuilder
    assert backend.supports_attn_type("decoder")
    assert not any(map(backend.supports_attn_type, ("encoder", "encoder_only", "encoder_decoder")))
    assert not (backend.supports_sink() or backend.supports_mm_prefix() or backend.supports_non_causal())
    assert backend.forward_includes_kv_cache_update
    assert backend.full_cls_name() == ("locks_vllm.gpu_backend", "LocksBackend")


def test_without_options_the_backend_serves_with_the_defaults():
    assert gpu_metadata.options_from(fake_config()) == LocksOptions()
    assert gpu_metadata.options_from(fake_config({"budget": 512})).budget == 512


def test_on_cuda_the_plugin_registers_its_backend_as_custom(monkeypatch):
    import locks_vllm
    import vllm.platforms
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    try:
        locks_vllm.register()
        locks_vllm.register()
        assert AttentionBackendEnum.CUSTOM.get_class() is gpu_backend.LocksBackend
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
