"""Which heads a process holds under tensor parallelism."""

from types import SimpleNamespace

import pytest
import torch

from locks_vllm.shard import shard_of


def config(size, kv_heads):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=size),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: kv_heads),
    )


def shard(monkeypatch, size, rank, all_query_heads, all_kv_heads):
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: rank)
    kv_heads = max(1, all_kv_heads // size)
    return shard_of(config(size, all_kv_heads), all_query_heads // size, kv_heads)


def test_one_process_holds_all_heads():
    one = shard_of(config(1, 99), 28, 4)
    assert (one.all_query_heads, one.all_kv_heads, one.first, one.count) == (28, 4, 0, 4)


@pytest.mark.parametrize(("rank", "rows"), [(0, [0, 1]), (1, [2, 3])])
def test_heads_are_dealt_out_in_order(monkeypatch, rank, rows):
    part = shard(monkeypatch, 2, rank, 28, 4)
    assert (part.all_query_heads, part.all_kv_heads) == (28, 4)
    assert part.cut(torch.arange(4)[:, None]).flatten().tolist() == rows


def test_fewer_heads_than_processes_are_copied_to_neighbours(monkeypatch):
    heads = [shard(monkeypatch, 8, rank, 32, 2) for rank in range(8)]
    assert {part.all_kv_heads for part in heads} == {2}
    assert [part.cut(torch.arange(2)).tolist() for part in heads] == [[0]] * 4 + [[1]] * 4
