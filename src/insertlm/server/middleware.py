"""What every request passes through: host and API key are checked, the size limited, and the answer counted and timed.

This is plain ASGI, because Starlette's BaseHTTPMiddleware hides a client's disconnect from the routes behind it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from insertlm.server.errors import RefusedError, error_response
from insertlm.server.hosts import Hosts
from insertlm.server.limits import Limits
from insertlm.server.metrics import Metrics

__all__ = ["RequestMiddleware"]

# Headers of every answer. Browsers take its type as given, and no other site may put it in a frame. With `no-cache`
# they ask before they use a stored file, so that a page never mixes files of two versions.
_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "frame-ancestors 'none'",
    "cache-control": "no-cache",
}


class RequestMiddleware:
    """hosts: None if any will do   open: paths that need no key   known: paths counted under their own name; all others
    count as "other" """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        hosts: Hosts | None,
        key: str | None,
        metrics: Metrics,
        known: Collection[str],
        open: Collection[str],
    ) -> None:
        self.app, self.limits, self.hosts, self.metrics = app, limits, hosts, metrics
        self.known, self.open = known, open
        self._key = None if key is None else _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the start and the end of the server
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered as GET; uvicorn leaves out the body
            scope = {**scope, "method": "GET"}
        started, status = time.perf_counter(), 499  # if the client disconnects before there is an answer

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name, value in _HEADERS.items():
                    MutableHeaders(scope=message).setdefault(name, value)
            await send(message)

        try:
            await self._pass(scope, receive, counted)
        except Exception:  # Starlette's outermost middleware answers it with a 500
            status = 500
            raise
        finally:
            path = scope["path"] if scope["path"] in self.known else "other"
            self.metrics.count(path, status, time.perf_counter() - started)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_host(scope)
            self._check_key(scope)
            replay = await self._read(scope, receive)
        except RefusedError as refusal:
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, replay, send)

    def _check_host(self, scope: Scope) -> None:
        named = Headers(scope=scope).getlist("host")
        if self.hosts is not None and not (len(named) == 1 and self.hosts.allows(named[0])):
            raise RefusedError(421, "this is not the host that the request names; see insertlm serve --allowed-host")

    def _check_key(self, scope: Scope) -> None:
        """Compared in constant time. Both sides are hashed first, so that the time does not tell the length either."""
        if self._key is None or scope["path"] in self.open:
            return
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if not hmac.compare_digest(_digest(given.strip()), self._key) or kind.lower() != "bearer":
            raise RefusedError(401, "expected the header Authorization: Bearer KEY with the server's key")

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body unless it is too large; the app then receives it as one message."""
        too_large = RefusedError(413, f"the request has more than {self.limits.bytes} bytes")
        # A large body is refused by its announced length, before any of it is read. But the length may be missing or
        # wrong, so bytes are counted as they come, too. ([:20], because Python refuses to parse thousands of digits.)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.limits.bytes:
            raise too_large
        body = bytearray()
        try:
            # A client that sends a byte now and then must not hold its connection and memory for ever.
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
            # After the body come the server's own messages; the routes wait for the one that says "disconnect".
            return waiting.pop() if waiting else await receive()

        return replay


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
