"""A start that LOCKS refuses ends with its reason."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from vllm import LLM
if __name__ == "__main__":
    LLM(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", **json.loads(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"additional_config": {"locks": {"buget": 512}}}, "unknown option 'buget'; did you mean 'budget'?"),
        (
            {"additional_config": {"locks": {}}, "block_size": 24},
            "--block-size = 24 is not supported; use a multiple of 16",
        ),
        (
            {"additional_config": {"locks": {"dense_layers": [0, 1]}}},
            "no layer to serve: every attention layer has a sliding window or is listed in dense_layers",
        ),
    ],
    ids=["option", "blocks", "no-layer"],
)
def test_refusal_is_told_when_the_engine_starts(tiny_model, tmp_path, arguments, reason):
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model), json.dumps({"max_model_len": 256, **arguments})],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode != 0
    assert reason in done.stderr + done.stdout
