"""Insertion language models: sequences written by inserting one token at a time, anywhere.

    model = insertlm.load("english")
    [filled] = model.infill("Once upon a time, there was a ___. Tom was happy and went ___.")
    print(filled.text)

`import insertlm` is fast: torch is imported when `load` or `Model` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from insertlm.core.errors import InsertlmError

if TYPE_CHECKING:
    from insertlm.model import Model, load

    __version__: str

__all__ = ["InsertlmError", "Model", "__version__", "load"]

if not TYPE_CHECKING:  # a type checker that saw it would let any misspelt name pass

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from insertlm.core.version import VERSION

            return VERSION
        if name in __all__:
            from insertlm import model as api

            return getattr(api, name)
        raise AttributeError(f"module 'insertlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
