"""The commands `infill` and `infill set`: blanks of one text, and of many."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from insertlm.cli.common import standard_input, write_json_lines
from insertlm.core.errors import InsertlmError
from insertlm.core.files import check_writable
from insertlm.inference.trajectory import Limit, explain
from insertlm.infill.requests import Request
from insertlm.tasks.infill_sets import read_set
from insertlm.text.blanks import decode_text, missing_blank

if TYPE_CHECKING:
    from insertlm.infill.results import Infilling

__all__ = ["infill", "infill_set"]

_LIMITS: dict[Limit, str] = {
    "max_tokens": "--decode.max_tokens",
    "max_steps": "--decode.max_steps",
    "max_length": "the model (or --decode.max_length)",
    "blanks": "the most of a blank (--max, or what the text says of it)",
}


def infill(args: Namespace) -> None:
    text = decode_text(standard_input()) if args.text == "-" else args.text
    request = Request(text, None, args.anywhere, args.min, args.max, args.ban, args.require, words=args.words)
    # A mistake in the text is reported before the model is loaded.
    if len(request.pieces) == 1 and not args.anywhere:
        raise InsertlmError(f"{missing_blank(text)}{_file_hint(args.text)}")
    written = _fill_in([request] * args.samples, args)
    _print(written, args)
    # On standard error, so that the texts can be piped on.
    for number, infilling in enumerate(written, start=1):
        if (reason := explain(infilling.trajectory, _LIMITS)) is not None:
            print(f"insertlm: text {number}: {reason}", file=sys.stderr)


def infill_set(args: Namespace) -> None:
    check_writable(args.out)
    examples = read_set(args.set, args.count)
    requests = [
        Request(
            example.text,
            example.blanks,
            min_length=args.min,
            max_length=args.max,
            words=args.words,
            lengths_of=example.removed if args.true_lengths else None,
        )
        for example in examples
    ]
    written = _fill_in(requests, args)
    records = [
        {**example._asdict(), "output": infilling.text, "fills": infilling.fills, "complete": infilling.complete}
        for example, infilling in zip(examples, written, strict=True)
    ]
    write_json_lines(args.out, records)
    complete = sum(infilling.complete for infilling in written)
    print(f"wrote {len(written):,} texts to {args.out}, {complete:,} of them ended by the model itself")


def _file_hint(text: str) -> str:
    """For the name of a file in place of its text."""
    try:
        is_file = Path(text).is_file()
    except OSError:  # a text may be too long for a name
        is_file = False
    if not is_file and not re.fullmatch(r"\S+\.(txt|md|jsonl?)", text):
        return ""
    return f"; to fill in a file: insertlm infill - < {shlex.quote(text)}"


def _fill_in(requests: Sequence[Request], args: Namespace) -> list[Infilling]:
    from insertlm.core.progress import progress_bar
    from insertlm.model import ENGLISH, load

    model = load(ENGLISH if args.model is None else args.model, args.device)
    with progress_bar("infilling", len(requests)) as advance:
        return model.fill(requests, model.settings(args.overrides), args.seed, progress=advance)


def _print(written: Sequence[Infilling], args: Namespace) -> None:
    from insertlm.cli.terminal import show_infilling, show_spans, standard_output

    console = standard_output()
    for number, infilling in enumerate(written):
        if args.json:
            _print_json(infilling)
        elif args.show:
            console.print(*[""] * bool(number), show_infilling(infilling), sep="\n")
        elif console.is_terminal:
            console.print(show_spans(infilling.spans), soft_wrap=True)
        else:
            print(infilling.text)  # not by rich, which replaces tabs


def _print_json(infilling: Infilling) -> None:
    trajectory, decode = infilling.trajectory, infilling.tokenizer.decode
    record = {
        "text": infilling.text,
        "fills": infilling.fills,
        "named": infilling.named,
        "probabilities": infilling.probabilities,
        "complete": infilling.complete,
        "limit": trajectory.limit,
        "stop_probability": trajectory.stop_probability,
        "events": [{**event._asdict(), "token": decode([event.token])} for event in trajectory.events],
    }
    print(json.dumps(record))
