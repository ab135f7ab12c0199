"""What a model's folder says about the model, for the page: `examples.json`, which any folder may have.

    {"about": "Short stories for children.", "examples": [{"name": "Two blanks", "request": {"text": "Once ___."}}]}

A request is the body of a request to /v1/infill. The first example may have been written beforehand, with its events:
the page plays it when it opens. `python docs/record_example.py FOLDER` writes it into the file.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insertlm.core.errors import InsertlmError
from insertlm.core.files import reason
from insertlm.server.schemas import EventShape, InfillBody, PieceShape

__all__ = ["FILE", "Example", "ModelExamples", "Written", "WrittenText", "read_examples"]

FILE = "examples.json"


class WrittenText(BaseModel):
    """What the page shows of a text in an answer. Nothing else is kept, so a file stays readable when answers get new
    fields."""

    text: str
    note: str | None = None
    probabilities: dict[str, dict[str, float]] = Field(default_factory=dict)
    pieces: list[PieceShape]
    events: list[EventShape]


class Written(BaseModel):
    """The texts of an answer, and the cells they started from, which a stream tells in its first event."""

    cells: list[str]
    texts: list[WrittenText] = Field(min_length=1)


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
