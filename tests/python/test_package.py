"""The installed package: what it holds, needs and exports."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import locks
import pytest
from locks import ops

DISTRIBUTION = "locks-vllm"


def elf(*options: str) -> str:
    return subprocess.run(
        ["readelf", "--wide", *options, str(ops.LIBRARY)], capture_output=True, text=True, check=True
    ).stdout


def symbols(*, defined: bool) -> list[str]:
    rows = [line.split() for line in elf("--dyn-syms").splitlines()]
    # number, value, size, type, binding, visibility, section, name
    return [row[7] for row in rows if len(row) > 7 and row[0].rstrip(":").isdecimal() and (row[6] != "UND") == defined]


def test_one_wheel_for_every_python():
    wheel = importlib.metadata.distribution(DISTRIBUTION).read_text("WHEEL")
    assert re.search(r"^Tag: py3-none-linux_\w+$", wheel, re.MULTILINE)
    assert "Root-Is-Purelib: false" in wheel


def test_both_packages_and_their_entry_points():
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    assert distribution.version == locks.__version__
    folders = {Path(file).parts[0] for file in distribution.files}
    assert {"locks", "locks_vllm"} <= folders
    assert Path("locks/py.typed") in map(Path, distribution.files)
    entries = {(entry.group, entry.name): entry.value for entry in distribution.entry_points}
    assert entries == {
        ("console_scripts", "locks"): "locks.cli:main",
        ("vllm.general_plugins", "locks"): "locks_vllm:register",
    }


def test_vllm_is_no_dependency():
    requires = importlib.metadata.requires(DISTRIBUTION)
    names = {re.match(r"[\w-]+", line).group() for line in requires if "extra ==" not in line}
    assert names == {"torch", "numpy", "pydantic", "typer", "rich", "safetensors"}


def test_library_needs_torch_alone():
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", elf("--dynamic")))
    assert "libtorch.so" in needed
    assert needed <= {
        "libtorch.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"
    }
    assert "RPATH" not in elf("--dynamic") and "RUNPATH" not in elf("--dynamic")


def test_library_has_no_python_and_no_unstable_symbols():
    undefined = symbols(defined=False)
    assert not [name for name in undefined if re.match(r"_?Py[A-Z_]", name)]
    assert not [name for name in undefined if re.search(r"N?3?c10|N2at|5torch", name)]
    assert [name for name in undefined if name.startswith(("aoti_torch_", "torch_"))]


def test_library_exports_nothing_of_the_core():
    assert not [name for name in symbols(defined=True) if "5locks" in name]


def run_copy(folder: Path, library: bytes | None) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the package whose native library is missing, or other bytes."""
    copy = folder / "locks"
    shutil.copytree(Path(ops.__file__).parent, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if library is not None:
        (copy / ops.LIBRARY.name).write_bytes(library)
    return subprocess.run(
        [sys.executable, "-m", "locks.cli", "formats"], capture_output=True, text=True, cwd=folder, timeout=120
    )


def test_missing_library_is_named(tmp_path):
    result = run_copy(tmp_path, None)
    assert result.returncode == 2
    assert result.stderr.startswith(f"locks: {tmp_path}/locks/liblocks_torch.so is missing: ")
    assert "pip install ." in result.stderr and result.stderr.count("\n") == 1


def test_foreign_library_is_named(tmp_path):
    result = run_copy(tmp_path, b"not a library")
    assert result.returncode == 2
    assert "does not load" in result.stderr and "expected torch 2.11 or later" in result.stderr


@pytest.mark.parametrize("module", ["locks", "locks.budget", "locks.cli"])
def test_light_modules_do_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
