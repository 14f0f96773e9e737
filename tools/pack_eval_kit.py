"""Packs an evaluation for a GPU machine without network, beside what tools/pack_gpu_kit.py packs.

    locks eval TASKS --model FOLDER --data DIR --out .kit-eval/NAME --stage prepare ...
    .venv/bin/python tools/pack_eval_kit.py --name qwen --model-file qwen2.5-coder-0.5b.gguf

The prompts of .kit-eval/NAME, made here, travel as they are: the stage that needs a GPU needs neither the data nor
lm-evaluation-harness. The model travels in pieces, .kit-eval-NAME/part-NN, one call each, which `. tools/eval_kit.sh
NAME` gathers there; when all have come it converts them. What a call answered comes back as .kit-eval/NAME/answers*,
goes along with the next call, which goes on from there, and is scored here with `--stage score`.
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
    parser.add_argument("--name", required=True, help="of the evaluation: the folder in .kit-eval")
    parser.add_argument("--model-file", type=Path, help="a Qwen2 GGUF file; without, the model is the test model")
    args = parser.parse_args()
    prepared = ROOT / ".kit-eval" / args.name
    if not (prepared / "prepared.json").is_file():
        parser.error(f"{prepared} has no prepared.json; run `locks eval ... --out {prepared} --stage prepare` first")
    size = sum(file.stat().st_size for file in prepared.iterdir() if file.is_file())
    note = "" if size <= LARGEST_PROMPTS else "; with LOCKS and vLLM's archive that may be too much for one call"
    print(f".kit-eval/{args.name}: {size / 2**20:.1f} MiB{note}")
    if args.model_file is not None:
        pieces = cut(args.model_file, ROOT / f".kit-eval-{args.name}")
        print(f".kit-eval-{args.name}: {pieces} pieces")


if __name__ == "__main__":
    main()
