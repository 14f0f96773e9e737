"""Dense attention beside the rows of kernel_bench: vLLM's FlashAttention-3 over the same shapes, on the same machine.

    python bench/dense_attention.py ROWS.json

For each context and batch of the file, a CUDA graph of all layers, each with a cache of its own in random block order,
like kernel_bench. Adds `dense_us` (median, a layer) to every row of the whole chain, and `speedup`; and to the file the
driver and the versions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from locks.commands.bench_machine import describe_machine
from vllm.vllm_flash_attn import flash_attn_varlen_func

BLOCK = 16
# As kernel_bench's row "chain": a step that completes no block.
TOKENS_SHORT = 3


def dense_us(context: int, batch: int, shape: dict[str, int], replays: int) -> float:
    """Median microseconds of one layer's decode attention, keys and values side by side as LOCKS needs them."""
    kv_heads, heads, dim, layers = (shape[name] for name in ("kv_heads", "query_heads", "head_dim", "layers"))
    blocks = context // BLOCK + 1
    order = torch.randperm(batch * blocks, device="cuda").to(torch.int32) + 1
    table = order.view(batch, blocks)
    cache_shape = (batch * blocks + 1, kv_heads, BLOCK, 2 * dim)
    caches = [torch.randn(cache_shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    query = torch.randn(batch, heads, dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), context // BLOCK * BLOCK - TOKENS_SHORT, dtype=torch.int32, device="cuda")

    def attend(cache: torch.Tensor) -> None:
        keys, values = cache.transpose(1, 2).split(dim, -1)
        flash_attn_varlen_func(
            q=query, k=keys, v=values, out=out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lengths,
            max_seqlen_k=context, softmax_scale=dim**-0.5, causal=True, block_table=table, fa_version=3,
        )

    attend(caches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            attend(cache)
    times = []
    for replay in range(-3, replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 0:
            times.append(begin.elapsed_time(end) * 1e3 / layers)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.json", help="what kernel_bench --json wrote; changed")
    path = parser.parse_args().rows
    report = json.loads(path.read_text())
    machine = describe_machine()
    report |= {"driver": machine["driver"], "versions": machine["versions"]}
    measured: dict[tuple[int, int], float] = {}
    for row in report["rows"]:
        case = (row["context"], row["batch"])
        if case not in measured:
            measured[case] = dense_us(*case, report["shape"], report["replays"])
            print(f"dense FlashAttention-3 {case[0]:>9} x {case[1]}: {measured[case]:8.2f} us a layer", flush=True)
        if row["name"].split(":")[0] in ("chain", "chain+block", "whole"):
            row["dense_us"] = measured[case]
            row["speedup"] = measured[case] / row["median_us"]
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
