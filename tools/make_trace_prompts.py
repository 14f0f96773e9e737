"""Writes the prompts whose traces docs/quality.md compares, for `locks capture --prompt-file`.

    tools/make_trace_prompts.py MODEL TEXTS OUT [--tokens 8160]

TEXTS is a folder with war_and_peace_pg2600.txt.gz and sherlock_holmes_pg1661.txt.gz (Project Gutenberg). Each prompt
has a whole number of blocks for MODEL's tokenizer, so that nothing of its end is left out, and ends with the right
answer if it asks a question: needle10 to needle90 (a number hidden at that percentage of a novel, as in RULER), keys (a
list of random keys and values), code (Python's own tarfile.py) and essay.
"""

import argparse
import gzip
import random
import sys
import tarfile
from pathlib import Path

BLOCK = 16
ANSWER = ("<<answer>>", "<</answer>>")
INTRODUCTION = (
    "<|im_start|>user\nA special magic number is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the number afterwards.\n\n"
)
QUESTION = (
    "\n\nWhat is the special magic number for {city} mentioned in the provided text?<|im_end|>\n<|im_start|>assistant\n"
    "The special magic number for {city} mentioned in the provided text is: {number}"
)
NEEDLES = {10: "Lisbon", 30: "Nairobi", 50: "Quito", 70: "Oslo", 90: "Hanoi"}


class Counter:
    """Counts and cuts by a model's tokenizer."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def tokens(self, text: str) -> int:
        for mark in ANSWER:
            text = text.replace(mark, "")
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def first(self, text: str, count: int) -> str:
        """The beginning of a text, of so many tokens."""
        ids = self._tokenizer(text[: 8 * count], add_special_tokens=False)["input_ids"]
        return self._tokenizer.decode(ids[:count])

    def whole_blocks(self, text: str, count: int) -> str:
        text = self.first(text, count)
        while self.tokens(text) % BLOCK:
            text = text[:-1]
        return text


def needle(counter: Counter, novel: str, depth: int, city: str, number: int, count: int) -> str:
    hidden = f" One of the special magic numbers for {city} is:{ANSWER[0]} {number}{ANSWER[1]}. "
    text = counter.first(novel, count - 90)  # room for what stands around it
    while True:
        place = text.index(". ", len(text) * depth // 100) + 1
        prompt = INTRODUCTION + text[:place] + hidden + text[place:].lstrip()
        prompt += QUESTION.format(city=city, number=number)
        if counter.tokens(prompt) % BLOCK == 0 and counter.tokens(prompt) <= count:
            return prompt
        text = text[:-3]


def keys_and_values(counter: Counter, draw: random.Random, count: int) -> str:
    lines: list[str] = []
    head = "Find the value of a key in this list.\n\n"
    while counter.tokens(head + "\n".join(lines)) < count - 120:
        lines += [f"{draw.getrandbits(64):016x}: {draw.getrandbits(64):016x}" for _ in range(4)]
    place = len(lines) // 3
    key, value = lines[place].split(": ")
    lines[place] = f"{key}:{ANSWER[0]} {value}{ANSWER[1]}"
    prompt = head + "\n".join(lines) + f"\n\nThe value of {key} is: {value}"
    while counter.tokens(prompt) % BLOCK:
        prompt = "\n" + prompt if prompt[0] != "\n" else "-" + prompt
    return prompt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or name of a model, for its tokenizer")
    parser.add_argument("texts", type=Path, help="folder with the two novels")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--tokens", type=int, default=8160, help="of a prompt, at most")
    arguments = parser.parse_args()
    counter, count = Counter(arguments.model), arguments.tokens // BLOCK * BLOCK
    novels = [gzip.decompress((arguments.texts / name).read_bytes()).decode()
              for name in ("war_and_peace_pg2600.txt.gz", "sherlock_holmes_pg1661.txt.gz")]
    draw = random.Random(7)
    prompts = {
        f"needle{depth}": needle(
            counter, novels[place % 2][50_000 + 60_000 * place :], depth, city, draw.randrange(10**6, 10**7), count
        )
        for place, (depth, city) in enumerate(NEEDLES.items())
    }
    prompts["keys"] = keys_and_values(counter, draw, count)
    prompts["code"] = counter.whole_blocks(Path(tarfile.__file__).read_text(encoding="utf-8"), count)
    prompts["essay"] = counter.whole_blocks(novels[1][200_000:], count)
    arguments.out.mkdir(exist_ok=True)
    for name, prompt in prompts.items():
        (arguments.out / f"{name}.txt").write_text(prompt, encoding="utf-8")
        print(f"{name}: {counter.tokens(prompt)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
