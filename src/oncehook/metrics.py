"""Numbers for Prometheus that cost next to nothing to count.

The client library's own counters take a lock at every step; these are plain dictionaries, because they are only touched
on the event loop. The library still says what they are called and how they are written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


class Instrument(Protocol):
    """Anything that can be read off."""

    def family(self) -> Metric:
        """What it shows now."""


class Count:
    """Something that only grows, by labels."""

    def __init__(self, name: str, about: str, *labels: str) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, *labels: str, by: int = 1) -> None:
        """Count one more. By nought, it is shown from the start, so that its first rise is seen."""
        self._values[labels] = self._values.get(labels, 0) + by

    def values(self) -> dict[tuple[str, ...], int]:
        """Return a copy of what was counted so far, by labels."""
        return dict(self._values)

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Spread:
    """How some measure is spread over buckets, by one label or by several."""

    def __init__(self, name: str, about: str, labels: str | Sequence[str], buckets: Sequence[float]) -> None:
        self._name, self._about = name, about
        self._labels = (labels,) if isinstance(labels, str) else labels
        self._buckets = buckets
        self._rows: dict[str | tuple[str, ...], list[float]] = {}
        """Per label: how many fell into each bucket, into none of them, and the sum of all."""

    def add(self, label: str | tuple[str, ...], value: float) -> None:
        """Note one measurement."""
        row = self._rows.get(label)
        if row is None:
            row = self._rows[label] = [0] * (len(self._buckets) + 2)
        row[bisect_left(self._buckets, value)] += 1
        row[-1] += value

    def family(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        names = [*(f"{float(limit)}" for limit in self._buckets), "+Inf"]
        for label, row in self._rows.items():
            upto = 0.0
            buckets = []
            for name, n in zip(names, row[:-1], strict=True):
                upto += n
                buckets.append((name, upto))
            family.add_metric((label,) if isinstance(label, str) else label, buckets, row[-1])
        return family


class Level:
    """Something that goes up and down, or is simply so."""

    def __init__(self, name: str, about: str, *labels: str) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, *labels: str) -> None:
        """Say how it stands."""
        self._values[labels] = value

    def clear(self) -> None:
        """Say nothing, until it is set anew."""
        self._values.clear()

    def family(self) -> Metric:
        family = GaugeMetricFamily(self._name, self._about, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Panel:
    """The instruments of one inbox together, as a registry that the client library can write out."""

    def __init__(self) -> None:
        self._instruments: list[Instrument] = []

    def mount(self, instrument: Count | Spread | Level) -> None:
        """Show this one too."""
        self._instruments.append(instrument)

    def collect(self) -> Iterable[Metric]:
        """What all of them show now."""
        return [instrument.family() for instrument in self._instruments]
