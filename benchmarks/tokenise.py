"""How many megabytes of text are tokenised in a second of one core's time?

python benchmarks/tokenise.py FILE --tokenizer tokenizer.json
python benchmarks/tokenise.py FILE --size 8192       # trains a tokenizer on the file first

Reading and unpacking the file is not timed. Encoding is timed as in the processes that build a corpus store, with the
array of ids and the split of every document, in processor time, so that other load does not matter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import islice

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core

import numpy as np
import torch
from common import report

from insertlm.data.sources import documents, source_of, texts
from insertlm.data.tokenising import Encoder, Options
from insertlm.text.subwords import SubwordTokenizer, load_tokenizer, train_bpe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help=".txt or .jsonl, also with .gz, .xz or .zst")
    parser.add_argument("--tokenizer", help="tokenizer.json, vocab.txt or a hub name")
    parser.add_argument("--size", type=int, default=8192, help="size of the tokenizer to train, without --tokenizer")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    source = source_of(arguments.file)
    tokenizer = (
        load_tokenizer(arguments.tokenizer) if arguments.tokenizer else train_bpe(texts([source]), arguments.size)
    )
    chosen = list(islice(documents(source), arguments.documents))
    size = sum(len(document.data) for document in chosen)
    speeds, tokens = [], 0
    for _ in range(arguments.repetitions):
        encode = Encoder(SubwordTokenizer.from_json(tokenizer.json), Options(block=1 << 20))  # with an empty cache
        started = time.process_time()
        tokens = int(np.frombuffer(encode(chosen, source.kind).lengths, np.int64).sum())
        speeds.append(size / 1e6 / (time.process_time() - started))
    report(
        "tokenising speed, one core",
        torch.device("cpu"),
        vocabulary=tokenizer.size,
        megabytes=round(size / 1e6, 1),
        tokens=tokens,
        megabytes_per_second=round(statistics.median(speeds), 2),
        fastest=round(max(speeds), 2),
        slowest=round(min(speeds), 2),
    )


if __name__ == "__main__":
    main()
