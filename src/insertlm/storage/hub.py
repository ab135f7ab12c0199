"""Models on the Hugging Face Hub: fetched by their id, pushed as one commit. Every failure becomes one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from insertlm.core.errors import InsertlmError
from insertlm.core.version import VERSION

__all__ = ["FILES", "fetch", "has_file", "is_hub_id", "name_of", "push"]

FILES = (  # of an export
    "README.md",
    "SHA256SUMS",
    "config.json",
    "filling_insertlm.py",
    "model.safetensors",
    "modeling_insertlm.py",
    "recipe.yaml",
    "tokenizer.json",
    "tokenizer_config.json",
    "writing_insertlm.py",
)
_STATUS = {
    401: "it wants a token (401), from hf auth login or in HF_TOKEN, or has no such repository",
    403: "it does not let you (403); expected a token that may",
    404: "it has no such repository (404)",
}
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether it reads `owner/name` and cannot be a path, because there is no folder `owner` here."""
    return _ID.fullmatch(name) is not None and not Path(name).parent.exists()


def fetch(name: str) -> Path:
    """A folder with the files of an export, from the Hub or, without a connection, from the cache."""
    with _talking(f"{name}: no folder here, and the Hub gives none"):
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=list(FILES), library_name="insertlm"))
    if not (folder / "recipe.yaml").is_file():
        raise InsertlmError(f"{name}: the Hub has no recipe.yaml there; expected what insertlm export --push wrote")
    return folder


def has_file(name: str, file: str) -> bool:
    """Whether the repository of that name has this file, on the Hub or, without a connection, in the cache."""
    with _talking(f"{name}: no folder here, and the Hub gives none"):
        from huggingface_hub import snapshot_download

        return (Path(snapshot_download(name, allow_patterns=[file], library_name="insertlm")) / file).is_file()


def name_of(folder: Path) -> str:
    """The name of a model: that of its folder, or, in the cache of the Hub, that of its repository."""
    # The cache has models--OWNER--NAME/snapshots/COMMIT, whose last part tells a reader nothing.
    *_, repository, snapshots, last = ("", "", *folder.resolve().parts)
    return repository.split("--", 2)[-1] if snapshots == "snapshots" and repository.startswith("models--") else last


def push(folder: Path, name: str, private: bool) -> str:
    """Upload an export as one commit, into a new repository or an old one. Returns its address."""
    if not _ID.fullmatch(name):
        raise InsertlmError(f"--push {name}: expected OWNER/NAME, such as me/stories")
    with _talking(f"cannot push to {name}"):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi(library_name="insertlm")
        # Only a new repository is made public or private; an old one stays as it is.
        address = api.create_repo(name, private=private or None, exist_ok=True)
        files = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=folder / file) for file in FILES]
        api.create_commit(name, files, commit_message=f"Export of insertlm {VERSION}")
        return str(address)


@contextmanager
def _talking(failure: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise InsertlmError(f"{failure}: huggingface_hub is not installed; pip install 'insertlm[hub]'") from error
    except Exception as error:  # the library lets those of several HTTP packages through
        raise InsertlmError(f"{failure}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """In a few words."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        said = getattr(error, "server_message", None)
        return _STATUS.get(status, f"it answers {status}" + (f": {_line(said)}" if said else ""))
    if type(error).__name__ == "LocalEntryNotFoundError" and error.__cause__ is not None:
        return _reason(error.__cause__)
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, ConnectionError) or type(error).__module__.startswith("http"):
        return f"it cannot be reached ({type(error).__name__})"
    return _line(getattr(error, "strerror", None) or error) or type(error).__name__


def _line(text: object) -> str:
    return " ".join(str(text).split())
