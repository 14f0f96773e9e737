"""Times the demo's prompt in vLLM without LOCKS and with it, and writes bench/results/vllm_cpu.json.

    .venv/bin/python tools/compare_vllm.py

After `make setup`. Each mode has a process and an engine of its own; the prompt is read once, and decoding is timed on
later requests that find it in the prefix cache. Run it on an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

from provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
MODES = {"vLLM without LOCKS": None, "LOCKS, all": "all", "LOCKS, 512 tokens": 512}
NUM_TOKENS, REPEATS = 48, 3


def measure(budget: int | str | None) -> dict:
    """Seconds of the prompt and of each decode step, in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    if budget is None:
        os.environ["VLLM_PLUGINS"] = ""  # the plug-in is not even loaded
    sys.path.insert(0, str(ROOT))
    from demo.document import build_document
    from demo.smollm2 import ensure_model
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    folder = ensure_model(ROOT / ".cache")
    prompt = build_document(AutoTokenizer.from_pretrained(folder)).token_ids
    options = {} if budget is None else {"additional_config": {"locks": {"budget": budget}}}
    limits = {"max_model_len": 8192, "max_num_seqs": 1, "max_num_batched_tokens": 1024}
    engine = LLM(str(folder), enforce_eager=True, seed=0, **limits, **options).llm_engine

    def generate(name: str, count: int) -> list[float]:
        parameters = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        seconds = []
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begin)
        return seconds

    prompt_seconds = sum(generate("prompt", 1))
    steps = [second for i in range(REPEATS) for second in generate(f"decode-{i}", NUM_TOKENS)[1 - NUM_TOKENS :]]
    tenths = quantiles(steps, n=10)
    return {
        "prompt_tokens": len(prompt),
        "prompt_seconds": prompt_seconds,
        "timed_steps": len(steps),
        "tokens_per_second": 1 / median(steps),
        "tokens_per_second_p10": 1 / tenths[-1],
        "tokens_per_second_p90": 1 / tenths[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=list(MODES), help="measure one mode and print it (used by the others)")
    mode = parser.parse_args().mode
    if mode is not None:
        print(json.dumps(measure(MODES[mode])))
        return 0
    rows = []
    for name in MODES:
        print(f"{name} ...", flush=True)
        run = subprocess.run([sys.executable, __file__, "--mode", name], capture_output=True, text=True, check=False)
        if run.returncode != 0:
            sys.exit(f"{name} failed:\n{run.stderr[-2000:]}")
        rows.append({"mode": name, **json.loads(run.stdout.splitlines()[-1])})
        print(f"  prompt {rows[-1]['prompt_seconds']:.1f} s, {rows[-1]['tokens_per_second']:.1f} tokens/s")
    result = provenance() | {"rows": rows}
    (ROOT / "bench" / "results" / "vllm_cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
