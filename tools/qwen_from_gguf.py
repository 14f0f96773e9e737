"""Makes a Hugging Face folder that vLLM loads of a Qwen2 GGUF file: for experiments with models at hand in that form.

    python tools/qwen_from_gguf.py MODEL.gguf FOLDER

Not through transformers' GGUF loader, whose result has the wrong end-of-sequence token. The same file gives the same
bytes everywhere.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.gguf_file import (  # noqa: E402
    ADDED_TOKEN,
    CONTROL_TOKEN,
    byte_pair_tokenizer,
    read_gguf,
    tensor_name,
    token_ids,
)

# As Qwen2's own tokenizer.json has it; the GGUF file only names it ("qwen2").
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_weights(tensors, path: Path) -> bool:
    """Whether the file has an output matrix of its own."""
    import numpy as np
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    state = {}
    for tensor in tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        state[tensor_name(tensor.name)] = values.to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})
    return "lm_head.weight" in state


def write_configs(metadata: dict, folder: Path, tied: bool) -> None:
    tokens = token_ids(metadata)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["qwen2.embedding_length"],
        "intermediate_size": metadata["qwen2.feed_forward_length"],
        "num_hidden_layers": metadata["qwen2.block_count"],
        "num_attention_heads": metadata["qwen2.attention.head_count"],
        "num_key_value_heads": metadata["qwen2.attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": metadata["qwen2.context_length"],
        "rms_norm_eps": round(metadata["qwen2.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": metadata["qwen2.rope.freq_base"],
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **tokens,
    }
    # Both ends of a turn stop a generation, as in Qwen's own configuration.
    ends = [metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.bos_token_id"]]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({**tokens, "eos_token_id": ends}, indent=2) + "\n")


def write_tokenizer(metadata: dict, folder: Path) -> None:
    from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

    names, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer = byte_pair_tokenizer(metadata)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    added = [
        AddedToken(name, special=kind == CONTROL_TOKEN, normalized=False)
        for name, kind in zip(names, types, strict=True)
        if kind in (CONTROL_TOKEN, ADDED_TOKEN)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # not Qwen2's, which transformers builds anew
        "eos_token": names[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": names[metadata["tokenizer.ggml.padding_token_id"]],
        "model_max_length": metadata["qwen2.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    tensors, metadata = read_gguf(args.model)
    if metadata["general.architecture"] != "qwen2":
        sys.exit(f"{args.model}: architecture {metadata['general.architecture']!r}, expected qwen2")
    if args.folder.exists():
        sys.exit(f"{args.folder} exists already, expected a new folder")
    # Whole or not at all: tools/eval_kit.sh takes a folder of this name for the model.
    scratch = args.folder.with_name(args.folder.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    own_output = write_weights(tensors, scratch / "model.safetensors")
    write_configs(metadata, scratch, tied=not own_output)
    write_tokenizer(metadata, scratch)
    scratch.rename(args.folder)


if __name__ == "__main__":
    main()
