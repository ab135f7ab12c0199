"""Checkpoints that are complete or absent, and that are checked when they are read.

    RUN/checkpoints/step-00000200/{weights,ema,optimizer}.safetensors, manifest.json
    RUN/checkpoints/step-00000200/weights-00000-of-00002.safetensors, …   where two processes wrote it

Design:
- No pickle: a checkpoint from elsewhere cannot run code.
- A checkpoint is written under a dot name and renamed into place when the disk has all of it, and it is renamed to a
  dot name before it is deleted. So a `step-` folder is whole at any moment. What a killed run leaves behind has a dot
  name and is removed at the next save.
- The manifest has the size and the SHA-256 of every file. A disk that loses bytes, or a copy that stopped halfway, is
  an error at loading, not a model that is slightly wrong.
- Several processes each write their own files, with whole tensors or a range of their rows; one process writes the
  manifest, last. Nothing is written twice, and readers need not know how many processes there were: a tensor that is in
  several files is cut along its first dimension, in the order of the files. torch.distributed.checkpoint can do this
  too, but its format is partly pickle, has no checksums, is read by nothing else, and is visible before it is complete.
- Only one run writes into a folder. Two would remove each other's temporary folders.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason, sync, write_durably

__all__ = [
    "Checkpoint",
    "File",
    "Files",
    "Parts",
    "Shard",
    "best",
    "commit",
    "latest",
    "load",
    "load_part",
    "save",
    "score_of",
    "seconds_of",
    "select",
    "step_of",
    "sweep",
    "write",
]

_FORMAT = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
_IO_ERROR = re.compile(r"I/O error: (.*?) \(os error \d+\)")


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` maps each part ("weights", "ema", "optimizer") to its named tensors, on the CPU."""

    step: int
    tensors: dict[str, dict[str, Tensor]]


class File(msgspec.Struct, frozen=True):
    size: int
    sha256: str


Files = dict[str, File]


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """score: of the validation at this step, higher is better; None if there was none   seconds: of training so far"""

    format: int
    step: int
    files: Files
    score: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Shard:
    """One of the processes that write a checkpoint together."""

    rank: int = 0
    world: int = 1

    def file_name(self, part: str) -> str:
        return f"{part}.safetensors" if self.world == 1 else f"{part}-{self.rank:05d}-of-{self.world:05d}.safetensors"


def save(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], keep: int) -> Path:
    """Write the checkpoint of `step` into `folder`, then keep only the last `keep` checkpoints up to this one."""
    sweep(folder)
    return commit(folder, step, write(folder, step, tensors), keep)


