"""Many requests in flight under a sparse budget, with aborts: nothing leaks and nothing crosses."""

import random

import pytest
from engine_harness import (
    Generated,
    _generated,
    assert_records_match_keys,
    assert_same,
    counters,
    engine,
    greedy,
    metric,
    only,
    reset_counters,
)

BLOCK_SIZE = 32
BUDGET = 128
IN_FLIGHT = 64


@pytest.fixture(scope="module")
def llm(tiny_model):
    with engine(
        tiny_model,
        locks={"budget": BUDGET, "formats": "auto"},
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=331,
        max_num_seqs=IN_FLIGHT,
    ) as running:
        yield running


def random_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(512) for _ in range(length)]


def run_with_aborts(llm, prompts, lengths, draw) -> dict[int, Generated]:
    """Adds all requests, aborts about a third of them at random moments; returns those that finished."""
    from vllm import SamplingParams

    core = llm.llm_engine
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=2, detokenize=False)
        core.add_request(f"r{index}", {"prompt_token_ids": prompt}, params)
    doomed = set(draw.sample(range(len(prompts)), len(prompts) // 3))
    finished = {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                finished[int(output.request_id[1:])] = _generated(output)
        if doomed and draw.random() < 0.7:
            index = doomed.pop()
            if index not in finished:
                core.abort_request([f"r{index}"])
    return finished


def test_requests_do_not_cross_and_nothing_leaks(llm):
    draw = random.Random(3)
    prompts = [
        random_prompt(draw, draw.choice((1, 5, 40, 150, 300, 600)) + draw.randrange(40)) for _ in range(IN_FLIGHT)
    ]
    lengths = [draw.randrange(1, 40) for _ in prompts]
    together = run_with_aborts(llm, prompts, lengths, draw)
    assert len(together) >= IN_FLIGHT // 2
    assert_records_match_keys(llm)
    for layer in counters(llm).values():
        assert layer["sparse_rows"] > 0 and layer["dense_rows"] > 0
        assert layer["invalid_records"] == 0
    alone = []
    for index in together:
        assert llm.reset_prefix_cache()
        alone += greedy(llm, [prompts[index]], lengths[index])
    assert_same(list(together.values()), alone)
    assert_records_match_keys(llm)
    assert metric(llm, "kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    "length", [1, 2, 3, 4, 5, 15, 16, 17, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, BUDGET - 1, BUDGET, BUDGET + 1]
)
def test_lengths_around_every_boundary_under_any_budget(llm, length):
    prompt = random_prompt(random.Random(length), length)
    llm.reset_prefix_cache()
    llm.collective_rpc("locks_set_budget", args=("all",))
    dense = greedy(llm, [prompt], 5)
    try:
        for budget in (1, 96, BUDGET):
            llm.collective_rpc("locks_set_budget", args=(budget,))
            reset_counters(llm)
            sparse = greedy(llm, [prompt], 5)
            layer = next(iter(counters(llm).values()))
            assert layer["sparse_rows"] + layer["dense_rows"] == 4
            if layer["sparse_rows"] == 0:
                assert_same(sparse, dense, least_share=0.2)
            if length + 4 <= 80:
                assert layer["sparse_rows"] == 0
    finally:
        llm.collective_rpc("locks_set_budget", args=(BUDGET,))
    assert_records_match_keys(llm)


def test_the_same_prompts_at_once_share_their_records(llm):
    draw = random.Random(11)
    shared = random_prompt(draw, 10 * BLOCK_SIZE)
    prompts = [shared + random_prompt(draw, 1 + index) for index in range(8)]
    llm.reset_prefix_cache()
    greedy(llm, [shared], 1)
    reset_counters(llm)
    greedy(llm, prompts, 4)
    for layer in counters(llm).values():
        assert layer["records_built"] == 0
        assert layer["prefill_tokens"] == sum(len(prompt) - 10 * BLOCK_SIZE for prompt in prompts)
    assert_records_match_keys(llm)


def test_auto_takes_fine_for_layers_without_a_key_bias(llm):
    assert {layer["format"] for layer in only(llm.collective_rpc("locks_describe")).values()} == {"fine"}
