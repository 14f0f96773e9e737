"""An engine without graphs, where each step can tell the exact mass that it kept."""

import pytest
from engine_checks import measured_mass
from engine_harness import assert_records_match_keys
from gpu_harness import KV_HEADS, gpu_engine


def test_evaluation_measures_the_mass_that_was_kept(smollm2, prompts):
    prompt = prompts[-1]
    with gpu_engine(smollm2, locks={"dense_tokens": 0}, enforce_eager=True) as llm:
        llm.collective_rpc("locks_set_evaluation", args=(True,))
        llm.collective_rpc("locks_evaluation")  # drops what the warm-up left
        means = {budget: measured_mass(llm, prompt, budget, KV_HEADS, 1e-3) for budget in ("all", 512, 96)}
        print(means)
        assert means["all"] == pytest.approx(1, abs=1e-4)
        assert 0.2 < means[96] < means[512] < 1
        assert_records_match_keys(llm)
