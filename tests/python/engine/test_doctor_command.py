"""`locks doctor --self-test` as a user runs it: two engines."""

import json
import subprocess
import sys


def test_the_self_test_passes_in_the_installed_vllm():
    command = [sys.executable, "-m", "locks.cli", "doctor", "--self-test", "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    told = json.loads(result.stdout)
    found = {item["what"]: item for item in told["self_test"]}
    assert told["ok"] and all(item["ok"] for item in found.values())
    assert "2 layers in float32 on CPU" in found["runs"]["found"]
    assert found['budget "all" equals vLLM']["numbers"]["compared_tokens"] == 32
    sparse = found["it reads what arithmetic says"]["numbers"]
    assert 0 < sparse["bytes_read"] < 0.5 * sparse["bytes_dense"]
