"""Models by their id on the Hub, and pushing them there. The Hub is a stand-in on this machine: nothing here has been
tried against the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import constants
from stand_in_hub import TOKEN, Hub, stand_in

import insertlm
from insertlm.cli.main import main
from insertlm.core.errors import InsertlmError
from insertlm.storage.hub import FILES, is_hub_id

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
    assert theirs.name == stored.partition("/")[2]  # and not as the Hub's cache calls the folder
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
