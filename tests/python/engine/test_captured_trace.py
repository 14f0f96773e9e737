"""Capture in real engines: the command on a model of the CPU, and the calls over the plug-in's GPU code."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from engine_harness import engine, greedy, only
from locks_vllm.capture import from_plain

from locks.commands.capture_engine import CaptureJob, Plan, capture
from locks.commands.capture_repeat import Repetition
from locks.trace import Trace

STEPS, TOLERANCE = 64, 2e-3  # float32, in another order of summation
LAYERS, KV_HEADS = [2, 17], [1, 2]
ANSWER = " 738512"


def transformers_attention(model, tokens):
    """What another implementation hands to its attention: for each layer q, k and v [heads, tokens, d]."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def watch(module, query, key, value, *arguments, **more):
        seen.append((query[0], key[0], value[0]))
        return sdpa_attention_forward(module, query, key, value, *arguments, **more)

    AttentionInterface.register("watched", watch)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="watched")
    with torch.no_grad():
        network(torch.tensor([tokens]))
    return seen


def assert_captured(parts, reference, kv_head):
    queries, keys, values = reference
    group = queries.shape[0] // keys.shape[0]
    expected = {
        "queries": queries[kv_head * group : (kv_head + 1) * group, -parts["queries"].shape[1] :],
        "keys": keys[kv_head],
        "values": values[kv_head],
    }
    for name, tensor in expected.items():
        assert parts[name].shape == tensor.shape
        assert (parts[name] - tensor).abs().max() < TOLERANCE * tensor.abs().max(), name


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    lines = [f"{line}. Violin {line * 37 % 911} was sold for {line * 13 % 977} coins in Lisbon." for line in range(60)]
    lines[20] = f"The secret number is<<answer>>{ANSWER}<</answer>>."
    path = tmp_path_factory.mktemp("prompt") / "violins.txt"
    path.write_text("\n".join(lines))
    return path