def sweep(folder: Path) -> None:
    """Remove what a killed run has left behind. Nobody may be writing."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def write(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], shard: Shard | None = None) -> Files:
    """The first half of saving, which every process does: files that nobody sees yet."""
    # A checkpoint of this step that verifies stays. A run has one state per step, and replacing a folder takes two
    # renames, between which a kill would leave none. A damaged one is replaced.
    place = folder / _folder_name(step)
    staging = _staging(place)
    with _writing(place):
        if _verifies(place):
            return {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
            staging.mkdir(exist_ok=True)
            return {
                (name := (shard or Shard()).file_name(part)): _write_part(staging / name, named)
                for part, named in tensors.items()
            }
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def commit(
    folder: Path,
    step: int,
    files: Files,
    keep: int,
    score: float | None = None,
    *,
    keep_best: bool = False,
    seconds: float = 0.0,
) -> Path:
    """The second half, which one process does: make the checkpoint visible, then remove those that are not kept.

    files: of all processes; empty if the checkpoint exists already   seconds: of training so far
    """
    if keep < 1:
        raise InsertlmError(f"cannot keep {keep} checkpoints in {folder}; expected at least 1")
    place = folder / _folder_name(step)
    if files:
        with _writing(place):
            _publish(place, _Manifest(_FORMAT, step, files, score, seconds))
    _prune(folder, step, keep, best(folder) if keep_best else None)
    return place


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    try:
        return max(_complete(folder), key=step_of, default=None)
    except OSError as error:
        raise InsertlmError(f"cannot list the checkpoints in {folder}: {reason(error)}") from error


def best(folder: Path) -> Path | None:
    """The checkpoint with the highest score, the latest of several, or None if none has a score."""
    try:
        scores = {path: _legible_score(path) for path in _complete(folder)}
    except OSError as error:
        raise InsertlmError(f"cannot list the checkpoints in {folder}: {reason(error)}") from error
    rated = {path: score for path, score in scores.items() if score is not None}
    return max(rated, key=lambda path: (rated[path], step_of(path)), default=None)


def select(folder: Path, which: str | int) -> Path:
    """The checkpoint that is meant: `last`, `best`, or the number of its step."""
    if which == "last":
        found, missing = latest(folder), f"no checkpoint yet; expected {folder}/step-…"
    elif which == "best":
        found, missing = best(folder), "no checkpoint was validated; expected train.validate_every and train.keep_best"
    elif str(which).isdecimal():
        there = sorted(map(step_of, _complete(folder)))
        found = folder / _folder_name(int(which)) if int(which) in there else None
        missing = f"no checkpoint of step {which}; expected one of {', '.join(map(str, there)) or 'those of a run'}"
    else:
        raise InsertlmError(f"checkpoint {which}: expected last, best or the number of a step")
    if found is None:
        raise InsertlmError(f"{folder.parent}: {missing}")
    return found


def score_of(path: Path) -> float | None:
    return _read_manifest(path).score


def seconds_of(path: Path) -> float:
    return _read_manifest(path).seconds


def _legible_score(path: Path) -> float | None:
    """None if the manifest is damaged."""
    # A run goes on from the newest checkpoint, so damage to older ones is no reason to stop it.
    try:
        return score_of(path)
    except InsertlmError:
        return None


def load(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises if any file is not, byte for byte, what was saved."""
    manifest = _read_manifest(path)
    return Checkpoint(manifest.step, {part: _load_files(path, manifest, part) for part in _parts(manifest)})


class Parts(Mapping[str, dict[str, Tensor]]):
    """The parts of a checkpoint, each read when it is asked for, so that they need not fit into memory together."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getitem__(self, part: str) -> dict[str, Tensor]:
        return load_part(self._path, part)

    def __iter__(self) -> Iterator[str]:
        return iter(_parts(_read_manifest(self._path)))

    def __len__(self) -> int:
        return len(list(iter(self)))


def load_part(path: Path, part: str) -> dict[str, Tensor]:
    """Read and verify one part. Inference needs the averaged weights, not the optimiser's state of twice their size."""
    manifest = _read_manifest(path)
    if part not in (parts := _parts(manifest)):
        raise InsertlmError(f"{path} has no part {part!r}; expected one of: {', '.join(parts)}")
    return _load_files(path, manifest, part)


def _part(file: str) -> str:
    stem = Path(file).stem
    found = _SHARD.fullmatch(stem)
    return found[1] if found else stem


