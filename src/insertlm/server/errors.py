"""What can go wrong, as status codes and OpenAI's shape of an error. No answer tells more than it must: no path, no
traceback, nothing of what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from insertlm.core.errors import InsertlmError

__all__ = ["GoneError", "RefusedError", "add_handlers", "answer", "invalid", "refusal_of", "shape"]

_KINDS = {401: "unauthorized", 404: "not_found_error", 429: "overloaded", 503: "overloaded", 504: "timeout"}


class RefusedError(Exception):
    """A request that is not answered as asked. param: the field that is to blame"""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> Mapping[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


class GoneError(Exception):
    """The client has gone away; nobody reads the answer."""


def invalid(message: str, param: str | None = None) -> RefusedError:
    return RefusedError(422, message, param)


def refusal_of(error: Exception) -> RefusedError:
    """What users are told of any error."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, GoneError):
        return RefusedError(499, "the client has gone away")
    if isinstance(error, InsertlmError):
        return invalid(str(error))
    return RefusedError(500, "something went wrong on the server; its log says what")


def shape(refusal: RefusedError) -> dict[str, Any]:
    kind = _KINDS.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def answer(refusal: RefusedError) -> JSONResponse:
    return JSONResponse(shape(refusal), refusal.status, dict(refusal.headers))


def add_handlers(app: FastAPI) -> None:
    """Every error of an app in one shape."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        return answer(refusal_of(error))

    async def fields(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(_refusal_of_fields(error.errors()))

    async def protocol(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        headers = error.headers or {}
        known = {
            400: "the body is no JSON that can be read; expected UTF-8, not nested too deeply",
            404: "nothing is here; see /docs",
            405: f"expected the method {headers.get('Allow')}",
        }
        refusal = RefusedError(error.status_code, known.get(error.status_code, str(error.detail)))
        return JSONResponse(shape(refusal), refusal.status, {**headers, **refusal.headers})

    for kind in (RefusedError, GoneError, InsertlmError, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, fields)
    app.add_exception_handler(HTTPException, protocol)


def _refusal_of_fields(errors: Sequence[Mapping[str, Any]]) -> RefusedError:
    """Of the first field that is wrong. If it may be of several types: what is wrong with the one it has."""
    same = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    worst = max(same, key=lambda error: (not error["type"].endswith("_type"), len(error["loc"])))
    kind, loc = worst["type"], worst["loc"]
    if kind == "json_invalid":
        return RefusedError(
            400, f"the body is no JSON, character {loc[-1]}: {worst['ctx']['error'].removesuffix(' at')}"
        )
    if loc == ("body",):
        return invalid("expected a JSON object as the body; see /docs")
    place = _place(loc)
    message = "unknown field; see /docs" if kind == "extra_forbidden" else worst["msg"].removeprefix("Value error, ")
    return invalid(f"{place}: {message}" if place else message, place or None)


def _place(parts: Sequence[Any]) -> str:
    """The field, without whether it was in the body or in the address; a name that users made up is not repeated."""
    return ".".join(str(part) for part in parts[1:] if not isinstance(part, str) or part.isidentifier())
