"""Writes tests/fuzz/corpus/: inputs of the fuzz targets made from valid data, which every run starts from.

    .venv/bin/python tests/fuzz/make_corpus.py

A target takes numbers from the end of its input, the last byte first, and what is left at the front as bytes
(FuzzedDataProvider), so each input is written as the payload and, behind it, the numbers in reverse.
"""

import zlib
from pathlib import Path

import torch
from locks import ops
from locks.formats import PRESETS, Format

CORPUS = Path(__file__).parent / "corpus"
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
FORMATS = (*PRESETS, "b4r1m4v4c4-plain", "b8r4m8v8c8", "b16r4m4v8c8")
SELECTORS = 11
WHOLE, TOKENS, FRACTION = 0, 1, 2  # Budget::Kind


class Input:
    """An input, its numbers in the order in which the target takes them."""

    def __init__(self) -> None:
        self._numbers = bytearray()

    def within(self, low: int, high: int, value: int) -> "Input":
        """ConsumeIntegralInRange(low, high), which takes as many bytes as the range needs."""
        assert low <= value <= high, (low, value, high)
        size = (max(1, (high - low).bit_length()) + 7) // 8 if high > low else 0
        self._numbers += (value - low).to_bytes(size, "big")
        return self

    def small(self, low: int, high: int, value: int) -> "Input":
        """any_int(input, low, high), the branch that is not just any number."""
        return self.within(0, 7, 1).within(low, high, value)

    def flag(self, value: bool) -> "Input":
        """ConsumeBool()."""
        return self.within(0, 1, int(value))

    def bytes(self, payload: bytes) -> bytes:
        """The whole input."""
        return payload + bytes(reversed(self._numbers))


def record(name: str, head_dim: int) -> bytes:
    """A valid record of 16 random keys."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    form = Format.parse(name)
    keys = torch.randn(1, 1, 16, head_dim, generator=draw)
    records = torch.zeros(1, 1, 1, form.record_bytes(head_dim), dtype=torch.uint8)
    first, length = torch.zeros(1, dtype=torch.int32), torch.full((1,), 16, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    ops.summarise_blocks(keys, table, first, length, form.code, None, table, records, None)
    return records.numpy().tobytes()


def record_inputs() -> dict[str, bytes]:
    """record_fuzz: a record of each format, then heads, a flag for the reference key, and the query's payload."""
    inputs = {}
    for place, name in enumerate(FORMATS):
        head_dim = 64 if place else 80
        numbers = Input().within(0, 255, Format.parse(name).code).within(0, 5, HEAD_DIMS.index(head_dim)).flag(False)
        numbers.within(1, 9, 3).flag(place % 2 == 1)
        inputs[name] = numbers.bytes(record(name, head_dim) + bytes(range(90, 122)))
    return inputs


def config_inputs() -> dict[str, bytes]:
    """config_fuzz: names at the front; the numbers behind them are found by the fuzzer."""
    names = (*FORMATS, "fine16", "b4r1m4v4c4-", "b99r99m99v99c99", "rocketkv", "shadowkv")
    return {name: name.encode() + b"\\ " for name in names}


def step_inputs() -> dict[str, bytes]:
    """step_fuzz: two sequences of a valid step, under each kind of budget."""
    payload = bytes((37 * i * i + 11 * i) % 256 for i in range(97))
    inputs = {}
    for name, kind in (("whole", WHOLE), ("tokens", TOKENS), ("fraction", FRACTION)):
        numbers = Input().within(0, 143, Format.parse("fine").code).flag(True)
        numbers.within(1, 2, 2).within(1, 3, 3).within(1, 3, 2).within(1, 3, 1)
        numbers.within(0, 9, 9).within(0, 9, 9).within(0, 4, 2).within(0, 12, 5)
        for length in (140, 33):
            numbers.small(0, 200, length)
        for begin in (0, 16):
            numbers.small(0, 200, begin)
        for block in (3, 1, 4, 8, 5, 2, 6, 0, 0, 0) * 2:
            numbers.small(0, 9, block)
        numbers.within(0, 2, kind).flag(kind == FRACTION)
        numbers = numbers.within(0, 2**64 - 1, 2**63) if kind == FRACTION else numbers.small(0, 200, 120)
        inputs[name] = numbers.bytes(payload)
    return inputs


def trace_inputs() -> dict[str, bytes]:
    """trace_fuzz: a trace of 160 tokens and three steps, with each selector."""
    payload = bytes((29 * i * i + 7 * i) % 256 for i in range(61))
    inputs = {}
    for selector in range(SELECTORS):
        numbers = Input().within(0, SELECTORS - 1, selector).within(0, 143, Format.parse("fine").code)
        numbers.within(0, 2, TOKENS).flag(False).small(0, 200, 100)
        numbers.small(0, 200, 20).small(0, 200, 25).flag(True)
        numbers.within(1, 3, 2).within(1, 4, 3).within(0, 200, 160).flag(True).flag(True).small(0, 3, 1)
        for position in (120, 150, 159):
            numbers.small(0, 199, position)
        numbers.within(0, 3, 1).within(0, 8, 4).small(5, 64, 60).small(1, 20, 20).within(0, 64, 20)
        inputs[f"selector{selector}"] = numbers.within(0, 2**32 - 1, 1).bytes(payload)
    return inputs


def main() -> None:
    """Replaces the corpus, but for `regression-*`: inputs that once broke a promise."""
    targets = {"record": record_inputs, "config": config_inputs, "step": step_inputs, "trace": trace_inputs}
    for target, make in targets.items():
        folder = CORPUS / f"{target}_fuzz"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if not old.name.startswith("regression-"):
                old.unlink()
        for name, data in make().items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
