"""The page on scaling shows what its script computes, and the benchmark of scaling runs."""

from __future__ import annotations

import json
import subprocess
import sys

import scaling
import scaling_plan


def test_the_table_on_the_page_is_the_scripts() -> None:
    page = scaling_plan.PAGE.read_text(encoding="utf-8")
    shown = page.partition(scaling_plan.MARKS[0])[2].partition(scaling_plan.MARKS[1])[0]
    assert shown == scaling_plan.table(), "run: python benchmarks/scaling_plan.py --write"


def test_more_gpus_are_slower_only_where_sending_takes_longest_and_need_less_memory() -> None:
    for run in scaling_plan.RUNS:
        for way in (scaling_plan.replicated, scaling_plan.sharded):
            step, sending = way(run, 64)
            assert step <= way(run, 8)[0] or sending > 0.5
            assert way(run, 8)[0] < way(run, 1)[0]
        assert scaling_plan.memory(run, 64) < scaling_plan.memory(run, 8)


def test_one_process_is_measured() -> None:
    """In a process of its own: it wraps torch's collectives."""
    line = ["--layers", "1", "--width", "64", "--batch-size", "2", "--steps", "4", "--way", "one"]
    done = subprocess.run([sys.executable, scaling.__file__, *line], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["milliseconds"] > 0
    assert found["communication_share"] == found["megabytes_sent"] == 0
