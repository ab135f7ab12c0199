"""`serve`: models over HTTP."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import fields

from insertlm.errors import InsertlmError
from insertlm.server.limits import Limits

__all__ = ["serve"]

_GRACE = 5  # seconds more than a request may take, before a shutdown no longer waits


def serve(args: Namespace) -> None:
    try:
        import fastapi_swagger  # type: ignore[import-untyped]  # noqa: F401  # it imports FastAPI
        import uvicorn
    except ImportError as error:
        raise InsertlmError("serve needs FastAPI and uvicorn; install them: pip install 'insertlm[serve]'") from error
    from insertlm.api import bundled, load
    from insertlm.server.app import create_app

    limits = Limits(**{limit.name: getattr(args, f"max_{limit.name}") for limit in fields(Limits)})
    key = args.api_key or os.environ.get("INSERTLM_API_KEY") or None
    app = create_app([load(name, args.device) for name in args.models or bundled()], limits, key)
    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        timeout_graceful_shutdown=int(limits.seconds) + _GRACE,
        server_header=False,
        log_level="info",
    )
