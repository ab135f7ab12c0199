"""Routes that clients of other servers use: OpenAI's /v1/completions and llama.cpp's /infill, each with one blank.

An insertion model may insert anywhere in a blank until it stops, so no part of a fill is final before the end. A
streamed fill therefore comes as one piece. A family that writes a blank from left to right sends every token.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from itertools import accumulate
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request, Response

from insertlm.infill.drafts import BestOf, Event, InfillDraft
from insertlm.infill.requests import Request as InfillRequest
from insertlm.infill.results import Infilling, spell
from insertlm.server.errors import invalid
from insertlm.server.registry import Registry, Served, answer_head
from insertlm.server.requests import EventStream, RunningRequest, encode_event, while_connected
from insertlm.server.routes import ERRORS, STREAM, expect_json, usage_of
from insertlm.server.schemas import Choice, Completion, CompletionBody, LlamaAnswer, LlamaBody, Logprobs

__all__ = ["other_routes"]

_IMPOSSIBLE = -9999.0  # what OpenAI has in place of minus infinity, which is not JSON


def other_routes(registry: Registry) -> APIRouter:
    router = APIRouter(responses={**ERRORS, **STREAM}, dependencies=[Depends(expect_json)])

    @router.post("/v1/completions", response_model=Completion, tags=["as OpenAI"])
    async def completions(body: CompletionBody, request: Request) -> Completion | Response:
        """Write what comes between `prompt` and `suffix`, or after `prompt`. With `stream` the text comes in one
        piece when it is done, or token by token from a family that writes from left to right."""
        one, prompts = registry.find(body.model, "text"), [body.prompt] if isinstance(body.prompt, str) else body.prompt
        _check(body, prompts, registry.limits.samples)
        asked = [_between(prompt, body.suffix or "", body.min_tokens) for prompt in prompts for _ in range(body.n or 1)]
        changes = {"temperature": body.temperature, "top_p": body.top_p, "max_tokens": body.max_tokens}
        running, drafts = await registry.infill(one, asked, body.seed or 0, changes, request.receive, _streams(one))
        # As with OpenAI, the n texts of a prompt stand together.
        echoed = [prompt if body.echo else "" for prompt in prompts for _ in range(body.n or 1)]
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        fills = [_GrowingFill(draft, stops) for draft in drafts]
        reply = _CompletionAnswer(answer_head("cmpl", one), fills, echoed, body.logprobs is not None)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(running, lambda: reply.chunks(running, usage), named=False)
        return reply.whole(await _results(running, request))

    @router.post("/infill", response_model=LlamaAnswer, tags=["as llama.cpp"])
    async def infill(body: LlamaBody, request: Request) -> LlamaAnswer | Response:
        """Write what comes between `input_prefix` and `input_suffix`."""
        one = registry.find(body.model, "text")
        if body.n_predict == 0:  # editors send this so that llama.cpp caches the text; there is no such cache here
            nothing = LlamaAnswer(model=one.name, stop_type="limit")
            return _stream_of(nothing) if body.stream else nothing
        seed = secrets.randbelow(1 << 62) if body.seed == -1 else body.seed or 0
        most = None if body.n_predict == -1 else body.n_predict
        changes = {**body.model_dump(include={"temperature", "top_p", "top_k"}), "max_tokens": most}
        asked = _between(body.input_prefix + body.prompt, body.input_suffix)
        running, drafts = await registry.infill(one, [asked], seed, changes, request.receive, _streams(one))
        fill = _GrowingFill(drafts[0], body.stop or [])
        if body.stream:
            return EventStream(running, lambda: _llama_chunks(running, one, fill), named=False)
        [result] = await _results(running, request)
        return _llama(one, fill.cut(result.fills[0]), result, fill)

    return router


# --- Requests


def _between(before: str, behind: str, least: int | None = None) -> InfillRequest:
    """One blank between two texts. With no text on either side the model writes from nothing. least: tokens"""
    if not before and not behind:  # the range of a blank must lie in a text; "___" alone writes from nothing
        return InfillRequest("___", min_length=least)
    blank = (len(before), len(before))
    return InfillRequest(before + behind, [blank], min_length=least, onward=not behind)


def _check(body: CompletionBody, prompts: Sequence[str], most: int) -> None:
    if not 1 <= len(prompts) * (body.n or 1) <= most:
        raise invalid(f"expected 1 to {most} texts of one request, got {len(prompts) * (body.n or 1)}", "n")
    for name, plain in (("best_of", (None, 1)), ("logit_bias", (None, {}))):
        if getattr(body, name) not in plain:
            raise invalid(f"{name} is not supported", name)
    if body.logprobs not in (None, 0, 1):
        raise invalid(
            "expected 0 or 1: the tokens that were written have log-probabilities, others have none", "logprobs"
        )


def _streams(one: Served) -> bool:
    """Whether a token is final as soon as it is written."""
    return one.model.family.abilities.left_to_right


async def _results(running: RunningRequest, request: Request) -> list[Infilling]:
    try:
        return await while_connected(request.receive, running.results())
    finally:
        running.cancel()


# --- Answers


class _GrowingFill:
    """The fill of a draft while it grows from left to right. stops: strings before the first of which it is cut off"""

    def __init__(self, draft: InfillDraft | BestOf, stops: Sequence[str]) -> None:
        self.draft, self.stops, self.ids, self.sent = draft, [stop for stop in stops if stop], list[int](), ""
        # Of every token its log-probability, and where its text ends. told: how many tokens `logprobs` has given
        self.likely, self.ends, self.told = list[float](), list[int](), 0
        # So many characters at the end may be the beginning of a stop, so they are kept back.
        self.keep = max(map(len, self.stops), default=1) - 1

    def cut(self, text: str) -> str:
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def add(self, event: Event) -> str:
        """The text that can be sent after one more token."""
        self.ids.append(event.token)
        self.likely.append(math.log(event.probability) if event.probability else _IMPOSSIBLE)
        text = self.draft.tokenizer.decode(self.ids)
        text = text.removeprefix(" ") if self.draft.given.spaces else text
        whole = self.cut(text)
        # Tokens are bytes: a character whose second half is yet to come decodes to U+FFFD.
        self.ends.append(len(text.rstrip("\ufffd")))
        final = whole if whole != text else text[: len(text) - self.keep].rstrip("\ufffd")
        return self._rest(final)

    def finish(self, result: Infilling) -> str:
        """The text that has not been sent yet."""
        path = result.trajectory
        written = [path.events[number] for number in path.order if number >= 0]
        self.ids = [event.token for event in written]
        self.likely = [max(event.log_probability, _IMPOSSIBLE) for event in written]
        return self._rest(self.cut(result.fills[0]))

    def logprobs(self, offset: int, done: bool) -> Logprobs:
        """Of the tokens whose text was sent since the last call. offset: of the fill in the text   done: the fill has
        ended, perhaps in the middle of a token, where a stop begins"""
        if done:
            parts = spell(self.draft.tokenizer, self.ids, " " if self.draft.given.spaces else "")
            self.ends = [*accumulate(map(len, parts))]
        found, begin = Logprobs(), self.ends[self.told - 1] if self.told else 0
        for end, likely in [*zip(self.ends, self.likely, strict=True)][self.told :]:
            if end > len(self.sent) and not (done and begin < len(self.sent)):
                break
            found.tokens.append(self.sent[begin:end])
            found.token_logprobs.append(likely)
            found.text_offset.append(offset + begin)
            begin = end
            self.told += 1
        return found

    def _rest(self, text: str) -> str:
        rest = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += rest
        return rest

    def why(self, result: Infilling) -> Literal["word", "eos", "limit"]:
        """Why it ended, in llama.cpp's words: "word" means one of the stops."""
        return "word" if self.cut(result.fills[0]) != result.fills[0] else "eos" if result.complete else "limit"


