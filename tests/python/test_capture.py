"""`locks capture` without an engine: its arguments, marks in prompts, sizes, writing, and what a layer keeps."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from locks.commands import capture as command
from locks.commands.capture_engine import CaptureJob, Plan, Refused, check_size, identity, prepare
from locks.commands.capture_prompt import PromptError, strip_marks, tokenise
from locks.trace import LayerTrace, Trace, TraceError, layer_bytes, write_trace
from safetensors import safe_open
from safetensors.torch import save_file
from trace_case import METADATA, write_small_trace

from locks_vllm.capture import Capture, as_plain, from_plain


@pytest.mark.parametrize(
    ("text", "plain", "held"),
    [
        ("no mark", "no mark", []),
        ("a <<answer>>b c<</answer>> d", "a b c d", ["b c"]),
        ("<<answer>>b<</answer>><<answer>>c<</answer>>", "bc", ["b", "c"]),
        ("é <<answer>>\nü\n<</answer>>", "é \nü\n", ["\nü\n"]),
    ],
)
def test_marks_are_taken_out(text, plain, held):
    stripped, spans = strip_marks(text)
    assert stripped == plain and [plain[begin:end] for begin, end in spans] == held


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\n<<answer>>b", "'<<answer>>' is not closed"),
        ("a\n<</answer>>", "line 2: '<</answer>>', expected '<<answer>>' before it"),
        ("<<answer>>a<<answer>>", "line 1: '<<answer>>', expected '<</answer>>' before it"),
        ("<<answer>><</answer>>", "line 1: nothing between"),
    ],
)
def test_marks_that_do_not_pair_are_refused(text, reason):
    with pytest.raises(PromptError) as refusal:
        strip_marks(text)
    assert reason in str(refusal.value)


class Letters:
    """A tokenizer of a special token and then a token for each two characters."""

    is_fast = True
    chat_template = None

    def __call__(self, text, add_special_tokens, return_offsets_mapping):
        places = [(begin, min(begin + 2, len(text))) for begin in range(0, len(text), 2)]
        if add_special_tokens:
            places = [(0, 0), *places]
        return {"input_ids": list(range(len(places))), "offset_mapping": places}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"[{messages[0]['content']}]"


def test_answers_are_the_tokens_that_overlap_them():
    assert tokenise("abc<<answer>>def<</answer>>gh", Letters(), chat=False) == ([0, 1, 2, 3, 4], [(2, 4)])
    assert tokenise("abcd", Letters(), chat=False) == ([0, 1, 2], [])


def test_a_chat_template_moves_the_answer_and_adds_no_token_twice():
    with_template = Letters()
    with_template.chat_template = "yes"
    assert tokenise("abc<<answer>>de<</answer>>f", with_template, chat=True) == ([0, 1, 2, 3], [(2, 3)])
    with pytest.raises(PromptError, match="no chat template"):
        tokenise("abc", Letters(), chat=True)


def test_a_tokenizer_without_places_takes_no_marks():
    slow = Letters()
    slow.is_fast = False
    with pytest.raises(PromptError, match="does not tell where tokens lie"):
        tokenise("a<<answer>>b<</answer>>", slow, chat=False)


MODEL = SimpleNamespace(
    get_total_num_hidden_layers=lambda: 4,
    get_total_num_kv_heads=lambda: 2,
    get_head_size=lambda: 64,
    max_model_len=128,
    dtype=torch.float16,
    hf_text_config=SimpleNamespace(num_attention_heads=6),
)


def a_job(tmp_path, text="x" * 180, **changes):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(text)
    job = CaptureJob("model", str(prompt), str(tmp_path / "t.safetensors"), [0, 3], [1], steps=8, max_mib=1)
    return dataclasses.replace(job, **changes)


def test_the_plan_tells_the_size_of_the_file(tmp_path):
    plan = prepare(a_job(tmp_path, "x" * 100 + "<<answer>>yz<</answer>>" + "x" * 60), MODEL, Letters())
    assert (plan.layers, plan.kv_heads, len(plan.tokens), plan.answer_spans) == ([0, 3], [[1], [1]], 80, [(51, 52)])
    assert plan.prompt_tokens == 82
    assert plan.num_bytes == 2 * (2 * (2 * 80 + 3 * 8) * 64 + 4 * 8)
    assert prepare(a_job(tmp_path, layers=None, kv_heads=[0, 1, 1, 0]), MODEL, Letters()).layers == [0, 1, 2, 3]
    all_heads = prepare(a_job(tmp_path, kv_heads=None), MODEL, Letters())
    assert all_heads.kv_heads == [[0, 1], [0, 1]]
    assert all_heads.num_bytes == 2 * (2 * (2 * 80 + 3 * 8) * 64 * 2 + 4 * 8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": [0, 4]}, "--layers: 4, expected 0 to 3, the model's layers"),
        ({"kv_heads": [2]}, "--kv-heads: 2, expected 0 to 1, the model's KV heads"),
        ({"kv_heads": [0, 1, 0]}, "--kv-heads: 3 numbers, expected one, or one for each of 2 layers"),
        ({"text": "x" * 12}, "0 tokens in whole blocks of 16, expected at least --steps = 8"),
        ({"text": "x" * 254}, "128 tokens, expected at most 127: the model is served with max_model_len = 128"),
        ({"text": "x" * 160 + "<<answer>>yz<</answer>>"}, "an answer lies behind token 80"),
        ({"text": "<<answer>>x"}, "is not closed"),
    ],
)
def test_what_the_model_does_not_allow_is_refused(tmp_path, changes, reason):
    with pytest.raises(Refused) as refusal:
        prepare(a_job(tmp_path, **changes), MODEL, Letters())
    assert reason in str(refusal.value)


def test_a_trace_over_the_bound_is_refused_with_the_way_out(tmp_path):
    job = a_job(tmp_path)
    check_size(job, 2**20, 2**18)
    with pytest.raises(Refused) as refusal:
        check_size(job, 5 * 2**18, 2**18)
    assert str(refusal.value).endswith(
        "would take 1.2 MiB, and --max-mib = 1; take at most 4 layers (--layers), a shorter prompt, or --max-mib 2"
    )


def test_identity_knows_models_and_prompts_apart(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    job = a_job(tmp_path, model=str(folder))
    plan = Plan([0], [[1]], [5, 7], 2, [], 0)
    told = identity(job, plan, None)
    assert (told["model"], told["context"], told["n"]) == ("model", "prompt.txt", "2") and "depth" not in told
    assert identity(job, dataclasses.replace(plan, answer_spans=[(1, 2)]), None)["depth"] == "0.5000"
    assert told["prompt_sha256"] != identity(job, dataclasses.replace(plan, tokens=[7, 5]), None)["prompt_sha256"]
    (folder / "model.safetensors").write_bytes(b"weights")
    assert told["model_sha256"] != identity(job, plan, None)["model_sha256"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--layers", "a"), "--layers = 'a', expected numbers such as 0,3,16, or all"),
        (("--layers", "1,1"), "--layers = '1,1'"),
        (("--kv-heads", "-1"), "--kv-heads = '-1', expected numbers such as 0,3,16, or all"),
        (("--engine", "["), "--engine = '['"),
        (("--engine", "[]"), "expected a JSON object"),
        (("--steps", "0"), "--steps"),
        (("--prompt-file", "missing.txt"), "--prompt-file = 'missing.txt', expected a file that exists"),
        (("--out", "no/such/folder/t.safetensors"), "expected a file in a folder that exists"),
    ],
)
def test_bad_arguments_are_refused_before_vllm_loads(call_locks, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.setattr(command, "Engine", None)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("text")
    result = call_locks("capture", "m", "--prompt-file", prompt, "--out", tmp_path / "t.safetensors", *arguments)
    assert result.returncode == 2 and reason in result.stderr and result.stderr.count("\n") == 1


def test_an_empty_prompt_and_an_existing_file_are_refused(call_locks, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Engine", None)
    prompt, out = tmp_path / "prompt.txt", tmp_path / "t.safetensors"
    prompt.touch()
    assert "is empty, expected a prompt" in call_locks("capture", "m", "--prompt-file", prompt, "--out", out).stderr
    prompt.write_text("text")
    out.touch()
    result = call_locks("capture", "m", "--prompt-file", prompt, "--out", out)
    assert result.returncode == 2 and "exists already, expected a new file" in result.stderr


def layer_trace(**changes):
    draw = torch.Generator().manual_seed(5)
    tensors = {
        "queries": torch.randn(3, 4, 64, generator=draw).bfloat16(),
        "keys": torch.randn(100, 64, generator=draw).bfloat16(),
        "values": torch.randn(100, 64, generator=draw).bfloat16(),
        "positions": torch.arange(96, 100, dtype=torch.int32),
    }
    return LayerTrace(**{"layer": 7, "scale": 0.125, **tensors, **changes})


def test_what_is_written_is_what_is_read(tmp_path):
    path, layer = tmp_path / "t.safetensors", layer_trace()
    other = layer_trace(layer=9, positions=layer.positions)
    written = write_trace(path, [layer, other], {"model": "m"}, [(3, 5), (40, 41)])
    assert written == path.stat().st_size
    assert 0 < written - 2 * layer_bytes(3, 4, 100, 64, 2) < 1500  # the header
    trace = Trace(path)
    assert (trace.layers, trace.scale, trace.answer_spans) == ([7, 9], 0.125, [(3, 5), (40, 41)])
    read = trace.read(7)
    for name in ("queries", "keys", "values", "positions"):
        assert torch.equal(getattr(read, name), getattr(layer, name).to(getattr(read, name).dtype))


def test_kv_heads_of_a_layer_are_written_side_by_side(tmp_path):
    path = tmp_path / "t.safetensors"
    second = layer_trace(kv_head=2, queries=-layer_trace().queries, keys=-layer_trace().keys)
    write_trace(path, [layer_trace(kv_head=1), second], {"depth": "0.25"})
    trace = Trace(path)
    assert (trace.layers, trace.depth, trace.metadata["kv_heads"]) == ([7], 0.25, "1+2")
    first, last = trace.heads(7)
    assert (first.kv_head, last.kv_head) == (1, 2)
    for name in ("queries", "keys", "values", "positions"):
        assert torch.equal(getattr(first, name), getattr(layer_trace(), name).to(getattr(first, name).dtype))
        assert torch.equal(getattr(last, name), getattr(second, name).to(getattr(last, name).dtype))
    with pytest.raises(TraceError, match="layer7.k has 2 KV heads, expected one"):
        trace.read(7)


@pytest.mark.parametrize("text", ["", "1", "a+b", "0+1+2", "0+1,0", "0,1"])
def test_kv_heads_that_are_not_those_of_the_tensors_are_refused(tmp_path, text):
    path = tmp_path / "t.safetensors"
    write_trace(path, [layer_trace(), layer_trace(kv_head=1)], {})
    with safe_open(str(path), framework="pt") as stored:
        metadata = {**stored.metadata(), "kv_heads": text}
        save_file({name: stored.get_tensor(name) for name in stored.keys()}, path, metadata=metadata)
    with pytest.raises(TraceError, match='metadata "kv_heads" = '):
        Trace(path).heads(7)


@pytest.mark.parametrize("text", ["", "deep", "-0.1", "1.5", "nan"])
def test_a_depth_that_is_none_is_refused(tmp_path, text):
    with pytest.raises(TraceError, match='metadata "depth" = '):
        Trace(write_small_trace(tmp_path / "t.safetensors", metadata={**METADATA, "depth": text}))


def test_a_trace_that_no_reader_takes_is_not_written(tmp_path):
    path = tmp_path / "t.safetensors"
    spoiled = layer_trace()
    spoiled.keys[5, 1] = math.nan
    with pytest.raises(TraceError, match=r"layer7.k has nan at \[5, 1\]"):
        write_trace(path, [spoiled], {})
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_trace(path, [layer_trace()], {})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name] and path.read_text() == "mine"


@pytest.mark.parametrize("text", ["5", "5:", "5:5", "7:3", "-1:3", "1:2,", "1:2;3:4"])
def test_answer_spans_that_are_none_are_refused(tmp_path, text):
    path = write_small_trace(tmp_path / "t.safetensors", metadata={**METADATA, "answer_spans": text})
    with pytest.raises(TraceError, match='metadata "answer_spans" = '):
        Trace(path)


LENGTH, BLOCK_TOKENS, KV_HEADS, GROUP = 70, 32, 2, 3


class Request:
    """A request in a cache made here, computed in steps."""

    def __init__(self):
        draw = torch.Generator().manual_seed(1)
        self.queries = torch.randn(LENGTH + 8, KV_HEADS * GROUP, 64, generator=draw)
        self.keys, self.values = torch.randn(2, 9, KV_HEADS, BLOCK_TOKENS, 64, generator=draw)
        self.blocks = torch.tensor([4, 2, 7], dtype=torch.int32)

    def show(self, capture, begin, end, others=0):
        """A step that computes positions begin .. end - 1, beside tokens of another request in front."""
        starts = [0, others, others + end - begin]
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([others, end], dtype=torch.int32),
            block_table=torch.stack([torch.zeros_like(self.blocks), self.blocks]),
        )
        query = torch.cat([torch.zeros(others, KV_HEADS * GROUP, 64), self.queries[begin:end], torch.zeros(5, 6, 64)])
        capture.take(query, self.keys, self.values, metadata)

    def rows(self, cache, head):
        return cache[self.blocks.long(), head].flatten(0, 1)[:LENGTH]


@pytest.mark.parametrize("heads", [[1], [0, 1]])
@pytest.mark.parametrize("cuts", [(0, 70), (0, 60, 70), (0, 33, 61, 62, 69, 70), (0, 70, 71, 72)])
def test_a_layer_keeps_the_same_however_the_prompt_is_cut(cuts, heads):
    request, capture = Request(), Capture(heads, group=GROUP, first_query=60, length=LENGTH)
    for begin, end in zip(cuts, cuts[1:]):
        request.show(capture, begin, end)
    parts = capture.read()
    assert torch.equal(parts["queries"], request.queries[60:70, GROUP * heads[0] :].transpose(0, 1))
    assert torch.equal(parts["keys"], torch.stack([request.rows(request.keys, head) for head in heads]))
    assert torch.equal(parts["values"], torch.stack([request.rows(request.values, head) for head in heads]))


def test_what_is_no_capture_is_told_when_it_is_read():
    def problem(*steps, **more):
        request, capture = Request(), Capture([0], group=GROUP, first_query=60, length=LENGTH)
        for begin, end in steps:
            request.show(capture, begin, end, **more)
        with pytest.raises(RuntimeError) as refusal:
            capture.read()
        return str(refusal.value)

    assert "has not reached 70 tokens" in problem((0, 64))
    assert "positions 60 to 63 came from the prefix cache" in problem((64, 70))
    assert "a step of 2 requests ran" in problem((0, 70), others=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_travel_as_plain_values(dtype):
    tensor = torch.randn(3, 5, 2).to(dtype).transpose(0, 1)
    told = as_plain(tensor)
    assert torch.equal(from_plain(json.loads(json.dumps(told))), tensor)
