"""How long deliveries take from received to done: quantiles of a sample, for the chart of the overview.

Read off the store's own deliveries, a few for each part of the time, so that it survives a restart and costs the same
with a million events. Called by `overview`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Final

from oncehook.admin import Admin
from oncehook.model import DeliveryStatus, Filter

Points = Sequence[tuple[datetime, int]]
Flows = Mapping[str, Points]

HEIGHT: Final = 28.0


@dataclass(frozen=True, slots=True)
class Spark:
    """A small line in a box of 100 by 28, and the area under it."""

    line: str
    area: str


def spark(values: Sequence[float]) -> Spark:
    """Return the line through these values, from nothing to their highest."""
    if len(values) < 2:
        values = [0.0, 0.0]
    top = max(values) or 1.0
    step = 100 / (len(values) - 1)
    points = [f"{n * step:.1f} {27 - 24 * value / top:.1f}" for n, value in enumerate(values)]
    path = "M" + "L".join(points)
    return Spark(path, f"{path}V{HEIGHT:g}H0z")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar: its ink, where it begins and how wide it is, of 100."""

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
    """A stretch of time up to now, cut into steps."""

    word: str
    """As written in the address."""
    title: str
    before: str
    seconds: float
    step: float

    def steps(self, now: datetime) -> list[datetime]:
        """Return where each step begins, oldest first; the last one is still under way."""
        first = now.timestamp() // self.step * self.step - self.step * (ceil(self.seconds / self.step) - 1)
        start = datetime.fromtimestamp(first, UTC)
        return [start + timedelta(seconds=self.step * n) for n in range(ceil(self.seconds / self.step))]

    def label(self, at: datetime) -> str:
        return at.strftime("%d %b") if self.step >= 86_400 else at.strftime("%H:%M")


SPANS: Final = (
    Span("1h", "Last hour", "hour before", 3600, 60),
    Span("24h", "Last 24 h", "day before", 86_400, 1800),
    # Older than two days, counters know days only.
    Span("7d", "Last 7 days", "week before", 7 * 86_400, 86_400),
)


def span_of(word: str) -> Span:
    """Return the stretch that an address names; the last hour when it names none we know."""
    return next((span for span in SPANS if span.word == word), SPANS[0])


def fill(points: Points | None, steps: Sequence[datetime], step: float) -> list[int]:
    """Return what was counted in each step, with nothing where nothing was."""
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
    """A chart is a table: its columns with their ink, its rows with a label each."""

    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    sentence: str


PARTS: Final = 12
SAMPLE: Final = 40
"""Deliveries looked at for each part."""
SHARES: Final = (0.5, 0.95, 0.99)

Values = Sequence[float | None]


class Latency:
    """The chart of latencies; parts that are past are computed once."""

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
    shares = [f"p{100 * share:.0f} {_show_latency(value or 0)}" for share, value in zip(SHARES, last, strict=True)]
    return f"Lately {', '.join(shares)}."


def _show_latency(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
