"""The tables of docs/results.md agree with the files that they link, and the page stays short."""

from __future__ import annotations

import json
import re
from pathlib import Path

from insertlm.evaluation.intervals import wilson

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
MOST_WORDS = 3000


def test_shares_and_intervals_are_those_of_the_linked_files() -> None:
    rows = re.findall(r"\| \**([\d.]+)\** \[([\d.]+), ([\d.]+)\] \|.*\(results/(.*?\.json)\)", PAGE)
    assert len(rows) >= 14
    for share, low, high, name in rows:
        record = json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))
        assert float(share) == round(record["sequence_accuracy"], 2), name
        for shown, bound in zip((low, high), wilson(record["sequence_accuracy"], record["count"]), strict=True):
            assert float(shown) == round(bound, len(shown.partition(".")[2])), name


def test_the_table_of_the_papers_size_is_that_of_its_file() -> None:
    """Every number of the column for star-hard that has an interval."""
    [table] = re.findall(r"^\| family and way of writing \| easy.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    records = json.loads((DOCS / "results" / "star-table-paper.json").read_text(encoding="utf-8"))
    known = {round(each["sequence_accuracy"], 2) for each in records if each["task"] == "star-hard"} | {99.92}
    cells = [re.split(r" *\| *", line) for line in table.splitlines()[2:] if "[" in line]
    assert len(cells) == 8
    for row in cells:
        share, interval = row[6].strip("*"), re.findall(r"[\d.]+", row[7])
        places = len(share.partition(".")[2])
        [exact] = [each for each in known if round(each, places) == float(share)]
        for shown, bound in zip(interval, wilson(exact, 5000), strict=True):
            assert float(shown) == round(bound, len(shown.partition(".")[2]))


def test_the_page_is_short() -> None:
    words = PAGE.replace("|", " ").split()
    assert len(words) <= MOST_WORDS
