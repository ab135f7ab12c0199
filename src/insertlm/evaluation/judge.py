"""A language model as a judge: every text gets a score from 1 to 5 for each rubric.

The judge answers greedily, with at most 1,000 tokens. An answer without a score is kept and counted, but left out of
the means. A judge is a local model, prompted without a chat template as Prometheus 2 is in the paper, or a server with
OpenAI's chat completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from insertlm.evaluation.evaluator import find_model, load_pretrained, model_identity
from insertlm.evaluation.journal import Journal, key_of
from insertlm.evaluation.nll import mean_and_error
from insertlm.evaluation.rubrics import RUBRICS, SYSTEM, parse_score, prompt

__all__ = ["MOST_TOKENS", "Judge", "LocalJudge", "Verdict", "judge_texts", "summarise_verdicts"]

MOST_TOKENS = 1000  # of an answer
_TOGETHER = 8  # questions in a batch of a local model


class Judge(Protocol):
    """Something that answers questions. identity: a key for the model, under which the journal keeps its answers"""

    @property
    def identity(self) -> str: ...

    def answers(self, questions: Sequence[str]) -> Iterable[tuple[int, str]]:
        """The number of each question with its answer, in any order. The judge puts SYSTEM before each question."""
        ...


@dataclass(frozen=True)
class Verdict:
    """One rubric over all texts. score: the mean (None: no answer has a score)   shares: of the scores 1 to 5, in
    percent   unparsable: numbers, from 1, of the texts whose answer has no score"""

    score: float | None
    error: float
    shares: list[float]
    unparsable: list[int]


def judge_texts(
    texts: Sequence[str],
    judge: Judge,
    rubrics: Sequence[str],
    journal: Journal,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, list[int | None]]:
    """The scores of all texts by rubric. An empty text is not judged and has None. `progress` is called with the number
    of finished questions."""
    keys = {
        (name, number): key_of("judge", judge.identity, SYSTEM, prompt(text, RUBRICS[name]))
        for name in rubrics
        for number, text in enumerate(texts)
        if text.strip()
    }
    # By key, so that equal texts are judged once.
    asked = {key: prompt(texts[number], RUBRICS[name]) for (name, number), key in keys.items() if key not in journal}
    missing = list(asked.items())
    done = len(texts) * len(rubrics) - len(missing)
    progress(done)
    for number, answer in judge.answers([question for _, question in missing]) if missing else ():
        journal.add(missing[number][0], {"score": parse_score(answer), "answer": answer})
        done += 1
        progress(done)
    scores = {place: journal[key]["score"] for place, key in keys.items()}
    return {name: [scores.get((name, number)) for number in range(len(texts))] for name in rubrics}


def summarise_verdicts(texts: Sequence[str], scores: Mapping[str, Sequence[int | None]]) -> dict[str, Verdict]:
    return {name: _verdict(texts, found) for name, found in scores.items()}


def _verdict(texts: Sequence[str], scores: Sequence[int | None]) -> Verdict:
    good = [score for score in scores if score is not None]
    pairs = enumerate(zip(texts, scores, strict=True), start=1)
    unparsable = [number for number, (text, score) in pairs if score is None and text.strip()]
    if not good:
        return Verdict(None, 0.0, [0.0] * 5, unparsable)
    shares = [100 * good.count(score) / len(good) for score in range(1, 6)]
    return Verdict(*mean_and_error(good), shares, unparsable)


class LocalJudge:
    """A model of transformers. It is loaded when it is first asked, so a finished journal needs no model."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self._place = find_model(name)

    @property
    def identity(self) -> str:
        return model_identity(self.name, self._place)

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[int, str]]:
        """In batches of similar lengths, the longest first, so that running out of memory shows at once."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model, tokenizer = load_pretrained(self.name, self._place, self.device, dtype)
        tokenizer.padding_side = "left"  # a causal model continues the last position, which must be a real token
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        order = sorted(range(len(questions)), key=lambda number: -len(questions[number]))
        for first in range(0, len(order), _TOGETHER):
            batch = order[first : first + _TOGETHER]
            yield from zip(batch, _generate(model, tokenizer, [questions[number] for number in batch]), strict=True)


@torch.inference_mode()
def _generate(model: Any, tokenizer: Any, questions: Sequence[str]) -> list[str]:
    inputs = tokenizer([f"{SYSTEM}\n\n{question}" for question in questions], return_tensors="pt", padding=True)
    given = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    out = model.generate(
        **given, max_new_tokens=MOST_TOKENS, do_sample=False, num_beams=1, pad_token_id=tokenizer.pad_token_id
    )
    answers: list[str] = tokenizer.batch_decode(out[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers
