"""The bodies of requests and answers. FastAPI checks requests with them and shows all of them in /docs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool
from pydantic_core import PydanticCustomError

from insertlm.inference.trajectory import Limit

__all__ = [
    "Choice",
    "Completion",
    "CompletionBody",
    "ErrorBody",
    "EventShape",
    "FilledText",
    "Graph",
    "InfillAnswer",
    "InfillBody",
    "LlamaAnswer",
    "LlamaBody",
    "Logprobs",
    "ModelList",
    "ModelShape",
    "PieceShape",
    "Solution",
    "SolveBody",
    "Usage",
]

_MOST = 1_000_000  # no sensible number is larger; the server's own limits, which are lower, are checked later


def _unicode(text: str) -> str:
    """JSON can hold half of a surrogate pair, which cannot be encoded as UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("expected Unicode text")
    return text


def _number(value: Any) -> Any:
    # pydantic takes true for 1 and "7" for 7. Its strict numbers would refuse 7.0, which some clients write for 7.
    if isinstance(value, bool | str):
        raise PydanticCustomError("number_type", "Input should be a number, not {given}", {"given": _JSON[type(value)]})
    return value


_JSON = {bool: "true or false", str: "a string"}
_NUMBER = BeforeValidator(_number)  # the last annotation, so that it runs first
_Int = Annotated[int, _NUMBER]

Text = Annotated[str, AfterValidator(_unicode)]
# As in the Python API: the i-th sample uses seed + i, which must stay a signed 64-bit number.
Seed = Annotated[int, Field(ge=0, lt=1 << 62), _NUMBER]
Length = Annotated[int, Field(ge=0, le=_MOST), _NUMBER]
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False), _NUMBER]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), _NUMBER]
Threshold = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER]
Word = Annotated[str, Field(max_length=200)]
# Lists fail at their first mistake: to report every mistake of a long list would block the event loop.
Texts = Annotated[list[Text], Field(fail_fast=True)]
Stops = Annotated[list[Text], Field(max_length=16, fail_fast=True)]
Words = Annotated[list[Word], Field(default_factory=list, fail_fast=True)]
Ranges = Annotated[list[tuple[_Int, _Int]], Field(fail_fast=True)]
Choices = Annotated[dict[Text, Annotated[list[Text], Field(min_length=1, fail_fast=True)]], Field(default_factory=dict)]
Lengths = Length | Annotated[list[Length | None], Field(fail_fast=True)] | None


class _StrictBody(BaseModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class _LenientBody(BaseModel):
    """Unknown fields are ignored, because clients of other servers send many that mean nothing here."""

    model_config = ConfigDict(extra="ignore")


def _example(**fields: Any) -> ConfigDict:
    """The example that /docs fills in."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


# --- Requests


class InfillBody(_StrictBody):
    """Null: the value of the model's recipe."""

    model_config = _example(text="Lily found ___. She ___ all day.", max_length=8)

    model: Text | None = Field(None, description="null: the first model of text")
    text: Text = Field(
        description="text with ___ for every blank, or {name}, {name:3-8 words}, {name:about 5 words}, "
        "{name:up to 9 tokens}, {name|one|two} or {name:/regular expression/}"
    )
    blanks: Ranges | None = Field(None, description="ranges of characters to fill in instead of ___")
    anywhere: StrictBool = Field(False, description="also insert outside the blanks")
    min_length: Lengths = Field(
        None,
        description="fewest tokens of every blank, or a list with one number for each; null: one, 0: it may stay empty",
    )
    max_length: Lengths = Field(None, description="most tokens of every blank, or a list with one number for each")
    words: Lengths = Field(
        None,
        description="about how many words belong into every blank, or a list with one number for each; for models that "
        "take such hints (`takes_hints` in /v1/models)",
    )
    choices: Choices = Field(description="by name, what may be written into a blank {name}; one of them is")
    banned: Words = Field(description="words that must not be written")
    required: Words = Field(description="words that must be written")
    samples: Annotated[int, Field(ge=1, le=_MOST), _NUMBER] = Field(
        1, description="number of texts; text i has the seed + i"
    )
    seed: Seed = 0
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Length | None = None
    stop_threshold: Threshold | None = None
    best_of: Annotated[int, Field(ge=1, le=_MOST), _NUMBER] | None = Field(
        None, description="so many drafts of each text are written side by side, and the likeliest as a whole is kept"
    )
    order: Text | None = Field(
        None, description="which place is written next: auto, or one of the model's `orders` in /v1/models"
    )
    max_tokens: Annotated[int, Field(ge=1, le=_MOST), _NUMBER] | None = None
    stream: StrictBool = False


class SolveBody(_StrictBody):
    model_config = _example(
        prompt="52>35 53>51 35>50 42>3 31>36 4>31 40>22 33>39 37>46 52>4 46>26 28>32 8>28 1>9 36>21 39>7 51>33 21>19 "
        "6>11 13>52 52>42 50>40 3>8 52>53 22>6 26>1 52>37 : 52 32"
    )

    model: Text | None = None
    prompt: Text = Field(description="a star graph: edges, then source and goal")
    seed: Seed = 0
    stream: StrictBool = False


class StreamOptions(_LenientBody):
    include_usage: StrictBool = False


class CompletionBody(_LenientBody):
    """OpenAI's. Fields that are not listed here are ignored."""

    model_config = _example(prompt="Lily found ", suffix=" in the park.", max_tokens=20)

    model: Text | None = None
    prompt: Text | Texts = ""
    suffix: Text | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MOST), _NUMBER] | None = None
    min_tokens: Length | None = Field(None, description="vLLM's; null: one, 0: the text may be empty")
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Annotated[int, Field(ge=1, le=_MOST), _NUMBER] | None = None
    seed: Seed | None = None
    stop: Text | Stops | None = Field(None, description="the text ends before the first of these")
    echo: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    best_of: _Int | None = Field(None, description="values above 1 are not supported")
    logprobs: _Int | None = Field(
        None, description="0 or 1: the log-probability of every token that was written; there are none of other tokens"
    )
    logit_bias: dict[str, Any] | None = Field(None, description="not supported")


