"""`lm_eval --model insertlm`: lm-evaluation-harness is told of the model here, evaluation/lm_eval_model.py.

    python -m insertlm.evaluation.harness register      # from now on `lm_eval` knows it, in this environment
    python -m insertlm.evaluation.harness unregister    # no longer
    python -m insertlm.evaluation.harness run …         # `lm_eval run …` with the model, this once; nothing is written

The harness has a fixed table of models and looks for no others, so it must be told while it starts. Python itself runs
the `import` lines of .pth files at every start: `register` writes one such file, with the source of `Announcer`.

Design choices:
- Whoever does not import lm_eval pays for one line of Python, half a millisecond: no module is imported, not even this
  one.
- The line does not lean on insertlm: left behind by an uninstalled one, it is silent.
- Neither torch nor lm_eval's own models are imported before somebody asks for ours: a name is registered, not a class.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
from pathlib import Path

from insertlm.core.errors import InsertlmError
from insertlm.core.files import write_atomically, writing

__all__ = ["Announcer", "main", "register", "run", "unregister"]

_FILE = "insertlm-lm-eval.pth"


class Announcer:
    """Asked for every module that is imported, finds none. When lm_eval asks for its models, it is told of ours."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "lm_eval.models":
            try:
                sys.meta_path.remove(Announcer)
                from lm_eval.api.registry import model_registry

                model_registry.register("insertlm", target="insertlm.evaluation.lm_eval_model:InsertlmLM")
            except Exception:  # an lm_eval of another shape goes on without ours
                pass


def register() -> None:
    """Make `lm_eval` of this environment know the model."""
    _announce()
    source = f"{inspect.getsource(Announcer)}sys.meta_path.insert(0, Announcer)\n"
    about = "# lm_eval --model insertlm. To remove it: python -m insertlm.evaluation.harness unregister"
    line = f'import sys; exec({source!a}, {{"sys": sys, "__name__": "insertlm.evaluation.harness"}})'
    try:
        write_atomically(_file(), f"{about}\n{line}\n".encode())
    except InsertlmError as error:
        raise InsertlmError(f"{error}; python -m insertlm.evaluation.harness run … needs no file") from error
    print(f"registered: lm_eval --model insertlm works in this environment ({_file()})")


def unregister() -> None:
    """Take it back."""
    there = _file().exists()
    with writing(_file()):
        _file().unlink(missing_ok=True)
    print(f"unregistered: {_file()} is gone" if there else "nothing to do: it was not registered")


def run() -> None:
    """`lm_eval`, which knows the model this once."""
    _announce()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


def _announce() -> None:
    """Tell lm_eval of the model in this process, and see that it listened."""
    sys.meta_path.insert(0, Announcer)
    expected = "expected version 0.4.13 or one like it: pip install 'insertlm[lm-eval]'"
    try:
        import lm_eval.models
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise InsertlmError(f"lm_eval: {error}; {expected}") from error
    if "insertlm" not in model_registry:
        raise InsertlmError(f"lm_eval {lm_eval.__version__} cannot be told of models; {expected}")


def _file() -> Path:
    return Path(sysconfig.get_paths()["purelib"]) / _FILE


def main() -> int:
    """The exit code."""
    try:
        match sys.argv[1:]:
            case ["register"]:
                register()
            case ["unregister"]:
                unregister()
            case _:
                run()
    except InsertlmError as error:
        print("insertlm:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
