"""Packs an evaluation for a GPU machine without network, beside what tools/pack_gpu_kit.py packs.

    locks eval TASKS --model FOLDER --data DIR --out .kit-eval/PROMPTS --stage prepare ...
    .venv/bin/python tools/pack_eval_kit.py [--model NAME FILE.gguf]

The prompts in .kit-eval, made here, travel as they are: the stage that needs a GPU needs neither the data nor
lm-evaluation-harness. A model, a Qwen2 GGUF file, travels in pieces, .kit-eval-NAME/part-NN, one call each, which
`. tools/eval_kit.sh NAME` gathers there; when all have come it converts them. Without one, the model is the test model
of tools/pack_gpu_kit.py. What a call answered comes back as .kit-eval/PROMPTS/answers*, goes along with the next call,
which goes on from there, and is scored here with `--stage score`.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIECE_BYTES = 50 * 2**20
# What one call may bring (64 MiB) less the prompts, LOCKS and what else travels beside a piece.
LARGEST_PROMPTS = 8 * 2**20


def cut(source: Path, folder: Path) -> int:
    """Pieces of a file, and what they must give together."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    digest, count = hashlib.sha256(), 0
    with source.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            count += 1
            digest.update(piece)
            (folder / f"part-{count:02}").write_bytes(piece)
    about = {"file": source.name, "pieces": count, "sha256": digest.hexdigest()}
    (folder / "about.json").write_text(json.dumps(about) + "\n")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=2, metavar=("NAME", "FILE"), help="a Qwen2 GGUF file, to be cut into pieces")
    args = parser.parse_args()
    prepared = sorted(path.parent for path in (ROOT / ".kit-eval").glob("*/prepared.json"))
    if not prepared:
        parser.error(".kit-eval holds no prompts; run `locks eval ... --out .kit-eval/PROMPTS --stage prepare` first")
    for folder in prepared:
        size = sum(file.stat().st_size for file in folder.iterdir())
        note = "" if size <= LARGEST_PROMPTS else "; with LOCKS and vLLM's archive that may be too much for one call"
        print(f"{folder.relative_to(ROOT)}: {size / 2**20:.1f} MiB{note}")
    if args.model is not None:
        name, file = args.model
        folder = ROOT / f".kit-eval-{name}"
        print(f"{folder.relative_to(ROOT)}: {cut(Path(file), folder)} pieces")


if __name__ == "__main__":
    main()
