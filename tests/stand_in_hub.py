"""A stand-in for the Hub on this machine, as far as its client asks it when models are fetched and pushed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["TOKEN", "Hub", "stand_in"]

TOKEN = "hf_stand_in"
_LARGE = ".safetensors"  # what goes by LFS


class Hub:
    """A server on this machine that answers the few requests of huggingface_hub that loading and pushing take. It keeps
    repositories in memory, each a list of commits, speaks git LFS, not Xet, and trusts one token.

    repos: by name, the files of each commit   private: names   objects: by SHA-256   asked: all requests so far
    down: it answers 503"""

    def __init__(self) -> None:
        self.repos: dict[str, list[dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.down = False
        self.address = ""

    def revision(self, name: str) -> str:
        return hashlib.sha1(f"{name}{len(self.repos[name])}".encode()).hexdigest()

    def commit(self, name: str, body: bytes) -> None:
        files = dict(self.repos[name][-1]) if self.repos[name] else {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
        self.repos[name].append(files)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        if self.hub.down:
            return self._send(503, {"error": "down"})
        for pattern, name in _ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                getattr(self, name)(body, *match.groups())
                return None
        return self._send(404, {"error": f"no {path}"})

    def _send(self, status: int, content: Any = None, raw: bytes | None = None, **headers: str) -> None:
        data = json.dumps(content).encode() if raw is None else raw
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _may_read(self, name: str) -> bool:
        if name in self.hub.repos and (self._known() or name not in self.hub.private):
            return True
        # The real one tells nobody whether a repository that he may not see exists.
        self._send(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return False

    def _may_write(self, name: str) -> bool:
        if not self._known():
            self._send(401, {"error": "Invalid user"})
        elif not name.startswith("me/"):
            self._send(403, {"error": "Forbidden"})
        else:
            return True
        return False

    # --- Routes

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self._may_write(name):
            return None
        if name in self.hub.repos:
            return self._send(409, {"error": "You already created this", "url": f"{self.hub.address}/{name}"})
        self.hub.repos[name] = []
        if asked.get("visibility") == "private" or asked.get("private"):
            self.hub.private.add(name)
        return self._send(200, {"url": f"{self.hub.address}/{name}"})

    def validate(self, body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, name: str) -> None:
        if self._may_write(name):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(_LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._send(200, {"files": files})

    def batch(self, body: bytes, name: str) -> None:
        if self._may_write(name):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.address}/objects/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._send(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self._send(200, {})

    def commit(self, body: bytes, name: str) -> None:
        if self._may_write(name):
            self.hub.commit(name, body)
            oid = self.hub.revision(name)
            self._send(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{oid}", "commitOid": oid})

    def about(self, body: bytes, name: str) -> None:
        if self._may_read(name):
            names = self.hub.repos[name][-1] if self.hub.repos[name] else {}
            files = [{"rfilename": file} for file in names]
            self._send(200, {"id": name, "sha": self.hub.revision(name), "siblings": files})

    def tree(self, body: bytes, name: str) -> None:
        if self._may_read(name):
            files = self.hub.repos[name][-1]
            listed = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            self._send(200, listed)

    def file(self, body: bytes, name: str, file: str) -> None:
        if self._may_read(name):
            data = self.hub.repos[name][-1].get(file)
            if data is None:
                return self._send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self._send(200, raw=data, ETag=etag, X_Repo_Commit=self.hub.revision(name))
        return None


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES = [
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"POST /api/models/{_NAME}/preupload/main", "preupload"),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /objects/(\w+)", "store"),
    (rf"POST /api/models/{_NAME}/commit/main", "commit"),
    (rf"GET /api/models/{_NAME}(?:/revision/\w+)?", "about"),
    (rf"GET /api/models/{_NAME}/tree/\w+", "tree"),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/\w+/(.+)", "file"),
]


@contextmanager
def stand_in() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
