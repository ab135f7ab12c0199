"""What a model's folder says about the model, for the page: `examples.json`, which any folder may have.

    {"about": "Short stories for children.", "examples": [{"name": "Two blanks", "request": {"text": "Once ___."}}]}

A request is the body of a request to /v1/infill. The first example may have been written beforehand, with its events:
the page plays it when it opens (docs/record_example.py).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.server.schemas import InfillAnswer, InfillBody

__all__ = ["FILE", "Example", "ModelExamples", "Written", "read_examples"]

FILE = "examples.json"


class Written(BaseModel):
    """An answer with what it started from: the texts of the cells that a stream tells in its first event."""

    cells: list[str]
    answer: InfillAnswer


class Example(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    request: InfillBody
    written: Written | None = None


class ModelExamples(BaseModel):
    model_config = ConfigDict(extra="forbid")

    about: str | None = Field(default=None, description="what the model knows")
    examples: list[Example] = Field(default_factory=list)


def read_examples(folder: Path) -> ModelExamples:
    """Nothing if the folder has no such file."""
    file = folder / FILE
    try:
        return ModelExamples.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return ModelExamples()
    except OSError as error:
        raise InsertlmError(f"{file}: cannot be read: {reason(error)}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise InsertlmError(f"{file}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from error
