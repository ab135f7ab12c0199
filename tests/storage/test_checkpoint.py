"""Checkpoints survive kills, full disks and damaged files.

Run as a script (`python test_checkpoint.py kill|limit FOLDER`) this file is the process that the tests below start to
kill, or to run out of space.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.storage import checkpoints

PARTS = ("weights", "ema", "optimizer")


def state(step: int, size: int = 50_000) -> dict[str, dict[str, Tensor]]:
    """What the checkpoint of `step` must hold: every part different, all of it known from the step."""
    return {part: {"a": torch.full((size,), step + k / 4), "n": torch.tensor(step)} for k, part in enumerate(PARTS)}


def same(left: dict[str, dict[str, Tensor]], right: dict[str, dict[str, Tensor]]) -> bool:
    if {part: set(named) for part, named in left.items()} != {part: set(named) for part, named in right.items()}:
        return False
    return all(bits(left[part][name]) == bits(right[part][name]) for part in left for name in left[part])


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    """Comparable for every value, NaN and -0.0 included."""
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fails(call: Callable[[], object]) -> str:
    """The message of the error that `call` must raise: always one line."""
    with pytest.raises(InsertlmError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


# Saving and loading


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]),
    shape=st.lists(st.integers(0, 4), max_size=3),
    transposed=st.booleans(),
    seed=st.integers(0, 2**32),
)
@example(dtype=torch.bfloat16, shape=[2, 3], transposed=True, seed=0)
@settings(max_examples=40, deadline=None)
def test_round_trip_keeps_every_bit(dtype: torch.dtype, shape: list[int], transposed: bool, seed: int) -> None:
    values = torch.empty(shape, dtype=dtype)
    random_bytes = torch.randint(0, 256, (values.nbytes,), generator=torch.Generator().manual_seed(seed))
    values = random_bytes.to(torch.uint8).view(dtype).reshape(shape)
    if transposed:
        values = values.permute([*reversed(range(values.dim()))])
    tensors = {"weights": {"x": values, "y.z": torch.ones(2)}, "ema": {"x": values}}
    with tempfile.TemporaryDirectory() as folder:
        loaded = checkpoints.load(checkpoints.save(Path(folder), 7, tensors, keep=1))
    assert loaded.step == 7
    assert same(loaded.tensors, tensors)


def test_tied_and_overlapping_tensors_and_gradients(tmp_path: Path) -> None:
    base = torch.arange(12.0, requires_grad=True)
    named = {"whole": base, "tied": base, "part": base[3:7], "rows": base.reshape(3, 4)[:, 1:]}
    loaded = checkpoints.load(checkpoints.save(tmp_path, 1, {"weights": named}, keep=1))
    assert same(loaded.tensors, {"weights": {name: tensor.detach() for name, tensor in named.items()}})


def test_parts_of_one_buffer_are_not_copied() -> None:
    flat = torch.arange(12.0)
    views = {"a": flat[:5], "b": flat[5:]}
    stored = checkpoints._storable(views)
    assert all(stored[name].data_ptr() == views[name].data_ptr() for name in views)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 1, state(1), keep=1)
    loaded = checkpoints.load(path)
    file = path / "weights.safetensors"
    with file.open("r+b") as handle:  # in place: what a mapping of the file would show
        handle.write(bytes(file.stat().st_size))
    assert same(loaded.tensors, state(1))


def test_load_part_reads_and_verifies_that_part_only(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 3, state(3), keep=1)
    (path / "optimizer.safetensors").unlink()
    assert same({"ema": checkpoints.load_part(path, "ema")}, {"ema": state(3)["ema"]})
    assert "optimizer.safetensors" in fails(lambda: checkpoints.load_part(path, "optimizer"))
    message = fails(lambda: checkpoints.load_part(path, "momentum"))
    assert "momentum" in message
    assert all(part in message for part in PARTS)


def test_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        path = checkpoints.save(tmp_path / "checkpoints", 1, state(1), keep=1)
    finally:
        os.umask(old)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {
        **{f"{part}.safetensors": "0o644" for part in PARTS},
        "manifest.json": "0o644",
    }


# Which checkpoints there are


def test_keep_removes_the_oldest_by_number(tmp_path: Path) -> None:
    for step in (5, 99_999_999, 100_000_000):
        checkpoints.save(tmp_path, step, state(step, 3), keep=2)
    assert names(tmp_path) == ["step-100000000", "step-99999999"]
    assert checkpoints.latest(tmp_path) == tmp_path / "step-100000000"
    checkpoints.save(tmp_path, 100_000_001, state(1, 3), keep=2)
    assert names(tmp_path) == ["step-100000000", "step-100000001"]


def test_a_run_set_back_keeps_what_it_writes(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoints.save(tmp_path, step, state(step, 3), keep=3)
    checkpoints.save(tmp_path, 15, state(15, 3), keep=1)
    assert names(tmp_path) == ["step-00000015", "step-00000020", "step-00000030"]


def test_keep_must_be_positive(tmp_path: Path) -> None:
    assert "at least 1" in fails(lambda: checkpoints.save(tmp_path, 1, state(1, 3), keep=0))


def test_latest_ignores_what_is_not_complete(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path / "nowhere") is None
    assert checkpoints.latest(tmp_path) is None
    path = checkpoints.save(tmp_path, 3, state(3, 3), keep=1)
    shutil.copytree(path, tmp_path / ".step-00000009.writing")
    shutil.copytree(path, tmp_path / "step-00000008-copy")
    (tmp_path / "step-00000007").mkdir()
    assert checkpoints.latest(tmp_path) == path


def test_leftovers_of_killed_runs_go_at_the_next_save(tmp_path: Path) -> None:
    for name in (".step-00000001.writing", ".step-00000001.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(b"half")
    checkpoints.save(tmp_path, 1, state(1, 3), keep=1)
    assert names(tmp_path) == ["step-00000001"]


def test_a_good_checkpoint_of_the_same_step_stays_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 4, state(4, 3), keep=1)
    before = path.stat().st_ino
    assert checkpoints.save(tmp_path, 4, state(5, 3), keep=1) == path
    assert path.stat().st_ino == before
    assert same(checkpoints.load(path).tensors, state(4, 3))
    (path / "ema.safetensors").write_bytes(b"")
    checkpoints.save(tmp_path, 4, state(5, 3), keep=1)
    assert same(checkpoints.load(path).tensors, state(5, 3))
    assert names(tmp_path) == ["step-00000004"]


# Damage


def truncate(path: Path) -> None:
    os.truncate(path / "ema.safetensors", 100)


def flip_a_bit(path: Path) -> None:
    file = path / "ema.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def lengthen(path: Path) -> None:
    with (path / "ema.safetensors").open("ab") as file:
        file.write(b"x")


def remove_a_file(path: Path) -> None:
    (path / "ema.safetensors").unlink()


def swap_two_files(path: Path) -> None:
    shutil.copy(path / "weights.safetensors", path / "ema.safetensors")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (truncate, "truncated: 100 bytes; expected "),
        (lengthen, "too long"),
        (flip_a_bit, "altered: its SHA-256 is "),
        (swap_two_files, "altered: its SHA-256 is "),
        (remove_a_file, "missing; expected a file of "),
    ],
)
def test_damaged_file(tmp_path: Path, damage: Callable[[Path], None], expected: str) -> None:
    path = checkpoints.save(tmp_path, 1, state(1), keep=1)
    damage(path)
    for call in (lambda: checkpoints.load(path), lambda: checkpoints.load_part(path, "ema")):
        message = fails(call)
        assert str(path / "ema.safetensors") in message
        assert expected in message
    checkpoints.load_part(path, "weights")


def test_a_file_that_is_not_safetensors_though_the_manifest_agrees(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 1, state(1, 3), keep=1)
    (path / "ema.safetensors").write_bytes(b"garbage")
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"]["ema.safetensors"] = {"size": 7, "sha256": checkpoints._sha256(path / "ema.safetensors")}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "expected a safetensors file" in fails(lambda: checkpoints.load(path))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a checkpoint manifest"),
        (b"\xff\x00garbage\n\n", "not a checkpoint manifest"),
        (b"[1, 2]", "not a checkpoint manifest"),
        (b'{"format": 1, "step": "x", "files": {}}', "$.step"),
        (b'{"format": 1, "step": 1, "files": {"ema.safetensors": {"size": 3}}}', "sha256"),
        (b'{"format": 2, "other": 1}', "unknown checkpoint format 2; expected format 1"),
        (None, "missing; expected the manifest"),
    ],
)
def test_bad_manifest(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = checkpoints.save(tmp_path, 1, state(1, 3), keep=1)
    manifest = path / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    message = fails(lambda: checkpoints.load(path))
    assert str(manifest) in message
    assert expected in message


def test_every_torn_manifest_is_refused(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 1, state(1, 3), keep=1)
    whole = (path / "manifest.json").read_bytes()
    for length in range(len(whole.rstrip())):
        (path / "manifest.json").write_bytes(whole[:length])
        fails(lambda: checkpoints.load(path))


def test_missing_folder(tmp_path: Path) -> None:
    message = fails(lambda: checkpoints.load(tmp_path / "step-00000001"))
    assert str(tmp_path / "step-00000001") in message
    assert "expected a folder like" in message


# Kills


def test_sigkill_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """A process saves without pause and is killed 15 times; each time, the latest checkpoint is whole."""
    moments = random.Random(0)
    interrupted, step = 0, 0
    with start("kill", str(tmp_path)) as forks:
        assert forks.stdin and forks.stdout
        for _ in range(15):
            print("save", file=forks.stdin, flush=True)
            victim = int(forks.stdout.readline())
            time.sleep(moments.random() * 2 * seconds_until_saved(tmp_path, step + 1))
            os.kill(victim, signal.SIGKILL)
            assert int(forks.stdout.readline()) == -signal.SIGKILL
            interrupted += any(tmp_path.glob(".step-*"))
            for path in tmp_path.glob("step-*"):
                found = checkpoints.load(path)
                assert same(found.tensors, state(found.step))
            last = checkpoints.latest(tmp_path)
            found_step = checkpoints.load(last).step if last else 0
            assert found_step >= step  # none is ever lost
            step = found_step
        forks.stdin.close()
    assert interrupted >= 5, "too few kills fell into a save to test anything"


def seconds_until_saved(folder: Path, step: int) -> float:
    """How long a save takes at the moment: on a busy machine, a fixed time to the kill would often be too short."""
    start = time.monotonic()
    while not (folder / f"step-{step:08d}").exists() and time.monotonic() < start + 30:
        time.sleep(0.001)
    return time.monotonic() - start


def fork_savers(folder: Path) -> None:
    """For each line of input, fork a process that saves until it is killed. Forked, as starting torch takes seconds."""
    torch.set_num_threads(1)  # a fork has no thread pool
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            save_forever(folder)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def save_forever(folder: Path) -> None:
    signal.alarm(60)  # should nobody be left to kill it
    last = checkpoints.latest(folder)
    step = checkpoints.load(last).step if last else 0
    while True:
        step += 1
        checkpoints.save(folder, step, state(step), keep=2)


# Full disks


def assert_full_disk_was_survived(folder: Path, message: str, cause: str) -> None:
    good = folder / "step-00000001"
    assert "\n" not in message
    assert str(folder / "step-00000002") in message
    assert cause in message
    assert message.endswith(f"the last good checkpoint is still there: {good}")
    assert names(folder) == [good.name]
    assert same(checkpoints.load(good).tensors, state(1, 300))


def save_a_small_and_a_large_one(folder: Path) -> str:
    checkpoints.save(folder, 1, state(1, 300), keep=1)
    return fails(lambda: checkpoints.save(folder, 2, state(2, 1_000_000), keep=1))


def test_file_size_limit(tmp_path: Path) -> None:
    with start("limit", str(tmp_path / "checkpoints")) as limited:
        message, _ = limited.communicate(timeout=60)
    assert limited.returncode == 0
    assert_full_disk_was_survived(tmp_path / "checkpoints", message.rstrip("\n"), "File too large")


def save_under_a_limit(folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error instead of a signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    print(save_a_small_and_a_large_one(folder))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MB: room for the first of three large parts."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        pytest.skip("a real full disk needs the right to mount a tmpfs (root)")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_no_space_left(tiny_disk: Path) -> None:
    folder = tiny_disk / "checkpoints"
    message = save_a_small_and_a_large_one(folder)
    assert_full_disk_was_survived(folder, message, "No space left on device")


def test_no_space_left_for_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path, 1, state(1, 300), keep=1)

    def refuse(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoints, "write_durably", refuse)
    message = fails(lambda: checkpoints.save(tmp_path, 2, state(2, 300), keep=1))
    assert_full_disk_was_survived(tmp_path, message, "No space left on device")


def test_a_damaged_checkpoint_is_not_called_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.save(tmp_path, 1, state(1, 300), keep=1)
    truncate(path)

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoints, "write_durably", refuse)
    message = fails(lambda: checkpoints.save(tmp_path, 1, state(1, 300), keep=1))
    assert message.endswith("there is no earlier good checkpoint")


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = fails(lambda: checkpoints.save(tmp_path / "file" / "checkpoints", 1, state(1, 3), keep=1))
    assert str(tmp_path / "file" / "checkpoints" / "step-00000001") in message
    assert "Not a directory" in message


def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        checkpoints.save(tmp_path, 1, {"weights": {"a": torch.eye(2)}, "ema": {"a": torch.eye(2).to_sparse()}}, keep=1)
    assert names(tmp_path) == []


def test_the_manifest_says_what_the_files_are(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 6, state(6, 3), keep=1)
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["step"]) == (1, 6)
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        f"{part}.safetensors": (path / f"{part}.safetensors").stat().st_size for part in PARTS
    }


if __name__ == "__main__":
    {"kill": fork_savers, "limit": save_under_a_limit}[sys.argv[1]](Path(sys.argv[2]))
