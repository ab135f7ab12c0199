"""insertlm's own routes: texts with any number of blanks, streamed insertion by insertion, and star graphs."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Query, Request, Response

from insertlm.inference.trajectory import Limit, Trajectory, explain
from insertlm.infill.drafts import Draft, Event
from insertlm.infill.requests import Request as InfillRequest
from insertlm.infill.results import Infilling, spell
from insertlm.server.errors import RefusedError, invalid
from insertlm.server.registry import Registry, answer_head
from insertlm.server.requests import EventStream, RunningRequest, encode_event, while_connected
from insertlm.server.schemas import (
    ErrorBody,
    EventShape,
    FilledText,
    Graph,
    InfillAnswer,
    InfillBody,
    PieceShape,
    Solution,
    SolveBody,
    Usage,
)
from insertlm.tasks.base import expect_task
from insertlm.tasks.star import Star, edges_of

__all__ = ["ERRORS", "STREAM", "expect_json", "native_routes", "usage_of"]

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": about}
    for status, about in {
        400: "The body is not JSON.",
        401: "The key is missing or wrong.",
        404: "No such model is served.",
        408: "The request did not arrive in time.",
        413: "The request or its text is too long.",
        415: "The content type is not JSON.",
        422: "The request cannot be carried out; the message says why.",
        429: "Too many texts are being written or queued.",
        503: "The server is shutting down.",
        504: "The text was not done in time.",
    }.items()
}

# What clients know the limits by.
_LIMITS: dict[Limit, str] = {
    "max_tokens": "max_tokens",
    "max_steps": "max_steps of the model's recipe",
    "max_length": "the model",
    "blanks": "the most of a blank (max_length, or what the text says of it)",
}

Answer = InfillAnswer | Solution
# Makes the answer from its head, the results, and the events of each.
Finish = Callable[[dict[str, Any], Sequence[Any], Sequence[list[EventShape]]], Answer]
# What a stream has told already is not in its last event.
_WITHOUT_EVENTS: Any = {"events": True, "samples": {"__all__": {"events"}}}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer; with stream, its events."}
}


async def expect_json(request: Request) -> None:
    """Refuse the content types that a browser lets any web page send to any server. Before a page may send JSON to
    another site, the browser asks that site (CORS)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and not re.fullmatch(r"application/([\w.+-]+\+)?json", kind):
        raise RefusedError(415, "expected the header Content-Type: application/json")


def native_routes(registry: Registry) -> APIRouter:
    router = APIRouter(tags=["insertlm"], responses={**ERRORS, **STREAM}, dependencies=[Depends(expect_json)])

    @router.post("/v1/infill", response_model=InfillAnswer)
    async def infill(body: InfillBody, request: Request) -> Answer | Response:
        """Fill in all blanks of a text together.

        With `stream` the answer is server-sent events: `start` with the given text as a list of cells, an `insertion`
        for every token as it is written, and `done` with the whole answer, or `error`. A request with banned words,
        or with `best_of`, streams its insertions once the text is done, because another one may be kept. Several
        `samples` are written together: the insertions of all come in one stream, each with the number of its sample.
        """
        one = registry.find(body.model, "text")
        if body.samples > (most := registry.limits.samples):
            raise invalid(f"expected at most {most} texts of one request, got {body.samples}", "samples")
        if (body.best_of or 1) > most:
            raise invalid(f"expected at most {most} drafts of a text, got {body.best_of}", "best_of")
        lengths = (body.min_length, body.max_length)
        asked = InfillRequest(
            body.text,
            body.blanks,
            body.anywhere,
            *lengths,
            body.banned,
            body.required,
            words=body.words,
            choices=body.choices,
        )
        # The names of these fields are those of the decode section; null leaves the recipe's value.
        changes = body.model_dump(include={"temperature", "top_p", "top_k", "stop_threshold", "order", "best_of"})
        changes["max_tokens"] = body.max_tokens
        running, drafts = await registry.infill(one, [asked] * body.samples, body.seed, changes, request.receive)
        return await _answer(running, drafts[0], request, body.stream, answer_head("infill", one), _filled)

    @router.post("/v1/solve", response_model=Solution)
    async def solve(body: SolveBody, request: Request) -> Answer | Response:
        """Find the path through a star graph. The events are those of /v1/infill; at the start there are no cells."""
        one = registry.find(body.model, "star")
        running, draft = await registry.solve(one, body.prompt, body.seed, request.receive)
        task = expect_task(one.model.recipe.task, Star, one.name)
        return await _answer(running, draft, request, body.stream, answer_head("solve", one), partial(_solved, task))

    @router.get("/v1/graphs/example")
    async def example(seed: int = Query(0, ge=0, lt=1 << 62), model: str | None = None) -> Graph:
        """A star graph to solve, a different one for every seed, with the path to find."""
        one = registry.find(model, "star")
        task = expect_task(one.model.recipe.task, Star, one.name)
        [drawn] = task.examples("test", 1, seed)
        *flat, source, goal = drawn.prefix
        edges = edges_of(flat)
        prompt = f"{' '.join(f'{tail}>{head}' for tail, head in edges)} : {source} {goal}"
        return Graph(prompt=prompt, edges=edges, source=source, goal=goal, path=task.path(drawn.target))

    return router


