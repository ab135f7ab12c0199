"""What decoding returns: the insertions in the order in which they happened. Streams, plots and tests read this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, get_args

__all__ = ["LIMITS", "Insertion", "Limit", "Trajectory", "explain"]

# What ends a text that its model would continue: the setting of that name, or that its blanks may get no more tokens.
# If several do, the last of them is named: users set it most often, and that blanks are full is no news to them.
Limit = Literal["blanks", "max_length", "max_steps", "max_tokens"]
LIMITS: tuple[Limit, ...] = get_args(Limit)

# The command line and HTTP have different names for the same limits, so the name is filled in.
_REMEDIES: dict[Limit, str] = {
    "max_tokens": "it reached {} after {tokens}; raise it for a longer text",
    # Who asks for more tokens gets enough steps for them, see Model.settings.
    "max_steps": "it reached {} after {tokens}; for a longer text raise it, or give {max_tokens}",
    "max_length": "it is as long as {} allows, after {tokens}; shorten what is given",
    "blanks": "it was ended by {} after {tokens}; raise it for longer fills",
}


class Insertion(NamedTuple):
    """One event. `rank` is the place of the token in the text as it was then, as in `list.insert(rank, token)`. Events
    of one step are in reading order. `stop_probability` is the one before this step, see Trajectory."""

    step: int
    rank: int
    token: int
    log_probability: float
    stop_probability: float | None


@dataclass(frozen=True)
class Trajectory:
    """How one text was written.

    `prefix` was given and is not part of the text. `start` is the text as given (empty unless infilling), into which
    every event inserts one token. `stop_probability` is how sure the model was that nothing is missing from the
    finished text (None: its family cannot tell). `limit` is what ended the text, None if the model did or if the
    text was `stopped` by whoever watched it.
    """

    prefix: list[int]
    start: list[int]
    events: list[Insertion]
    stop_probability: float | None
    limit: Limit | None = None
    stopped: bool = False

    @property
    def complete(self) -> bool:
        """Whether the model ended it."""
        return self.limit is None and not self.stopped

    @property
    def ids(self) -> list[int]:
        """The text as written, in reading order."""
        return self._replay([*self.start], [event.token for event in self.events])

    @property
    def order(self) -> list[int]:
        """For each token of `ids`, the number of the event that wrote it; -1 for given ones."""
        return self._replay([-1] * len(self.start), list(range(len(self.events))))

    @property
    def steps(self) -> list[list[Insertion]]:
        """The events grouped by step, without steps that wrote nothing."""
        return [list(events) for _, events in groupby(self.events, key=lambda event: event.step)]

    @property
    def turns(self) -> list[int]:
        """For each token of `ids`, the number of the step in `steps` that wrote it, from 1; 0 for given tokens."""
        numbers = [number for number, events in enumerate(self.steps, start=1) for _ in events]
        return self._replay([0] * len(self.start), numbers)

    # Ids, order and step numbers all follow from replaying the events, so only the events are stored.
    def _replay(self, line: list[int], values: list[int]) -> list[int]:
        for event, value in zip(self.events, values, strict=True):
            line.insert(event.rank, value)
        return line


def explain(trajectory: Trajectory, names: Mapping[Limit, str]) -> str | None:
    """Which limit ended the text and what to do about it; None if the model ended it. names: what the user who reads
    this calls each limit"""
    count = len(trajectory.events)
    tokens = f"{count} token{'s' * (count != 1)}"
    if trajectory.stopped:
        return f"it was stopped after {tokens}"
    if trajectory.limit is None:
        return None
    return _REMEDIES[trajectory.limit].format(names[trajectory.limit], tokens=tokens, max_tokens=names["max_tokens"])
