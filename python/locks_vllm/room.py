"""The room that vLLM's cache gives a record."""

from __future__ import annotations

# Bytes of a record for each channel of a token: 16 tokens of two bytes.
BYTES_PER_CHANNEL = 32


def slot_bytes_for(record_bytes: int, key_value_bytes: int, mixed: bool) -> int:
    """Room for a record, given the bytes of 16 tokens' keys and values of one KV head.

    Models that mix kinds of attention get pages of one size from vLLM, which then needs one page size to divide the
    other: the room is raised to the next divisor of `key_value_bytes`.
    """
    if not mixed:
        return record_bytes
    for slot in range(record_bytes, key_value_bytes + 1, BYTES_PER_CHANNEL):
        if key_value_bytes % slot == 0:
            return slot
    raise NotImplementedError(
        f"LOCKS: summary format: a record takes {record_bytes} bytes, expected at most {key_value_bytes}, the keys and"
        " values of 16 tokens of one KV head; choose a smaller format"
    )