async def _answer(
    running: RunningRequest,
    draft: Draft[Any],
    request: Request,
    stream: bool,
    head: dict[str, Any],
    finish: Finish,
) -> Response | Answer:
    """draft: one of the texts, which all start from the same cells   head: id, time and model"""
    if stream:
        return EventStream(running, lambda: _events(running, draft, head, finish))
    try:
        return await while_connected(request.receive, _whole(running, head, finish))
    finally:
        running.cancel()  # does nothing if the job is done


async def _whole(running: RunningRequest, head: dict[str, Any], finish: Finish) -> Answer:
    *told, results = [message async for message in running.messages()]
    assert isinstance(results, list)
    events: list[list[EventShape]] = [[] for _ in results]
    for event in told:
        assert isinstance(event, Event)
        events[event.sample].append(_event_shape(event))
    return finish(head, results, events)


async def _events(
    running: RunningRequest, draft: Draft[Any], head: dict[str, Any], finish: Finish
) -> AsyncGenerator[bytes]:
    cells = [{"text": cell} for cell in draft.cells]
    yield encode_event({"id": head["id"], "model": head["model"], "cells": cells}, "start")
    async for message in running.messages():
        if isinstance(message, Event):
            yield encode_event(_event_shape(message).model_dump(), "insertion")
        else:
            answer = finish(head, message, [[] for _ in message])
            yield encode_event(answer.model_dump(exclude=_WITHOUT_EVENTS), "done")


def _filled(head: dict[str, Any], results: Sequence[Infilling], events: Sequence[list[EventShape]]) -> InfillAnswer:
    texts = [_filled_text(result, its) for result, its in zip(results, events, strict=True)]
    return InfillAnswer(
        **head,
        **dict(texts[0]),
        samples=texts if len(texts) > 1 else None,
        usage=usage_of([result.trajectory for result in results]),
    )


def _filled_text(result: Infilling, events: list[EventShape]) -> FilledText:
    return FilledText(
        text=result.text,
        fills=result.fills,
        named=result.named,
        probabilities=result.probabilities,
        complete=result.complete,
        limit=result.trajectory.limit,
        note=explain(result.trajectory, _LIMITS),
        pieces=[PieceShape(text=text, order=order) for text, order in result.pieces],
        events=events,
    )


def _solved(
    task: Star, head: dict[str, Any], results: Sequence[Trajectory], events: Sequence[list[EventShape]]
) -> Solution:
    [path], [its] = results, events
    tokenizer = task.tokenizer
    parts = zip(spell(tokenizer, path.ids), path.order, strict=True)
    return Solution(
        **head,
        text=tokenizer.decode(path.ids),
        nodes=task.path(path.ids),
        complete=path.complete,
        limit=path.limit,
        note=explain(path, _LIMITS),
        pieces=[PieceShape(text=text, order=order) for text, order in parts],
        events=its,
        usage=usage_of([path]),
    )


def usage_of(written: Sequence[Trajectory]) -> Usage:
    given = sum(len(each.prefix) + len(each.start) for each in written)
    new = sum(len(each.events) for each in written)
    return Usage(prompt_tokens=given, completion_tokens=new, total_tokens=given + new)


def _event_shape(event: Event) -> EventShape:
    return EventShape(**event._asdict())
