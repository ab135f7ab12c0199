"""The commands that fill in blanks and make sets of them: `infill`, `data infilling`.

Modules that import torch are imported where they are needed.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from insertlm.blanks import decode_text, parse_blanks
from insertlm.evaluation.texts import read_texts
from insertlm.files import check_writable, write_atomically
from insertlm.tasks.infilling import make_set

if TYPE_CHECKING:
    from insertlm.infilling import Infilling

__all__ = ["data_infilling", "infill"]


def infill(args: Namespace) -> None:
    text = decode_text(sys.stdin.buffer.read()) if args.text == "-" else args.text
    parse_blanks(text)  # what is wrong with it is said before the model is loaded
    from insertlm.api import BUNDLED, load
    from insertlm.config import override_decode
    from insertlm.infilling import Request
    from insertlm.infilling import infill as fill_in

    model = load(args.model or BUNDLED, args.device)
    request = Request(text, None, args.anywhere, args.min, args.max, args.ban, args.require)
    settings = override_decode(model.recipe.decode, args.overrides)
    seeds = range(args.seed, args.seed + args.samples)
    written = fill_in(model.family, model.text_tokenizer, request, settings, seeds)
    _print(written, args)
    for number, infilling in enumerate(written, start=1):
        if not infilling.complete:
            print(f"insertlm: text {number}: a limit on steps or length ended it", file=sys.stderr)


def data_infilling(args: Namespace) -> None:
    check_writable(args.out)
    examples = make_set(read_texts(args.file, args.field), args.kind, args.count, args.seed)
    lines = [json.dumps(example._asdict(), ensure_ascii=False) for example in examples]
    write_atomically(args.out, "".join(f"{line}\n" for line in lines).encode())
    print(f"wrote {len(lines):,} texts with blanks to {args.out}")


def _print(written: Sequence[Infilling], args: Namespace) -> None:
    from insertlm.terminal import show_infilling, show_spans, standard_output

    console = standard_output()
    for number, infilling in enumerate(written):
        if args.json:
            _print_json(infilling)
        elif args.show:
            console.print(*[""] * bool(number), show_infilling(infilling), sep="\n")
        elif console.is_terminal:
            console.print(show_spans(infilling.spans), soft_wrap=True)
        else:
            print(infilling.text)  # as it is: rich would change tabs


def _print_json(infilling: Infilling) -> None:
    trajectory, decode = infilling.trajectory, infilling.tokenizer.decode
    record = {
        "text": infilling.text,
        "fills": infilling.fills,
        "complete": infilling.complete,
        "stop_probability": trajectory.stop_probability,
        "events": [{**event._asdict(), "token": decode([event.token])} for event in trajectory.events],
    }
    print(json.dumps(record))
