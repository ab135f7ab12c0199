"""What every request passes: the key is asked for, its size is limited, and its answer is given a few headers, counted
and timed.

Written as plain ASGI: a middleware of the framework would hide from answers that their client has gone away.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from insertlm.server.errors import RefusedError, answer
from insertlm.server.limits import Limits
from insertlm.server.metrics import Traffic

__all__ = ["Gate"]

# Of every answer: it is what it says it is, nobody frames it, and a page never mixes files of two versions.
_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "frame-ancestors 'none'",
    "cache-control": "no-cache",
}


class Gate:
    """open: paths that need no key   known: paths that are counted by name; all others are one"""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        key: str | None,
        traffic: Traffic,
        known: Collection[str],
        open: Collection[str],
    ) -> None:
        self.app, self.limits, self.traffic, self.known, self.open = app, limits, traffic, known, open
        self._key = None if key is None else _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # all that is answered but the body, which the server leaves out
            scope = {**scope, "method": "GET"}
        started, status = time.perf_counter(), 499  # the client left before there was an answer

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name, value in _HEADERS.items():
                    MutableHeaders(scope=message).setdefault(name, value)
            await send(message)

        try:
            await self._pass(scope, receive, counted)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"] if scope["path"] in self.known else "other"
            self.traffic.requests.add(path=path, status=str(status))
            self.traffic.seconds.add(time.perf_counter() - started, path=path)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)
            replay = await self._read(scope, receive)
        except RefusedError as refusal:
            await answer(refusal)(scope, receive, send)
            return
        await self.app(scope, replay, send)

    def _check_key(self, scope: Scope) -> None:
        """In constant time: both sides are hashed first, so that not even the length can be told."""
        if self._key is None or scope["path"] in self.open:
            return
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if not hmac.compare_digest(_digest(given.strip()), self._key) or kind.lower() != "bearer":
            raise RefusedError(401, "expected the header Authorization: Bearer KEY with the server's key")

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """Take in the whole body, if it is not too large, and hand it on from there."""
        too_large = RefusedError(413, f"the request has more than {self.limits.bytes} bytes")
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.limits.bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > self.limits.bytes:
                        raise too_large
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        except TimeoutError as error:
            raise RefusedError(408, "the request did not arrive in time") from error
        waiting: list[Message] = [{**message, "body": bytes(body)} if message["type"] == "http.request" else message]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
