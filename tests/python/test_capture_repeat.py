"""`locks capture --repeat-context`: the prompts that make a model repeat its context, and traces that hold it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from locks.commands.capture_engine import CaptureJob, Refused, prepare
from locks.commands.capture_prompt import PromptError
from locks.commands.capture_repeat import CHUNK_TOKENS, repetition
from locks.formats import Format
from locks.quality import measure
from locks.trace import LayerTrace, Repeat, Trace, TraceError, layer_bytes, write_trace

CHUNKS = [(4, 304, 0, 310), (304, 580, 310, 600)]


class Letters:
    """A tokenizer whose tokens are the letters' numbers."""

    is_fast = True
    chat_template = "{user}"

    def __call__(self, text, add_special_tokens=True, return_offsets_mapping=False):
        encoded = {"input_ids": [ord(letter) for letter in text]}
        if return_offsets_mapping:
            encoded["offset_mapping"] = [(place, place + 1) for place in range(len(text))]
        return encoded

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"[user]{messages[0]['content']}[model]"


def text_of(tokens):
    return "".join(map(chr, tokens))


def test_a_context_is_repeated_chunk_by_chunk():
    text = "".join(chr(ord("a") + place % 26) for place in range(2 * CHUNK_TOKENS + 500))
    found = repetition([ord(letter) for letter in text], 64, text, Letters(), chat=False)
    end = len(text) - 64
    assert found.end == end
    first, second, third = map(text_of, found.passes)
    middle, last = 4 + CHUNK_TOKENS, 4 + 2 * CHUNK_TOKENS
    assert first == "\n\nRepeat the previous context exactly.\n" + text[4:middle]
    request = "\n\nRepeat the part of the previous context exactly, starting with "
    assert second == f"{request}{text[middle - 8 : middle]}\n{text[middle:last]}"
    assert third == f"{request}{text[last - 8 : last]}\n{text[last:end]}"
    lengths = list(map(len, found.passes))
    rows = [0, lengths[0], sum(lengths[:2]), sum(lengths)]
    assert found.chunks == [
        (4, middle, rows[0], rows[1]), (middle, last, rows[1], rows[2]), (last, end, rows[2], rows[3])
    ]
    assert (found.rows, found.longest) == (sum(lengths), end + max(lengths))


def test_a_chat_template_stands_around_the_request():
    tokens = [ord(letter) for letter in "[user]" + "x" * 40 + "[model]"]
    found = repetition(tokens, 10, "x" * 40, Letters(), chat=True)
    assert found.chunks[0][:2] == (6, 43)
    assert text_of(found.passes[0]) == "\n\nRepeat the previous context exactly.[model]" + "x" * 37


def test_what_cannot_be_repeated_is_refused():
    with pytest.raises(PromptError, match="68 tokens, of which the last 64 .* and the first 4 are not context"):
        repetition([1] * 68, 64, "x" * 68, Letters(), chat=False)
    strange = Letters()
    strange.apply_chat_template = lambda messages, **_: messages[0]["content"].upper()
    with pytest.raises(PromptError, match="chat template changes the text"):
        repetition([1] * 200, 64, "x" * 200, strange, chat=True)


MODEL = SimpleNamespace(
    get_total_num_hidden_layers=lambda: 4,
    get_total_num_kv_heads=lambda: 2,
    get_head_size=lambda: 64,
    max_model_len=512,
    dtype=torch.float16,
    hf_text_config=SimpleNamespace(num_attention_heads=6),
)


