"""A hundred requests of a soak against a real server; `tools/soak.py` sends thousands."""

import asyncio

from tools.soaking.plan import Kind
from tools.soaking.run import Soak, document_tokens, run_soak


def test_a_short_soak_holds(tmp_path):
    plan = Soak(requests=100, seed=3)
    model, text = document_tokens()
    result = asyncio.run(run_soak(plan, model, text, tmp_path / "server.log", lambda name, done: None))
    assert result["faults"] == []
    sent = {kind: sum(row["requests"].get(kind.value, 0) for row in result["phases"]) for kind in Kind}
    assert sum(sent.values()) == plan.requests and all(sent.values()), sent
