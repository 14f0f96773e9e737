"""Long texts by vLLM as it serves, without LOCKS and with it: which of them end in a loop?

    python tools/generate_long.py MODEL --budgets 0.02,512 --json results/NAME/long_generation.json

The prompts, seeds and measures of the evaluation's task `long_generation`. Each mode is an engine of its own, with all
that vLLM makes of it (on a GPU, full CUDA graphs): the product's path and not the evaluation's. With --side-by-side all
run at once, for which --engine has to leave room.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from provenance import provenance

DENSE = "dense"


def budget_of(mode: str) -> float | int:
    """A fraction of the context, or tokens."""
    return float(mode) if "." in mode else int(mode)


def generate(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one mode's engine writes, in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_NO_USAGE_STATS="1")
    if mode == DENSE:
        os.environ["VLLM_PLUGINS"] = ""  # the plug-in is not even loaded
    import torch
    from locks.evaluation.engine import sampling
    from locks.evaluation.measures import long_requests
    from vllm import LLM

    options: dict[str, Any] = {"model": arguments.model, "max_num_seqs": arguments.count, "seed": 0}
    if mode != DENSE:
        # By default a GPU reads contexts of this length whole.
        options["additional_config"] = {"locks": {"budget": budget_of(mode), "dense_tokens": 0}}
        options["worker_extension_cls"] = "locks_vllm.worker.LocksWorkerExtension"
        if torch.cuda.is_available():
            options["attention_backend"] = "CUSTOM"
    llm = LLM(**options | json.loads(arguments.engine))
    tokenizer = llm.get_tokenizer()
    longest = llm.llm_engine.model_config.max_model_len
    chat = getattr(tokenizer, "chat_template", None) is not None
    requests = long_requests(arguments.tokens, arguments.count, tokenizer, chat, longest)
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    outputs = llm.generate(prompts, [sampling(request) for request in requests])
    told: dict[str, Any] = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    if mode != DENSE:
        layers = llm.collective_rpc("locks_counters")[0].values()
        told["sparse_rows"] = sum(layer["sparse_rows"] for layer in layers)
        told["dense_rows"] = sum(layer["dense_rows"] for layer in layers)
        if told["sparse_rows"] == 0:
            raise RuntimeError(f"budget {mode}: no row was read sparsely")
    return told


def run(mode: str, given: list[str]) -> dict[str, Any]:
    """A process of this file that generates for one mode."""
    print(f"{mode} ...", flush=True)
    command = [sys.executable, __file__, *given, "--mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{mode} failed:\n{done.stderr[-3000:]}")
    print(f"{mode}: done", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def judge(mode: str, told: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """A row: lengths, loops, and how varied the ends are."""
    from locks.evaluation.statistics import distinct_share, first_divergence, loop_period

    texts, others = told["tokens"], dense["tokens"]
    looping = {doc for doc, text in enumerate(texts) if loop_period(text) is not None}
    dense_looping = {doc for doc, text in enumerate(others) if loop_period(text) is not None}
    row = {key: value for key, value in told.items() if key != "tokens"}
    return row | {
        "mode": mode,
        "n": len(texts),
        "lengths": [len(text) for text in texts],
        "looping": sorted(looping),
        "looping_where_dense_is_not": sorted(looping - dense_looping),
        "distinct_4_grams": sum(map(distinct_share, texts)) / len(texts),
        "first_divergence": [first_divergence(text, other) for text, other in zip(texts, others, strict=True)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="of Hugging Face, or a folder")
    parser.add_argument("--budgets", default="0.02,512", help="fractions or tokens that LOCKS may read a step")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each text")
    parser.add_argument("--count", type=int, default=8, help="texts")
    parser.add_argument("--engine", default="{}", metavar="JSON", help="further arguments of vLLM's LLM")
    parser.add_argument("--side-by-side", action="store_true", help="all engines at once")
    parser.add_argument("--json", type=Path, help="file of results")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode is not None:
        print("\n" + json.dumps(generate(arguments.mode, arguments)))
        return 0
    modes = [DENSE, *arguments.budgets.split(",")]
    given = sys.argv[1:]
    with ThreadPoolExecutor(len(modes) if arguments.side_by_side else 1) as pool:
        told = dict(zip(modes, pool.map(lambda mode: run(mode, given), modes), strict=True))
    rows = [judge(mode, told[mode], told[DENSE]) for mode in modes]
    from locks.commands.bench_machine import describe_machine
    from torch.cuda import is_available

    result = (describe_machine() if is_available() else provenance()) | {
        "model": Path(arguments.model).name,
        "tokens": arguments.tokens,
        "engine": json.loads(arguments.engine),
        "rows": rows,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
