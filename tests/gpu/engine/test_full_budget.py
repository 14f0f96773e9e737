"""vLLM's second model runner, full graphs, chunked prompts, prefix caching: equality at full budget, and what sparse
steps read."""

import random

import pytest
from engine_checks import assert_sparse_reads, blocks_built
from engine_harness import (
    MAX_TOKENS,
    assert_records_match_keys,
    counters,
    greedy,
    metric,
    only,
    reset_counters,
)
from gpu_harness import BLOCK_SIZE, KV_HEADS, LAYERS, TOKEN_BYTES, assert_close, gpu_engine, python_decodes


@pytest.fixture(scope="module")
def llm(smollm2):
    with gpu_engine(
        smollm2, runner=2, locks={"budget": "all", "dense_tokens": 0}, max_num_batched_tokens=197
    ) as engine:
        engine.collective_rpc("watch_python_decodes")
        yield engine


@pytest.fixture(autouse=True)
def _all(llm):
    """Each test starts with the whole budget and with counters at zero."""
    llm.collective_rpc("locks_set_budget", args=("all",))
    llm.collective_rpc("watch_python_decodes")
    reset_counters(llm)


def test_the_second_runner_serves_all_layers(llm):
    assert ".gpu.model_runner." in only(llm.collective_rpc("runner_class"))
    classes = only(llm.collective_rpc("attention_classes"))
    assert set(classes.values()) == {"LocksImpl"} and len(classes) == LAYERS


def test_a_batch_in_chunks_equals_flash_attention(llm, prompts, plain_vllm):
    got = greedy(llm, prompts, MAX_TOKENS)
    assert_close(got, plain_vllm)
    assert_records_match_keys(llm)
    layers = counters(llm)
    assert len(layers) == LAYERS
    for layer in layers.values():
        assert layer["sparse_rows"] == layer["records_read"] == layer["invalid_records"] == 0
        # Prompts whose last chunk is one token are rows of the same kernels, read whole.
        assert 0 <= layer["dense_rows"] - len(prompts) * (MAX_TOKENS - 1) <= len(prompts)
        assert layer["bytes_read"] == layer["bytes_dense"]
        assert layer["prefill_tokens"] == sum(map(len, prompts)) - sum(one.cached_tokens for one in got)


def test_a_prefix_hit_rebuilds_nothing_and_equals_flash_attention(llm, prompts, plain_vllm):
    greedy(llm, prompts, MAX_TOKENS)
    reset_counters(llm)
    again = greedy(llm, prompts, MAX_TOKENS)
    assert_close(again, plain_vllm)
    assert again[-1].cached_tokens == (len(prompts[-1]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert_records_match_keys(llm)
    built = KV_HEADS * blocks_built(prompts, again, MAX_TOKENS)
    for layer in counters(llm).values():
        assert layer["records_built"] == built


@pytest.mark.parametrize("budget", [96, 512, 0.25])
def test_sparse_steps_run_in_graphs_and_read_what_arithmetic_says(llm, prompts, budget):
    prompt = prompts[-1]
    greedy(llm, [prompt], 1)
    reset_counters(llm)
    llm.collective_rpc("watch_python_decodes")
    llm.collective_rpc("locks_set_budget", args=(budget,))
    greedy(llm, [prompt], MAX_TOKENS)
    assert python_decodes(llm) == 0
    assert_sparse_reads(llm, len(prompt), MAX_TOKENS, budget, LAYERS, KV_HEADS, TOKEN_BYTES)
    assert_records_match_keys(llm)


def test_a_sparse_budget_still_continues_the_text(llm, prompts, plain_vllm):
    llm.collective_rpc("locks_set_budget", args=(1024,))
    got = greedy(llm, prompts[-1:], MAX_TOKENS)[0]
    same = sum(one == other for one, other in zip(got.tokens, plain_vllm[-1].tokens, strict=True))
    print(f"{same} of {MAX_TOKENS} tokens as with the whole context")
    assert same >= MAX_TOKENS // 2


def test_batches_of_every_size_run_in_graphs(llm, prompts):
    """Padded ones too: vLLM captures 1, 2, 4, 8 and 16 sequences."""
    llm.collective_rpc("locks_set_budget", args=(96,))
    prompt = prompts[-2][:400]
    for size in (1, 2, 3, 4, 5, 9, 16):
        llm.reset_prefix_cache()
        greedy(llm, [prompt], 1)
        reset_counters(llm)
        llm.collective_rpc("watch_python_decodes")
        got = greedy(llm, [prompt] * size, 6)
        layer = next(iter(counters(llm).values()))
        assert layer["sparse_rows"] == 5 * size
        # Rows whose prompts came in an earlier step than the others' decode beside them, outside of graphs.
        assert python_decodes(llm) <= LAYERS * 2
        assert layer["invalid_records"] == layer["nonfinite_pages"] == 0
        assert len({tuple(one.tokens) for one in got}) <= 3
    assert_records_match_keys(llm)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 95, 96, 97, 127, 128, 129, 255, 256, 257])