def test_the_plan_counts_the_repetition(tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("x" * 200)
    job = CaptureJob("model", str(prompt), "t.safetensors", [0, 3], [1], steps=8, max_mib=1, repeat_context=True)
    plan = prepare(job, MODEL, Letters())
    rows = len("\n\nRepeat the previous context exactly.\n") + 192 - 8 - 4
    assert (plan.repeat_rows, plan.longest_prompt) == (rows, 192 - 8 + rows)
    assert plan.as_answer()["repeat_rows"] == rows
    assert plan.num_bytes == 2 * ((2 * 192 + 3 * 8 + 4 * rows) * 64 * 2 + 4 * 8)
    plain = prepare(dataclasses.replace(job, repeat_context=False), MODEL, Letters())
    assert (plain.repeat_rows, plain.longest_prompt, plain.repetition) == (0, 192, None)
    prompt.write_text("x" * 288)
    with pytest.raises(Refused, match=r"288 tokens, 595 with a part of it repeated \(--repeat-context\), expected at"):
        prepare(job, MODEL, Letters())


def repeated(kv_heads=(0,), chunks=CHUNKS):
    """A layer whose context of tokens 4 to 579 is repeated in 600 rows."""
    draw = torch.Generator().manual_seed(3)
    table = torch.tensor(chunks, dtype=torch.int32)
    positions = torch.arange(580, 640, dtype=torch.int32)
    return [
        LayerTrace(
            5, torch.randn(3, 60, 64, generator=draw).half(), torch.randn(640, 64, generator=draw).half(),
            torch.randn(640, 64, generator=draw).half(), positions, 0.125, head,
            Repeat(
                torch.randn(3, 600, 64, generator=draw).half(), torch.randn(600, 64, generator=draw).half(), table
            ),
        )
        for head in kv_heads
    ]


@pytest.mark.parametrize("kv_heads", [(0,), (1, 3)])
def test_what_is_written_is_what_is_read(tmp_path, kv_heads):
    heads = repeated(kv_heads)
    written = write_trace(tmp_path / "t.safetensors", heads, {})
    assert 0 < written - layer_bytes(3, 60, 640, 64, 2, len(kv_heads), 600) < 1500  # the header
    trace = Trace(tmp_path / "t.safetensors")
    assert trace.repeat_chunks == CHUNKS
    for head, read in zip(heads, trace.heads(5), strict=True):
        assert (read.kv_head, read.repeat.chunks.tolist()) == (head.kv_head, [list(chunk) for chunk in CHUNKS])
        assert torch.equal(read.repeat.queries, head.repeat.queries.float())
        assert torch.equal(read.repeat.keys, head.repeat.keys.float())


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([(4, 304, 0, 310), (305, 580, 310, 600)], 'metadata "repeat_chunks" = .*, expected begin:end:first:last'),
        ([(4, 4, 0, 600)], 'metadata "repeat_chunks" = '),
        ([(4, 580, 0, 599)], r"layer5.repeat_q has shape \[3, 600, 64\], expected \[3, 599, 64\]"),
        ([(4, 700, 0, 600)], 'layer5.k has 640 tokens, expected 700, the context of "repeat_chunks"'),
    ],
)
def test_a_repetition_that_is_none_is_refused(tmp_path, chunks, message):
    with pytest.raises(TraceError, match=message):
        write_trace(tmp_path / "t.safetensors", repeated(chunks=chunks), {})


def test_kvzip_reads_such_a_trace_and_names_what_others_lack(tmp_path):
    write_trace(tmp_path / "t.safetensors", repeated(), {})
    (head,) = Trace(tmp_path / "t.safetensors").heads(5)
    wide = Format.parse("wide")
    kept = [measure(head, "kvzip", wide, budget, window=30).retained for budget in (144.0, 320.0, 640.0)]
    assert 0 < kept[0] < kept[1] < kept[2] == 1
    with pytest.raises(RuntimeError, match="kvzip: the trace holds no pass .* `locks capture --repeat-context`"):
        measure(dataclasses.replace(head, repeat=None), "kvzip", wide, 320.0)
    short = dataclasses.replace(head, repeat=Repeat(head.repeat.queries[:2], head.repeat.keys, head.repeat.chunks))
    with pytest.raises(RuntimeError, match=r"repeat_queries: expected \[3, 600, 64\] f32, got \[2, 600, 64\]"):
        measure(short, "kvzip", wide, 320.0)
