"""The server put together: `insertlm serve` runs this with uvicorn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from html import escape
from importlib.metadata import PackageNotFoundError, metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.staticfiles import NotModifiedResponse

from insertlm.core.version import VERSION
from insertlm.model import Model
from insertlm.server.compatible import other_routes
from insertlm.server.errors import RefusedError, add_handlers
from insertlm.server.examples import ModelExamples
from insertlm.server.hosts import Hosts
from insertlm.server.limits import Limits
from insertlm.server.metrics import Metrics
from insertlm.server.middleware import RequestMiddleware
from insertlm.server.registry import Registry, Served
from insertlm.server.routes import ERRORS, native_routes
from insertlm.server.schemas import ModelList, ModelShape

__all__ = ["create_app"]

_PAGE = Path(__file__).parent / "page"
_SWAGGER = Path(str(files("fastapi_swagger"))) / "resources"
# All static files by path, but for the page itself. /docs is our own page because FastAPI's loads its scripts from the
# internet.
_FILES = {
    "/docs": _PAGE / "docs.html",
    **{f"/{file.name}": file for file in _PAGE.iterdir() if file.suffix != ".html"},
    **{f"/swagger/{name}": _SWAGGER / name for name in ("swagger-ui.css", "swagger-ui-bundle.js")},
}
_OPEN = {"/", "/health", "/openapi.json", *_FILES}  # paths that need no key


def create_app(
    models: Sequence[Model], limits: Limits | None = None, key: str | None = None, hosts: Hosts | None = None
) -> FastAPI:
    """An ASGI app that serves these models. key: the API key that clients must send; None: no key is needed
    hosts: the names it answers to; None: any"""
    limits = limits or Limits()
    registry = Registry(models, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        registry.close()  # finish the running texts; uvicorn accepts no more connections by now

    app = FastAPI(
        title="insertlm",
        version=VERSION,
        description="Insertion language models: blanks of unknown length, filled in any order.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to any host that the client names in its request
    )
    app.state.registry = registry  # for `insertlm serve`, which closes it after a second Ctrl-C
    add_handlers(app)
    app.include_router(native_routes(registry))
    app.include_router(other_routes(registry))
    metrics = Metrics(registry.served.values())
    _add_models(app, registry)
    _add_monitoring(app, registry, metrics)
    # Starlette's plain routes, which stay out of the schema: static files are no part of the API.
    app.add_route("/", _page_route(_repository()))
    for path, file in _FILES.items():
        app.add_route(path, _file_route(file))
    schema = app.openapi()  # FastAPI keeps it, so no route may be added from here on
    if key is not None:
        _add_key_to(schema)
    # Only known paths are counted by name. Otherwise a client could make up paths and fill the metrics with them.
    known = {"/", *schema["paths"]}
    app.add_middleware(RequestMiddleware, limits=limits, hosts=hosts, key=key, metrics=metrics, known=known, open=_OPEN)
    return app


def _add_models(app: FastAPI, registry: Registry) -> None:
    shapes = {name: _shape(one) for name, one in registry.served.items()}

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

    @app.get(
        "/v1/models/{name}/examples",
        tags=["insertlm"],
        response_model_exclude_unset=True,
        responses={401: ERRORS[401], 404: ERRORS[404]},
    )
    async def examples(name: str) -> ModelExamples:
        """Texts that suit the model, as bodies of requests to /v1/infill. The page offers them."""
        if name not in registry.served:
            raise RefusedError(404, "no such model is served here; see /v1/models", "model", "model_not_found")
        return registry.served[name].told


def _shape(one: Served) -> ModelShape:
    able, decode = one.model.family.abilities, one.model.recipe.decode
    settings: dict[str, float | str] = {name: getattr(decode, name) for name in ("temperature", "top_p", "top_k")}
    if able.stop_threshold:
        settings["stop_threshold"] = decode.stop_threshold
    if able.orders:
        settings["order"] = decode.order
    return ModelShape(
        id=one.name,
        task=one.kind,
        about=one.told.about,
        parameters=sum(each.numel() for each in one.model.family.parameters()),
        takes_hints=able.takes_hints,
        bounds_tokens=able.supports_constraints,
        left_to_right=able.left_to_right,
        orders=[*able.orders],
        settings=settings,
    )


def _add_monitoring(app: FastAPI, registry: Registry, metrics: Metrics) -> None:
    @app.get("/health", tags=["monitoring"], responses={503: {"description": "It cannot answer requests."}})
    async def health() -> JSONResponse:
        """Whether it can answer requests."""
        # A load balancer goes by the status alone, so a dead worker must not answer 200.
        well = all(one.worker.alive for one in registry.served.values())
        return JSONResponse({"status": "ok" if well else "unavailable"}, 200 if well else 503)

    @app.get(
        "/metrics",
        name="metrics",
        tags=["monitoring"],
        response_class=PlainTextResponse,
        responses={401: ERRORS[401]},
    )
    async def show_metrics() -> PlainTextResponse:
        """Metrics for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_key_to(schema: dict[str, Any]) -> None:
    """With the key in the schema, /docs asks for it and clients generated from the schema send it."""
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path in schema["paths"].keys() - _OPEN:
        for operation in schema["paths"][path].values():
            operation["security"] = [{"key": []}]


def _repository() -> str | None:
    """The address `Repository` under project.urls in pyproject.toml, if there is one."""
    try:
        links = metadata("insertlm").get_all("Project-URL") or []
    except PackageNotFoundError:  # the sources are on the path, not installed
        return None
    return next((link.partition(", ")[2] for link in links if link.lower().startswith("repository, ")), None)


def _page_route(repository: str | None) -> Callable[[Request], Awaitable[Response]]:
    """The page, with a link to the source if it is known where that is."""
    link = f'<a href="{escape(repository)}">Source</a>' if repository else ""
    html = (_PAGE / "index.html").read_text(encoding="utf-8").replace("<!-- repository -->", link)
    tag, folder = f'"{sha256(html.encode()).hexdigest()}"', StaticFiles(directory=_PAGE)

    async def give(request: Request) -> Response:
        page = HTMLResponse(html, headers={"etag": tag})
        known = folder.is_not_modified(page.headers, request.headers)
        return NotModifiedResponse(page.headers) if known else page

    return give


def _file_route(file: Path) -> Callable[[Request], Awaitable[Response]]:
    folder = StaticFiles(directory=file.parent)  # answers 304 for a file that the browser has already

    async def give(request: Request) -> Response:
        return await folder.get_response(file.name, request.scope)

    return give