def run_capture(model, prompt_file, out, *arguments):
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "locks.cli", "capture", model, "--prompt-file", prompt_file, "--out", out]
    return subprocess.run(
        list(map(str, [*command, *arguments])),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command_captures_what_the_model_attends_with(smollm2, prompt_file, tmp_path, call_locks):
    out = tmp_path / "t.safetensors"
    # A chunk that ends within the captured queries: they come from two steps.
    engine_options = json.dumps({"dtype": "float32", "max_num_batched_tokens": 1200})
    heads = ["--layers", ",".join(map(str, LAYERS)), "--kv-heads", ",".join(map(str, KV_HEADS))]
    done = run_capture(smollm2, prompt_file, out, *heads, "--engine", engine_options)
    assert done.returncode == 0, done.stderr
    stated, written = done.stdout.splitlines()
    assert "MiB (at most 1024): 2 layers, " in stated and stated.endswith("queries of the last 64, 1 marked answers")
    assert written == f"{out}: written, {out.stat().st_size} bytes"

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokens = tokenizer(prompt_file.read_text().replace("<<answer>>", "").replace("<</answer>>", ""))["input_ids"]
    tokens = tokens[: len(tokens) // 16 * 16]
    assert 1200 < len(tokens) < 1200 + STEPS
    trace = Trace(out)
    ((begin, end),) = trace.answer_spans
    assert tokenizer.decode(tokens[begin:end]) == ANSWER
    assert (trace.layers, trace.scale) == (LAYERS, 0.125)
    reference = transformers_attention(smollm2, tokens)
    for number, head in zip(LAYERS, KV_HEADS, strict=True):
        layer = trace.read(number)
        assert layer.positions.tolist() == list(range(len(tokens) - STEPS, len(tokens)))
        parts = {"queries": layer.queries, "keys": layer.keys, "values": layer.values}
        assert_captured(parts, reference[number], head)

    quality = call_locks("quality", out, "--budget", "256", "--format", "wide", "--json", "-")
    assert quality.returncode == 0, quality.stderr
    rows = json.loads(quality.stdout)
    assert [row["layer"] for row in rows] == LAYERS and all(0.2 < row["retained"] <= 1 for row in rows)


def test_the_command_refuses_before_the_engine_starts(smollm2, prompt_file, tmp_path):
    out = tmp_path / "t.safetensors"
    done = run_capture(smollm2, prompt_file, out, "--layers", "30")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--layers: 30, expected 0 to 29, the model's layers" in done.stderr
    done = run_capture(smollm2, prompt_file, out, "--engine", '{"max_model_len": 128}')
    assert done.returncode == 2 and "expected at most 127" in done.stderr
    done = run_capture(tmp_path, prompt_file, out)
    assert done.returncode == 2 and done.stderr.startswith("locks: MODEL = ") and done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("worker", ["locks_vllm.worker.LocksWorkerExtension", "emulated_gpu.EmulatedWorker"])
def test_a_running_engine_captures_and_goes_on(tiny_model, worker):
    prompt = [(7 * place) % 509 for place in range(400)]
    arguments = {"max_model_len": 512, "max_num_batched_tokens": 129, "enable_prefix_caching": True}
    with engine(tiny_model, locks={"budget": "all"}, worker_extension_cls=worker, **arguments) as llm:

        def start(*values):
            return only(llm.collective_rpc("locks_capture_start", args=values))

        for values, reason in (
            (([2], [[0]], 0, 9), "layer 2 is not served by LOCKS; served are 0, 1"),
            (([1], [[2]], 0, 9), "KV head 2 of layer 1, expected 0 to 1"),
        ):
            with pytest.raises(Exception, match=reason):
                start(*values)
        about = start([0, 1], [[1], [0, 1]], 336, 400)
        assert about == 2 * [{"scale": 0.125, "group": 3, "head_dim": 64, "element_bytes": 4}]
        with pytest.raises(Exception, match="has not reached 400 tokens"):
            llm.collective_rpc("locks_capture_read", args=(0,))
        before = greedy(llm, [prompt], 4)
        reference = transformers_attention(tiny_model, prompt)
        for layer, heads in ((0, [1]), (1, [0, 1])):
            told = only(llm.collective_rpc("locks_capture_read", args=(layer,)))
            parts = {name: from_plain(part) for name, part in told.items()}
            queries = parts["queries"].chunk(len(heads))
            for head, *each_head in zip(heads, queries, parts["keys"], parts["values"], strict=True):
                captured = dict(zip(("queries", "keys", "values"), each_head, strict=True))
                assert_captured(captured, reference[layer], head)
        with pytest.raises(Exception, match="layer 0 has no capture"):
            llm.collective_rpc("locks_capture_read", args=(0,))
        start([0], [[0]], 336, 400)
        assert greedy(llm, [prompt], 4)[0].tokens == before[0].tokens
        with pytest.raises(Exception, match="came from the prefix cache, without queries"):
            llm.collective_rpc("locks_capture_read", args=(0,))
        llm.collective_rpc("locks_capture_stop")
        assert math.isclose(greedy(llm, [prompt], 4)[0].logprobs[0], before[0].logprobs[0], abs_tol=TOLERANCE)


def test_a_model_repeats_its_context_behind_it(tiny_model):
    tokens = [(7 * place) % 509 for place in range(400)]
    passes = [[11, 12, *tokens[4:204]], [13, 14, 15, *tokens[204:336]]]
    chunks = [(4, 204, 0, 202), (204, 336, 202, 337)]
    job = CaptureJob(str(tiny_model), "", "", [0, 1], None, STEPS, max_mib=64, repeat_context=True)
    plan = Plan([0, 1], [[0, 1], [0, 1]], tokens, 400, [], 0, Repetition(336, passes, chunks))
    arguments = {"max_model_len": 640, "max_num_batched_tokens": 129, "enable_prefix_caching": True}
    with engine(tiny_model, locks={"budget": "all"}, **arguments) as llm:
        traces = capture(job, plan, llm, lambda message: None)
    assert [(trace.layer, trace.kv_head) for trace in traces] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    references = [transformers_attention(tiny_model, tokens[:336] + rows) for rows in passes]
    own = transformers_attention(tiny_model, tokens)
    for trace in traces:
        parts = {"queries": trace.queries, "keys": trace.keys, "values": trace.values}
        assert_captured(parts, own[trace.layer], trace.kv_head)
        assert trace.repeat.chunks.tolist() == [list(chunk) for chunk in chunks]
        for reference, (*_, first, last) in zip(references, chunks, strict=True):
            queries, keys, _ = reference[trace.layer]
            expected = queries[3 * trace.kv_head : 3 * trace.kv_head + 3, 336:]
            found = trace.repeat.queries[:, first:last]
            assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
            expected = keys[trace.kv_head, 336:]
            assert (trace.repeat.keys[first:last] - expected).abs().max() < TOLERANCE * expected.abs().max()
