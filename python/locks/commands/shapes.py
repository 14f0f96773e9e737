"""Models by the shape of their attention: shapes that come with the package, and folders with a config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locks.commands import CommandError

SHAPES = Path(__file__).resolve().parent.parent / "shapes"


@dataclass(frozen=True)
class Heads:
    """The layers of a model and the heads of each."""

    num_layers: int
    num_kv_heads: int  # of a layer
    head_dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Heads:
        """From a config.json, or its part about text. Raises CommandError where a number is missing."""
        config = config.get("text_config", config)
        try:
            query_heads = config["num_attention_heads"]
            kv_heads = config.get("num_key_value_heads") or query_heads
            head_dim = config.get("head_dim") or config["hidden_size"] // query_heads
            return cls(config["num_hidden_layers"], kv_heads, head_dim)
        except KeyError as error:
            raise CommandError(f"config.json has no {error.args[0]!r}, expected that of a decoder model") from None


def load_shape(name: str) -> dict[str, Any]:
    """The config.json of a shape that comes with the package, or of a folder."""
    path = SHAPES / f"{name}.json"
    if not path.is_file():
        path = Path(name) / "config.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
        raise CommandError(f"{name!r}, expected {known}, or a folder with a config.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: not readable as JSON: {error}") from None


def cut_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The same model with its first layers only. Raises CommandError where it has fewer."""
    if "text_config" in config:
        return config | {"text_config": cut_layers(config["text_config"], count)}
    if count > Heads.of(config).num_layers:
        raise CommandError(f"--layers = {count}, expected at most {config['num_hidden_layers']}, the model's")
    kinds = {"layer_types": config["layer_types"][:count]} if config.get("layer_types") else {}
    return config | {"num_hidden_layers": count} | kinds
