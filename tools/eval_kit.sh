# Sourced in the repository root of a GPU machine, behind tools/gpu_kit.sh, as `. tools/eval_kit.sh NAME`: gathers the
# pieces of a model (tools/pack_eval_kit.py) and, when all have come, makes a folder of it: EVAL_MODEL.
# Without pieces the test model is EVAL_MODEL.
EVAL_NAME=$1
EVAL_PARTS=$LOCKS_KIT/eval-$EVAL_NAME
EVAL_MODEL=$LOCKS_TEST_MODEL
if [ -f ".kit-eval-$EVAL_NAME/about.json" ] || [ -d "$EVAL_PARTS" ]; then
  EVAL_MODEL=$EVAL_PARTS/model
  mkdir -p "$EVAL_PARTS"
  for part in ".kit-eval-$EVAL_NAME"/*; do
    if [ -f "$part" ]; then mv "$part" "$EVAL_PARTS/"; fi
  done
  if [ ! -d "$EVAL_MODEL" ]; then
    python3 - "$EVAL_PARTS" <<'PYTHON' && python3 tools/qwen_from_gguf.py "$EVAL_PARTS/model.gguf" "$EVAL_MODEL"
import hashlib, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
about = json.loads((folder / "about.json").read_text())
parts = sorted(folder.glob("part-*"))
if len(parts) < about["pieces"]:
    sys.exit(f"{len(parts)} of {about['pieces']} pieces of {about['file']} have come")
digest = hashlib.sha256()
with (folder / "model.gguf").open("wb") as whole:
    for part in parts:
        piece = part.read_bytes()
        digest.update(piece)
        whole.write(piece)
if digest.hexdigest() != about["sha256"]:
    sys.exit(f"{about['file']}: the pieces give another file")
PYTHON
  fi
fi
export EVAL_MODEL
