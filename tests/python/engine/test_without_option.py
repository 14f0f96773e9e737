"""The plug-in without its option: vLLM's own classes and vLLM's own results."""

from engine_harness import PLAIN_ARGUMENTS, PlainRun, assert_same, engine, only

VLLM_IMPL = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"


def test_an_installed_plugin_changes_nothing_unless_asked(smollm2, prompts, plain_run):
    with engine(smollm2, worker_extension_cls="engine_harness.ClassNames", **PLAIN_ARGUMENTS) as llm:
        assert only(llm.collective_rpc("class_names")) == [VLLM_IMPL]
        assert only(llm.collective_rpc("num_cache_layers")) == 30
        got = PlainRun.of(llm, prompts)
    assert got.alone == plain_run.alone
    assert_same(got.batch, plain_run.batch)
