"""The texts of recipes/english: one JSON line a document.

python recipes/english/prepare.py split train.txt.xz data/english.jsonl    # documents are two blank lines apart
python recipes/english/prepare.py sample MODEL.gguf data/everyday.jsonl --minutes 1.5

The English mix is formal: encyclopedias, textbooks, papers. `sample` lets the base model itself write what people write
to each other (letters, talk, how-tos, reviews, notes) and what it knows (countries, animals, inventions), for prompts
that are put together from lists. It keeps whole sentences of paragraphs without placeholders, headings and lists, if
they do not go round in circles. Only a chat model can be asked so.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import time
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import IO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_KINDS = (
    "a short, friendly email to a neighbour about",
    "a polite email to a colleague about",
    "an email that asks a customer service for help with",
    "a letter to an old friend about",
    "a thank-you note for",
    "a short message to my sister about",
    "an invitation that mentions",
    "a complaint about",
    "an apology to a friend because of",
    "a conversation between two friends about",
    "a telephone call between a mother and her son about",
    "a conversation in a shop about",
    "a job interview in which somebody talks about",
    "a local news report about",
    "a short article for a school newspaper about",
    "a diary entry about",
    "a review by a customer of",
    "a short story for adults about",
    "the first page of a novel about",
    "a paragraph that explains to a beginner how to deal with",
    "plain advice, without a list, on",
    "a short speech at a family party about",
    "an announcement to all members of a club about",
    "notes of a meeting, as full sentences, about",
    "three sentences of travel advice about",
    "a description, as in a guidebook, of",
    "one long sentence about",
    "two sentences about",
    "a weather report that mentions",
    "a sports report that mentions",
)
_TOPICS = (
    "a broken fence",
    "a late train",
    "a birthday cake",
    "the new dentist",
    "a lost dog",
    "moving to another city",
    "a used bicycle",
    "a flooded cellar",
    "the summer holidays",
    "a small Italian restaurant",
    "a leaking roof",
    "learning to swim",
    "an old piano",
    "the school play",
    "a delayed delivery",
    "growing tomatoes",
    "a night at the sea",
    "a job in a bakery",
    "the weekly market",
    "a stolen wallet",
    "a bus driver",
    "painting a kitchen",
    "a cold winter",
    "the football match on Saturday",
    "a hotel by a lake",
    "a noisy party",
    "a new computer",
    "the price of bread",
    "a visit to the doctor",
    "an exam next week",
    "a walk in the mountains",
    "a surprise guest",
    "a library card",
    "a wedding in May",
    "a power cut",
    "cooking soup",
    "a missing parcel",
    "a bank account",
    "a lazy cat",
    "a camping trip",
    "the first day at work",
    "a broken phone",
    "fresh coffee",
    "a museum",
    "a concert in the park",
    "a sick grandmother",
    "a car that does not start",
    "a house by the river",
    "a long flight",
    "the new neighbours",
    "baking bread",
    "a language course",
    "a rainy Sunday",
    "a garden in spring",
    "an unpaid bill",
    "a child's drawing",
    "a job offer",
    "a traffic jam",
    "the town's bridge",
    "a washing machine",
    "a pair of shoes",
    "a fishing boat",
    "running a marathon",
    "a good night's sleep",
    "a chess club",
    "a snowstorm",
    "a forgotten appointment",
    "a second-hand book",
    "a farm",
    "saving money",
    "an election",
    "a fire in a factory",
    "a choir",
    "a storm at the coast",
)
_FACTS = (
    "one sentence that says what everybody should know about",
    "three simple facts, as full sentences, about",
    "a short paragraph for children about",
    "a short entry of an encyclopedia about",
    "two sentences about the history of",
    "a sentence that compares something else with",
)
_SUBJECTS = (
    *("France", "Germany", "Italy", "Spain", "England", "Scotland", "Greece", "Russia", "China", "Japan", "India"),
    *("Brazil", "Mexico", "Canada", "Australia", "Egypt", "Kenya", "Norway", "Poland", "Turkey", "the United States"),
    *("Paris", "London", "Rome", "Berlin", "New York", "Tokyo", "the Amazon", "the Nile", "the Alps", "the Pacific"),
    *(
        "the sun",
        "the moon",
        "the planets",
        "gravity",
        "light",
        "water",
        "ice",
        "iron",
        "gold",
        "oxygen",
        "electricity",
    ),
    *("the heart", "the brain", "bones", "blood", "sleep", "vitamins", "the eye", "teeth", "vaccines", "antibiotics"),
    *("elephants", "bees", "whales", "penguins", "dogs", "cats", "horses", "snakes", "spiders", "birds", "dinosaurs"),
    *("trees", "roses", "mushrooms", "wheat", "rice", "coffee", "tea", "chocolate", "cheese", "bread", "salt", "sugar"),
    *("volcanoes", "earthquakes", "rain", "snow", "wind", "deserts", "forests", "rivers", "the seasons", "the weather"),
    *("the wheel", "the printing press", "the telephone", "the computer", "the internet", "the bicycle", "the car"),
    *("Shakespeare", "Mozart", "Einstein", "Newton", "Marie Curie", "Darwin", "Leonardo da Vinci", "Napoleon"),
    *("the Romans", "the pyramids", "the Middle Ages", "the French Revolution", "the Second World War"),
    *("football", "chess", "the Olympic Games", "the violin", "opera", "painting", "photography", "the theatre"),
    *("money", "banks", "taxes", "elections", "parliaments", "courts", "schools", "universities", "hospitals"),
)
_TONES = ("", " Keep it short.", " Use simple words.", " Be warm and personal.", " Use names of people and places.")
_SENTENCES = re.compile(r"(?:.*[.!?][\"'”]?(?=\s))?", re.DOTALL)  # of a text that was cut off, those that are whole
_SHORTEST, _LONGEST = 80, 1500  # characters
_LEAST_COMPRESSED = 0.42  # of the bytes: repetition compresses to less
# What a template leaves open, headings, lists, and a model that talks about itself.
_UNWANTED = re.compile(
    r"[\[\]{}<>*#_|]|^\s*\d+[.)]|^\s*-|\bas an ai\b|^(?:sure|certainly|here(?:'s| is| are))",
    re.IGNORECASE | re.MULTILINE,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    split = commands.add_parser("split", help="cut a text into documents")
    split.add_argument("source", type=Path)
    split.add_argument("out", type=Path)
    sample = commands.add_parser("sample", help="let a chat model write everyday texts")
    sample.add_argument("model", type=Path)
    sample.add_argument("out", type=Path)
    sample.add_argument("--minutes", type=float, default=1.5, help="a batch that has begun is finished")
    sample.add_argument("--batch-size", type=int, default=2048)
    sample.add_argument("--tokens", type=int, default=256, help="the most that a text may have")
    sample.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as out:
        texts = _documents(arguments.source) if arguments.command == "split" else _samples(arguments)
        count = sum(1 for text in texts if _write(text, out))
    print(f"{arguments.out}: {count:,} texts")


def _write(text: str, out: IO[str]) -> bool:
    out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return True


def _documents(source: Path) -> Iterator[str]:
    with lzma.open(source, "rt", encoding="utf-8") if source.suffix == ".xz" else source.open(encoding="utf-8") as file:
        for text in re.split(r"\n{3,}", file.read()):
            if text.strip():
                yield text.strip()


def _samples(arguments: argparse.Namespace) -> Iterator[str]:
    """Whole texts, until the time is over."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, name = arguments.model.parent, arguments.model.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, padding_side="left")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype).to(device).eval()
    tokenizer.pad_token = "<|endoftext|>"
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    wanted = [*product(_KINDS, _TOPICS, _TONES), *product(_FACTS, _SUBJECTS, _TONES[:3])]
    prompts = [f"Write {kind} {topic}.{tone}" for kind, topic, tone in wanted]
    random.Random(arguments.seed).shuffle(prompts)
    torch.manual_seed(arguments.seed)
    deadline, written, kept = time.monotonic() + 60 * arguments.minutes, 0, 0
    while time.monotonic() < deadline:
        asked = [prompts[(written + i) % len(prompts)] for i in range(arguments.batch_size)]
        chats = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in asked]
        batch = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        with torch.inference_mode():
            ids = model.generate(
                **batch, max_new_tokens=arguments.tokens, do_sample=True, temperature=0.6, top_p=0.9, top_k=200,
                eos_token_id=end, pad_token_id=pad,
            )  # fmt: skip
        written += len(asked)
        for row in ids[:, batch["input_ids"].shape[1] :]:
            text = tokenizer.decode(row, skip_special_tokens=True).strip()
            text = _clean(text if end in row.tolist() else _SENTENCES.match(text)[0])
            if _is_good(text):
                kept += 1
                yield text
        print(f"{kept:,} of {written:,} texts kept")


def _clean(text: str) -> str:
    """The longest run of paragraphs without anything unwanted: a letter without its "Dear [Name]"."""
    runs, run = [""], []
    for paragraph in [*re.split(r"\n\s*\n", text), "#"]:
        if _UNWANTED.search(paragraph):
            runs.append("\n\n".join(run))
            run = []
        else:
            run.append(paragraph.strip())
    return max(runs, key=len)


def _is_good(text: str) -> bool:
    size = len(text.encode())
    return (
        _SHORTEST <= len(text) <= _LONGEST
        and len(zlib.compress(text.encode(), 9)) >= _LEAST_COMPRESSED * size
        and text[-1] in ".!?\"'”"
    )


if __name__ == "__main__":
    main()
