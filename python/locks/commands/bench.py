"""locks bench serve, locks bench prefill"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from locks.commands import CommandError
from locks.commands.bench_engine import EngineJob
from locks.commands.shapes import Heads, load_shape

LOCKS, DENSE = "locks", "flash_attn"
# Share of the bytes of a step; a context grows while it is timed.
LARGEST_DISAGREEMENT = 0.005
BLOCK_TOKENS = 16  # as in locks.formats, which loads torch
_LINES_OF_LOG = 40

app = typer.Typer(help="Time LOCKS in vLLM on this machine's GPU, beside vLLM's own attention.")


@dataclass(frozen=True)
class Backend:
    """A way to attend that can be timed."""

    name: str
    vllm_name: str
    kv_cache_dtype: str = "auto"


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(DENSE, "FLASH_ATTN"),
        Backend(LOCKS, "CUSTOM"),
        Backend("flashinfer", "FLASHINFER"),
        Backend("flash_attn_fp8", "FLASH_ATTN", "fp8"),
        Backend("flashinfer_fp8", "FLASHINFER", "fp8"),
    )
}

_Shape = Annotated[
    str, typer.Argument(help="A model's shape: qwen2.5-7b-1m, llama-3.1-8b, or a folder with its config.json.")
]
_Backends = Annotated[str, typer.Option(help=f"In this order, each in an engine of its own: {', '.join(BACKENDS)}.")]
_Budget = Annotated[str, typer.Option(help="What LOCKS may read a step: tokens, a fraction of the context, or all.")]
_Options = Annotated[str, typer.Option(help="Further options of LOCKS, as JSON.", metavar="JSON")]
_Engine = Annotated[str, typer.Option(help="Further arguments of vLLM's LLM, as JSON.", metavar="JSON")]
_Parallel = Annotated[int, typer.Option("--tensor-parallel", help="GPUs that share the model.", min=1)]
_Json = Annotated[Optional[str], typer.Option("--json", metavar="FILE", help="Also write the rows and the machine.")]


@app.command()
def serve(
    shape: _Shape = "qwen2.5-7b-1m",
    cases: Annotated[str, typer.Option(help="Tokens of context x sequences, separated by commas.")] = (
        "1024x1,8192x1,131072x1,1000000x1,131072x8,262144x7"
    ),
    backends: _Backends = f"{DENSE},{LOCKS}",
    budget: _Budget = "2048",
    options: _Options = "{}",
    steps: Annotated[int, typer.Option(help="Tokens that each sequence generates.", min=20)] = 60,
    block_size: Annotated[int, typer.Option(help="Tokens of a cache block.", min=16)] = 16,
    spread: Annotated[
        float,
        typer.Option(help="Standard deviation of a head's logits over the context, for LOCKS; 0: all alike.", min=0),
    ] = 2.0,
    tensor_parallel: _Parallel = 1,
    engine: _Engine = "{}",
    json_file: _Json = None,
) -> None:
    """Time a decode step at long context: dummy weights, and a cache filled with noise, so that no prompt is read."""
    wanted = [_case("--cases", text) for text in _split("--cases", cases)]
    bench = Bench(shape, backends, budget, options, engine, json_file)
    bench.run("serve", wanted, steps=steps, block_size=block_size, spread=spread, tensor_parallel=tensor_parallel)


@app.command()
def prefill(
    shape: _Shape = "qwen2.5-7b-1m",
    prompts: Annotated[str, typer.Option(help="Tokens of each prompt, separated by commas.")] = "32768,131072",
    backends: _Backends = f"{DENSE},{LOCKS}",
    budget: _Budget = "2048",
    options: _Options = "{}",
    tensor_parallel: _Parallel = 1,
    engine: _Engine = "{}",
    json_file: _Json = None,
) -> None:
    """Time how long a prompt takes to its first token: what the records cost there."""
    wanted = [(_at_least("--prompts", text, 2), 1) for text in _split("--prompts", prompts)]
    bench = Bench(shape, backends, budget, options, engine, json_file)
    bench.run("prefill", wanted, prefill=True, tensor_parallel=tensor_parallel)


def _refusal(reason: object, command: str = "locks bench") -> CommandError:
    return CommandError(f"{reason}; see `{command} --help`")


def _split(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise _refusal(f"{option} = {text!r}, expected at least one")
    return parts


def _at_least(option: str, text: str, least: int) -> int:
    if not (text.isdecimal() and int(text) >= least):
        raise _refusal(f"{option}: {text!r}, expected a number of tokens >= {least}")
    return int(text)


def _case(option: str, text: str) -> tuple[int, int]:
    context, _, batch = text.partition("x")
    if not (context.isdecimal() and batch.isdecimal() and int(context) >= 2 and int(batch) >= 1):
        raise _refusal(f"{option}: {text!r}, expected tokens of context x sequences, such as 131072x8")
    return int(context), int(batch)


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise _refusal(f"{option} = {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise _refusal(f"{option} = {text!r}, expected a JSON object")
    return value


class Bench:
    """One call of the command: its engines run one after the other, and what one cannot do, the others still do."""

    def __init__(
        self, shape: str, backends: str, budget: str, options: str, engine: str, json_file: str | None
    ) -> None:
        from locks.budget import parse_budget

        self.shape, self.config = shape, load_shape(shape)
        self.heads = Heads.of(self.config)
        names = _split("--backends", backends)
        for name in names:
            if name not in BACKENDS:
                raise _refusal(f"--backends: {name!r}, expected {', '.join(BACKENDS)}")
        self.backends = [BACKENDS[name] for name in names]
        try:
            parse_budget(budget)
        except ValueError as error:
            raise _refusal(error) from None
        self.locks = {"budget": budget} | _object("--options", options)
        self.engine = _object("--engine", engine)
        self.json_file = json_file
        if json_file is not None and not Path(json_file).absolute().parent.is_dir():
            raise _refusal(f"--json = {json_file!r}, expected a file in a folder that exists")

    def run(self, kind: str, cases: list[tuple[int, int]], **settings: Any) -> None:
        """Times the cases, (context, sequences) each, in every engine; prints and writes the rows.

        kind: serve or prefill. Raises CommandError at the end, for all that went wrong.
        """
        machine = describe_machine() | {"settings": settings}
        rows: list[dict[str, Any]] = []
        failures: list[str] = []
        with _progress(len(self.backends) * len(cases)) as (say, advance):
            for backend in self.backends:
                job = EngineJob(
                    config=self.config,
                    backend=backend.vllm_name,
                    cases=cases,
                    locks=self.locks if backend.name == LOCKS else None,
                    kv_cache_dtype=backend.kv_cache_dtype,
                    engine=self.engine,
                    **settings,
                )
                try:
                    for row in run_engine(job, lambda doing, name=backend.name: say(f"{name}: {doing}")):
                        rows.append(self._row(kind, backend, row))
                        advance(_line(rows[-1]))
                        if "problem" in rows[-1]:  # told at the end: the times may be of use
                            failures.append(f"{backend.name}: {rows[-1]['problem']}")
                except EngineError as error:
                    failures.append(f"{backend.name}: {error}")
                compare(rows)
                if self.json_file is not None:  # after each engine: what has been measured is not lost
                    write(self.json_file, machine, rows, failures)
        if rows:
            Console().print(_table(f"{kind} {self.shape}, {machine['machine']}", rows))
        if failures:
            raise CommandError("; ".join(failures))

    def _row(self, kind: str, backend: Backend, row: dict[str, Any]) -> dict[str, Any]:
        is_locks = backend.name == LOCKS
        formats = self.locks.get("formats", "fine")
        row = {
            "name": f"{kind}:{self.shape}",
            "backend": backend.name,
            "format": (formats if isinstance(formats, str) else json.dumps(formats)) if is_locks else None,
            "budget": self.locks["budget"] if is_locks else None,
            **row,
            "percent_of_peak": None,
        }
        if kind == "serve":
            row["tokens_per_second"] = 1e6 * row["batch"] / row["median_us"]
            if is_locks and (problem := self._problem(row)) is not None:
                row["problem"] = problem
            row.setdefault("bytes", self._dense_bytes(row) // (2 if backend.kv_cache_dtype == "fp8" else 1))
        else:
            row["bytes"] = None
        return row

    def _heads(self) -> tuple[int, int]:
        """KV heads of all layers, and their channels."""
        return self.heads.num_kv_heads * self.heads.num_layers, self.heads.head_dim

    def _dense_bytes(self, row: dict[str, Any]) -> int:
        """Keys and values of the whole context, in 16 bits."""
        heads, head_dim = self._heads()
        return row["batch"] * row["context"] * heads * head_dim * 2 * 2

    def _problem(self, row: dict[str, Any]) -> str | None:
        """Holds what the device counted against arithmetic."""
        from locks.budget import budget_tokens, parse_budget
        from locks.formats import Format

        where = f"{row['context']}x{row['batch']}"
        if row["invalid_records"]:
            return f"{where}: {row['invalid_records']} invalid records a step"
        if row["sparse_share"] not in (0, 1) or row["format"] in (None, "auto") or row["format"].startswith("{"):
            return None
        if not row["sparse_share"]:
            row["bytes_expected"] = self._dense_bytes(row)
        else:
            heads, head_dim = self._heads()
            form, context = Format.parse(row["format"]), row["context"]
            tokens = budget_tokens(parse_budget(row["budget"]), context, form.page_tokens)
            records = context // BLOCK_TOKENS * form.record_bytes(head_dim)
            row["bytes_expected"] = row["batch"] * heads * (records + tokens * head_dim * 2 * 2)
        if abs(row["bytes"] / row["bytes_expected"] - 1) > LARGEST_DISAGREEMENT + row["steps"] / row["context"]:
            return f"{where}: a step read {row['bytes']:.0f} bytes, expected {row['bytes_expected']}"
        return None


class EngineError(Exception):
    """An engine that did not do all of its cases."""


def run_engine(job: EngineJob, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yields the rows of an engine as they come. Its process is gone, and its memory free, when this ends."""
    command = [sys.executable, "-m", "locks.commands.bench_engine"]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdin is not None and process.stdout is not None
        count = 0
        try:
            process.stdin.write(job.as_json())
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "row" in answer:
                    count += 1
                    yield answer["row"]
                else:
                    say(answer["doing"])
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        if code != 0 or count != len(job.cases):
            log.seek(0)
            raise EngineError(_reason(log.readlines(), code))


def _reason(lines: list[str], code: int) -> str:
    """What an engine that stopped last said; all of its last lines go to stderr."""
    sys.stderr.writelines(lines[-_LINES_OF_LOG:])
    errors = [line.strip() for line in lines if "Error" in line.split(" ", 1)[0] or "Error:" in line]
    last = errors[-1] if errors else (lines[-1].strip() if lines else "no output")
    return f"the engine stopped with code {code}: {last}"


def compare(rows: list[dict[str, Any]]) -> None:
    """Sets each row beside the dense one of the same case, if there is one."""
    dense = {(row["context"], row["batch"]): row["median_us"] for row in rows if row["backend"] == DENSE}
    for row in rows:
        row["dense_us"] = dense.get((row["context"], row["batch"]))
        row["speedup"] = None if row["dense_us"] is None else row["dense_us"] / row["median_us"]


def _output_of(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
    return None


def _commit() -> str | None:
    """Of the package: from its metadata, where an installer noted it, or of the checkout that it lies in."""
    import importlib.metadata

    with contextlib.suppress(importlib.metadata.PackageNotFoundError, KeyError, ValueError):
        noted = importlib.metadata.distribution("locks-vllm").read_text("direct_url.json")
        return json.loads(noted or "{}")["vcs_info"]["commit_id"]
    return _output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")


def describe_machine() -> dict[str, Any]:
    """The machine and the versions that a result belongs to. Raises CommandError where nothing can be timed."""
    import importlib.metadata
    from datetime import datetime, timezone

    import torch

    from locks import __version__

    try:
        vllm = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise _refusal("vLLM for CUDA is not installed here: pip install vllm==0.26.0") from None
    if not torch.cuda.is_available():
        raise _refusal("torch sees no CUDA device, and this command times one")
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "machine": torch.cuda.get_device_name(),
        "driver": driver,
        "versions": {"locks": __version__, "vllm": vllm, "torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write(path: str, machine: dict[str, Any], rows: list[dict[str, Any]], failures: list[str]) -> None:
    """The file of `--json`: the machine, the rows, and what went wrong as "not_measured"."""
    text = json.dumps({**machine, "rows": rows, "not_measured": failures}, indent=1) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refusal(f"--json = {path!r}: {error.strerror}, expected a file that you may write") from error


def _line(row: dict[str, Any]) -> str:
    low, high = row["p10_us"] / 1e3, row["p90_us"] / 1e3
    return (
        f"{row['name']} {row['backend']} {row['context']} x {row['batch']}: {row['median_us'] / 1e3:.3f} ms"
        f" ({low:.3f} to {high:.3f})"
    )


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for heading in ("context x\nsequences", "backend", "ms, median\n(p10 to p90)", "MB read\na step", "times as\nfast"):
        table.add_column(heading, justify="left" if heading == "backend" else "right", no_wrap=True)
    for row in rows:
        median, low, high = (row[name] / 1e3 for name in ("median_us", "p10_us", "p90_us"))
        table.add_row(
            f"{row['context']} x {row['batch']}",
            row["backend"],
            f"{median:.3f} ({low:.3f} to {high:.3f})",
            "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}",
            "" if row["speedup"] is None else f"{row['speedup']:.2f}",
        )
    return table


@contextlib.contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Tells on stderr what is being done and what has been: as a bar if that is a terminal, else a line a result."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda text: None), (lambda line: print(line, file=sys.stderr, flush=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        yield (
            lambda text: progress.update(task, description=text),
            lambda line: progress.advance(task),
        )
