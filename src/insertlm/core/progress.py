"""A progress bar on standard error for work that takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number that is done. The bar disappears at the end, and is not shown at all if
    standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)
