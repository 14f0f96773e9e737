"""The parts of the demo that need no engine: the model's conversion, the document, the report."""

import base64
import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from demo import console, document, engine, report, smollm2


@pytest.fixture(scope="session")
def model_folder(pytestconfig):
    return smollm2.ensure_model(pytestconfig.rootpath / ".cache")


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="session")
def model(model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()


def test_tokenizer_splits_numbers_into_digits(tokenizer):
    assert tokenizer.tokenize("In 2024, 48213 items") == (
        ["In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "4", "8", "2", "1", "3", "Ġitems"]
    )


def test_tokenizer_round_trips_text(tokenizer):
    text = "a  b\tnaïve 日本 12.50\n\n  def f(x): return x<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_are_the_instruct_model_s(tokenizer, model):
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer("<|im_end|>").input_ids == [tokenizer.eos_token_id]


def test_perplexity_is_a_language_model_s(tokenizer, model):
    """12.5 on this text with Python 3.11; 4,057 with the channels of K in the GGUF's order."""
    from pydoc_data.topics import topics

    ids = tokenizer(topics["objects"], return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert 3 < math.exp(loss) < 25


def test_greedy_answer_is_right(tokenizer, model):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert output[-1] == tokenizer.eos_token_id
    assert "Paris" in tokenizer.decode(output)


def test_ensure_model_reuses_an_intact_folder(model_folder):
    before = (model_folder / smollm2.MARKER).stat()
    assert smollm2.ensure_model(model_folder.parent) == model_folder
    assert (model_folder / smollm2.MARKER).stat().st_ino == before.st_ino


def test_ensure_model_repairs_a_damaged_folder(model_folder, tmp_path, monkeypatch):
    def convert(source, folder, progress):
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(name)

    monkeypatch.setattr(smollm2, "_convert", convert)
    folder = smollm2.ensure_model(tmp_path)
    (folder / "config.json").write_text("cut sh")
    assert smollm2.ensure_model(tmp_path) == folder
    assert (folder / "config.json").read_text() == "config.json"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_ensure_model_leaves_nothing_when_interrupted(model_folder, tmp_path, monkeypatch):
    def convert(source, folder, progress):
        (folder / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_wheel_is_named(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "not-installed-at-all")
    with pytest.raises(FileNotFoundError, match="--no-deps not-installed-at-all"):
        smollm2.find_gguf()


def test_document_fits_its_target_with_the_fact_half_way(tokenizer):
    found = document.build_document(tokenizer)
    size = len(found.token_ids)
    assert abs(size / document.TARGET_TOKENS - 1) < 0.02
    assert tokenizer.decode(found.token_ids[found.fact_begin : found.fact_end]).strip() == found.fact
    assert abs(found.fact_begin / size - 0.5) < 0.05
    assert tokenizer.decode(found.token_ids).count(found.expected) == 1
    assert found.question in tokenizer.decode(found.token_ids[-40:])
    assert document.build_document(tokenizer) == found


def test_document_of_too_many_tokens_is_refused(tokenizer):
    with pytest.raises(ValueError, match="short of the target"):
        document.build_document(tokenizer, target_tokens=10**6)


def _trace(budget, fact_pages):
    """Three layers, two heads, 64 tokens in pages of four; head 0 of layer 1 finds the fact."""
    pages = []
    for length in (64, 65, 66):
        step = np.zeros((3, 2, -(-length // 4)), bool)
        step[:, :, 0] = step[:, :, -1] = True
        step[1, 0, fact_pages] = True
        pages.append(np.ones_like(step) if budget is None else step)
    retained = np.full((3, 3), 1.0 if budget is None else 0.9)
    return engine.Trace(4, retained, pages)


def test_trace_reduces_masks_by_page_and_head():
    trace = _trace(16, slice(7, 9))
    share = trace.read_share(28, 36)
    assert share.shape == (3, 3)
    assert share[:, 1].tolist() == [0.5, 0.5, 0.5] and share[:, [0, 2]].sum() == 0
    density = trace.density(16)
    assert density.shape == (3, 4)
    assert density[1].tolist() == [
        0.25,
        0.125,
        0.125,
        0.25 / 3,
    ]  # the last page is in the cut bin once it exists
    assert trace.steps_by_position(1, 16)[0].tolist() == [0.25, 0.125, 0.125, 0.25]


def test_evaluation_of_the_engine_is_unpacked_in_layer_order():
    masks = {
        name: np.random.default_rng(len(name)).random((2, 17)) < 0.5
        for name in ("layers.2.attn", "layers.10.attn")
    }
    answer = {
        name: {
            "page_tokens": 4,
            "num_kv_heads": 2,
            "steps": [
                {
                    "lengths": [66],
                    "retained": [len(name) / 20],
                    "pages": [base64.b64encode(np.packbits(mask).tobytes()).decode()],
                }
            ],
        }
        for name, mask in reversed(masks.items())
    }
    trace = engine._trace(engine._by_layer(answer))
    assert trace.retained.tolist() == [[13 / 20, 14 / 20]]
    assert (trace.pages[0] == np.stack([masks["layers.2.attn"], masks["layers.10.attn"]])).all()


@pytest.fixture
def rows():
    def row(budget, read):
        generation = engine.Generation([5, 6, 7, 8], [0.1, 0.1, 0.1])
        records, record_bytes = (0, 0) if budget is None else (24, 100)
        counts = engine.Counts(records, record_bytes, pages=12, bytes=read, dense_bytes=4000, prompt_tokens=8)
        return engine.Measurement(budget, generation, counts, [0.1, 0.1, 0.2], _trace(budget, slice(7, 9)))

    return [row(None, 4000), row(32, 1500), row(16, 900)]


def test_report_is_self_contained_and_matches_the_result(rows, tmp_path):
    about = document.Document(
        [1] * 64, "The <number> is 7.", "Which & what?", "7", 28, 34, ["objects"], "ab" * 32
    )
    answers = ["It is 7.", "It is 7.", "<script>"]
    result = report.result_of(rows, answers, about, "a model", "fine")
    report.write_result(result, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert [row["correct"] for row in result["rows"]] == [True, True, False]
    assert [row["budget_tokens"] for row in result["rows"]] == [None, 32, 16]
    assert [row["bytes_per_step"] for row in result["rows"]] == [4000, 1500, 900]

    report.write_report(result, rows, [["is", "7", "(end)"]] * 3, about, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5 and page.count("<figcaption>") == 5
    assert "&lt;script&gt;" in page and "<script" not in page
    for outside in ('src="http', "src='http", 'href="http', "@import", "url(http"):
        assert outside not in page


def test_steps_without_a_terminal_are_plain_lines():
    stream = io.StringIO()
    steps = console.Steps(Console(file=stream, width=100))
    with steps.step("Reading", measurable=True) as update:
        for share in (0.1, 0.3, 0.6, 1.0):
            update(share, f"{share:.0%} of it")
    lines = stream.getvalue().splitlines()
    assert lines[0].strip() == "… Reading" and lines[-1].startswith("✓ Reading 100% of it (")
    assert len(lines) == 5


def test_output_of_the_process_goes_to_the_log(tmp_path):
    log = tmp_path / "logs" / "engine.log"
    program = f"""
import os, pathlib
from demo import console
with console.own_console(pathlib.Path({str(log)!r})) as shown:
    print("from Python", flush=True)
    os.system("echo from a child; echo failing >&2")
    shown.print("for the reader")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("for the reader\nafter\n", "")
    assert console.last_lines(log) == "from Python\nfrom a child\nfailing"
    assert console.last_lines(log, 1) == "failing"


def test_importing_the_demo_leaves_the_environment_alone():
    """vLLM reads it, also for other engines of the process: those of other tests."""
    program = (
        "import os; before = dict(os.environ); from demo import __main__, engine, report; "
        "assert dict(os.environ) == before, set(os.environ) - set(before)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
