"""A request at work, as the event loop sees it: it can be waited for, watched and left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from insertlm.inference.settings import DecodeConfig
from insertlm.infill.drafts import Draft, Event
from insertlm.server.errors import GoneError, RefusedError, refusal_of, shape
from insertlm.server.worker import Ended, Failed, Job, Message, Worker

__all__ = ["EventStream", "Ticket", "server_sent", "unless_gone"]

Result = TypeVar("Result")


class Ticket:
    """A job from its beginning to its end. seconds: what it may take in all"""

    def __init__(
        self, worker: Worker, drafts: Sequence[Draft[Any]], settings: DecodeConfig, watched: bool, seconds: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._deadline, self._seconds = self._loop.time() + seconds, seconds
        self._worker, self._job = worker, Job(drafts, settings, watched, self._tell)

    async def begin(self) -> None:
        """Hand it in, and wait until its texts are under way."""
        self._worker.submit(self._job)
        try:
            await self._next()
        except BaseException:
            self.leave()
            raise

    async def messages(self) -> AsyncGenerator[Event | list[Any]]:
        """Insertions, and at last the results."""
        while True:
            message = await self._next()
            if isinstance(message, Ended):
                yield message.results
                return
            if isinstance(message, list):
                for event in message:
                    yield event

    async def results(self) -> list[Any]:
        *_, results = [message async for message in self.messages()]
        assert isinstance(results, list)
        return results

    def leave(self) -> None:
        self._worker.leave(self._job)

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._messages.get()
        except TimeoutError as error:
            raise RefusedError(504, f"the text was not done within {self._seconds:g} seconds") from error
        if isinstance(message, Failed):
            raise message.error
        return message

    def _tell(self, message: Message) -> None:
        with suppress(RuntimeError):  # the event loop is gone, and all who waited with it
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Do some work as long as the client waits for it; raises GoneError if it does not."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


def server_sent(data: dict[str, Any] | str, event: str | None = None) -> bytes:
    """One event of a stream. In ASCII: some clients take other characters, such as U+2028, for the end of a line."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


class EventStream(Response):
    """Server-sent events. What fails midway is told as an event, for the status is sent by then. ticket: is left,
    however it ends   named: whether errors are events of that name, or plain data as OpenAI's are"""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, events: Callable[[], AsyncGenerator[bytes]], named: bool = True) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._ticket, self._events, self._named = ticket, events, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(GoneError):
            try:
                await unless_gone(receive, self._send(send))
            finally:
                self._ticket.leave()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            told = server_sent(shape(refusal_of(error)), "error" if self._named else None)
            await send({"type": "http.response.body", "body": told, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
