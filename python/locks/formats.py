"""Summary formats: how many bytes a record spends on the keys of 16 tokens."""

from __future__ import annotations

from dataclasses import dataclass

from locks import ops

DEFAULT = "fine"
PRESETS = ("fine", "fine8", "compact", "wide", "paper")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_TOKENS = 16  # tokens that a record covers

# (page tokens, rank), in the order in which bits 7-4 of a format's code count them: include/locks/summary.h.
_SHAPES = ((4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4), (16, 8))


@dataclass(frozen=True)
class Format:
    """A summary format, as the one-byte code that operators and record headers hold.

    Make one with `Format.parse`: a preset's name (`fine`, `fine8`, `compact`, `wide`, `paper`), or the general
    spelling `b4r1m4v4c4`: page tokens, rank, bits of centroid, basis and coefficients; `-plain` at the end
    for formats without rotation, reference key and refit.
    """

    code: int

    @classmethod
    def parse(cls, name: str) -> Format:
        """Raises ValueError, naming the value and what is allowed, for a name that is no format."""
        if not isinstance(name, str):
            raise ValueError(f"format = {name!r}, expected a name such as {', '.join(PRESETS)}")
        try:
            return cls(ops.parse_format(name))
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    @property
    def name(self) -> str:
        return ops.format_name(self.code)

    @property
    def page_tokens(self) -> int:
        return _SHAPES[self.code >> 4][0]

    @property
    def rank(self) -> int:
        return _SHAPES[self.code >> 4][1]

    @property
    def centroid_bits(self) -> int:
        return 8 if self.code & 8 else 4

    @property
    def basis_bits(self) -> int:
        return 8 if self.code & 4 else 4

    @property
    def coefficient_bits(self) -> int:
        return 8 if self.code & 2 else 4

    @property
    def improved(self) -> bool:
        """Rotated keys, centroids less the reference key, coefficients refit on the quantised basis."""
        return bool(self.code & 1)

    def record_bytes(self, head_dim: int) -> int:
        """Bytes of a record: one block of 16 tokens, one KV head. Raises ValueError for other head sizes than
        HEAD_DIMS."""
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim = {head_dim!r}, expected {', '.join(map(str, HEAD_DIMS))}")
        return ops.record_bytes(self.code, head_dim)

    def share_of_cache(self, head_dim: int) -> float:
        """Bytes of a record against those of the 16-bit keys and values that it stands for."""
        return self.record_bytes(head_dim) / (BLOCK_TOKENS * head_dim * 2 * 2)


def parse_format(name: str) -> Format:
    """Format.parse as a function."""
    return Format.parse(name)
