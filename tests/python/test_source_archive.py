"""The source archive: what a build needs, and nothing that merely lies in the tree."""

import importlib.util
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("CMakeLists.txt", "LICENSE", "README.md", "cmake", "include", "pyproject.toml", "python", "src")


@pytest.fixture(scope="module")
def check_wheel():
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "tools" / "check_wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    code = "import sys; from build_backend import build_sdist; print(build_sdist(sys.argv[1]))"
    environment = {"PYTHONPATH": str(ROOT / "python" / "packaging"), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code, out], cwd=ROOT, env=environment, check=True, capture_output=True)
    (path,) = out.iterdir()
    return path


def test_it_has_every_source_and_nothing_else(check_wheel, archive):
    with tarfile.open(archive) as opened:
        held = {str(Path(*Path(name).parts[1:])) for name in opened.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", *BUILT_FROM], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(tracked) > 150
    assert [name for name in tracked if (ROOT / name).exists() and name not in held] == []
    assert check_wheel.strays(archive) == []
    assert [name for name in held if name.endswith((".pyc", ".so"))] == []


def test_what_does_not_belong_there_is_named(check_wheel, tmp_path):
    (tmp_path / "environment").mkdir()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as opened:
        opened.add(tmp_path / "environment", "locks_vllm-1/.venv")
    (named,) = check_wheel.strays(tmp_path / "a.tar.gz")
    assert named.startswith("a.tar.gz: .venv: expected none but ")
