"""The options of the plug-in: `--additional-config '{"locks": {...}}'`.

budget          what a decode step may read of a context: "all", a number of tokens >= 1, or a fraction of the
                length in (0, 1). 2048 by default.
formats         the summary format of each layer: one name ("fine"), or {"default": "fine", "0": "fine8"} with
                layer numbers. "fine" by default. "auto" takes "fine8" where 4 bits lose much (auto_format.py).
dense_layers    numbers of layers that keep vLLM's own attention. None by default.
reference_keys  a .safetensors file with `layerN.reference_key` [kv_heads, head_dim] for each LOCKS layer N, after the
                rotary embedding (calibration.py).
                Without it the reference key comes from the key bias of the checkpoint, if there is one. It may also
                hold `layerN.gap`, the points of attention mass that "fine" loses, for the format "auto".
evaluate        also measure the exact retained attention mass of each step. Slow: it reads the whole context, and on
                a GPU decode steps then run without CUDA graphs.

On a GPU only:
dense_tokens    contexts of at most so many tokens are read whole, since that is as fast. "auto" by default.
score_tokens    for how many tokens of context, over all sequences of a step, there is room to keep scores (8.5 bytes a
                query head for each 16 tokens at 4 tokens a page). Sequences beyond it are read whole. 8,388,608 by
                default.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from locks.budget import parse_budget
from locks.formats import DEFAULT as DEFAULT_FORMAT
from locks.formats import Format
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

logger = logging.getLogger("vllm.locks")

OPTION = "locks"
DEFAULT_BUDGET = 2048
AUTO = "auto"
# Up to here a context is read whole. Measured (docs/benchmark.md, crossover): one request alone is level at 16,384
# tokens and gains from records at 32,768 (5.06 ms, whole 5.21), eight together gain at 8,192 (5.42 ms, whole 5.76);
# prompts of 8,192 tokens should not change sides while they are answered.
AUTO_DENSE_TOKENS = 10240
DEFAULT_SCORE_TOKENS = 8 * 2**20
LARGEST_COUNT = 2**31 - 1  # counts of tokens are int32 on the device


class LocksOptions(BaseModel):
    """What `--additional-config '{"locks": {...}}'` holds, checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    budget: float = Field(default=float(DEFAULT_BUDGET), validate_default=False)
    formats: dict[str, str] = Field(default_factory=lambda: {"default": DEFAULT_FORMAT})
    dense_layers: tuple[int, ...] = ()
    reference_keys: Path | None = None
    evaluate: bool = False
    dense_tokens: int = AUTO_DENSE_TOKENS
    score_tokens: int = DEFAULT_SCORE_TOKENS

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            raise ValueError(f'{OPTION} = {values!r}, expected an object such as {{"budget": {DEFAULT_BUDGET}}}')
        for key in values:
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"{OPTION}: unknown option {key!r}; {hint}allowed are {', '.join(cls.model_fields)}")
        return values

    @field_validator("budget", mode="before")
    @classmethod
    def _budget(cls, value: Any) -> float:
        return parse_budget(value)

    @field_validator("formats", mode="before")
    @classmethod
    def _formats(cls, value: Any) -> dict[str, str]:
        if isinstance(value, str):
            value = {"default": value}
        if not isinstance(value, Mapping):
            raise ValueError(f'{value!r}, expected a format name or {{"default": NAME, "LAYER": NAME}}')
        formats = {"default": DEFAULT_FORMAT}
        given: dict[str, str] = {}  # by its number, which "0" and "00" share, a layer's key
        for layer, name in value.items():
            if layer != "default" and not (isinstance(layer, str) and layer.isdecimal()):
                raise ValueError(f'key {layer!r}, expected "default" or a layer number such as "0"')
            if not isinstance(name, str):
                raise ValueError(f"{layer!r}: {name!r}, expected a format name such as {DEFAULT_FORMAT!r}")
            try:
                if name != AUTO:
                    Format.parse(name)
            except ValueError as error:
                reason = str(error).removeprefix("parse_format: ")
                raise ValueError(f'{layer!r}: {reason}; or "{AUTO}"') from None
            number = layer if layer == "default" else str(int(layer))
            if number in given:
                raise ValueError(f"{given[number]!r} and {layer!r}: layer {number} is there twice, expected once")
            given[number] = layer
            formats[number] = name
        return formats

    @field_validator("dense_layers", mode="before")
    @classmethod
    def _dense_layers(cls, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{value!r}, expected a list of layer numbers such as [0, 1]")
        for layer in value:
            if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
                raise ValueError(f"{layer!r}, expected a layer number >= 0")
        return tuple(value)

    @field_validator("reference_keys", mode="before")
    @classmethod
    def _reference_keys(cls, value: Any) -> Path | None:
        if value is None:
            return None
        if not isinstance(value, (str, Path)):
            raise ValueError(f"{value!r}, expected the path of a .safetensors file")
        try:
            path = Path(value).expanduser()
        except RuntimeError:  # "~name" of a user that is not there
            path = Path(value)
        if path.suffix != ".safetensors" or not path.is_file():
            raise ValueError(f"{str(path)!r}, expected an existing .safetensors file")
        return path

    @field_validator("evaluate", mode="before")
    @classmethod
    def _evaluate(cls, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r}, expected true or false")
        return value

    @field_validator("dense_tokens", mode="before")
    @classmethod
    def _dense_tokens(cls, value: Any) -> int:
        return AUTO_DENSE_TOKENS if value == AUTO else _count(value, f' or "{AUTO}"')

    @field_validator("score_tokens", mode="before")
    @classmethod
    def _score_tokens(cls, value: Any) -> int:
        return _count(value)

    def format_of(self, layer: int) -> str:
        """The name of a layer's summary format, or "auto"."""
        return self.formats.get(str(layer), self.formats["default"])

    def check_layers(self, num_layers: int) -> None:
        """Raises ValueError if an option names a layer that the model lacks."""
        for field, layers in (
            ("formats", [int(layer) for layer in self.formats if layer != "default"]),
            ("dense_layers", list(self.dense_layers)),
        ):
            for layer in layers:
                if layer >= num_layers:
                    raise ValueError(
                        f"{OPTION}.{field}: layer {layer}, expected 0 to {num_layers - 1}, the model's layers"
                    )


def _count(value: Any, alternative: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_COUNT:
        raise ValueError(f"{value!r}, expected a number of tokens from 0 to {LARGEST_COUNT}{alternative}")
    return value


def _message(error: ValidationError) -> str:
    """One line for each thing that is wrong, without pydantic's decoration."""
    lines = []
    for item in error.errors():
        text = str(item["ctx"]["error"]) if "error" in item.get("ctx", {}) else f"{item['input']!r}: {item['msg']}"
        field = ".".join(str(part) for part in item["loc"])
        lines.append(f"{OPTION}.{field}: {text}" if field else text)
    return "; ".join(lines)


@lru_cache(maxsize=8)
def _parse(text: str) -> LocksOptions:
    try:
        return LocksOptions.model_validate(json.loads(text))
    except ValidationError as error:
        raise ValueError(_message(error)) from None


def parse_options(values: Any) -> LocksOptions:
    """Checks the object under "locks". Raises ValueError naming the option, its value and what is allowed."""
    try:
        text = json.dumps(values, sort_keys=True)
    except TypeError:
        raise ValueError(f"{OPTION} = {values!r}, expected plain JSON values") from None
    return _parse(text)


@lru_cache(maxsize=8)  # once for each key
def _warn_of(key: str) -> None:
    # It may be another plug-in's option, so it is no error.
    logger.warning("additional_config: key %r is not LOCKS's; did you mean %r?", key, OPTION)


def options_of(additional_config: Any) -> LocksOptions | None:
    """The options in vLLM's `additional_config`, or None if LOCKS is not asked for."""
    if not isinstance(additional_config, Mapping):
        return None
    for key in additional_config:
        if key != OPTION and str(key).lower() == OPTION:
            raise ValueError(f"additional_config: key {key!r}, expected {OPTION!r}")
        if OPTION not in additional_config and difflib.get_close_matches(str(key).lower(), [OPTION]):
            _warn_of(str(key))
    return parse_options(additional_config[OPTION]) if OPTION in additional_config else None
