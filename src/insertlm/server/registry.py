"""The models that are served, each with the worker that writes its texts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.types import Receive

from insertlm.core.errors import InsertlmError
from insertlm.inference.settings import DecodeConfig
from insertlm.infill.drafts import BestOf, InfillDraft, PlainDraft
from insertlm.infill.requests import Request
from insertlm.model import Model
from insertlm.server.errors import RefusedError, invalid
from insertlm.server.examples import ModelExamples, read_examples
from insertlm.server.limits import Limits
from insertlm.server.requests import RunningRequest, while_connected
from insertlm.server.worker import Worker

__all__ = ["Kind", "Registry", "Served", "answer_head"]

Kind = Literal["text", "star"]
_KINDS: dict[str, Kind] = {"text": "text", "graph": "star"}  # what clients call the kinds of tasks that are served


@dataclass(frozen=True)
class Served:
    """A model with its worker."""

    name: str
    kind: Kind
    model: Model
    worker: Worker
    told: ModelExamples


class Registry:
    """All models that are served, by name. Checks a request against the limits and starts it."""

    def __init__(self, models: Sequence[Model], limits: Limits) -> None:
        self.limits = limits
        self.served: dict[str, Served] = {}
        kinds = {model.name: _kind(model) for model in models}
        if len(kinds) < len(models):
            raise InsertlmError("two models have the same name; expected folders of different names")
        for model in models:
            worker = Worker(model.name, model.family, limits.concurrent, limits.queue)
            self.served[model.name] = Served(model.name, kinds[model.name], model, worker, read_examples(model.folder))

    def find(self, name: str | None, kind: Kind) -> Served:
        """The model of that name, or the first of that kind."""
        if name is not None and name not in self.served:
            raise RefusedError(404, "no such model is served here; see /v1/models", "model", "model_not_found")
        one = self.served[name] if name is not None else next((s for s in self.served.values() if s.kind == kind), None)
        if one is None:
            raise RefusedError(404, f"no model of the kind {kind} is served here", "model", "model_not_found")
        if one.kind != kind:
            raise invalid(f"this is a model of the kind {one.kind}; expected one of the kind {kind}", "model")
        return one

    def close(self, *, finish: bool = True) -> None:
        """Finish the running texts, or drop them."""
        for one in self.served.values():
            one.worker.close(self.limits.seconds, finish=finish)

    async def infill(
        self,
        one: Served,
        requests: Sequence[Request],
        seed: int,
        changes: dict[str, Any],
        receive: Receive,
        watched: bool = True,
    ) -> tuple[RunningRequest, list[InfillDraft | BestOf]]:
        """Start to fill in blanks. changes: of keys in the recipe's `decode` section, None where there is none
        receive: tells whether the client is still connected   watched: whether to report single insertions"""
        for request in requests:
            self._check(request)
        settings = self._settings(one, changes)
        # In a thread: to tokenise a long text takes milliseconds, in which the event loop would serve nobody.
        drafts = await asyncio.to_thread(one.model.begin_infill, requests, settings, seed)
        running = RunningRequest(one.worker, drafts, settings, watched, self.limits.seconds)
        await while_connected(receive, running.start())
        return running, drafts

    async def solve(self, one: Served, prompt: str, seed: int, receive: Receive) -> tuple[RunningRequest, PlainDraft]:
        """Start to write the answer to a prompt."""
        self._check_length(prompt, "prompt")
        draft = one.model.begin(prompt, seed)
        settings = self._settings(one, {})
        running = RunningRequest(one.worker, [draft], settings, True, self.limits.seconds)
        await while_connected(receive, running.start())
        return running, draft

    def _settings(self, one: Served, changes: dict[str, Any]) -> DecodeConfig:
        """The recipe's `decode` section with these changes, and no more tokens than the server allows."""
        most, wanted = self.limits.tokens, changes.get("max_tokens")
        if wanted is not None and wanted > most:
            raise invalid(f"expected at most {most} tokens, got {wanted}", "max_tokens")
        settings = one.model.settings(**{key: value for key, value in changes.items() if value is not None})
        return msgspec.structs.replace(settings, max_tokens=min(settings.max_tokens or most, most))

    def _check(self, request: Request) -> None:
        limits = self.limits
        self._check_length(request.text, "text")
        if (blanks := len(request.pieces) - 1) > limits.blanks:
            raise invalid(f"expected at most {limits.blanks} blanks, got {blanks}", "text")
        choices = [choice for field in request.fields for choice in field.choices]
        if len(choices) > limits.choices:
            raise invalid(f"expected at most {limits.choices} choices, got {len(choices)}", "choices")
        self._check_length("".join(choices), "choices")
        for name in ("banned", "required"):
            if len(words := getattr(request, name)) > limits.words:
                raise invalid(f"expected at most {limits.words} words, got {len(words)}", name)

    def _check_length(self, text: str, name: str) -> None:
        if len(text) > self.limits.characters:
            raise RefusedError(413, f"expected at most {self.limits.characters} characters, got {len(text)}", name)


def answer_head(kind: str, one: Served) -> dict[str, Any]:
    """The fields that every answer begins with."""
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": one.name}


def _kind(model: Model) -> Kind:
    task = model.recipe.task
    if task.kind not in _KINDS:
        raise InsertlmError(f"{model.name}: this is a model of the task {task.tag}; expected {' or '.join(_KINDS)}")
    return _KINDS[task.kind]
