"""Exact causal attention of prompt tokens over the plain cache, in memory linear in the context."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

# Rows of queries that share one mask. 128 rows by 128 K tokens take 16 MiB of mask, and smaller tiles are slower.
_TILE = 128


def gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys and values of the sequence in `blocks`, each [kv_heads, length, d]."""
    _, num_heads, _, block_tokens, head_dim = cache.shape
    ids = blocks[: -(-length // block_tokens)].long()
    rows = cache.index_select(0, ids).permute(2, 1, 0, 3, 4).reshape(2, num_heads, -1, head_dim)
    return rows[0, :, :length], rows[1, :, :length]


def attend_prompt(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, output: torch.Tensor
) -> None:
    """Attention of the last `query.shape[0]` tokens of a sequence over all of it.

    query and output are [tokens, query_heads, d]; keys and values [kv_heads, length, d] hold the whole sequence, the
    tokens of the query included. Token i of n sees keys 0 .. length - n + i.
    """
    num_queries, length = query.shape[0], keys.shape[1]
    context = length - num_queries
    heads = query.transpose(0, 1)[None]
    keys, values = keys[None], values[None]
    if context == 0:
        # torch masks from the upper left, which is right exactly where there is no context.
        result = scaled_dot_product_attention(heads, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        output.copy_(result[0].transpose(0, 1))
        return
    for begin in range(0, num_queries, _TILE):
        end = min(begin + _TILE, num_queries)
        seen = context + end
        mask = torch.ones(end - begin, seen, dtype=torch.bool, device=query.device).tril(context + begin)
        result = scaled_dot_product_attention(
            heads[:, :, begin:end], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale, enable_gqa=True
        )
        output[begin:end].copy_(result[0].transpose(0, 1))
