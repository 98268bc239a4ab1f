"""Charts of the dashboard: sparklines, bars, flows over time, and latency from received to done.

Flows come from the store's counters. Latencies are quantiles of a small sample of deliveries per step, so that they
survive a restart and cost the same with a million events. Called by `overview` and `setup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Final

from oncehook.admin import Admin
from oncehook.human import show_elapsed
from oncehook.model import DeliveryStatus, Filter

Points = Sequence[tuple[datetime, int]]
Flows = Mapping[str, Points]

HEIGHT: Final = 28.0


@dataclass(frozen=True, slots=True)
class Spark:
    """A sparkline in a box of 100 by 28, and the area under it."""

    line: str
    area: str


def spark(values: Sequence[float]) -> Spark:
    """Return the sparkline of these values, from zero to their highest."""
    if len(values) < 2:
        values = [0.0, 0.0]
    top = max(values) or 1.0
    step = 100 / (len(values) - 1)
    points = [f"{n * step:.1f} {27 - 24 * value / top:.1f}" for n, value in enumerate(values)]
    path = "M" + "L".join(points)
    return Spark(path, f"{path}V{HEIGHT:g}H0z")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar: its colour, start and width, in percent."""

    ink: str
    x: float
    width: float


def bar(parts: Iterable[tuple[str, float]], whole: float) -> list[Piece]:
    pieces: list[Piece] = []
    x = 0.0
    for ink, amount in parts:
        width = min(100 * amount / whole, 100 - x) if whole > 0 else 0.0
        if width > 0:
            pieces.append(Piece(ink, round(x, 2), round(max(width, 0.6), 2)))
            x += width
    return pieces


# -- time in steps -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A time span up to now, divided into steps."""

    word: str
    """Its name in the address."""
    title: str
    before: str
    seconds: float
    step: float

    def steps(self, now: datetime) -> list[datetime]:
        """Return the beginning of each step, oldest first; the last one is not over yet."""
        first = now.timestamp() // self.step * self.step - self.step * (ceil(self.seconds / self.step) - 1)
        start = datetime.fromtimestamp(first, UTC)
        return [start + timedelta(seconds=self.step * n) for n in range(ceil(self.seconds / self.step))]

    def label(self, at: datetime) -> str:
        return at.strftime("%d %b") if self.step >= 86_400 else at.strftime("%H:%M")


SPANS: Final = (
    Span("1h", "Last hour", "hour before", 3600, 60),
    Span("24h", "Last 24 h", "day before", 86_400, 1800),
    # Counters older than two days are kept by day only.
    Span("7d", "Last 7 days", "week before", 7 * 86_400, 86_400),
)


def span_of(word: str) -> Span:
    """Return the span that a parameter names; the last hour for an unknown name."""
    return next((span for span in SPANS if span.word == word), SPANS[0])


def fill(points: Points | None, steps: Sequence[datetime], step: float) -> list[int]:
    """Return the count of each step, 0 where nothing was counted."""
    counted: dict[int, int] = {}
    for at, n in points or ():
        slot = int(at.timestamp() // step)
        counted[slot] = counted.get(slot, 0) + n
    return [counted.get(int(at.timestamp() // step), 0) for at in steps]


def total(flows: Flows, *names: str) -> int:
    return sum(n for name in names for _, n in flows.get(name, ()))


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as a table: columns with their colours, rows with a label each."""

    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    sentence: str


PARTS: Final = 12
SAMPLE: Final = 40
"""Deliveries read per step."""
SHARES: Final = (0.5, 0.95, 0.99)

Values = Sequence[float | None]


class Latency:
    """The chart of latencies; past steps are computed once."""

    def __init__(self) -> None:
        self._past: dict[tuple[str, int, frozenset[str] | None], Values] = {}

    async def get(self, admin: Admin, span: Span, now: datetime) -> Chart:
        part = Span(span.word, span.title, span.before, span.seconds, span.seconds / PARTS)
        steps = part.steps(now)
        values = [await self._part(admin, part, at, now) for at in steps]
        while len(self._past) > 10 * PARTS:
            self._past.pop(next(iter(self._past)))
        rows = [(span.label(at), row) for at, row in zip(steps, values, strict=True)]
        return Chart([("p50", "done"), ("p95", "twin"), ("p99", "odd")], rows, _sentence(values))

    async def _part(self, admin: Admin, span: Span, at: datetime, now: datetime) -> Values:
        key = (span.word, int(at.timestamp()), admin.scope)
        kept = self._past.get(key)
        if kept is not None:
            return kept
        until = at + timedelta(seconds=span.step)
        meant = Filter(status=DeliveryStatus.done, since=at, until=until)
        found = (await admin.deliveries(meant, limit=SAMPLE)).items
        spans = sorted((one.settled_at - one.received_at).total_seconds() * 1000 for one in found if one.settled_at)
        values = [max(round(quantile(spans, share)), 0) for share in SHARES] if spans else [None] * len(SHARES)
        if until < now - timedelta(minutes=1):
            self._past[key] = values
        return values


def _sentence(values: Sequence[Values]) -> str:
    last = next((row for row in reversed(values) if row[0] is not None), None)
    if last is None:
        return "Received to done: nothing was done in this time."
    shares = [f"p{100 * n:.0f} {show_elapsed((value or 0) / 1000)}" for n, value in zip(SHARES, last, strict=True)]
    return f"Lately {', '.join(shares)}."
