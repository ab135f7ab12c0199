"""`insertlm lm-eval` is `lm_eval` that knows our model, and a .pth file of an older version does no harm.

An environment of its own sees the packages of this one, and the sources as an installed package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from harness_tasks import save_run, save_tasks

import insertlm
from insertlm.cli.main import main

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'insertlm[lm-eval]'")

from insertlm.evaluation.lm_eval_model import InsertlmLM

SOURCES = Path(insertlm.__file__).parents[1]
LM_EVAL = Path(sysconfig.get_paths()["scripts"]) / "lm_eval"
WITHOUT = {"PYTHONPATH", "PYTHONHOME"}
ASK = "from lm_eval.api.registry import get_model; print(get_model('insertlm').__module__, get_model('dummy').__name__)"
# What `register` of older versions wrote into site-packages: it registers the model when lm_eval is imported.
OLD_HOOK = """
class Announcer:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "lm_eval.models":
            try:
                sys.meta_path.remove(Announcer)
                from lm_eval.api.registry import model_registry

                model_registry.register("insertlm", target="insertlm.evaluation.lm_eval_model:InsertlmLM")
            except Exception:
                pass

sys.meta_path.insert(0, Announcer)
"""
OLD_FILE = f'import sys; exec({OLD_HOOK!a}, {{"sys": sys, "__name__": "insertlm.harness"}})\n'


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

    def lm_eval(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "insertlm", "lm-eval", *arguments)


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
    assert json.loads(file.read_text())["config"]["insertlm_likelihood"] == "exact"


def test_it_runs_the_model_and_writes_nothing_into_the_environment(environment: Environment, tmp_path: Path) -> None:
    before = sorted(environment.site.iterdir())
    check_results(environment.lm_eval(*evaluation(tmp_path)), environment.folder)
    assert sorted(environment.site.iterdir()) == before


def test_arguments_go_to_lm_eval_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.append(sys.argv))
    monkeypatch.setattr(sys, "argv", ["insertlm"])
    assert main(["lm-eval", "ls", "--help", "--decode.seed", "--", "x"]) == 0
    assert seen == [["lm_eval", "ls", "--help", "--decode.seed", "--", "x"]]


def test_the_file_of_an_older_version_does_no_harm(environment: Environment, tmp_path: Path) -> None:
    (environment.site / "insertlm-lm-eval.pth").write_text(OLD_FILE, encoding="ascii")
    done = environment.run("-c", "import sys; print('torch' in sys.modules, 'lm_eval' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert environment.run("-c", ASK).stdout == "insertlm.evaluation.lm_eval_model DummyLM\n"
    check_results(environment.lm_eval(*evaluation(tmp_path)), environment.folder)
    (environment.site / "insertlm").unlink()
    done = environment.run("-c", "import lm_eval.models")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_import_in_python_is_enough(environment: Environment) -> None:
    done = environment.run("-c", f"import insertlm.evaluation.lm_eval_model; {ASK}")
    assert done.stdout == "insertlm.evaluation.lm_eval_model DummyLM\n"


# --- Mistakes


def test_a_model_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: InsertlmLM("nowhere"))
    monkeypatch.setattr(sys, "argv", ["insertlm"])
    assert main(["lm-eval", "run"]) == 2
    assert capsys.readouterr().err.startswith("insertlm: nowhere: no model there")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "lm_eval: No module named 'lm_eval'; expected version 0.4.13 or one like it"),
        (["__init__.py"], "lm_eval: No module named 'lm_eval.__main__'; expected version 0.4.13 or one like it"),
        (["__init__.py", "__main__.py"], "lm_eval: cannot import name 'cli_evaluate' from 'lm_eval.__main__'"),
    ],
)
def test_without_lm_eval_or_with_an_old_one_it_says_what_to_install(
    bare: Environment, files: list[str], message: str
) -> None:
    for name in files:
        (bare.site / "lm_eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (bare.site / "lm_eval" / name).touch()
    done = bare.lm_eval("--tasks", "choices")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"insertlm: {message}")
    assert done.stderr.endswith(": pip install 'insertlm[lm-eval]'\n") and done.stderr.count("\n") == 1
