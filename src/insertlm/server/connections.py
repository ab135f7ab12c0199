"""Connections that send no request.

uvicorn waits without an end for the headers of a request, so that clients who send a byte now and then could take up
all connections that the machine has. (How long the body may take is checked in middleware.py.)
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection"]


class Connection(H11Protocol):
    """uvicorn's, which is closed if it has waited too long for the headers of its next request. (Between two requests
    uvicorn closes it sooner, if nothing comes at all.)"""

    seconds: ClassVar[float] = 10.0
    _overdue: asyncio.TimerHandle | None = None  # while headers are waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        # A cycle is a request whose headers have come, and its answer.
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._overdue is None:
            self._overdue = self.loop.call_later(self.seconds, self.transport.close)

    def _stop(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
