"""The parts of the demo that need no engine: the model's conversion, the document, the report."""

import math

import pytest

from demo import smollm2

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def model_folder(pytestconfig):
    try:
        smollm2.find_gguf()
    except FileNotFoundError as error:
        pytest.skip(str(error))
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
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[
        0, prompt.input_ids.shape[1] :
    ]
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
