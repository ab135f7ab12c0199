"""A request whose texts are being written, as the event loop sees it: it can be awaited, streamed and cancelled.

The worker writes in a thread of its own and passes messages to the event loop, so neither blocks the other.
"""

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
from insertlm.server.errors import DisconnectedError, RefusedError, error_body, refusal_of
from insertlm.server.worker import Ended, Failed, Job, Message, Worker

__all__ = ["EventStream", "RunningRequest", "encode_event", "while_connected"]

Result = TypeVar("Result")


class RunningRequest:
    """A job of a worker, from its submission to its last message. seconds: how long it may take in all"""

    def __init__(
        self, worker: Worker, drafts: Sequence[Draft[Any]], settings: DecodeConfig, watched: bool, seconds: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        # Unbounded: a slow client must not stop the worker, which writes the texts of others, too. A text has a limit.
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._deadline, self._seconds = self._loop.time() + seconds, seconds
        self._worker, self._job = worker, Job(drafts, settings, watched, self._tell)

    async def start(self) -> None:
        """Submit the job, and wait until its texts are being written."""
        self._worker.submit(self._job)
        try:
            await self._next()  # a refusal comes before the answer starts, so it can still set the status
        except BaseException:  # a cancelled request must free its place, too
            self.cancel()
            raise

    async def messages(self) -> AsyncGenerator[Event | list[Any]]:
        """Insertions as they happen, and then the list of results."""
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

    def cancel(self) -> None:
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
        # Called in the worker's thread, and asyncio's queues are for the thread of the event loop alone.
        with suppress(RuntimeError):  # the event loop has closed, so nobody waits for this
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Run `work` as long as the client is connected; raises DisconnectedError once it is not."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DisconnectedError
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        # Both are awaited, so that no task outlives its request and no exception is reported as never retrieved.
        await asyncio.gather(task, leaving, return_exceptions=True)


def encode_event(data: dict[str, Any] | str, event: str | None = None) -> bytes:
    """One server-sent event. JSON stays ASCII: some clients take characters such as U+2028 for the end of a line."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


class EventStream(Response):
    """An answer of server-sent events. An error midway becomes an event, because the status has been sent by then.

    running: is cancelled however the stream ends   named: whether an error is an event called "error" (OpenAI's streams
    send plain data)
    """

    media_type = "text/event-stream"

    def __init__(
        self, running: RunningRequest, events: Callable[[], AsyncGenerator[bytes]], named: bool = True
    ) -> None:
        # Without X-Accel-Buffering nginx would collect events and send them late.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # Starlette has set it to 0, the length of the empty body
        self._running, self._events, self._named = running, events, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(DisconnectedError):
            try:
                await while_connected(receive, self._send(send))
            finally:
                self._running.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            told = encode_event(error_body(refusal_of(error)), "error" if self._named else None)
            await send({"type": "http.response.body", "body": told, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
