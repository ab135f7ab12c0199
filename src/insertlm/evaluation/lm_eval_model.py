"""Models of this library for lm-evaluation-harness. Importing this module registers them as `insertlm`.

Design choices:
- A likelihood is the probability that a text which begins with the context continues with the continuation and ends
  there; see families/likelihood/measure.py. For an ARM and a filler it is exact, for an ILM if the continuation has no
  more than `exact` tokens. **Else, and for an MDM, it is a lower bound** with a standard error. The harness has no
  field for this beside each answer, so `config` in its results holds how many are exact, and the mean error and the
  largest.
- To generate is to fill in one blank at the end of the context. The fill is cut at the first of the task's `until`.
- A context that is too long loses its beginning. A text that is too long to score is scored in pieces, each as a text
  of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import lm_eval.models  # noqa: F401  # before ours is registered: the harness registers its own only in an empty table
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from insertlm.core.errors import InsertlmError
from insertlm.core.progress import progress_bar
from insertlm.families.likelihood.measure import Effort, Estimate, log_likelihoods
from insertlm.inference.score import Completion
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.infill.requests import Request
from insertlm.model import load
from insertlm.recipe import change_decode
from insertlm.text.blanks import is_control

__all__ = ["InsertlmLM"]

_BATCH = 64
# What the harness passes when the user gave nothing. Results do not depend on the batch size.
_NO_SIZE, _NO_DEVICE = (None, 1, "1", "auto"), "cuda:0"
_MOST_WRITTEN = 256  # tokens, as for other models of the harness
_MOST_NAMES = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # the names that tasks use for it


@register_model("insertlm")
class InsertlmLM(LM):  # type: ignore[misc]
    """pretrained: run folder, exported folder, Hub id or bundled name   exact, orders, states, seed: see Effort
    settings: keys of the `decode` section"""

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        exact: int = Effort().exact,
        orders: int = Effort().orders,
        states: int = Effort().states,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.model = load(pretrained, None if device == _NO_DEVICE else device)
        self.text_tokenizer = self.model.text_tokenizer
        self.batch_size = _BATCH if batch_size in _NO_SIZE else int(batch_size or 0)
        self.effort = Effort(exact, orders, states, seed, self.batch_size)
        self.settings = self.model.settings(**settings)
        self.estimates: list[Estimate] = []
        self._device = self.model.family.device

    @property
    def tokenizer_name(self) -> str:
        return self.model.name

    @property
    def max_length(self) -> int:
        """The most tokens that a text may have."""
        return self.model.family.longest_text

    def get_model_info(self) -> dict[str, Any]:
        """Fields for `config` in the results of the harness."""
        errors = [estimate.error for estimate in self.estimates if not estimate.exact]
        if not errors:
            return {"insertlm_likelihood": "exact"} if self.estimates else {}
        exact = len(self.estimates) - len(errors)
        return {
            "insertlm_likelihood": "partly exact, partly a lower bound" if exact else "lower bound",
            "insertlm_exact": exact,
            "insertlm_bounds": len(errors),
            "insertlm_bound_error_mean": sum(errors) / len(errors),
            "insertlm_bound_error_max": max(errors),
            "insertlm_effort": self.effort._asdict(),
        }

    # --- Likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [self._pair(*request.args) for request in requests]
        written = self._greedy([given for given, _ in pairs], max((len(target) for _, target in pairs), default=0))
        answers = dict[int, tuple[float, bool]]()

        def answer(number: int, value: float) -> None:
            # The harness asks for the likelihood and for whether greedy writing gives the same continuation.
            answers[number] = value, written[number] == pairs[number][1]
            # So that an interrupted run of the harness finds what is done.
            self.cache_hook.add_partial("loglikelihood", requests[number].args, answers[number])

        self._measure(pairs, answer)
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self._pieces(self.text_tokenizer.encode(*request.args)) for request in requests]
        owner = [number for number, pieces in enumerate(texts) for _ in pieces]
        values: list[list[float]] = [[] for _ in texts]

        def answer(number: int, value: float) -> None:
            mine = owner[number]
            values[mine].append(value)
            if len(values[mine]) == len(texts[mine]):
                self.cache_hook.add_partial("loglikelihood_rolling", requests[mine].args, math.fsum(values[mine]))

        self._measure([([], piece) for pieces in texts for piece in pieces], answer)
        return list(map(math.fsum, values))

    def _pieces(self, ids: list[int]) -> list[list[int]]:
        return [ids[first : first + self.max_length] for first in range(0, max(1, len(ids)), self.max_length)]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of the context, as many as fit, and of the continuation. Both are tokenised together. Spaces at the end
        of the context belong to the word after them."""
        kept = context.rstrip()
        ids = self.text_tokenizer.encode(context + continuation)
        start = len(self.text_tokenizer.encode(kept))
        given, target = ids[:start], ids[start:]
        if len(target) > self.max_length:
            raise InsertlmError(f"a continuation has {len(target)} tokens; the model takes {self.max_length}")
        return given[max(0, len(ids) - self.max_length) :], target

    def _measure(self, pairs: Sequence[tuple[list[int], list[int]]], answer: Callable[[int, float], None]) -> None:
        """log P of each target behind what is given. answer: called with its number and value"""
        completions = [Completion.behind(given, target) for given, target in pairs]
        with progress_bar("measuring", len(pairs)) as advance:

            def found(number: int, estimate: Estimate) -> None:
                self.estimates.append(estimate)
                answer(number, estimate.value)
                advance(len(self.estimates) - before)

            before = len(self.estimates)
            log_likelihoods(self.model.family, completions, self.effort, found)

    def _greedy(self, contexts: Sequence[list[int]], most: int) -> list[list[int] | None]:
        """What the model would write after each, None if it would not end; an MDM cannot continue a text."""
        if not self.model.family.abilities.decides_length:
            return [None] * len(contexts)
        prompts = {tuple(given): Prompt([], 0, given, frozenset({len(given)}), onward=True) for given in contexts}
        settings = DecodeConfig(stop_threshold=self.settings.stop_threshold, max_steps=most + 1)
        trajectories = self.model.write(list(prompts.values()), settings, self.batch_size)
        written = {
            given: trajectory.ids[len(given) :] if trajectory.complete else None
            for given, trajectory in zip(prompts, trajectories, strict=True)
        }
        return [written[tuple(given)] for given in contexts]

    # --- Writing

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}  # only requests with the same settings can be written together
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        answers = [""] * len(requests)
        for numbers in groups.values():
            asked = [requests[number] for number in numbers]
            for number, text in zip(numbers, self._write([r.args[0] for r in asked], asked[0].args[1]), strict=True):
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return answers

    def _write(self, contexts: Sequence[str], asked: dict[str, Any]) -> list[str]:
        """asked: generation_kwargs of the task"""
        settings, most, until = self._settings(asked)
        wanted = [self._blank(context, most) for context in contexts]
        with progress_bar("writing", len(wanted)) as advance:
            written = self.model.fill(wanted, settings, self.effort.seed, self.batch_size, advance)
        return [_cut(infilling.fills[0], until) for infilling in written]

    def _settings(self, asked: dict[str, Any]) -> tuple[DecodeConfig, int, list[str]]:
        """The decoding settings, the most tokens, and the strings at which a text is cut."""
        asked = dict(asked)
        until, sampled = asked.pop("until", None) or [], asked.pop("do_sample", None)
        most = next((asked.pop(name) for name in _MOST_NAMES if name in asked), _MOST_WRITTEN)
        if asked.get("num_beams") == 1:  # the tasks' way to say "no beam search", which holds here anyway
            del asked["num_beams"]
        changes: dict[str, Any] = {key: asked.pop(key) for key in ("temperature", "top_k", "top_p") if key in asked}
        if sampled is not None:
            changes["temperature"] = changes.get("temperature", 1.0) if sampled else 0.0
        if asked:
            raise InsertlmError(
                f"generation_kwargs: unknown {min(asked)}; expected until, max_gen_toks, do_sample, temperature, "
                "top_k or top_p"
            )
        settings = self.model.limit_tokens(change_decode(self.settings, changes), most)
        return settings, most, [until] if isinstance(until, str) else list(until)

    def _blank(self, context: str, most: int) -> Request:
        """The context with a blank at its end. If it is too long for the model, its beginning is cut off."""
        # At least half of the model's length is left to the context.
        room = self.max_length - min(most, self.max_length // 2)
        seen = "".join(" " if is_control(character) else character for character in context)
        ids = self.text_tokenizer.encode(seen)
        if len(ids) > room:
            seen = self.text_tokenizer.decode(ids[-room:]).lstrip("\ufffd")  # half of a character that was cut
        return Request(seen, [(len(seen), len(seen))], onward=True) if seen else Request("___")


def _cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of these."""
    return text[: min((place for end in until if end and (place := text.find(end)) >= 0), default=len(text))]
