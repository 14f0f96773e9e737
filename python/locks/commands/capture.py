"""locks capture"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from locks.commands import CommandError, json_object, usage_error
from locks.commands.bench_process import Engine, EngineError
from locks.commands.capture_engine import CaptureJob
from locks.commands.output import can_write
from locks.commands.vllm_package import need_vllm

COMMAND = "locks capture"
_MIB = 2**20
EXAMPLES = """Examples:

    locks capture Qwen/Qwen2.5-0.5B-Instruct --prompt-file book.txt --layers 0,3,16 --out book.safetensors

    locks capture MODEL --prompt-file question.txt --chat --kv-heads all --out all.safetensors
"""


def capture(
    model: Annotated[str, typer.Argument(help="A model as vLLM takes it: a folder, or a name on the hub.")],
    prompt_file: Annotated[
        Path,
        typer.Option(
            help="The prompt, UTF-8 text as it is. `<<answer>>...<</answer>>` marks what carries the answer: the marks"
            " are taken out, and the tokens between are noted in the trace."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The trace to write (.safetensors); it must not exist yet.")],
    layers: Annotated[str, typer.Option(help="Layer numbers with commas between, or all.")] = "all",
    kv_heads: Annotated[
        str,
        typer.Option(help="KV head to capture: one number for all layers, one for each with commas between, or all."),
    ] = "0",
    steps: Annotated[int, typer.Option(help="Take the queries of so many tokens, the prompt's last.", min=1)] = 64,
    max_mib: Annotated[int, typer.Option(help="Refuse to write a trace larger than this, in MiB.", min=1)] = 1024,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    repeat_context: Annotated[
        bool,
        typer.Option(
            "--repeat-context",
            help="Also make the model repeat its context, all but the last --steps tokens, and capture that: what the"
            " selector kvzip evicts by.",
        ),
    ] = False,
    engine: Annotated[str, typer.Option(help="Further arguments of vLLM's LLM, as JSON.", metavar="JSON")] = "{}",
) -> None:
    """Capture a model's attention as a trace.

    Runs the model in vLLM on one prompt, and writes the queries, keys and values of its layers to a file for
    `locks quality`. Tells the size of the file before the engine starts."""
    job = CaptureJob(
        model=model,
        prompt_file=str(prompt_file),
        out=str(out),
        layers=None if layers == "all" else _numbers("--layers", layers, ", or all"),
        kv_heads=None if kv_heads == "all" else _numbers("--kv-heads", kv_heads, ", or all", repeated=True),
        steps=steps,
        max_mib=max_mib,
        chat=chat,
        repeat_context=repeat_context,
        engine=json_object(COMMAND, "--engine", engine),
    )
    _check_files(prompt_file, out)
    need_vllm(COMMAND)
    try:
        with _progress() as say, Engine("locks.commands.capture_engine") as process:
            for answer in process.measure(job, say):
                if "refused" in answer:
                    raise _refusal(answer["refused"])
                print(_plan_line(job, answer["plan"]) if "plan" in answer else _written_line(job, answer), flush=True)
    except EngineError as error:
        raise _refusal(error) from None


def _refusal(reason: object) -> CommandError:
    return usage_error(COMMAND, reason)


def _numbers(option: str, text: str, alternative: str = "", repeated: bool = False) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) <= 9]
    if len(numbers) != len(parts) or (not repeated and len(set(numbers)) != len(numbers)):
        raise _refusal(f"{option} = {text!r}, expected numbers such as 0,3,16{alternative}")
    return numbers


def _check_files(prompt_file: Path, out: Path) -> None:
    """Refuses what can be told before anything is loaded."""
    try:
        if not prompt_file.is_file():
            raise _refusal(f"--prompt-file = {str(prompt_file)!r}, expected a file that exists")
        if prompt_file.stat().st_size == 0:
            raise _refusal(f"--prompt-file = {str(prompt_file)!r} is empty, expected a prompt")
        if out.exists():
            raise _refusal(f"--out = {str(out)!r} exists already, expected a new file")
        if not can_write(out.absolute().parent):
            raise _refusal(f"--out = {str(out)!r}, expected a file in a folder that exists and that you may write")
    except OSError as error:  # such as a name that is too long
        raise _refusal(f"{error.filename!r}: {error.strerror}") from None


def _plan_line(job: CaptureJob, plan: dict[str, Any]) -> str:
    marked = f", {len(plan['answer_spans'])} marked answers" if plan["answer_spans"] else ""
    repeated = f", and {plan['repeat_rows']} that repeat the context" if plan["repeat_rows"] else ""
    return (
        f"{job.out}: {plan['bytes'] / _MIB:.1f} MiB (at most {job.max_mib}): {len(plan['layers'])} layers,"
        f" {plan['tokens']} of the prompt's {plan['prompt_tokens']} tokens, queries of the last {job.steps}{repeated}"
        f"{marked}"
    )


def _written_line(job: CaptureJob, answer: dict[str, Any]) -> str:
    return f"{job.out}: written, {answer['written']} bytes"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What goes on, on stderr: a line that changes if that is a terminal, nothing if it is not."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda doing: None
        return
    with console.status("loading vLLM") as status:
        yield lambda doing: status.update(doing)
