"""The command `serve`: models over HTTP."""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.server.limits import Limits

__all__ = ["serve"]

_GRACE = 5  # seconds beyond the limit of a request for which a shutdown waits


def serve(args: Namespace) -> None:
    try:
        import fastapi_swagger  # type: ignore[import-untyped]  # noqa: F401  # which imports FastAPI
        import prometheus_client  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise InsertlmError(f"serve needs the package {error.name}: pip install 'insertlm[serve]'") from error
    from insertlm.model import bundled, load
    from insertlm.server.app import create_app

    if (
        args.api_key is not None and not args.api_key.strip()
    ):  # such as a shell variable that is not set: it would let everyone in
        raise InsertlmError("argument --api-key: expected a key, got an empty one")
    _check_free(args.host, args.port)
    limits = Limits(**{limit.name: getattr(args, f"max_{limit.name}") for limit in fields(Limits)})
    key = (args.api_key or os.environ.get("INSERTLM_API_KEY", "")).strip() or None
    if key is not None and not key.isascii():  # clients disagree on how to encode other characters in a header
        raise InsertlmError("the API key: expected ASCII characters alone")
    with ThreadPoolExecutor(1) as loading:  # a thread that ends, see server/worker.py
        models = list(loading.map(lambda name: load(name, args.device), args.models or bundled()))
    app = create_app(models, limits, key)
    try:
        uvicorn.run(
            app,
            host=args.host,
            port=args.port,
            timeout_graceful_shutdown=int(limits.seconds) + _GRACE,
            server_header=False,
            log_level="info",
        )
    finally:
        app.state.registry.close(finish=False)  # after a second Ctrl-C uvicorn skips the app's own shutdown


def _check_free(host: str, port: int) -> None:
    """Refuse a port that is taken before the models are loaded, which takes a while."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise InsertlmError(f"cannot listen on {host}, port {port}: {reason(error)}; see --host and --port") from error
