"""What conversions of GGUF files share, whatever the model's architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONTROL_TOKEN, ADDED_TOKEN = 3, 4  # token types
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


def read_gguf(path: Path) -> tuple[Any, dict[str, Any]]:
    """The file's tensors, and its metadata."""
    from gguf import GGUFReader  # slow imports stay out of the path on which a converted model is there

    reader = GGUFReader(path)
    return reader.tensors, {name: field.contents() for name, field in reader.fields.items()}


def tensor_name(name: str) -> str:
    """Hugging Face's name of a tensor: model.layers.3.self_attn.q_proj.weight for blk.3.attn_q.weight."""
    *block, kind, part = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_TENSOR_NAMES[kind]}.{part}"


def token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """The tokens that a model's configuration names."""
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def byte_pair_tokenizer(metadata: dict[str, Any]) -> Any:
    """A `tokenizers.Tokenizer` with the file's vocabulary and merges. The file only names what comes before them (the
    normalizer and the pre-tokenizer) and how added tokens are taken: that is the caller's."""
    from tokenizers import Tokenizer, decoders, models

    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {name: i for i, name in enumerate(metadata["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
