"""`lm_eval` knows our model where it was registered, and only there; nobody else notices.

An environment of its own sees the packages of this one, and the sources as an installed package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
from harness_tasks import save_run, save_tasks

import insertlm
from insertlm.core.errors import InsertlmError
from insertlm.evaluation import harness

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'insertlm[lm-eval]'")

from insertlm.evaluation.lm_eval_model import InsertlmLM

SOURCES = Path(insertlm.__file__).parents[1]
LM_EVAL = Path(sysconfig.get_paths()["scripts"]) / "lm_eval"
WITHOUT = {"PYTHONPATH", "PYTHONHOME"}
KNOWN = (
    "from lm_eval.api.registry import get_model; print(get_model('insertlm').__module__, get_model('dummy').__name__)"
)


class Environment:
    """A virtual environment. site: its site-packages"""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        self.site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").stdout.strip())

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if name not in WITHOUT}
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            check=False,
            cwd=self.folder,
            env={**variables, "HF_HOME": str(self.folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )

    def harness(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "insertlm.evaluation.harness", *arguments)


@pytest.fixture
def bare(tmp_path: Path) -> Environment:
    """With nothing but our package, as pip installs it."""
    environment = Environment(tmp_path / "env")
    (environment.site / "insertlm").symlink_to(SOURCES / "insertlm")
    return environment


@pytest.fixture
def environment(bare: Environment) -> Environment:
    """With all packages of this one. (Their own .pth files are not read.)"""
    paths = sysconfig.get_paths()
    (bare.site / "packages.pth").write_text(f"{paths['purelib']}\n{paths['platlib']}\n")
    return bare


def evaluation(folder: Path) -> list[str]:
    """What is behind `lm_eval`."""
    for name in ("model", "tasks"):
        (folder / name).mkdir()
    model, tasks = save_run(folder / "model"), save_tasks(folder / "tasks")
    line = f"--model insertlm --model_args pretrained={model} --tasks choices,writing --include_path {tasks}"
    return [*line.split(), "--device", "cpu", "--output_path", "out"]


def check_results(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stderr
    assert "|choices|" in done.stdout.replace(" ", "")
    [file] = (folder / "out").rglob("results_*.json")
    assert json.loads(file.read_text())["config"]["insertlm_likelihood"] == "lower bound"


# --- As users run it


def test_lm_eval_runs_the_model_once_it_is_registered(environment: Environment, tmp_path: Path) -> None:
    arguments = evaluation(tmp_path)
    done = environment.harness("register")
    [file] = environment.site.glob("insertlm*.pth")
    line = f"registered: lm_eval --model insertlm works in this environment ({file})\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "")
    check_results(environment.run(LM_EVAL, *arguments), environment.folder)
    done = environment.harness("unregister")
    assert (done.returncode, done.stdout) == (0, f"unregistered: {file} is gone\n")
    assert "no model for this name found" in environment.run("-c", KNOWN).stderr
    assert environment.harness("unregister").stdout == "nothing to do: it was not registered\n"


def test_registered_or_not_the_module_runs_it_too(environment: Environment, tmp_path: Path) -> None:
    environment.harness("register")
    check_results(environment.harness("run", *evaluation(tmp_path)), environment.folder)


def test_an_installed_package_and_one_under_development_are_found(environment: Environment) -> None:
    environment.harness("register")
    assert environment.run("-c", KNOWN).stdout == "insertlm.evaluation.lm_eval_model DummyLM\n"
    (environment.site / "insertlm").unlink()
    (environment.site / "__editable__.insertlm.pth").write_text(f"{SOURCES}\n")
    assert environment.run("-c", KNOWN).stdout == "insertlm.evaluation.lm_eval_model DummyLM\n"


# --- All others


def test_other_programs_import_nothing_for_it(environment: Environment) -> None:
    ask = ("-c", "import sys; print(*sorted(sys.modules))")
    before = environment.run(*ask).stdout
    environment.harness("register")
    assert environment.run(*ask).stdout == before


def test_its_line_takes_less_than_half_a_millisecond(environment: Environment) -> None:
    environment.harness("register")
    [file] = environment.site.glob("insertlm*.pth")
    about, line = file.read_text(encoding="ascii").splitlines()
    assert about.startswith("#") and line.startswith("import ")

    def seconds() -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "meta_path", [*sys.meta_path])
            started = time.perf_counter()
            exec(line)
            return time.perf_counter() - started

    assert min(seconds() for _ in range(30)) < 5e-4


def test_what_an_uninstalled_package_left_behind_is_silent(environment: Environment) -> None:
    environment.harness("register")
    (environment.site / "insertlm").unlink()
    done = environment.run("-c", "import lm_eval.models")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (environment.site / "packages.pth").unlink()  # lm_eval too
    done = environment.run("-c", "print('well')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


# --- Mistakes


def test_a_model_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: InsertlmLM("nowhere"))
    monkeypatch.setattr(sys, "argv", ["harness", "run"])
    assert harness.main() == 2
    assert capsys.readouterr().err.startswith("insertlm: nowhere: no model there")


def test_without_lm_eval_it_says_what_to_install(bare: Environment) -> None:
    for command in ("register", "run"):
        done = bare.harness(command)
        line = "insertlm: lm_eval: No module named 'lm_eval'; expected version 0.4.13 or one like it: "
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"{line}pip install 'insertlm[lm-eval]'\n"
    assert not [*bare.site.glob("*.pth")]


OLD = {"models/__init__.py": "", "api/registry.py": "MODEL_REGISTRY = {}"}
STRANGE = {"models/__init__.py": "", "api/registry.py": "model_registry = {}"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "lm_eval: No module named 'lm_eval.models'; expected version 0.4.13 or one like it"),
        (OLD, "lm_eval: cannot import name 'model_registry' from 'lm_eval.api.registry'"),
        (STRANGE, "lm_eval 9 cannot be told of models; expected version 0.4.13 or one like it"),
    ],
)
def test_other_versions_are_refused_before_anything_is_written(
    bare: Environment, files: dict[str, str], message: str
) -> None:
    for name, text in {"__init__.py": "__version__ = 9", **files}.items():
        (bare.site / "lm_eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (bare.site / "lm_eval" / name).write_text(text)
    done = bare.harness("register")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"insertlm: {message}")
    assert done.stderr.count("\n") == 1
    assert not [*bare.site.glob("*.pth")]


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_announce", lambda: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path / "gone")})
    with pytest.raises(
        InsertlmError, match=r"cannot write .*: No such file .*; python -m insertlm.evaluation.harness run … needs"
    ):
        harness.register()