class LlamaBody(_LenientBody):
    """llama.cpp's. Fields that are not listed here are ignored."""

    model_config = _example(input_prefix="Lily found ", input_suffix=" in the park.", n_predict=20)

    model: Text | None = None
    input_prefix: Text = ""
    input_suffix: Text = ""
    prompt: Text = Field("", description="appended to input_prefix")
    n_predict: Annotated[int, Field(ge=-1, le=_MOST), _NUMBER] | None = Field(
        None, description="-1: no limit but the server's; 0: nothing is written"
    )
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Length | None = None
    seed: Annotated[int, Field(ge=-1, lt=1 << 62), _NUMBER] | None = Field(None, description="-1: a random one")
    stop: Stops | None = None
    stream: StrictBool = False


# --- Answers


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class EventShape(BaseModel):
    """One insertion: put a new cell with this text at index `at` of the current list of cells.

    sample: the number of the text, if several were asked for; each has a list of cells of its own
    """

    sample: int
    order: int
    step: int
    at: int
    token: int
    text: str
    probability: float
    stop_probability: float | None


class PieceShape(BaseModel):
    """order: the number of the event that wrote this piece; null for given text"""

    text: str
    order: int | None


class FilledText(BaseModel):
    text: str
    fills: list[str]
    named: dict[str, str] = Field(description="the fills of blanks that have a name")
    probabilities: dict[str, dict[str, float]] = Field(
        description="by name, the probability of each choice of a blank, the likeliest first; they add up to 1"
    )
    complete: bool
    limit: Limit | None = Field(description="what ended the text; null if the model did")
    note: str | None = Field(description="the same as a sentence, with what to do")
    pieces: list[PieceShape]
    events: list[EventShape] | None = None


class _Head(BaseModel):
    id: str
    created: int
    model: str


class InfillAnswer(FilledText, _Head):
    """Of several samples these are the fields of the first. The usage is that of all."""

    object: Literal["infill"] = "infill"
    samples: list[FilledText] | None = Field(description="all samples, if more than one was asked for")
    usage: Usage


class Solution(BaseModel):
    id: str
    object: Literal["solution"] = "solution"
    created: int
    model: str
    text: str
    nodes: list[int]
    complete: bool
    limit: Limit | None
    note: str | None
    pieces: list[PieceShape]
    events: list[EventShape] | None = None
    usage: Usage


class Graph(BaseModel):
    prompt: str
    edges: list[tuple[int, int]]
    source: int
    goal: int
    path: list[int]


class Logprobs(BaseModel):
    """OpenAI's. The tokens in reading order, and where they begin in the text; joined, they are what was written. Each
    log-probability is that of the insertion, when it happened, as `probability` of an event of /v1/infill."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float] = Field(default_factory=list)
    top_logprobs: None = None
    text_offset: list[int] = Field(default_factory=list)


class Choice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class LlamaAnswer(BaseModel):
    content: str = ""
    stop: bool = True
    model: str
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    truncated: bool = False
    stop_type: Literal["none", "eos", "limit", "word"]


class ModelShape(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "insertlm"
    task: Literal["text", "star"]
    about: str | None = Field(description="what it knows, if its folder says so")
    parameters: int
    takes_hints: bool = Field(description="whether it has learnt what `words` of /v1/infill means")
    bounds_tokens: bool = Field(description="whether `min_length` and `max_length` of /v1/infill bound its blanks")
    left_to_right: bool = Field(description="whether it writes every blank from left to right")
    orders: list[str] = Field(description="the values of `order` in /v1/infill that it knows beside auto")
    settings: dict[str, float | str] = Field(
        description="what a request may change about how it decodes, with the values of its recipe"
    )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelShape]


class ErrorShape(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorShape
