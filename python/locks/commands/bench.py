"""locks bench serve, locks bench prefill; and where the other benchmarks are registered"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer

from locks.commands import CommandError, json_object, locks_options, usage_error
from locks.commands.bench_append import earlier_rows
from locks.commands.bench_compare import EXAMPLES as COMPARE_EXAMPLES
from locks.commands.bench_compare import compare as compare_results
from locks.commands.bench_cpu import EXAMPLES as CPU_EXAMPLES
from locks.commands.bench_cpu import cpu
from locks.commands.bench_engine import SPARSE, WHOLE, Case, EngineJob
from locks.commands.bench_machine import describe_machine
from locks.commands.bench_process import Engine, EngineError
from locks.commands.bench_report import crossovers, line, print_table, progress
from locks.commands.output import STDOUT, JsonFile, check_target, write_json
from locks.commands.shapes import Heads, cut_layers, load_shape

SERVE, PREFILL = "locks bench serve", "locks bench prefill"
LOCKS, DENSE = "locks", "flash_attn"
# Share of the bytes of a step; a context grows while it is timed.
LARGEST_DISAGREEMENT = 0.005
BLOCK_TOKENS = 16  # as in locks.formats, which loads torch
_COUNT = "[0-9]{1,12}"  # far beyond any context; of thousands of digits Python makes no number

app = typer.Typer(help="Time LOCKS on this machine beside vLLM's own attention: in vLLM on a GPU, its stages on a CPU.")
app.command(epilog=CPU_EXAMPLES)(cpu)
app.command("compare", epilog=COMPARE_EXAMPLES)(compare_results)


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
_Append = Annotated[
    bool, typer.Option("--append", help="Keep the rows that FILE has, of the same machine, commit and settings.")
]


@app.command()
def serve(
    shape: _Shape = "qwen2.5-7b-1m",
    cases: Annotated[str, typer.Option(help="Tokens of context x sequences, separated by commas.")] = (
        "1024x1,8192x1,131072x1,1000000x1,131072x8,262144x7"
    ),
    crossover: Annotated[
        str,
        typer.Option(
            help="Further cases, at which LOCKS is timed twice: reading whole, and reading by its records. They tell"
            " from which context on the second is faster.",
            metavar="CASES",
        ),
    ] = "",
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
    json_file: JsonFile = None,
    append: _Append = False,
) -> None:
    """Time a decode step at long context: dummy weights, and a cache filled with noise, so that no prompt is read.

    A case that does not fit into an engine's cache is left out there, and told at the end."""
    wanted = [Case("serve", *timed) for timed in _cases("--cases", cases)]
    if crossover:
        found = _cases("--crossover", crossover)
        wanted += [Case("crossover", *timed, reads) for timed in found for reads in (WHOLE, SPARSE)]
    bench = Bench(SERVE, shape, load_shape(shape), backends, budget, options, engine, json_file, append)
    bench.run(wanted, steps=steps, block_size=block_size, spread=spread, tensor_parallel=tensor_parallel)


@app.command()
def prefill(
    shape: _Shape = "qwen2.5-7b-1m",
    prompts: Annotated[str, typer.Option(help="Tokens of each prompt, separated by commas.")] = "32768,131072",
    layers: Annotated[
        Optional[int],
        typer.Option(
            help="Only so many of the model's layers, which all cost the same: shares are those of all.", min=1
        ),
    ] = None,
    backends: _Backends = f"{DENSE},{LOCKS}",
    budget: _Budget = "2048",
    options: _Options = "{}",
    tensor_parallel: _Parallel = 1,
    engine: _Engine = "{}",
    json_file: JsonFile = None,
    append: _Append = False,
) -> None:
    """Time how long a prompt takes to its first token: what the records cost there."""
    lengths = _listed(PREFILL, "--prompts", prompts, _prompt, "a number of tokens >= 2, of at most 12 digits")
    wanted = [Case("prefill", length) for length in lengths]
    config = load_shape(shape)
    if layers is not None:
        config = cut_layers(config, layers)
    bench = Bench(PREFILL, shape, config, backends, budget, options, engine, json_file, append)
    bench.run(wanted, prefill=True, tensor_parallel=tensor_parallel)


