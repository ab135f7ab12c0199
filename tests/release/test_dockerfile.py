"""The Dockerfile, as far as it can be checked without an engine: what it copies, installs and runs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from insertlm.cli.arguments import parser

ROOT = Path(__file__).parents[2]
# A line for each instruction: continued lines are one, comments are none.
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def of(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def listed(text: str) -> list[str]:
    """The words of a command in brackets."""
    words: list[str] = json.loads(text[text.index("[") :])
    return words


def copied() -> list[str]:
    """What comes from the checkout."""
    return [name for rest in of("COPY") if not rest.startswith("--from") for name in rest.split()[:-1]]


def test_what_it_copies_is_there_and_the_build_sees_nothing_else() -> None:
    assert copied() and all((ROOT / name).exists() for name in copied())
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert rules[1] == "*"
    assert sorted(rule[1:] for rule in rules if rule.startswith("!")) == sorted(copied())


def test_it_copies_whatever_the_package_is_built_from() -> None:
    assert {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]} <= {*copied()}


def test_every_stage_has_one_supported_python() -> None:
    images = of("FROM")
    [version] = {re.fullmatch(r"python:(3\.\d+)-slim(?: AS \w+)?", image)[1] for image in images}  # type: ignore[index]
    least = PROJECT["requires-python"].removeprefix(">=")
    assert int(version.split(".")[1]) >= int(least.split(".")[1])


def test_torch_comes_first_from_an_index_of_choice_and_all_is_pinned() -> None:
    torch, package = [rest for rest in of("RUN") if "pip install" in rest]
    assert torch.endswith(" torch")
    assert of("ARG") == ["PIP_EXTRA_INDEX_URL="]  # which pip reads
    assert all("-c constraints.txt" in each for each in (torch, package))
    [extras] = re.findall(r"'\.\[(.*)\]'", package)
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    assert "serve" in extras.split(",")


def test_it_does_not_run_as_root_and_holds_no_key() -> None:
    names = [name for name, _ in STEPS]
    assert of("USER") == ["insertlm"]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert not any("INSERTLM_API_KEY" in rest for _, rest in STEPS)  # it comes by the environment of the container


def test_its_command_can_be_read_and_listens_where_it_says() -> None:
    command, *arguments = listed(of("ENTRYPOINT")[0])
    assert command in PROJECT["scripts"]
    for more in ([], ["stories-mini", "--max-tokens", "100"]):  # what may follow the name of the image
        read = parser().parse_args([*arguments, *more])
        assert (read.function, read.host, read.api_key) == ("serve", "0.0.0.0", None)
        assert [str(read.port)] == of("EXPOSE")


def test_its_health_check_tells_a_server_that_answers_from_one_that_does_not(tmp_path: Path) -> None:
    """The command itself, on a free port, with a key and a small model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    _, *check = [word.replace("8000", port) for word in listed(of("HEALTHCHECK")[0])]
    _, *arguments = [word.replace("8000", port) for word in listed(of("ENTRYPOINT")[0])]

    def healthy() -> bool:
        done = subprocess.run([sys.executable, *check], capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    assert not healthy()
    environment = {**os.environ, "INSERTLM_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "insertlm", *arguments, "star-hard-mini", "--device", "cpu"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 120
            while not healthy() and server.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
            assert healthy()
        finally:
            server.terminate()
