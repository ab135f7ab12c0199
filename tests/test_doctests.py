"""The examples in docstrings run."""

from __future__ import annotations

import doctest

import insertlm
from insertlm import model as api


def test_the_examples_of_the_api_are_true() -> None:
    names = {"insertlm": insertlm}
    found = doctest.DocTestFinder(recurse=True).find(api.Model, "Model", globs=names)
    runner, examples = doctest.DocTestRunner(), 0
    for each in sorted(found, key=lambda each: each.lineno or 0):
        each.globs = names  # the first one loads the model, the others use it
        examples += len(each.examples)
        runner.run(each, clear_globs=False)
    assert runner.summarize().failed == 0
    assert examples >= 10
