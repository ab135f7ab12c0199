"""What a user without a model that fills in would do: ask an instruct model, with a prompt, for what is missing.

python benchmarks/prompted_infilling.py SET.jsonl --model SmolLM2-135M-Instruct.Q4_1.gguf --out FILLED.jsonl
insertlm evaluate infilling FILLED.jsonl

The model sees two solved examples as earlier turns of the chat, then the text with `___` for its blanks. It is to write
what is missing alone, a numbered line for each blank. With `--ask text` it is to repeat the whole text with the blanks
filled; what stands between the given pieces in its answer is the fill. (SmolLM2-135M-Instruct then leaves the blanks
out.) A blank for which the answer has nothing stays empty, and its text is not `complete`.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from insertlm.cli.common import write_json_lines
from insertlm.core.files import check_writable
from insertlm.evaluation.evaluator import find_model, load_pretrained
from insertlm.model import choose_device
from insertlm.tasks.infill_sets import Blanked, read_set

__all__ = ["between", "filled", "numbered"]

_BATCH = 16
# Two texts, with what is missing in each.
_SHOTS = (
    ("Anna was late for school. ___ and ran to the bus. Luckily, ___.", ["She grabbed her bag", "the driver waited"]),
    ("The museum, which opened in ___, shows paintings. It is closed on Mondays.", ["the spring of 1987"]),
)
_ASK = {
    "text": "Fill in the blanks. Repeat the whole text, with each ___ replaced by the missing words.",
    "parts": "Write the words that are missing at each ___, one numbered line for each blank, and nothing else.",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", type=Path, help="JSONL file of insertlm data infilling")
    parser.add_argument("--model", required=True, help="instruct model: Hugging Face name, folder or .gguf file")
    parser.add_argument("--ask", choices=tuple(_ASK), default="parts")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--count", type=int, help="number of texts (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device")
    chosen = parser.parse_args(arguments)
    check_writable(chosen.out)
    examples = read_set(chosen.set, chosen.count)
    records = filled(
        examples, chosen.model, chosen.ask, chosen.temperature, chosen.top_p, chosen.seed, choose_device(chosen.device)
    )
    write_json_lines(chosen.out, records)
    complete = sum(record["complete"] for record in records)
    print(f"wrote {len(records):,} texts to {chosen.out}; {complete:,} answers have something for every blank")


def filled(
    examples: Sequence[Blanked],
    name: str,
    ask: str,
    temperature: float,
    top_p: float,
    seed: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Lines as `insertlm infill set` writes them."""
    halved = device.type == "cuda"
    model, tokenizer = load_pretrained(name, find_model(name), device, torch.bfloat16 if halved else torch.float32)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    records: dict[int, dict[str, Any]] = {}
    # Texts of like length together, so that little of a batch is padding.
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].text))
    torch.manual_seed(seed)
    for first in range(0, len(order), _BATCH):
        batch = order[first : first + _BATCH]
        prompts = [_prompt(tokenizer, examples[number], ask) for number in batch]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        room = max(len(tokenizer(examples[number].text)["input_ids"]) for number in batch)
        start = time.perf_counter()
        with torch.inference_mode():
            # Half as much again as the true text, which is more than a user could say.
            ids = model.generate(
                **inputs,
                max_new_tokens=32 + room + room // 2,
                do_sample=bool(temperature),
                pad_token_id=tokenizer.pad_token_id,
                **sampling,
            )[:, inputs["input_ids"].shape[1] :]
        seconds = (time.perf_counter() - start) / len(batch)
        for number, row in zip(batch, ids, strict=True):
            answer = tokenizer.decode(row, skip_special_tokens=True)
            tokens = int((row != tokenizer.pad_token_id).sum())
            records[number] = _record(examples[number], answer, ask) | {"tokens": tokens, "seconds": seconds}
    return [records[number] for number in sorted(records)]


def _prompt(tokenizer: Any, example: Blanked, ask: str) -> str:
    turns = []
    for text, missing in _SHOTS:
        turns += [_user(text, ask), {"role": "assistant", "content": _answer(text, missing, ask)}]
    turns.append(_user("___".join(example.pieces), ask))
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def _user(text: str, ask: str) -> dict[str, str]:
    return {"role": "user", "content": f"{_ASK[ask]}\n\n{text}"}


def _answer(text: str, missing: Sequence[str], ask: str) -> str:
    if ask == "parts":
        return "\n".join(f"{number}. {words}" for number, words in enumerate(missing, start=1))
    for words in missing:
        text = text.replace("___", words, 1)
    return text


def _record(example: Blanked, answer: str, ask: str) -> dict[str, Any]:
    found = numbered(answer, len(example.removed)) if ask == "parts" else between(answer, example.pieces)
    fills = [words or "" for words in found]
    output = example.pieces[0] + "".join(fill + piece for fill, piece in zip(fills, example.pieces[1:], strict=True))
    return {**example._asdict(), "output": output, "fills": fills, "complete": None not in found, "answer": answer}


def numbered(answer: str, blanks: int) -> list[str | None]:
    """The words behind each number. A single blank needs none."""
    lines = dict(re.findall(r"^\s*(\d+)[.):]\s*(\S.*?)\s*$", answer, re.MULTILINE))
    if blanks == 1 and not lines and answer.strip():
        return [answer.strip().splitlines()[0]]
    return [lines.get(str(number)) for number in range(1, blanks + 1)]


def between(answer: str, pieces: Sequence[str]) -> list[str | None]:
    """What stands between the pieces in an answer that is to repeat them.

    A model may change the text far from a blank, so only the three words on either side of one are looked for, and
    fewer if that many are not there.
    """
    fills: list[str | None] = []
    place = 0
    for before, behind in pairwise(pieces):
        start = _behind(answer, before.split()[-3:], place)
        end = None if start is None else _before(answer, behind.split()[:3], start)
        if start is None or end is None:
            fills.append(None)
            continue
        fills.append(answer[start:end].strip() or None)
        place = end
    return fills


def _behind(answer: str, words: Sequence[str], place: int) -> int | None:
    """Where the first of these words that are there ends, from a place on: as many of the last words as possible."""
    if not words:
        return place
    for count in range(len(words), 0, -1):
        if found := _pattern(words[-count:]).search(answer, place):
            return found.end()
    return None


def _before(answer: str, words: Sequence[str], place: int) -> int | None:
    if not words:
        return len(answer)
    for count in range(len(words), 0, -1):
        if found := _pattern(words[:count]).search(answer, place):
            return found.start()
    return None


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile(r"\s+".join(map(re.escape, words)))


if __name__ == "__main__":
    main()
