"""Models by the shape of their attention: shapes that come with the package, and folders with a config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locks.commands import NOT_JSON, CommandError

SHAPES = Path(__file__).resolve().parent.parent / "shapes"
# Of layers, heads and channels: far beyond any model, and few enough to list them.
_MOST = 2**20


@dataclass(frozen=True)
class Heads:
    """The layers of a model and the heads of each."""

    num_layers: int
    num_kv_heads: int  # of a layer
    head_dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Heads:
        """From a config.json, or its part about text. Raises CommandError where a number is missing or is none."""
        text = text_of(config)
        query_heads = _count(text, "num_attention_heads")
        kv_heads = query_heads if text.get("num_key_value_heads") is None else _count(text, "num_key_value_heads")
        named = text.get("head_dim") is not None
        head_dim = _count(text, "head_dim") if named else _count(text, "hidden_size") // query_heads
        return cls(_count(text, "num_hidden_layers"), kv_heads, head_dim)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that is about text: of a model that also takes other things a part of its own."""
    return config.get("text_config") or config


def _count(text: dict[str, Any], key: str) -> int:
    if key not in text:
        raise CommandError(f"config.json has no {key!r}, expected that of a decoder model")
    value = text[key]
    if type(value) is not int or not 1 <= value <= _MOST:
        raise CommandError(f"config.json: {key} = {value!r:.40}, expected a whole number from 1 to {_MOST}")
    return value


def load_shape(name: str) -> dict[str, Any]:
    """The config.json of a shape that comes with the package, or of a folder. Raises CommandError for one that does
    not describe a decoder."""
    path = SHAPES / f"{name}.json"
    if not path.is_file():
        path = Path(name) / "config.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
        raise CommandError(f"{name!r}, expected {known}, or a folder with a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *NOT_JSON) as error:
        raise CommandError(f"{path}: not readable as JSON: {error}") from None
    _check(config, path)
    return config


def _check(config: Any, path: Path) -> None:
    if not isinstance(config, dict) or not isinstance(text_of(config), dict):
        raise CommandError(f"{path}: expected an object that describes a model, such as vLLM reads")
    layers = Heads.of(config).num_layers
    kinds = text_of(config).get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == layers and all(isinstance(kind, str) for kind in kinds)
    ):
        raise CommandError(f"{path}: layer_types, expected a list of {layers} names, one a layer")


def cut_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The same model with its first layers only. Raises CommandError where it has fewer."""
    if config.get("text_config"):
        return config | {"text_config": cut_layers(config["text_config"], count)}
    if count > Heads.of(config).num_layers:
        raise CommandError(f"--layers = {count}, expected at most {config['num_hidden_layers']}, the model's")
    kinds = {"layer_types": config["layer_types"][:count]} if config.get("layer_types") else {}
    return config | {"num_hidden_layers": count} | kinds
