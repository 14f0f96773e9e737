"""One engine of `locks doctor --self-test`, in a process of its own (locks.commands.engine_child has the protocol).

Answers one object: what the engine is, and what it generated and counted.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from locks.commands.engine_child import Say, answer_parent

# Tokens of the prompts: one shorter than the always-read set, one that a budget of BUDGET tokens makes sparse.
PROMPTS = (40, 600)
MAX_TOKENS = 16
BUDGET = 128
_EXTENSION = "locks_vllm.worker.LocksWorkerExtension"
_MIB = 2**20
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass
class SelfTestJob:
    """What one engine does: generate for the prompts; with LOCKS also once more within a budget."""

    locks: bool
    folder: str  # of the model; a random one is written there if `random_model`
    random_model: bool
    num_answers: int = 1

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def write_random_model(folder: Path, dtype: Any) -> None:
    """A Llama of two layers. Its weights are large enough that it prefers some tokens clearly to others."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def engine_arguments(job: SelfTestJob, on_gpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's LLM: as LOCKS's users start it, or the same without LOCKS."""
    arguments: dict[str, Any] = {
        "model": job.folder,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enforce_eager": not on_gpu,  # on a GPU decode steps run in graphs, as they do in use
        "seed": 0,
    }
    if job.random_model and not on_gpu:
        arguments["dtype"] = "float32"  # the comparison is sharper; left alone, vLLM runs such weights in 16 bits
    if on_gpu:
        # Room for the prompts. The share of memory that vLLM may take is also what must be free when it starts.
        arguments["kv_cache_memory_bytes"] = (64 if job.random_model else 1024) * _MIB
        arguments["attention_backend"] = "CUSTOM" if job.locks else "FLASH_ATTN"
        if job.random_model:
            arguments["gpu_memory_utilization"] = 0.05
    if job.locks:
        # Short contexts are read by their records too, though on a GPU that gains nothing.
        arguments["additional_config"] = {"locks": {"budget": "all", "dense_tokens": 0}}
        arguments["worker_extension_cls"] = _EXTENSION
    return arguments


def generate(llm: Any, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Greedy tokens for prompts of random tokens; of each token its log probability and its lead over the next best."""
    from vllm import SamplingParams

    draw = random.Random(0)
    vocabulary = min(llm.llm_engine.model_config.get_vocab_size(), 20000)
    requests = [{"prompt_token_ids": draw.choices(range(10, vocabulary), k=length)} for length in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
    wanted = [request for request in requests if len(request["prompt_token_ids"]) in lengths]
    generated = []
    for output in llm.generate(wanted, params, use_tqdm=False):
        tokens, logprobs, leads = list(output.outputs[0].token_ids), [], []
        for token, candidates in zip(tokens, output.outputs[0].logprobs, strict=True):
            best, second = sorted((item.logprob for item in candidates.values()), reverse=True)[:2]
            logprobs.append(candidates[token].logprob)
            leads.append(best - second)
        generated.append({"tokens": tokens, "logprobs": logprobs, "leads": leads})
    return generated


def _call(llm: Any, method: str, *arguments: Any) -> Any:
    (answer,) = llm.collective_rpc(method, args=arguments)
    return answer


def sparse_run(llm: Any) -> dict[str, Any]:
    """The longest prompt once more, within a budget: what its layers counted, and whether records fit their keys."""
    layers = _call(llm, "locks_describe")
    whole = _call(llm, "locks_counters")
    _call(llm, "locks_set_budget", BUDGET)
    _call(llm, "locks_reset_counters")
    generate(llm, PROMPTS[-1:])
    told = {"layers": layers, "whole": whole, "sparse": _call(llm, "locks_counters")}
    try:
        told["records"] = _call(llm, "locks_verify_records")
    except RuntimeError as error:  # models that mix kinds of attention
        told["records_not_verified"] = str(error)
    return told


def run(told: dict[str, Any], say: Say) -> None:
    job = SelfTestJob(**told)
    if not job.locks:
        os.environ["VLLM_PLUGINS"] = ""  # vLLM as if LOCKS were not installed
    say({"doing": "loading vLLM"})
    import torch
    from vllm import LLM
    from vllm.platforms import current_platform

    on_gpu = current_platform.is_cuda()
    if job.random_model and not Path(job.folder, "config.json").exists():
        write_random_model(Path(job.folder), torch.bfloat16 if on_gpu else torch.float32)
    say({"doing": f"starting vLLM {'with' if job.locks else 'without'} LOCKS"})
    llm = LLM(**engine_arguments(job, on_gpu))
    config = llm.llm_engine.model_config
    answer: dict[str, Any] = {
        "device": current_platform.get_device_name() if on_gpu else "CPU",
        "dtype": str(config.dtype).removeprefix("torch."),
        "num_layers": config.hf_text_config.num_hidden_layers,
        "generated": generate(llm, PROMPTS),
    }
    if job.locks:
        answer |= sparse_run(llm)
    say(answer)


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    answer_parent(run, _ENVIRONMENT)


if __name__ == "__main__":
    main()