class _CompletionAnswer:
    """An answer in OpenAI's format. head: id, time and model   echoed: what `echo` repeats before each text
    logprobs: whether to tell how likely each token was"""

    def __init__(
        self, head: dict[str, Any], fills: Sequence[_GrowingFill], echoed: Sequence[str], logprobs: bool
    ) -> None:
        self.head, self.fills, self.echoed, self.logprobs = head, fills, echoed, logprobs

    def whole(self, results: Sequence[Infilling]) -> Completion:
        choices = [
            self._choice(index, fill.finish(result), result) for index, (fill, result) in self._numbered(results)
        ]
        usage = usage_of([result.trajectory for result in results])
        return Completion(**self.head, choices=choices, usage=usage)

    async def chunks(self, running: RunningRequest, usage: bool) -> AsyncGenerator[bytes]:
        async for message in running.messages():
            if isinstance(message, Event):
                if text := self.fills[message.sample].add(message):
                    yield self._chunk([self._choice(message.sample, text)])
                continue
            for index, (fill, result) in self._numbered(message):
                yield self._chunk([self._choice(index, fill.finish(result), result)])
            if usage:
                yield self._chunk([], usage=usage_of([result.trajectory for result in message]))
        yield encode_event("[DONE]")

    def _numbered(self, results: Sequence[Infilling]) -> list[tuple[int, tuple[_GrowingFill, Infilling]]]:
        return list(enumerate(zip(self.fills, results, strict=True)))

    def _choice(self, index: int, text: str, result: Infilling | None = None) -> Choice:
        """result: given for a text that is done"""
        fill, echoed = self.fills[index], self.echoed[index]
        return Choice(
            index=index,
            text=(echoed if fill.sent == text else "") + text,
            logprobs=fill.logprobs(len(echoed), result is not None) if self.logprobs else None,
            finish_reason=None if result is None else "length" if fill.why(result) == "limit" else "stop",
        )

    def _chunk(self, choices: list[Choice], **more: Any) -> bytes:
        return encode_event(Completion(**self.head, choices=choices, **more).model_dump())


def _llama(one: Served, text: str, result: Infilling, fill: _GrowingFill) -> LlamaAnswer:
    usage = usage_of([result.trajectory])
    return LlamaAnswer(
        content=text,
        model=one.name,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        stop_type=fill.why(result),
    )


def _stream_of(answer: LlamaAnswer) -> Response:
    """A stream that consists of this answer."""
    return Response(encode_event(answer.model_dump()), media_type="text/event-stream")


async def _llama_chunks(running: RunningRequest, one: Served, fill: _GrowingFill) -> AsyncGenerator[bytes]:
    async for message in running.messages():
        if not isinstance(message, Event):
            yield encode_event(_llama(one, fill.finish(message[0]), message[0], fill).model_dump())
        elif text := fill.add(message):
            yield encode_event({"content": text, "stop": False})