_Value = TypeVar("_Value", bound=Hashable)


def _listed(command: str, option: str, text: str, parse: Callable[[str], _Value | None], expected: str) -> list[_Value]:
    """The values of an option that takes several, with commas between. Raises CommandError for one that `parse` has no
    value of, and for one that is there twice: its rows could not be told apart."""
    found: dict[_Value, None] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        value = parse(part)
        if value is None:
            raise usage_error(command, f"{option}: {part!r:.60}, expected {expected}")
        if value in found:
            raise usage_error(command, f"{option}: {part!r:.60} is there twice, expected each once")
        found[value] = None
    if not found:
        raise usage_error(command, f"{option} = {text!r:.60}, expected at least one")
    return list(found)


def _prompt(text: str) -> int | None:
    return int(text) if re.fullmatch(_COUNT, text) and int(text) >= 2 else None


def _context_and_batch(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(f"({_COUNT})x({_COUNT})", text)
    if match is None:
        return None
    context, batch = int(match[1]), int(match[2])
    return (context, batch) if context >= 2 and batch >= 1 else None


def _cases(option: str, text: str) -> list[tuple[int, int]]:
    expected = "tokens of context x sequences, such as 131072x8, each of at most 12 digits"
    return _listed(SERVE, option, text, _context_and_batch, expected)


class Bench:
    """One call of the command: its engines run one after the other, and what one cannot do, the others still do."""

    def __init__(
        self,
        command: str,
        shape: str,
        config: dict[str, Any],
        backends: str,
        budget: str,
        options: str,
        engine: str,
        json_file: str | None,
        append: bool = False,
    ) -> None:
        self.command, self.shape, self.config = command, shape, config
        self.heads = Heads.of(config)
        self.backends = _listed(command, "--backends", backends, BACKENDS.get, ", ".join(BACKENDS))
        self.locks = locks_options(command, {"budget": budget}, options, self.heads.num_layers)
        self.engine = json_object(command, "--engine", engine)
        self.json_file, self.append = json_file, append
        check_target(command, "--json", json_file, or_stdout=True)
        if append and (json_file is None or json_file == STDOUT or not Path(json_file).is_file()):
            raise usage_error(command, f"--append: --json = {json_file!r}, expected a file that an earlier run wrote")

    def run(self, cases: list[Case], **settings: Any) -> None:
        """Times the cases in every engine; prints and writes the rows. Raises CommandError at the end, for all that
        went wrong."""
        machine = describe_machine(self.command) | {"settings": settings | {"layers": self.heads.num_layers}}
        rows, failures = self._earlier(machine)
        jobs = [self._job(backend, cases, settings) for backend in self.backends]
        with ExitStack() as stack, progress(sum(len(job.cases) for job in jobs)) as (say, advance):
            engines = [stack.enter_context(Engine()) for _ in jobs]
            for backend, job, engine in zip(self.backends, jobs, engines, strict=True):
                try:
                    with engine:
                        for answer in engine.measure(job, lambda doing, name=backend.name: say(f"{name}: {doing}")):
                            advance(self._add(rows, failures, backend, answer))
                            self._write(machine, rows, failures)
                except EngineError as error:
                    failures.append(f"{backend.name}: {error}")
                self._write(machine, rows, failures)
        if self.json_file == STDOUT:
            write_json(self.command, STDOUT, result(machine, rows, failures))
        else:
            self._print(machine, rows)
        if failures:
            raise CommandError("; ".join(failures))

    def _print(self, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        if rows:
            print_table(f"{self.shape}, {machine['machine']}", rows)
        for batch, tokens in crossovers(rows).items():
            where = "at no context timed" if tokens is None else f"from {tokens} tokens of context on"
            print(f"{batch} x: reading by records is as fast as reading whole {where}")

    def _write(self, machine: dict[str, Any], rows: list[dict[str, Any]], failures: list[str]) -> None:
        """After each row: what has been measured is not lost when a run is cut off."""
        compare(rows)
        if self.json_file is not None and self.json_file != STDOUT:  # stdout takes the whole, at the end
            write_json(self.command, self.json_file, result(machine, rows, failures))

    def _job(self, backend: Backend, cases: list[Case], settings: dict[str, Any]) -> EngineJob:
        is_locks = backend.name == LOCKS
        if not is_locks:  # reads all there is, always
            cases = list(dict.fromkeys(Case(case.kind, case.context, case.batch) for case in cases))
        return EngineJob(
            config=self.config,
            backend=backend.vllm_name,
            cases=cases,
            locks=self.locks if is_locks else None,
            kv_cache_dtype=backend.kv_cache_dtype,
            engine=self.engine,
            **settings,
        )

    def _earlier(self, machine: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        """With --append, rows and failures of the file of --json, but for those of the backends that run again."""
        if not self.append or self.json_file is None:
            return [], []
        return earlier_rows(self.command, self.json_file, machine, {backend.name for backend in self.backends})

    def _add(self, rows: list[dict[str, Any]], failures: list[str], backend: Backend, answer: dict[str, Any]) -> str:
        """Takes an engine's answer; returns it as a line."""
        if "skipped" in answer:
            failures.append(f"{backend.name}: {answer['skipped']}")
            return failures[-1]
        row = self._row(backend, answer["row"])
        rows.append(row)
        if "problem" in row:  # told at the end: the times may be of use
            failures.append(f"{backend.name}: {row['problem']}")
        return line(row)

    def _row(self, backend: Backend, answer: dict[str, Any]) -> dict[str, Any]:
        is_locks = backend.name == LOCKS
        formats = self.locks.get("formats", "fine")
        kind = answer["kind"]
        row = {
            "name": f"{kind}:{self.shape}",
            "backend": backend.name,
            "format": (formats if isinstance(formats, str) else json.dumps(formats)) if is_locks else None,
            "budget": self.locks["budget"] if is_locks else None,
            **{name: value for name, value in answer.items() if name != "kind"},
            "percent_of_peak": None,
        }
        if kind == "prefill":
            return row | {"bytes": None}
        row["tokens_per_second"] = 1e6 * row["batch"] / row["median_us"]
        if is_locks and (problem := self._problem(row)) is not None:
            row["problem"] = problem
        row.setdefault("bytes", self._dense_bytes(row) // (2 if backend.kv_cache_dtype == "fp8" else 1))
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
        slack = LARGEST_DISAGREEMENT + row["steps"] / row["context"]
        if row["invalid_records"]:
            return f"{where}: {row['invalid_records']} invalid records a step"
        dense = self._dense_bytes(row)
        if abs(row["bytes_dense"] / dense - 1) > slack:
            return f"{where}: a step counted {row['bytes_dense']:.0f} bytes for dense attention, expected {dense}"
        if row["sparse_share"] not in (0, 1) or row["format"] in (None, "auto") or row["format"].startswith("{"):
            return None
        if not row["sparse_share"]:
            row["bytes_expected"] = dense
        else:
            heads, head_dim = self._heads()
            form, context = Format.parse(row["format"]), row["context"]
            tokens = budget_tokens(parse_budget(row["budget"]), context, form.page_tokens)
            records = context // BLOCK_TOKENS * form.record_bytes(head_dim)
            row["bytes_expected"] = row["batch"] * heads * (records + tokens * head_dim * 2 * 2)
        if abs(row["bytes"] / row["bytes_expected"] - 1) > slack:
            return f"{where}: a step read {row['bytes']:.0f} bytes, expected {row['bytes_expected']}"
        return None


def compare(rows: list[dict[str, Any]]) -> None:
    """Sets each row beside the dense one of the same case, if there is one."""
    dense = {_case(row): row["median_us"] for row in rows if row["backend"] == DENSE}
    for row in rows:
        row["dense_us"] = dense.get(_case(row))
        row["speedup"] = None if row["dense_us"] is None else row["dense_us"] / row["median_us"]


def _case(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["name"], row["context"], row["batch"]


def result(machine: dict[str, Any], rows: list[dict[str, Any]], failures: list[str]) -> dict[str, Any]:
    """What `--json` writes: the machine, the rows, and what went wrong as "not_measured"."""
    return {**machine, "rows": rows, "not_measured": failures}
