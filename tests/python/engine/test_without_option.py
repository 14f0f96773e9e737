"""The plug-in without its option: vLLM's own classes and vLLM's own results."""

from conftest import MAX_TOKENS
from engine_harness import engine, greedy, only

VLLM_IMPL = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"


def test_an_installed_plugin_changes_nothing_unless_asked(smollm2, prompts, plain_vllm):
    with engine(
        smollm2,
        max_model_len=1024,
        block_size=32,
        max_num_batched_tokens=1024,
        worker_extension_cls="engine_harness.ClassNames",
    ) as llm:
        assert only(llm.collective_rpc("class_names")) == [VLLM_IMPL]
        assert only(llm.collective_rpc("num_cache_layers")) == 30
        got = greedy(llm, prompts, MAX_TOKENS)
    assert [one.tokens for one in got] == [one.tokens for one in plain_vllm]
    assert [one.logprobs for one in got] == [one.logprobs for one in plain_vllm]