def _parts(manifest: _Manifest) -> list[str]:
    return list(dict.fromkeys(map(_part, manifest.files)))


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _complete(folder: Path) -> list[Path]:
    """All checkpoints. The manifest is written last, so a folder that has one is complete."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / _MANIFEST).is_file()]


# Writing


def _staging(place: Path) -> Path:
    return place.with_name(f".{place.name}.writing")


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        left = _what_is_left(place.parent)
        raise InsertlmError(f"cannot write checkpoint {place}: {_reason(error)}; {left}") from error


def _publish(place: Path, manifest: _Manifest) -> None:
    staging = _staging(place)
    try:
        write_durably(staging / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        sync(staging)
        if place.exists():  # it did not verify
            _remove(place)
        staging.rename(place)
        sync(place.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # after success this name no longer exists


def _write_part(path: Path, named: Mapping[str, Tensor]) -> File:
    # One file for each part: whoever only needs the averaged weights need not read the rest.
    save_file(_storable(named), path)
    # safetensors makes files that only their owner can read; let them be as readable as the folder they are in.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)
    return File(path.stat().st_size, _sha256(path))


def _storable(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: contiguous, and no two in the same memory."""
    # Only tensors that overlap another one are copied. The others are written from where they are, since a copy of
    # everything would double the memory that a save takes.
    packed = {name: tensor.detach().contiguous() for name, tensor in named.items()}
    end = 0
    for name in sorted(packed, key=lambda name: packed[name].data_ptr()):
        tensor = packed[name]
        if tensor.data_ptr() < end:
            packed[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return packed


def _prune(folder: Path, step: int, keep: int, best: Path | None) -> None:
    """Remove old checkpoints, but not the best one."""
    # Steps later than this one belong to a run that was set back to an earlier checkpoint. They are the user's.
    try:
        earlier = sorted((path for path in _complete(folder) if step_of(path) < step), key=step_of)
        for path in earlier[: max(0, len(earlier) - (keep - 1))]:
            if path != best:
                _remove(path)
    except OSError as error:
        raise InsertlmError(f"cannot remove old checkpoints in {folder}: {reason(error)}") from error


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # what cannot be deleted now is tried again at the next save


def _reason(error: OSError | SafetensorError) -> str:
    # safetensors raises no OSError, but an error of its own with the text of one.
    if isinstance(error, OSError):
        return reason(error)
    found = _IO_ERROR.search(str(error))
    return found.group(1) if found else _one_line(error)


def _what_is_left(folder: Path) -> str:
    """What to tell somebody whose disk is full."""
    # Only a checkpoint that verifies is named: the latest may be a damaged one that was about to be replaced.
    good: list[Path] = []
    with suppress(OSError):  # the folder cannot be read, which is what the caller is about to say
        good = [path for path in _complete(folder) if _verifies(path)]
    last = max(good, key=step_of, default=None)
    return f"the last good checkpoint is still there: {last}" if last else "there is no earlier good checkpoint"


# Reading


def _read_manifest(path: Path) -> _Manifest:
    if not path.is_dir():
        raise InsertlmError(f"{path}: no such checkpoint; expected a folder like RUN/checkpoints/step-00000200")
    place = path / _MANIFEST
    try:
        # The format comes before the rest, which may look different in another one.
        data = place.read_bytes()
        version = msgspec.json.decode(data, type=_Format).format
        if version != _FORMAT:
            raise InsertlmError(f"{place}: unknown checkpoint format {version}; expected format {_FORMAT}")
        return msgspec.json.decode(data, type=_Manifest)
    except FileNotFoundError as error:
        raise InsertlmError(f"{place}: missing; expected the manifest of a complete checkpoint") from error
    except OSError as error:
        raise InsertlmError(f"{place}: cannot be read: {reason(error)}; expected a checkpoint manifest") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InsertlmError(f"{place}: not a checkpoint manifest: {_one_line(error)}") from error


def _load_files(path: Path, manifest: _Manifest, part: str) -> dict[str, Tensor]:
    pieces: dict[str, list[Tensor]] = {}
    for name in sorted(file for file in manifest.files if _part(file) == part):
        for key, tensor in _load_verified(path / name, manifest.files[name]).items():
            pieces.setdefault(key, []).append(tensor)
    return {key: found[0] if len(found) == 1 else torch.cat(found) for key, found in pieces.items()}


def _load_verified(path: Path, expected: File) -> dict[str, Tensor]:
    try:
        _verify(path, expected)
        # load_file maps the file into memory. The copies do not depend on a file that a later save may delete.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except OSError as error:
        raise InsertlmError(f"{path}: cannot be read: {reason(error)}; expected {expected.size} bytes") from error
    except SafetensorError as error:
        raise InsertlmError(f"{path}: expected a safetensors file: {_one_line(error)}") from error


def _verify(path: Path, expected: File) -> None:
    if not path.is_file():
        raise InsertlmError(f"{path}: missing; expected a file of {expected.size} bytes")
    # The size first: it is known at once, and tells a copy that stopped halfway from bytes that changed.
    size = path.stat().st_size
    if size != expected.size:
        kind = "truncated" if size < expected.size else "too long"
        raise InsertlmError(f"{path}: {kind}: {size} bytes; expected {expected.size}")
    found = _sha256(path)
    if found != expected.sha256:
        raise InsertlmError(f"{path}: altered: its SHA-256 is {found}; expected {expected.sha256}")


def _verifies(path: Path) -> bool:
    try:
        for name, expected in _read_manifest(path).files.items():
            _verify(path / name, expected)
    except InsertlmError:
        return False
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
