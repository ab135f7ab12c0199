"""The command `lm-eval`: lm-evaluation-harness, which knows `--model insertlm` here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from insertlm.core.errors import InsertlmError

__all__ = ["lm_eval"]


def lm_eval(arguments: Sequence[str]) -> None:
    """Run `lm_eval` with these arguments. The harness has a fixed table of models and finds no others by itself, so our
    model is imported before it starts, which adds it to the table."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import insertlm.evaluation.lm_eval_model  # noqa: F401  # registers the model
    except ImportError as error:
        expected = "expected version 0.4.13 or one like it: pip install 'insertlm[lm-eval]'"
        raise InsertlmError(f"lm_eval: {error}; {expected}") from error
    sys.argv = ["lm_eval", *arguments]  # the harness reads its arguments from here, and inserts `run` into them
    cli_evaluate()
