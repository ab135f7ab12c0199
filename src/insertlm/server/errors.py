"""Errors as status codes and bodies in OpenAI's format.

An error tells a client no more than it needs: no path, no traceback, nothing of what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from insertlm.core.errors import InsertlmError

__all__ = [
    "DisconnectedError",
    "RefusedError",
    "add_handlers",
    "error_body",
    "error_response",
    "invalid",
    "refusal_of",
]

# OpenAI's types of errors, by status; its clients decide by them what to raise and what to try again.
_KINDS = {401: "unauthorized", 404: "not_found_error", 429: "overloaded", 503: "overloaded", 504: "timeout"}


class RefusedError(Exception):
    """A request that is refused. param: the field that is wrong"""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> Mapping[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        # OpenAI's client waits this long before it tries again.
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


class DisconnectedError(Exception):
    """The client has disconnected; nobody reads the answer."""


def invalid(message: str, param: str | None = None) -> RefusedError:
    return RefusedError(422, message, param)


def refusal_of(error: Exception) -> RefusedError:
    """What the client is told of any error."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, DisconnectedError):
        # nginx's status for this. Nobody receives it, but the metrics count it.
        return RefusedError(499, "the client has disconnected")
    if isinstance(error, InsertlmError):
        return invalid(str(error))
    # Any other error is a mistake of ours. Its message may hold paths or texts, so it goes to the log only.
    return RefusedError(500, "something went wrong on the server; its log says what")


def error_body(refusal: RefusedError) -> dict[str, Any]:
    kind = _KINDS.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def error_response(refusal: RefusedError) -> JSONResponse:
    return JSONResponse(error_body(refusal), refusal.status, dict(refusal.headers))


def add_handlers(app: FastAPI) -> None:
    """Answer every error of an app in the same format."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        return error_response(refusal_of(error))

    async def fields(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_refusal_of_fields(error.errors()))

    async def protocol(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        headers = error.headers or {}
        # Starlette's own messages do not say what to do.
        known = {
            400: "the body cannot be read as JSON; expected UTF-8, not nested too deeply",
            404: "nothing is here; see /docs",
            405: f"expected the method {headers.get('Allow')}",
        }
        refusal = RefusedError(error.status_code, known.get(error.status_code, str(error.detail)))
        return JSONResponse(error_body(refusal), refusal.status, {**headers, **refusal.headers})

    for kind in (RefusedError, DisconnectedError, InsertlmError, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, fields)
    app.add_exception_handler(HTTPException, protocol)


def _refusal_of_fields(errors: Sequence[Mapping[str, Any]]) -> RefusedError:
    """About the first wrong field. Where a field may have several types, pydantic lists an error for each: take the one
    about the type that was sent."""
    same = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    worst = max(same, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))
    kind, loc = worst["type"], worst["loc"]
    if kind == "json_invalid":
        return RefusedError(
            400, f"the body is not JSON, character {loc[-1]}: {worst['ctx']['error'].removesuffix(' at')}"
        )
    if loc == ("body",):
        return invalid("expected a JSON object as the body; see /docs")
    place = _place(loc)
    message = "unknown field; see /docs" if kind == "extra_forbidden" else worst["msg"].removeprefix("Value error, ")
    return invalid(f"{place}: {message}" if place else message, place or None)


def _place(parts: Sequence[Any]) -> str:
    """The name of the field, without "body" or "query" before it. Names that the client made up are not repeated."""
    return ".".join(str(part) for part in parts[1:] if not isinstance(part, str) or part.isidentifier())
