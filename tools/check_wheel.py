"""Builds the source archive and the wheel in dist, and tries them where nothing else is installed.

Three things must hold: the archive holds all that a build needs, and its wheel has the files of the tree's own; the
wheel installs into an empty environment, without vLLM; and the `locks` command behaves there, down to what it says is
missing. The wheels are built without CUDA. Run by the interpreter that has the build tools and torch: `make wheel`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheel-check"
UV = [sys.executable, "-m", "uv"]
# What a user without a compiler for GPUs builds; the environment's own torch and build tools are used.
BUILD = [*UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable]
BUILD += ["-C", "cmake.define.LOCKS_CUDA=OFF"]


def run(command: list[str | Path], **options: object) -> None:
    subprocess.run(list(map(str, command)), check=True, **options)


def contents(wheel: Path) -> dict[str, str]:
    """Files of a wheel and their hashes. RECORD repeats them."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist() if not name.endswith(("/RECORD", "/"))
        }


def build() -> tuple[Path, Path, Path]:
    """The source archive, the wheel of the tree and that of the unpacked archive."""
    shutil.rmtree(WORK, ignore_errors=True)
    run([*BUILD, "--sdist", "--out-dir", DIST, ROOT])
    (source,) = DIST.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(WORK / "source", filter="data")
    (unpacked,) = (WORK / "source").iterdir()
    wheels = []
    for folder, tree in ((DIST, ROOT), (WORK / "wheel", unpacked)):
        print(f"==> wheel of {tree.name}", flush=True)
        run([*BUILD, "--wheel", "-C", f"build-dir={WORK / 'objects' / tree.name}", "--out-dir", folder, tree])
        (wheel,) = folder.glob("*.whl")
        wheels.append(wheel)
    return source, wheels[0], wheels[1]


# What a build needs, and what says whose it is.
SOURCES = {"CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "cmake", "include", "pyproject.toml",
           "python", "src"}


def strays(source: Path) -> list[str]:
    """What the source archive has and should not have."""
    with tarfile.open(source) as archive:
        tops = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    return [f"{source.name}: {name}: expected none but {', '.join(sorted(SOURCES))}" for name in sorted(tops - SOURCES)]


def compare(ours: Path, theirs: Path) -> list[str]:
    """What differs between the wheel of the tree and that of the source archive."""
    tree, archive = contents(ours), contents(theirs)
    missing = [f"{name}: only in the wheel of the tree" for name in tree.keys() - archive.keys()]
    added = [f"{name}: only in the wheel of the source archive" for name in archive.keys() - tree.keys()]
    changed = [f"{name}: differs" for name in tree.keys() & archive.keys() if tree[name] != archive[name]]
    return sorted(missing + added + changed)


# Commands in the empty environment: exit code, and what stdout and stderr together must have.
EXPECTED = {
    ("--help",): (0, ["Usage: locks", "serve", "quality", "doctor"]),
    ("version",): (0, ["locks", "torch", "CPU kernels"]),
    ("formats",): (0, ["fine", "compact", "paper"]),
    ("doctor",): (0, ["vLLM", "not installed"]),
    ("serve", "MODEL", "--dry-run"): (2, ["vllm"]),
    ("quality", "missing.safetensors"): (2, ["missing.safetensors"]),
}


def try_commands(wheel: Path) -> list[str]:
    """Installs the wheel into an environment of its own and runs the command there; what is not as it should be."""
    environment = WORK / "environment"
    print("==> an empty environment", flush=True)
    run([*UV, "venv", "--quiet", "--python", sys.executable, environment])
    run([*UV, "pip", "install", "--quiet", "--python", environment / "bin" / "python", wheel])
    wrong = []
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for arguments, (code, texts) in EXPECTED.items():
        answer = subprocess.run(
            [environment / "bin" / "locks", *arguments], capture_output=True, text=True, cwd=WORK, check=False,
            env=clean | {"COLUMNS": "120", "NO_COLOR": "1"},
        )
        said = answer.stdout + answer.stderr
        print(f"locks {' '.join(arguments)}: exit code {answer.returncode}")
        if "Traceback" in said or answer.returncode != code:
            wrong.append(f"locks {' '.join(arguments)}: exit code {answer.returncode}, expected {code}:\n{said}")
        wrong += [f"locks {' '.join(arguments)}: no {text!r} in:\n{said}" for text in texts if text not in said]
    return wrong


def main() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    source, ours, theirs = build()
    wrong = strays(source) + compare(ours, theirs) + try_commands(ours)
    for line in wrong:
        print(f"wheel: {line}", file=sys.stderr)
    if not wrong:
        shutil.rmtree(WORK)
        for path in sorted(DIST.glob("locks*")):
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
