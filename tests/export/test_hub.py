"""Models by their id on the Hub, and pushing them there. The Hub is a stand-in on this machine: nothing here has been
tried against the real one."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import constants

import insertlm
from insertlm.cli import main
from insertlm.errors import InsertlmError
from insertlm.export.folder import FILES
from insertlm.export.hub import is_hub_id

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


# --- What tests lean on


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With a cache and a token of its own; the library reads its environment once, on import."""
    with stand_in() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.address}{''.join(template[1:])}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def stored(hub: Hub, exported: Path) -> str:
    """An export that is on the Hub, and a file that is nobody's business."""
    hub.repos["you/stories"] = [{**{name: (exported / name).read_bytes() for name in FILES}, "notes.txt": b"mine"}]
    return "you/stories"


def complaint(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(command) == 2
    *progress, line = capsys.readouterr().err.splitlines()
    assert all(not other or "Fetching" in other for other in progress)
    return f"{line}\n"


# --- Loading


def test_a_model_is_loaded_by_its_id(hub: Hub, stored: str, exported: Path) -> None:
    ours, theirs = insertlm.load(exported, "cpu"), insertlm.load(stored, "cpu")
    weights = theirs.family.state_dict()
    assert all(weights[name].equal(value) for name, value in ours.family.state_dict().items())
    [mine], [yours] = (model.infill("The ___ sat.", seed=1, temperature=1.0) for model in (ours, theirs))
    assert mine.text == yours.text
    assert not any("notes.txt" in request for request in hub.asked)


def test_what_was_fetched_is_there_without_a_connection(hub: Hub, stored: str) -> None:
    folder = insertlm.load(stored, "cpu").folder
    hub.down = True
    assert insertlm.load(stored, "cpu").folder == folder


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("you/stories", True),
        ("you/stories-1.0_b", True),
        ("here/stories", False),  # there is a folder of that name
        ("stories", False),
        ("./stories", False),
        ("../stories", False),
        ("/you/stories", False),
        ("a/b/c", False),
        ("you/", False),
        ("you/st ories", False),
    ],
)
def test_what_is_meant_as_an_id(name: str, meant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert is_hub_id(name) == meant


def test_a_mistyped_path_is_not_asked_for(hub: Hub) -> None:
    Path("runs").mkdir()
    with pytest.raises(InsertlmError, match="runs/storys: no model there; expected a run folder"):
        insertlm.load("runs/storys")
    assert hub.asked == []


def test_a_folder_here_comes_first(hub: Hub, stored: str, exported: Path) -> None:
    Path("you").mkdir()
    Path("you/stories").symlink_to(exported)
    assert insertlm.load(stored, "cpu").folder == Path(stored)
    assert hub.asked == []


def test_what_the_hub_does_not_give_is_named(
    hub: Hub, stored: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("infill", "a ___", "--model")
    start = "insertlm: you/no-such: no folder here, and the Hub gives none: "
    assert complaint(capsys, *command, "you/no-such") == (
        f"{start}it wants a token (401), from hf auth login or in HF_TOKEN, or has no such repository\n"
    )
    hub.repos["you/other"] = [{"config.json": b"{}"}]
    assert "you/other: the Hub has no recipe.yaml there; expected" in complaint(capsys, *command, "you/other")
    hub.down = True
    assert complaint(capsys, *command, "you/no-such") == f"{start}it answers 503: down\n"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert complaint(capsys, *command, "you/no-such") == f"{start}it cannot be reached (ConnectError)\n"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert complaint(capsys, *command, "you/no-such") == f"{start}HF_HUB_OFFLINE is set\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "/home/me/.cache/blob"), "No space left on device"),
        (RuntimeError("of the storage\n  within"), "of the storage within"),
        (ConnectionResetError(104, "reset"), "it cannot be reached (ConnectionResetError)"),
        (KeyError(), "KeyError"),
    ],
)
def test_other_failures_are_named_too(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InsertlmError) as caught:
        insertlm.load("you/stories")
    assert str(caught.value) == f"you/stories: no folder here, and the Hub gives none: {said}"


# --- Pushing


@pytest.mark.parametrize("private", [False, True])
def test_a_model_is_pushed_as_one_commit(
    hub: Hub, text_run: Path, capsys: pytest.CaptureFixture[str], private: bool
) -> None:
    command = ["export", str(text_run), "--push", "me/stories", *(["--private"] if private else [])]
    assert main(command) == 0
    assert capsys.readouterr().out == f"pushed to {hub.address}/me/stories\n"
    [files] = hub.repos["me/stories"]
    assert set(files) == set(FILES)
    assert b'AutoModel.from_pretrained("me/stories", trust_remote_code=True)' in files["README.md"]
    assert (hub.private == {"me/stories"}) == private
    weights = insertlm.load("me/stories", "cpu").family.state_dict()
    assert all(weights[name].equal(value) for name, value in insertlm.load(text_run).family.state_dict().items())
    assert main(command[:4]) == 0  # again, into what is there
    assert len(hub.repos["me/stories"]) == 2
    assert (hub.private == {"me/stories"}) == private


def test_a_folder_is_written_too_if_named(hub: Hub, text_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(text_run), "out", "--push", "me/stories"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"pushed to {hub.address}/me/stories"
    assert hub.repos["me/stories"][0] == {path.name: path.read_bytes() for path in Path("out").iterdir()}


def test_what_the_hub_refuses_is_named(
    hub: Hub, text_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("export", str(text_run), "--push")
    assert "expected OWNER/NAME, such as me/stories" in complaint(capsys, *command, "stories")
    assert complaint(capsys, *command, "you/stories") == (
        "insertlm: cannot push to you/stories: it does not let you (403); expected a token that may\n"
    )
    monkeypatch.delenv("HF_TOKEN")
    assert complaint(capsys, *command, "me/stories").startswith(
        "insertlm: cannot push to me/stories: it wants a token (401), from hf auth login or in HF_TOKEN"
    )
    hub.down = True
    assert complaint(capsys, *command, "me/stories").endswith(": it answers 503: down\n")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert complaint(capsys, *command, "me/stories").endswith(": it cannot be reached (ConnectError)\n")
    assert hub.repos == {}


def test_without_the_library_it_says_what_to_install(
    text_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    found = complaint(capsys, "export", str(text_run), "--push", "me/stories")
    assert found.endswith("huggingface_hub is not installed; pip install 'insertlm[hub]'\n")


def test_the_commands_work_as_a_user_runs_them(text_run: Path, tmp_path: Path) -> None:
    """In processes of their own, which know of the stand-in by their environment alone."""
    with stand_in() as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(Path(insertlm.__file__).parents[1]),
        }
        for line in (
            ["export", str(text_run), "--push", "me/stories", "--private"],
            ["infill", "The ___ sat.", "--model", "me/stories"],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "insertlm", *line],
                check=False,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert done.returncode == 0, done.stderr
    [expected] = insertlm.load(text_run, "cpu").infill("The ___ sat.")
    assert done.stdout == f"{expected.text}\n"
