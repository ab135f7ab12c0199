"""The server put together: `insertlm serve` runs this with uvicorn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from insertlm.core.version import VERSION
from insertlm.model import Model
from insertlm.server.compatible import other_routes
from insertlm.server.errors import RefusedError, add_handlers
from insertlm.server.limits import Limits
from insertlm.server.metrics import Metric, Traffic, sample
from insertlm.server.middleware import Gate
from insertlm.server.registry import Shelf
from insertlm.server.routes import ERRORS, native_routes
from insertlm.server.schemas import ModelList, ModelShape

__all__ = ["create_app"]

_PAGE = Path(__file__).parent / "page"
_SWAGGER = Path(str(files("fastapi_swagger"))) / "resources"
# All files that are given away. (/docs: FastAPI has such a page, which loads its scripts from the internet.)
_FILES = {
    "/": _PAGE / "index.html",
    "/docs": _PAGE / "docs.html",
    **{f"/{file.name}": file for file in _PAGE.iterdir() if file.suffix != ".html"},
    **{f"/swagger/{name}": _SWAGGER / name for name in ("swagger-ui.css", "swagger-ui-bundle.js")},
}
_OPEN = {"/health", "/openapi.json", *_FILES}  # what needs no key
_NUMBERS: dict[str, tuple[str, str, Literal["gauge", "counter"]]] = {
    "running": ("insertlm_texts_running", "Texts under way.", "gauge"),
    "waiting": ("insertlm_texts_waiting", "Texts that wait for their turn.", "gauge"),
    "tokens": ("insertlm_tokens_total", "Tokens written.", "counter"),
    "steps": ("insertlm_steps_total", "Steps, each one of all texts under way.", "counter"),
    "cancelled": ("insertlm_cancelled_total", "Requests whose client went away or whose time was over.", "counter"),
}


def create_app(models: Sequence[Model], limits: Limits | None = None, key: str | None = None) -> FastAPI:
    """An ASGI app that serves these models. key: what clients must send; None: nothing"""
    limits = limits or Limits()
    shelf = Shelf(models, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        shelf.close()

    app = FastAPI(
        title="insertlm",
        version=VERSION,
        description="Insertion language models: blanks of unknown length, filled in any order.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would lead to any host that a client names
    )
    app.state.shelf = shelf
    add_handlers(app)
    app.include_router(native_routes(shelf))
    app.include_router(other_routes(shelf))
    traffic = Traffic()
    _add_models(app, shelf)
    _add_watching(app, shelf, traffic)
    for path, file in _FILES.items():
        app.add_route(path, _giving(file))
    schema = app.openapi()  # it is kept, for routes no longer change
    if key is not None:
        _show_key(schema)
    app.add_middleware(Gate, limits=limits, key=key, traffic=traffic, known={"/", *schema["paths"]}, open=_OPEN)
    return app


def _add_models(app: FastAPI, shelf: Shelf) -> None:
    shapes = {name: ModelShape(id=name, task=one.kind) for name, one in shelf.served.items()}

    @app.get("/v1/models", tags=["as OpenAI"], responses={401: ERRORS[401]})
    async def models() -> ModelList:
        """What is served: models of text for the infilling endpoints, of star graphs for /v1/solve."""
        return ModelList(data=[*shapes.values()])

    @app.get("/v1/models/{name}", tags=["as OpenAI"], responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(name: str) -> ModelShape:
        """One of them."""
        if name not in shapes:
            raise RefusedError(404, "no such model is served here; see /v1/models", "model", "model_not_found")
        return shapes[name]


def _add_watching(app: FastAPI, shelf: Shelf, traffic: Traffic) -> None:
    @app.get("/health", tags=["watching"], responses={503: {"description": "It cannot answer requests."}})
    async def health() -> JSONResponse:
        """Whether it can answer requests."""
        well = all(one.worker.alive for one in shelf.served.values())
        return JSONResponse({"status": "ok" if well else "unavailable"}, 200 if well else 503)

    @app.get("/metrics", tags=["watching"], response_class=PlainTextResponse, responses={401: ERRORS[401]})
    async def metrics() -> PlainTextResponse:
        """Numbers for Prometheus."""
        lines = [*traffic.requests.lines(), *traffic.seconds.lines()]
        for name, (metric, about, kind) in _NUMBERS.items():
            lines += Metric(metric, about, kind).head()
            for one in shelf.served.values():
                lines.append(sample(metric, getattr(one.worker, name), {"model": one.name}))
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4; charset=utf-8")


def _show_key(schema: dict[str, Any]) -> None:
    """In the schema, so that /docs asks for it and clients made from the schema send it."""
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path in schema["paths"].keys() - _OPEN:
        for operation in schema["paths"][path].values():
            operation["security"] = [{"key": []}]


def _giving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    folder = StaticFiles(directory=file.parent)  # it knows what a browser has already

    async def give(request: Request) -> Response:
        return await folder.get_response(file.name, request.scope)

    return give
