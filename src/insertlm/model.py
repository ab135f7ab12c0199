"""`load` and `Model`: how Python users, the command line, the server and lm-eval use a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import msgspec
import numpy as np
import torch
from torch import nn

from insertlm.core.checks import check_flag, check_text, listed, shown, whole_number
from insertlm.core.errors import InsertlmError
from insertlm.core.processes import Processes
from insertlm.families.base import Family
from insertlm.families.likelihood.measure import Effort, log_likelihoods
from insertlm.inference.scheduler import generate
from insertlm.inference.score import Completion, Likelihood, Score
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.inference.trajectory import Trajectory
from insertlm.infill import drafts
from insertlm.infill.drafts import BestOf, InfillDraft, PlainDraft
from insertlm.infill.requests import Given, Lengths, Request
from insertlm.infill.results import Infilling
from insertlm.infill.stream import Stream
from insertlm.nn.eight_bits import round_linears, supported
from insertlm.recipe import Recipe, change_decode, load_recipe, override_decode
from insertlm.storage.folders import bundled, find, is_bundled, read_weights
from insertlm.storage.hub import name_of
from insertlm.storage.loading import fill, hollow_family
from insertlm.text.tokenizers import Tokenizer

__all__ = ["ENGLISH", "GRAPHS", "Model", "bundled", "choose_device", "load", "prepare"]

ENGLISH, GRAPHS = "english", "star-hard-mini"  # used where no model is named: for texts, and for tasks
_MOST = 1 << 20  # samples, and states of an estimate: more only run out of memory
_LAST_SEED = (1 << 62) - 1  # sample i has the seed `seed + i`, which must stay a signed 64-bit number


@dataclass(frozen=True)
class Model:
    """A trained model with its recipe and its folder. step: the training step of its weights (None: a released model)

    Several threads may use it at once. On a CPU they run side by side, on a GPU one after the other.

    >>> model = insertlm.load("star-hard-mini")
    >>> graph = (
    ...     "4>7 7>1 1>6 6>0 0>11 11>12 7>9 9>2 2>5 5>8 8>3 7>20 20>21 21>22 22>23 23>24 "
    ...     "7>30 30>31 31>32 32>33 33>34 7>40 40>41 41>42 42>43 43>44 : 4 3"
    ... )
    """

    family: Family
    recipe: Recipe
    folder: Path
    step: int | None = None

    @property
    def name(self) -> str:
        """The name of its folder, or its Hub id."""
        return name_of(self.folder)

    @property
    def bundled(self) -> bool:
        """Whether it came with the package. Nothing may be written into the package's folders."""
        return is_bundled(self.folder)

    @overload
    def generate(
        self,
        prompts: Sequence[str],
        *,
        seed: int = 0,
        batch_size: int = 64,
        stream: Literal[False] = False,
        **settings: Any,
    ) -> list[Trajectory]: ...

    @overload
    def generate(
        self, prompts: Sequence[str], *, seed: int = 0, batch_size: int = 64, stream: Literal[True], **settings: Any
    ) -> Stream[Trajectory]: ...

    def generate(
        self, prompts: Sequence[str], *, seed: int = 0, batch_size: int = 64, stream: bool = False, **settings: Any
    ) -> list[Trajectory] | Stream[Trajectory]:
        """Write one text for every prompt. Prompts are text of the model's task (star: `"3>8 8>12 0>7 … : 3 12"`).

        `settings` override the recipe's `decode` section, e.g. `temperature=0.8`. Text i depends only on its prompt,
        the model and `seed + i`.

        >>> [path] = model.generate([graph])
        >>> model.decode(path.ids)
        '4 7 7 9 9 2 2 5 5 8 8 3'

        With `stream`, insertions come as they happen, and the trajectories are the stream's `results`.

        >>> text = []
        >>> stream = model.generate([graph], stream=True)
        >>> for event in stream:
        ...     text.insert(event.at, event.text)
        >>> " ".join(text)
        '4 7 7 9 9 2 2 5 5 8 8 3'
        >>> stream.results == [path]
        True

        Whoever has seen enough stops it, here after four tokens:

        >>> stream = model.generate([graph], stream=True)
        >>> for event in stream:
        ...     if event.order == 3:
        ...         stream.stop()
        >>> len(stream.results[0].events), stream.results[0].complete
        (4, False)
        """
        check_flag("stream", stream)
        seed, batch_size = _seed(seed), whole_number("batch_size", batch_size, 1)
        decode, begun = self.settings(**settings), list[PlainDraft]()
        for number, prompt in enumerate(listed("generate", prompts, "prompts")):
            try:
                begun.append(self.begin(prompt, seed + number))
            except InsertlmError as error:
                raise InsertlmError(f"prompt {number}: {error}") from error
        if stream:
            return Stream(self.family, begun, decode, batch_size)
        return list(self.write([draft.prompt for draft in begun], decode, batch_size))

    @overload
    def infill(
        self,
        text: str,
        *,
        blanks: Sequence[tuple[int, int]] | None = None,
        samples: int = 1,
        seed: int = 0,
        anywhere: bool = False,
        min_length: Lengths = None,
        max_length: Lengths = None,
        words: Lengths = None,
        banned: Sequence[str] = (),
        required: Sequence[str] = (),
        choices: Mapping[str, Sequence[str]] | None = None,
        batch_size: int = 64,
        stream: Literal[False] = False,
        **settings: Any,
    ) -> list[Infilling]: ...

    @overload
    def infill(
        self,
        text: str,
        *,
        blanks: Sequence[tuple[int, int]] | None = None,
        samples: int = 1,
        seed: int = 0,
        anywhere: bool = False,
        min_length: Lengths = None,
        max_length: Lengths = None,
        words: Lengths = None,
        banned: Sequence[str] = (),
        required: Sequence[str] = (),
        choices: Mapping[str, Sequence[str]] | None = None,
        batch_size: int = 64,
        stream: Literal[True],
        **settings: Any,
    ) -> Stream[Infilling]: ...

    def infill(
        self,
        text: str,
        *,
        blanks: Sequence[tuple[int, int]] | None = None,
        samples: int = 1,
        seed: int = 0,
        anywhere: bool = False,
        min_length: Lengths = None,
        max_length: Lengths = None,
        words: Lengths = None,
        banned: Sequence[str] = (),
        required: Sequence[str] = (),
        choices: Mapping[str, Sequence[str]] | None = None,
        batch_size: int = 64,
        stream: bool = False,
        **settings: Any,
    ) -> list[Infilling] | Stream[Infilling]:
        """Fill in the blanks of a text, `"The conference, ___ was postponed."`; infill/drafts.py lists the guarantees.

        Sample i depends only on the request, the model and `seed + i`. `settings` override the recipe's `decode`
        section, except its `max_length`, which here is the maximum of a blank. For the other arguments see Request:
        `words=5` says about how many words belong into a blank, to models that have learnt to take such hints.

        >>> english = insertlm.load("english")
        >>> [filled] = english.infill("The conference, ___ was postponed.", words=4)
        >>> filled.text == f"The conference, {filled.fills[0]} was postponed."
        True

        With `stream`, insertions come as they happen, and the filled texts are the stream's `results`. With banned
        words a sample's insertions come when it is done, because it may have to be written again.

        >>> stream = english.infill("The conference, ___ was postponed.", words=4, stream=True)
        >>> [event.token for event in stream] == [event.token for event in filled.trajectory.events]
        True
        """
        _ = self.text_tokenizer  # refuses models of other tasks before anything else is checked
        samples, batch_size = whole_number("samples", samples, 1, _MOST), whole_number("batch_size", batch_size, 1)
        check_flag("stream", stream)
        seed = _seed(seed)
        request = Request(
            text, blanks, anywhere, min_length, max_length, banned, required, words=words, choices=choices or {}
        )
        requests, decode = [request] * samples, self.settings(**settings)
        if stream:
            return Stream(self.family, self.begin_infill(requests, decode, seed), decode, batch_size)
        return self.fill(requests, decode, seed, batch_size)

    def likelihood(
        self,
        text: str,
        prompt: str = "",
        *,
        fills: Sequence[str] | None = None,
        exact: int = Effort().exact,
        orders: int = Effort().orders,
        states: int = Effort().states,
        seed: int = 0,
        batch_size: int = 64,
    ) -> Likelihood:
        """The probability that the model writes this text and ends, or with `fills` that it writes these into the
        blanks of the text. It is that of writing at temperature 1 without any rules; see Likelihood, and for what is
        exact and what a lower bound families/likelihood/measure.py.

        prompt: what the text answers, as for `generate`
        exact: an ILM's probability of up to so many tokens is summed up over all 2^n states; of more it is a bound
        orders, states, seed: of the random states from which a bound is estimated

        >>> english = insertlm.load("english")
        >>> moon, Paris = (english.likelihood("The capital of France is ___.", fills=[it]) for it in ("moon", "Paris"))
        >>> Paris.exact, Paris.tokens, Paris.value > moon.value
        (True, 1, True)
        """
        check_text("likelihood", text)
        counts = {"exact": exact, "orders": orders, "states": states, "batch_size": batch_size}
        effort = Effort(seed=_seed(seed), **{name: whole_number(name, n, 0, _MOST) for name, n in counts.items()})
        if fills is None:
            prefix, written = self._prefix(prompt), [text]
            completion = Completion.behind([], self.recipe.task.tokenizer.encode(text), prefix)
        elif isinstance(fills, str) or prompt != "":
            raise InsertlmError("likelihood: expected a list of fills, and no prompt besides")
        else:
            given = Given.of(Request(text).pieces, self.text_tokenizer, self.family.abilities)
            written = listed("fills", fills, "texts")
            for fill in written:
                check_text("fills", fill)
            if not given.blanks:
                raise InsertlmError("likelihood: the text has no blank; expected ___ for each fill")
            completion = given.completed(written, self.text_tokenizer)
        [found] = log_likelihoods(self.family, [completion], effort)
        each = None if found.fills is None else list(found.fills)
        size = sum(len(part.encode("utf-8", "replace")) for part in written)  # as tokenizers do
        return Likelihood(found.value, found.exact, found.error, completion.size, size, each)

    def score(self, text: str, prompt: str = "", *, batch_size: int = 64) -> Score:
        """How likely a text is under the model, decision by decision; see Score. prompt: what the text answers, as for
        `generate`. An ILM reads the text once without each of its tokens, an ARM or a filler once.

        >>> score = model.score("4 7 7 9 9 2 2 5 5 8 8 3", graph)
        >>> score.stop_probability > 0.99, min(score.tokens) > 0.99, max(score.stops) < 0.01
        (True, True, True)
        >>> model.score("4 7 7 9 9 2 2 5 5 8", graph).stop_probability < 0.01
        True
        """
        batch_size = whole_number("batch_size", batch_size, 1)
        check_text("score", text)
        prefix, ids = self._prefix(prompt), self.recipe.task.tokenizer.encode(text)
        return self.family.score(prefix, ids, batch_size)

    # --- For the command line, the server and lm-eval, which write many texts or schedule drafts themselves

    def begin(self, prompt: str, seed: int = 0) -> PlainDraft:
        """The draft of one text, as `generate` writes it."""
        seed = whole_number("seed", seed, 0, (1 << 63) - 1)
        return PlainDraft(Prompt(self._prefix(prompt), seed), self.recipe.task.tokenizer)

    def _prefix(self, prompt: str) -> list[int]:
        if not isinstance(prompt, str):
            raise InsertlmError(f"expected a prompt as text, got {shown(prompt)}")
        return self.recipe.task.parse_prompt(prompt)

    def begin_infill(
        self, requests: Sequence[Request], settings: DecodeConfig, seed: int = 0
    ) -> list[InfillDraft | BestOf]:
        """A draft for every request, the i-th with the seed `seed + i`. Refuses requests that cannot be met."""
        return drafts.begin(self.family, self.text_tokenizer, requests, settings, seed)

    def fill(
        self,
        requests: Sequence[Request],
        settings: DecodeConfig,
        seed: int = 0,
        batch_size: int = 64,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Infilling]:
        """Fill in the blanks of every request, the i-th with the seed `seed + i`. progress: called with the number of
        finished texts"""
        begun = self.begin_infill(requests, settings, seed)
        return Stream(self.family, begun, settings, batch_size, watched=False, progress=progress).results

    def write(
        self,
        prompts: Sequence[Prompt],
        settings: DecodeConfig,
        batch_size: int = 64,
        progress: Callable[[int], None] = lambda done: None,
        processes: Processes | None = None,
    ) -> Iterator[Trajectory]:
        """Write a text for every prompt in ids; see `generate` in inference/scheduler.py."""
        return generate(self.family, prompts, settings, batch_size, progress, processes)

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer of a model of text; other models are refused."""
        task = self.recipe.task
        if task.kind != "text":
            raise InsertlmError(f"{self.name}: this is a model of the task {task.tag}; expected a model of text")
        return task.tokenizer

    def settings(self, overrides: Sequence[tuple[str, str]] = (), /, **changes: Any) -> DecodeConfig:
        """The recipe's `decode` section with some keys changed. overrides: pairs from the command line, such as
        ("decode.temperature", "0.8")

        If `max_tokens` is changed and `max_steps` is not, there are enough steps for that many tokens.
        """
        for pair in (overrides := listed("settings", overrides, "pairs")):
            if not isinstance(pair, tuple) or [*map(type, pair)] != [str, str]:
                raise InsertlmError(f"settings: expected pairs of a key and its value as texts, got {shown(pair)}")
        # numpy's numbers are those of Python to whoever computes settings, and unknown types to msgspec.
        changes = {key: value.item() if isinstance(value, np.generic) else value for key, value in changes.items()}
        settings = change_decode(override_decode(self.recipe.decode, overrides), changes, strict=True)
        # A recipe's max_steps suits its own texts. Who asks for more tokens does not expect it to end them.
        changed = {key.removeprefix("decode.") for key, _ in overrides} | changes.keys()
        if "max_steps" in changed or "max_tokens" not in changed:
            return settings
        return self.limit_tokens(settings, settings.max_tokens)

    def limit_tokens(self, settings: DecodeConfig, most: int | None) -> DecodeConfig:
        """The same settings with at most so many tokens, and enough steps to write them. If the number of steps is a
        schedule, as in an MDM, it is not changed, because that would change the text."""
        steps = settings.max_steps if self.family.abilities.schedules_steps else max(settings.max_steps, most or 0)
        return change_decode(settings, {"max_tokens": most, "max_steps": steps})

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""
        tokenizer = self.recipe.task.tokenizer
        most = tokenizer.size - 1
        return tokenizer.decode([whole_number("decode: an id", i, 0, most) for i in listed("decode", ids, "ids")])


def _seed(seed: int) -> int:
    return whole_number("seed", seed, 0, _LAST_SEED)


def load(
    name_or_path: str | Path = ENGLISH,
    device: str | None = None,
    *,
    halved: bool | None = None,
    checkpoint: str | int = "last",
) -> Model:
    """A bundled model by name, a run folder of `insertlm train`, a folder of `insertlm export`, or the id of one on the
    Hugging Face Hub, `"owner/name"` (if there is no folder `owner` here).

    device: such as "cpu" or "cuda"; a GPU is used if there is one.
    halved: write in bfloat16 on a CPU too, as on a GPU always. Faster on CPUs that have instructions for it, and half
    the memory; but what is written together may then, in rare cases, differ from what is written alone. Unless said
    otherwise, this is done with weights of a few bits, on a CPU with such instructions; those are then kept in eight.
    checkpoint: of a run, "last", "best" (the one that validated best, see train.keep_best) or the number of its step.
    """
    if not isinstance(name_or_path, str | Path):
        raise InsertlmError(f"load: expected the name or the folder of a model, got {shown(name_or_path)}")
    if not isinstance(checkpoint, str):
        checkpoint = whole_number("checkpoint", checkpoint, 0)
    if halved is not None:
        check_flag("halved", halved)
    target = choose_device(device)
    folder = find(str(name_or_path))
    recipe = load_recipe(folder / "recipe.yaml")
    recipe = msgspec.structs.replace(recipe, task=recipe.task.with_files(folder))
    weights, step = read_weights(folder, checkpoint)
    if halved is None:
        halved = weights.in_groups and _has_bf16()
    family = hollow_family(recipe, weights, folder)
    # Before there are weights, which then need no second copy.
    if halved and weights.in_groups and target.type == "cpu" and _has_bf16() and supported():
        round_linears(family.backbone.blocks)
    _set_precision(family, target, halved)
    fill(family, weights, folder, target)
    return Model(prepare(family, target, halved), recipe, folder, step)


def prepare(family: Family, device: torch.device, halved: bool = False) -> Family:
    """A trained model made ready to write on `device`. halved: in bfloat16, as on a GPU always"""
    family.eval().requires_grad_(False).to(device)
    _set_precision(family, device, halved)
    if device.type == "cuda":
        family.backbone.compile_pieces()
    return family


def _set_precision(family: Family, device: torch.device, halved: bool) -> None:
    # On a GPU the linear layers run in bfloat16 anyway, under autocast. Storing them so saves a cast in every step.
    if halved or device.type == "cuda":
        for linear in (module for module in family.backbone.blocks.modules() if isinstance(module, nn.Linear)):
            linear.to(torch.bfloat16)


def choose_device(name: str | None = None) -> torch.device:
    """The device of that name, if torch can use it; with no name, a GPU if there is one."""
    if not isinstance(name, str | torch.device | None):
        raise InsertlmError(f"unknown device {shown(name)}; expected cpu or cuda")
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InsertlmError(f"unknown device {shown(name)}; expected cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise InsertlmError(f"device {name} is not supported; expected cpu or cuda")
    # torch reports a missing GPU only when it is first used, after the model has been loaded.
    if device.type == "cuda" and (device.index or 0) >= (gpus := torch.cuda.device_count()):
        found = f"{gpus} GPU{'s' if gpus > 1 else ''}; expected cpu or cuda" if gpus else "no GPU; expected cpu"
        raise InsertlmError(f"device {name}: torch finds {found}")
    return device


def _has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware."""
    ask = getattr(torch.cpu, "get_capabilities", None)  # older versions of torch lack it
    found: Mapping[str, object] = ask() if ask else {}
    return any(found.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
