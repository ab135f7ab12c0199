"""The command `serve`: models over HTTP."""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.server.hosts import Hosts
from insertlm.server.limits import Limits

__all__ = ["serve"]

_VARIABLE = "INSERTLM_API_KEY"
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
    from insertlm.server.connections import Connection

    key, hosts = _key(args.api_key), Hosts(args.host, args.allowed_hosts or ())
    _check_free(args.host, args.port)
    limits = Limits(**{limit.name: getattr(args, f"max_{limit.name}") for limit in fields(Limits)})
    with ThreadPoolExecutor(1) as loading:  # a thread that ends, see server/worker.py
        models = list(loading.map(lambda name: load(name, args.device), args.models or bundled()))
    app = create_app(models, limits, key, hosts)
    try:
        uvicorn.run(
            app,
            host=args.host,
            port=args.port,
            http=Connection,
            timeout_graceful_shutdown=int(limits.seconds) + _GRACE,
            server_header=False,
            log_level="info",
        )
    finally:
        app.state.registry.close(finish=False)  # after a second Ctrl-C uvicorn skips the app's own shutdown


def _key(option: str | None) -> str | None:
    """The key of the option, or of the environment; None if neither is set."""
    name, given = ("argument --api-key", option) if option is not None else (_VARIABLE, os.environ.get(_VARIABLE))
    if given is None:
        return None
    # Such as a shell variable that is not set, or what is missing from a file: a server without a key lets everyone in.
    if not given.strip():
        raise InsertlmError(f"{name}: expected a key, got an empty one; leave it out to serve everyone")
    # Clients disagree on how to encode other characters in a header, and none can send a line end there.
    if not given.isascii() or not given.isprintable():
        raise InsertlmError(f"{name}: expected a key of ASCII characters alone, without line ends")
    return given.strip()


def _check_free(host: str, port: int) -> None:
    """Refuse a port that is taken before the models are loaded, which takes a while."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise InsertlmError(f"cannot listen on {host}, port {port}: {reason(error)}; see --host and --port") from error
