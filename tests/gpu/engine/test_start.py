"""A start that LOCKS refuses ends with its reason."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

SCRIPT = """
import json, sys
from vllm import LLM
if __name__ == "__main__":
    LLM(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, attention_backend="CUSTOM",
        gpu_memory_utilization=0.05, max_model_len=256, **json.loads(sys.argv[2]))
"""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
CASES = [
    ({"kv_cache_dtype": "fp8"}, {}, "--kv-cache-dtype = 'fp8' is not supported"),
    ({"dtype": "float32"}, {}, "--dtype = 'float32' is not supported"),
    ({}, {"VLLM_KV_CACHE_LAYOUT": "NHD"}, "VLLM_KV_CACHE_LAYOUT = 'NHD' is not supported"),
    ({"block_size": 24}, {}, "--block-size = 24 is not supported"),
    ({"additional_config": {"locks": {"buget": 512}}}, {}, "unknown option 'buget'; did you mean 'budget'?"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        {},
        "--speculative-config = 'ngram' is not supported",
    ),
    (
        {"additional_config": {"locks": {"dense_layers": list(range(30))}}},
        {},
        "no layer to serve: every attention layer has a sliding window or is listed in dense_layers",
    ),
]


def test_refusals_are_told_when_the_engine_starts(smollm2, tmp_path):
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)

    def start(case):
        arguments, environment, _ = case
        return subprocess.run(
            [sys.executable, str(script), str(smollm2), json.dumps(arguments)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **QUIET, **environment},
        )

    with ThreadPoolExecutor(len(CASES)) as pool:
        for (_, _, reason), done in zip(CASES, pool.map(start, CASES), strict=True):
            assert done.returncode != 0
            told = (done.stderr + done.stdout).replace("\\", "")  # vLLM prints reasons as a list, with quotes escaped
            assert reason in told
