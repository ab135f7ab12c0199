"""Write docs/reference/ from the code: commands from argparse, keys of recipes from their typed sections.

    python docs/make_reference.py

tests/test_reference.py compares the pages with what this makes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

from insertlm.cli.arguments import parser
from insertlm.nn.spec import PRESETS
from insertlm.recipe import Recipe

PLACE = Path(__file__).parent / "reference"
MADE = "*Made from the code by `make docs`. Do not edit.*"

SECTIONS = {
    "task": "What is given and what must be written. `name` says which task it is.",
    "model": f"The network. `preset` fills in what is not given: {', '.join(f'`{name}`' for name in PRESETS)}.",
    "train": "The run: its length, its batches, and what is kept of it.",
    "family": "How the model learns and writes. `name` says which family it is.",
    "optim": "The optimiser and its learning rate.",
    "decode": "How the model writes. Every key is also `--decode.KEY VALUE` of commands and a keyword in Python.",
}


def pages() -> dict[str, str]:
    """Every page by its name."""
    return {"commands.md": commands(), "recipe.md": recipe()}


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |".replace("  ", " ") for row in rows]
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]


# --- Commands


def commands() -> str:
    lines = ["# Commands", "", MADE, ""]
    lines += ["`--help` behind a command prints the same. A mistake ends in one line and exit code 2.", ""]
    for name, command, summary in subcommands(parser()):
        lines += [f"## insertlm {name}", "", command.description or f"{summary[0].upper()}{summary[1:]}.", ""]
        if rows := [*arguments(command)]:
            lines += [*table(("argument", "meaning"), iter(rows)), ""]
        if command.epilog:
            lines += ["```text", *textwrap.wrap(command.epilog, 110), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def subcommands(
    command: argparse.ArgumentParser, before: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Every command that has none below it, with its summary."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, each in action.choices.items():
                below = [*subcommands(each, f"{before}{name} ")]
                yield from below or [(f"{before}{name}", each, summaries[name])]


def arguments(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    formatter = command._get_formatter()
    for action in command._actions:
        if not isinstance(action, argparse._HelpAction):
            value = action.metavar or action.dest.upper()
            name = " ".join([*action.option_strings, *([] if action.nargs == 0 else [str(value)])])
            optional = action.nargs in ("?", "*")
            needed = action.required and action.option_strings
            about = f"{formatter._expand_help(action)}{' (optional)' * optional}{' (required)' * bool(needed)}"
            yield f"`{name}`", about


# --- Recipes


def recipe() -> str:
    lines = ["# Keys of a recipe", "", MADE, ""]
    lines += [
        "A recipe is a YAML file with these sections. Any key can be given on the command line, too: "
        "`--train.steps 200`. A key without a default is required.",
        "",
    ]
    for field in msgspec.structs.fields(Recipe):
        lines += [f"## {field.name}", "", SECTIONS[field.name], ""]
        for kind in get_args(field.type) or (field.type,):
            if kind.__struct_config__.tag:
                about = (inspect.getdoc(kind) or "").splitlines()[0]
                lines += [f"### {field.name}: {kind.__struct_config__.tag}", "", about, ""]
            rows = [*keys(kind)]
            lines += [*table(("key", "type", "default", "meaning"), iter(rows)), ""] if rows else ["No other keys.", ""]
    return "\n".join(lines).rstrip() + "\n"


def keys(kind: Any) -> Iterator[tuple[str, str, str, str]]:
    comments = {name: text for base in reversed(kind.__mro__) for name, text in comments_of(base).items()}
    for field in msgspec.structs.fields(kind):
        default = "" if field.required else f"`{shown(field)}`"
        yield f"`{field.encode_name}`", type_in_words(types.type_info(field.type)), default, comments[field.name]


def shown(field: Any) -> str:
    """A default as a recipe would have it."""
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(default).decode().strip('"') or '""'


def comments_of(kind: type) -> dict[str, str]:
    """The comment behind each field in the source of a class."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    behind = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    fields = [node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)]  # type: ignore[attr-defined]
    return {
        node.target.id: " ".join(behind[line] for line in range(node.lineno, node.end_lineno + 1) if line in behind)  # type: ignore[union-attr, operator]
        for node in fields
    }


def type_in_words(kind: types.Type) -> str:
    match kind:
        case types.UnionType():
            return " or ".join(sorted((type_in_words(each) for each in kind.types), key=len, reverse=True))  # a set
        case types.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case types.IntType() | types.FloatType():
            return f"{'whole number' if isinstance(kind, types.IntType) else 'number'}{bounds(kind)}"
        case types.ListType() | types.VarTupleType():
            return f"list of {type_in_words(kind.item_type)}"
        case types.DictType():
            return f"mapping from {type_in_words(kind.key_type)} to {type_in_words(kind.value_type)}"
    return {types.BoolType: "true or false", types.StrType: "text", types.NoneType: "null"}[type(kind)]


def bounds(kind: types.IntType | types.FloatType) -> str:
    least, most = kind.ge if kind.ge is not None else kind.gt, kind.le if kind.le is not None else kind.lt
    if most is not None and most >= 2**31 - 1:  # what fits into a machine word is no news
        most = None
    limits = [(least, ">=" if kind.ge is not None else ">"), (most, "<=" if kind.le is not None else "<")]
    told = [f"{sign} {limit:g}" for limit, sign in limits if limit is not None]
    return f" {', '.join(told)}" if told else ""


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PLACE / name).write_text(text, encoding="utf-8")
        print(PLACE / name)