def test_lengths_around_every_boundary_under_any_budget(llm, prompts, length):
    prompt = prompts[-1][:length]
    llm.reset_prefix_cache()
    dense = greedy(llm, [prompt], 5)
    for budget in (1, 96, 128):
        llm.collective_rpc("locks_set_budget", args=(budget,))
        reset_counters(llm)
        sparse = greedy(llm, [prompt], 5)
        layer = next(iter(counters(llm).values()))
        assert 0 <= layer["sparse_rows"] + layer["dense_rows"] - 4 <= 1
        assert layer["invalid_records"] == 0
        if layer["sparse_rows"] == 0:
            assert_close(sparse, dense, least_share=0.2)
    assert_records_match_keys(llm)


def test_requests_do_not_cross_and_nothing_leaks(llm, prompts):
    from vllm import SamplingParams

    draw = random.Random(3)
    text = prompts[-1]
    wanted = []
    for _ in range(48):
        begin, length = draw.randrange(400), draw.choice((1, 5, 40, 150, 600, 2000)) + draw.randrange(40)
        wanted.append((text[begin : begin + length], draw.randrange(1, 40)))
    llm.collective_rpc("locks_set_budget", args=(128,))
    core = llm.llm_engine
    for index, (prompt, count) in enumerate(wanted):
        params = SamplingParams(temperature=1.0, seed=index, max_tokens=count, ignore_eos=True, detokenize=False)
        core.add_request(f"r{index}", {"prompt_token_ids": prompt}, params)
    doomed, finished = set(draw.sample(range(48), 16)), {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                finished[int(output.request_id[1:])] = len(output.outputs[0].token_ids)
        if doomed and draw.random() < 0.5:
            index = doomed.pop()
            if index not in finished:
                core.abort_request([f"r{index}"])
    assert all(count == wanted[index][1] for index, count in finished.items()) and len(finished) >= 32
    assert_records_match_keys(llm)
    for layer in counters(llm).values():
        assert layer["sparse_rows"] > 0 and layer["dense_rows"] > 0 and layer["invalid_records"] == 0
    assert metric(llm, "kv_cache_usage_perc") == 0


def test_a_bad_budget_is_refused_and_the_engine_goes_on(llm, prompts, plain_vllm):
    with pytest.raises(Exception, match=r"budget = -1.*expected"):
        llm.collective_rpc("locks_set_budget", args=(-1,))
    assert_close(greedy(llm, prompts[-1:], MAX_TOKENS), plain_vllm[-1:])


def test_evaluation_is_refused_where_decodes_run_in_graphs(llm):
    with pytest.raises(Exception, match="--enforce-eager"):
        llm.collective_rpc("locks_set_evaluation", args=(True,))
