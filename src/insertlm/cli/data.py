"""The commands `data`, `data tokenizer` and `data infilling`: examples of tasks, vocabularies, texts with blanks."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from insertlm.cli.common import write_json_lines
from insertlm.core.errors import InsertlmError
from insertlm.core.files import check_writable, write_atomically
from insertlm.data.textfiles import kind_of, read_records, read_texts
from insertlm.tasks.base import Example
from insertlm.tasks.infill_sets import Document, excerpts, make_set
from insertlm.tasks.registry import preset
from insertlm.text.detokenise import detokeniser
from insertlm.text.tokenizers import Tokenizer

__all__ = ["data", "data_infilling", "example_line"]


def data(args: Namespace) -> None:
    if args.name == "tokenizer":
        _make_tokenizer(args.files, args.size, args.out or Path("tokenizer.json"))
        return
    if args.files:
        raise InsertlmError(f"unknown argument {args.files[0]}; see insertlm data --help")
    task = preset(args.name)
    if args.out is not None:
        check_writable(args.out)
    examples = task.examples(args.split, args.count, args.seed)
    if args.out is None:
        print("\n\n".join(task.render(example) for example in examples))
        return
    write_atomically(args.out, "".join(example_line(task.tokenizer, example) for example in examples).encode())
    print(f"wrote {len(examples):,} examples to {args.out}")


def example_line(tokenizer: Tokenizer, example: Example) -> str:
    prefix, target = map(tokenizer.decode, example)
    return json.dumps({"prefix": prefix, "target": target}) + "\n"


def _make_tokenizer(files: Sequence[str], size: int, out: Path) -> None:
    from insertlm.data.sources import source_of, texts
    from insertlm.text.subwords import train_bpe

    if not files:
        raise InsertlmError("data tokenizer: expected one or more files of text")
    check_writable(out)
    found = texts(map(source_of, files))
    first = next(found, None)  # training on nothing would fail without naming the files
    if first is None:
        line = 'expected a text a line, in .jsonl as {"text": …}'
        raise InsertlmError(f"no usable document in {', '.join(files)}; {line}")
    tokenizer = train_bpe(chain([first], found), size)
    tokenizer.save(out)
    fewer = f", not {size:,}: the texts have no more pairs to merge; more text gives more"
    print(f"wrote {out}: {tokenizer.size:,} tokens{fewer if tokenizer.size < size else ''}")


def data_infilling(args: Namespace) -> None:
    check_writable(args.out)
    documents = _documents(args)
    if args.excerpts:
        documents = [
            excerpt
            for number, document in enumerate(documents)
            for excerpt in excerpts(document, args.excerpts, np.random.default_rng((args.seed, number, 1)))
        ]
    examples = make_set(documents, args.kind, args.count, args.seed)
    write_json_lines(args.out, [example._asdict() for example in examples])
    print(f"wrote {len(examples):,} texts with blanks to {args.out}")


def _documents(args: Namespace) -> list[Document]:
    texts = list(map(detokeniser(args.detokenise), read_texts(args.file, args.field)))
    if kind_of(args.file) == "txt":
        if args.only or args.without:
            raise InsertlmError(f"--only, --without: {args.file} has no fields; expected a .jsonl file")
        return list(map(Document, texts))
    found = []
    for number, (text, record) in enumerate(zip(texts, read_records(args.file), strict=True), start=1):
        if not _has(record, args.only, all) or (args.without and _has(record, args.without, any)):
            continue
        document = Document(text, _sentences(record) if args.detokenise == "none" else ())
        try:
            _ = document.sentences  # a list that does not fit is reported with its line
        except InsertlmError as error:
            raise InsertlmError(f"{args.file}, line {number}: {error}") from error
        found.append(document)
    if not found:
        raise InsertlmError(f"{args.file}: --only and --without leave none of {len(texts):,} texts")
    return found


def _has(record: Mapping[str, Any], wanted: Sequence[tuple[str, str]], every: Callable[[Iterable[bool]], bool]) -> bool:
    return every(fnmatchcase(str(record.get(name, "")), pattern) for name, pattern in wanted)


def _sentences(record: Mapping[str, Any]) -> tuple[str, ...]:
    listed = record.get("sentences")
    if not isinstance(listed, list) or not all(isinstance(sentence, str) for sentence in listed):
        return ()
    return tuple(listed)
