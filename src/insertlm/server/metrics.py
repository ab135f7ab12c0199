"""Numbers for Prometheus, in its text format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Literal

__all__ = ["Counter", "Histogram", "Metric", "Traffic", "sample"]

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
Labels = tuple[tuple[str, str], ...]


def sample(name: str, value: float, labels: Mapping[str, str] | Labels = ()) -> str:
    """One line."""
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in dict(labels).items())
    return f"{name}{{{inner}}} {value:.15g}" if inner else f"{name} {value:.15g}"


class Metric:
    """What all have: a name, and what it means."""

    def __init__(self, name: str, about: str, kind: Literal["counter", "histogram", "gauge"]) -> None:
        self.name, self.about, self.kind = name, about, kind

    def head(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} {self.kind}"


class Counter(Metric):
    def __init__(self, name: str, about: str) -> None:
        super().__init__(name, about, "counter")
        self.values: defaultdict[Labels, float] = defaultdict(float)

    def add(self, amount: float = 1, **labels: str) -> None:
        self.values[tuple(labels.items())] += amount

    def lines(self) -> Iterator[str]:
        yield from self.head()
        for labels, value in [*self.values.items()]:
            yield sample(self.name, value, labels)


class Histogram(Metric):
    def __init__(self, name: str, about: str) -> None:
        super().__init__(name, about, "histogram")
        self.counts: defaultdict[Labels, list[int]] = defaultdict(lambda: [0] * (len(_BUCKETS) + 1))
        self.sums: defaultdict[Labels, float] = defaultdict(float)

    def add(self, value: float, **labels: str) -> None:
        key = tuple(labels.items())
        self.counts[key][sum(value > most for most in _BUCKETS)] += 1
        self.sums[key] += value

    def lines(self) -> Iterator[str]:
        yield from self.head()
        for labels, counts in [*self.counts.items()]:
            total = 0
            for most, count in zip((*map(str, _BUCKETS), "+Inf"), counts, strict=True):
                total += count
                yield sample(f"{self.name}_bucket", total, (*labels, ("le", most)))
            yield sample(f"{self.name}_sum", self.sums[labels], labels)
            yield sample(f"{self.name}_count", total, labels)


class Traffic:
    """All requests."""

    def __init__(self) -> None:
        self.requests = Counter("insertlm_requests_total", "Requests by path and status.")
        self.seconds = Histogram("insertlm_request_seconds", "From a request's arrival to the end of its answer.")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
