"""Makes a Hugging Face folder that vLLM loads of a Qwen2 GGUF file: for experiments with models at hand in that form.

    python tools/qwen_from_gguf.py MODEL.gguf FOLDER

Not through transformers' GGUF loader, whose result has the wrong end-of-sequence token. The same file gives the same
bytes everywhere.
"""

import argparse
import json
import sys
from pathlib import Path

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN, _ADDED_TOKEN = 3, 4  # GGUF token types
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
        *block, kind, part = tensor.name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        state[f"{prefix}{_TENSOR_NAMES[kind]}.{part}"] = values.to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})
    return "lm_head.weight" in state


def write_configs(metadata: dict, folder: Path, tied: bool) -> None:
    tokens = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }
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
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    names, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(name, special=kind == _CONTROL_TOKEN, normalized=False)
        for name, kind in zip(names, types, strict=True)
        if kind in (_CONTROL_TOKEN, _ADDED_TOKEN)
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
    from gguf import GGUFReader

    reader = GGUFReader(args.model)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "qwen2":
        sys.exit(f"{args.model}: architecture {metadata['general.architecture']!r}, expected qwen2")
    args.folder.mkdir(parents=True)
    own_output = write_weights(reader.tensors, args.folder / "model.safetensors")
    write_configs(metadata, args.folder, tied=not own_output)
    write_tokenizer(metadata, args.folder)


if __name__ == "__main__":
    main()
