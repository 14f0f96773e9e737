"""An engine without graphs, where each step can tell the exact mass that it kept."""

import base64

import numpy as np
import pytest
from engine_harness import assert_records_match_keys, counters, greedy, only, reset_counters
from gpu_harness import KV_HEADS, gpu_engine


def test_evaluation_measures_the_mass_that_was_kept(smollm2, prompts):
    prompt = prompts[-1]
    with gpu_engine(smollm2, locks={"dense_tokens": 0}, enforce_eager=True) as llm:
        llm.collective_rpc("locks_set_evaluation", args=(True,))
        means = {}
        for budget in ("all", 512, 96):
            llm.collective_rpc("locks_set_budget", args=(budget,))
            llm.collective_rpc("locks_evaluation")
            reset_counters(llm)
            greedy(llm, [prompt], 6)
            evaluation, layers = only(llm.collective_rpc("locks_evaluation")), counters(llm)
            for name, layer in evaluation.items():
                assert [step["lengths"] for step in layer["steps"]] == [[len(prompt) + step] for step in range(1, 6)]
                retained = np.array([step["retained"] for step in layer["steps"]])
                assert (retained > 0).all() and (retained < 1 + 1e-3).all()
                pages = 0
                for step in layer["steps"]:
                    count = -(-step["lengths"][0] // layer["page_tokens"])
                    packed = np.frombuffer(base64.b64decode(step["pages"][0]), np.uint8)
                    mask = np.unpackbits(packed, count=KV_HEADS * count).reshape(KV_HEADS, count)
                    assert mask[:, :4].all() and mask[:, -16:].all()
                    pages += int(mask.sum())
                assert pages == layers[name]["pages_read"]
            means[budget] = np.mean([step["retained"] for layer in evaluation.values() for step in layer["steps"]])
        print(means)
        assert means["all"] == pytest.approx(1, abs=1e-4)
        assert 0.2 < means[96] < means[512] < 1
        assert_records_match_keys(llm)
