"""Charts of the dashboard: sparklines, bars, flows over time, latencies, small charts of destinations, retries.

All but one come from the store's counters. Latencies from received to done are quantiles of a small sample of
deliveries per step, so that they cost the same with a million events. Every chart is a table, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil, floor, inf, log10
from typing import Final
from urllib.parse import urlencode

from oncehook.admin import Admin
from oncehook.human import show_elapsed
from oncehook.model import ChartMark, DeliveryStatus, Filter, Level, Scope
from oncehook.web.dashboard.render import number, percent, took
from oncehook.web.language import translate

Points = Sequence[tuple[datetime, int]]
Flows = Mapping[str, Points]

HEIGHT: Final = 28.0


@dataclass(frozen=True, slots=True)
class Spark:
    """A sparkline in a box of 100 by 28, and the area under it."""

    line: str
    area: str
    top: float = 0.0
    """The highest value."""
    failed: str = ""
    """The area of a part of the values, in another colour."""


def spark(values: Sequence[float], failed: Sequence[float] = ()) -> Spark:
    """Return the sparkline of these values, from zero to their highest, with the part of them that failed."""
    if len(values) < 2:
        values = [0.0, 0.0]
    highest = max(values)
    line = _path(values, highest)
    area = f"{_path(failed, highest)}V27H0z" if any(failed) else ""  # nothing is drawn where none failed
    return Spark(line, f"{line}V{HEIGHT:g}H0z", highest, area)


def _path(values: Sequence[float], highest: float) -> str:
    top = highest or 1.0
    step = 100 / (len(values) - 1)
    points = [f"{n * step:.1f} {27 - 24 * value / top:.1f}" for n, value in enumerate(values)]
    return "M" + "L".join(points)


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
    """A time span up to now, or up to a moment, divided into steps."""

    word: str
    """Its name in the address."""
    title: str
    before: str
    seconds: float
    step: float
    until: datetime | None = None
    """Its end, where somebody has chosen one."""

    def end(self, now: datetime) -> datetime:
        return self.until or now

    def steps(self, now: datetime) -> list[datetime]:
        """Return the beginning of each step, oldest first; the last one is not over yet."""
        last = (self.end(now).timestamp() - (0.001 if self.until else 0)) // self.step * self.step
        first = last - self.step * (ceil(self.seconds / self.step) - 1)
        start = datetime.fromtimestamp(first, UTC)
        return [start + timedelta(seconds=self.step * n) for n in range(ceil(self.seconds / self.step))]

    def label(self, at: datetime) -> str:
        return at.strftime("%d %b %H:%M") if self.seconds > 86_400 else at.strftime("%H:%M")

    @property
    def per(self) -> str:
        """Return its step in words."""
        return translate(STEP_WORDS[int(self.step)])

    @property
    def words(self) -> str:
        """Return the words of a query for the events of this span."""
        if self.until is None:
            return f"since:{self.word}"
        start = self.until - timedelta(seconds=self.seconds)
        return f"since:{start:%Y-%m-%dT%H:%MZ} until:{self.until:%Y-%m-%dT%H:%MZ}"

    @property
    def query(self) -> str:
        """Return the parameters that mean this span."""
        if self.until is None:
            return urlencode({"since": self.word})
        start = self.until - timedelta(seconds=self.seconds)
        return urlencode({"from": f"{start:%Y-%m-%dT%H:%MZ}", "to": f"{self.until:%Y-%m-%dT%H:%MZ}"})


SPANS: Final = (
    Span("1h", "Last hour", "previous hour", 3600, 60),
    Span("24h", "Last 24 h", "previous day", 86_400, 1800),
    # Counters older than two days are kept by hour only.
    Span("7d", "Last 7 days", "previous week", 7 * 86_400, 3600),
)
STEP_WORDS: Final = {60: "minute", 300: "5 minutes", 900: "15 minutes", 1800: "half hour", 3600: "hour"}
STEPS: Final = tuple(STEP_WORDS)
MOST_STEPS: Final = 170
SHORTEST: Final = 300.0
KEPT: Final = 9 * 86_400.0
"""Seconds for which counters are kept by hour."""


def span_of(word: str) -> Span:
    """Return the span that a parameter names; the last hour for an unknown name."""
    return next((span for span in SPANS if span.word == word), SPANS[0])


def choose_span(word: str, since: datetime | None, until: datetime | None, now: datetime) -> Span:
    """Return the span of these parameters: from one moment to another where both are given, else the named one.

    A range is widened to five minutes, cut where it leaves what is kept, and divided as finely as counters are.
    """
    if since is None or until is None:
        return span_of(word)
    until = max(min(until, now), now - timedelta(seconds=KEPT - SHORTEST))
    since = max(min(since, until - timedelta(seconds=SHORTEST)), now - timedelta(seconds=KEPT))
    finest = 3600 if (now - since).total_seconds() > 2 * 86_400 else 60
    seconds = (until - since).total_seconds()
    step = next((one for one in STEPS if one >= finest and seconds / one <= MOST_STEPS), STEPS[-1])
    until = datetime.fromtimestamp(ceil(until.timestamp() / step) * step, UTC)
    seconds = ceil((until - since).total_seconds() / step) * step
    form = "%d %b %H:%M" if seconds > 86_400 or (now - since).total_seconds() > 86_400 else "%H:%M"
    title = translate("{} to {}").format(f"{until - timedelta(seconds=seconds):{form}}", f"{until:{form}}")
    return Span("", title, "the time before", float(seconds), float(step), until)


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
    starts: Sequence[datetime] = ()
    """When each row begins."""
    step: float = 0.0
    limits: Sequence[tuple[str, float]] = ()
    """Lines to draw across, by name: watermarks."""


@dataclass(frozen=True, slots=True)
class PlacedMark:
    """A mark in a chart: its place, as a share of the width, and its text."""

    x: float
    mark: ChartMark


def place_marks(marks: Sequence[ChartMark], span: Span, now: datetime) -> list[PlacedMark]:
    """Return the marks within a span, where they are drawn."""
    steps = span.steps(now)
    start, whole = steps[0], len(steps) * span.step
    placed = [(100 * (mark.at - start).total_seconds() / whole, mark) for mark in marks]
    return [PlacedMark(round(x, 2), mark) for x, mark in placed if 0 <= x <= 100]


PARTS: Final = 12
SAMPLE: Final = 40
"""Deliveries read per step."""
SHARES: Final = (0.5, 0.95, 0.99)

Values = Sequence[float | None]


class Latency:
    """The chart of latencies from received to done; past steps are computed once."""

    def __init__(self) -> None:
        self._past: dict[tuple[int, int, Scope], Values] = {}

    async def get(self, admin: Admin, span: Span, now: datetime) -> Chart:
        part = Span(span.word, span.title, span.before, span.seconds, span.seconds / PARTS, span.until)
        steps = part.steps(now)
        values = [await self._part(admin, part, at, now) for at in steps]
        while len(self._past) > 10 * PARTS:
            self._past.pop(next(iter(self._past)))
        rows = [(span.label(at), row) for at, row in zip(steps, values, strict=True)]
        return Chart(_LATENCIES, rows, _sentence(values, "Received to done"), steps, part.step)

    async def _part(self, admin: Admin, span: Span, at: datetime, now: datetime) -> Values:
        key = (int(span.step), int(at.timestamp()), admin.scope)
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


_LATENCIES: Final = [("p50", "done"), ("p95", "twin"), ("p99", "odd")]


def ack_chart(flows: Flows, span: Span, now: datetime) -> Chart:
    """Return the chart of how long answers to arrivals took, from the counters of all of them."""
    wide = Span(span.word, span.title, span.before, span.seconds, max(span.step, span.seconds / 60), span.until)
    steps = wide.steps(now)
    values = [[spread(counts, share) for share in SHARES] for counts in _spreads(flows, "ack:", steps, wide.step)]
    rows = [(span.label(at), row) for at, row in zip(steps, values, strict=True)]
    return Chart(_LATENCIES, rows, _sentence(values, "Ack"), steps, wide.step)


def _sentence(values: Sequence[Values], what: str) -> str:
    last = next((row for row in reversed(values) if row[0] is not None), None)
    if last is None:
        return translate("{}: nothing in this time.").format(translate(what))
    shares = [f"p{100 * n:.0f} {show_elapsed((value or 0) / 1000)}" for n, value in zip(SHARES, last, strict=True)]
    return translate("{}, lately {}.").format(translate(what), ", ".join(shares))


# -- how long it took, from counters of buckets --------------------------------------------------


def _spreads(flows: Flows, prefix: str, steps: Sequence[datetime], step: float) -> list[dict[float, int]]:
    """Return for each step how many took at most so many seconds (and more than the next smaller limit)."""
    found: list[dict[float, int]] = [{} for _ in steps]
    for name, points in flows.items():
        if name.startswith(prefix):
            for counts, n in zip(found, fill(points, steps, step), strict=True):
                if n:
                    counts[float(name.removeprefix(prefix))] = n
    return found


def spread(counts: Mapping[float, int], share: float) -> float | None:
    """Return the milliseconds below which this share lies, between the limits of its bucket; None without any."""
    whole, low = sum(counts.values()), 0.0
    left = share * whole
    for limit in sorted(counts):
        if counts[limit] >= left:
            high = limit if limit != inf else low * 2
            low = max(low, high / 2.5)  # limits grow by about that: an empty bucket below must not widen this one
            return max(round(1000 * (low + (high - low) * left / counts[limit]), 1), 0.1)
        left, low = left - counts[limit], limit
    return None


# -- one small chart for each destination, with the same axes ----------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    ink: str
    path: str
    area: str = ""


@dataclass(frozen=True, slots=True)
class SmallChart:
    """A chart of one destination in a box of 100 by 40, beside others with the same axes."""

    name: str
    figure: str
    """Its number over the whole span."""
    lines: Sequence[Line]
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class SmallCharts:
    """Small charts with shared axes, and the table behind them."""

    charts: Sequence[SmallChart]
    top: str
    """Label of the upper end of the shared axis."""
    bottom: str
    table: Chart


Destinations = Mapping[str, Flows]


def failure_rates(flows: Destinations, span: Span, now: datetime) -> SmallCharts:
    """Return the share of attempts that failed, by destination."""
    steps = span.steps(now)
    rates: dict[str, Values] = {}
    sums: dict[str, tuple[int, int]] = {}
    for name, own in flows.items():
        good = fill(own.get("succeeded"), steps, span.step)
        bad = [sum(two) for two in zip(*(fill(own.get(w), steps, span.step) for w in ("retry", "died")), strict=True)]
        if any(good) or any(bad):
            pairs = list(zip(good, bad, strict=True))
            rates[name] = [round(100 * n / (n + ok), 1) if n + ok else None for ok, n in pairs]
            sums[name] = sum(bad), sum(good) + sum(bad)
    highest = max((value for values in rates.values() for value in values if value), default=0)
    top = next(limit for limit in (5, 10, 25, 50, 100) if limit >= highest)
    made = [
        SmallChart(
            name,
            translate("{} % of {}").format(percent(*sums[name]), number(sums[name][1])),
            [_line(values, "dead", lambda v: v / top, filled=True)],
            is_bad=sums[name][0] > 0.1 * sums[name][1],
        )
        for name, values in sorted(rates.items(), key=lambda one: (-sums[one[0]][0] / sums[one[0]][1], one[0]))
    ]
    return SmallCharts(made, f"{top} %", "0 %", _small_table(rates, steps, span, "%"))


def latencies(flows: Destinations, span: Span, now: datetime) -> SmallCharts:
    """Return p50 and p95 of how long attempts took, by destination, on one axis of powers."""
    steps = span.steps(now)
    found: dict[str, list[Values]] = {}
    whole: dict[str, Values] = {}
    for name, own in flows.items():
        spreads = _spreads(own, "took:", steps, span.step)
        if any(spreads):
            found[name] = [[spread(counts, share) for counts in spreads] for share in SHARES[:2]]
            whole[name] = [spread(add_up(spreads), share) for share in SHARES[:2]]
    values = [value for two in found.values() for one in two for value in one if value]
    low = 10 ** floor(log10(max(min(values, default=1), 1)))
    high = max(10 ** ceil(log10(max(values, default=1000))), low * 10)

    def place(value: float) -> float:
        return log10(max(value, low) / low) / log10(high / low)

    made = [
        SmallChart(
            name,
            f"p50 {_ms(whole[name][0])}, p95 {_ms(whole[name][1])}",
            [_line(one, ink, place) for one, ink in zip(two, ("done", "twin"), strict=True)],
        )
        for name, two in sorted(found.items(), key=lambda one: (-(whole[one[0]][1] or 0), one[0]))
    ]
    table = {
        f"{name} p{share * 100:.0f}": one
        for name, two in found.items()
        for share, one in zip(SHARES, two, strict=False)
    }
    return SmallCharts(made, _ms(high), _ms(low), _small_table(table, steps, span, "ms"))


def add_up(spreads: Iterable[Mapping[float, int]]) -> dict[float, int]:
    sums: dict[float, int] = {}
    for counts in spreads:
        for limit, n in counts.items():
            sums[limit] = sums.get(limit, 0) + n
    return sums


def percentiles(flows: Flows) -> Values:
    """Return p50 and p95 of all attempts in these counters, in milliseconds."""
    counts = {
        float(name.removeprefix("took:")): sum(n for _, n in points)
        for name, points in flows.items()
        if name.startswith("took:")
    }
    return [spread(counts, share) for share in SHARES[:2]]


def _ms(value: float | None) -> str:
    return "–" if value is None else took(value / 1000)


def _line(values: Values, ink: str, place: Callable[[float], float], *, filled: bool = False) -> Line:
    """Return a line through the values, broken where there is none; a lone value is a short dash."""
    width = 100 / max(len(values), 1)
    path: list[str] = []
    area: list[str] = []
    run: list[tuple[float, float]] = []
    for n, value in enumerate([*values, None]):
        if value is not None:
            run.append((width * n, 40 - 38 * min(max(place(value), 0), 1)))
            continue
        if run:
            run.append((run[-1][0] + width, run[-1][1]))
            points = "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
            path.append(f"M{points}")
            area.append(f"M{run[0][0]:.1f} 40L{points}V40z")
            run = []
    return Line(ink, "".join(path), "".join(area) if filled else "")


def _small_table(columns: Mapping[str, Values], steps: Sequence[datetime], span: Span, unit: str) -> Chart:
    rows = [
        (span.label(at), [values[n] for values in columns.values()])
        for n, at in enumerate(steps)
        if any(values[n] is not None for values in columns.values())
    ]
    return Chart([(name, "done") for name in columns], rows, unit, steps, span.step)


# -- retries by attempt ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeatCell:
    tried: int
    failed: int

    @property
    def share(self) -> str:
        return percent(self.failed, self.tried)

    @property
    def heat(self) -> int:
        """Return how much of it failed, from 0 (none) to 5 (nearly all)."""
        return 0 if not self.failed else min(1 + int(4.99 * self.failed / self.tried), 5)


def heat_map(flows: Destinations) -> list[tuple[str, list[HeatCell | None]]]:
    """Return by destination how many attempts were made and failed, by their number; the last column has all later
    ones. Destinations whose every first attempt succeeded come last."""
    found: list[tuple[str, list[HeatCell | None]]] = []
    for name, own in flows.items():
        sums = {what: sum(n for _, n in points) for what, points in own.items()}
        failed = [sums.get(f"failed:{n}", 0) for n in range(1, 11)]
        done = [sums.get(f"done:{n}", 0) for n in range(1, 11)]
        # First attempts that succeeded are the rest of all attempts.
        done[0] = max(sum(n for what, n in sums.items() if what.startswith("took:")) - sum(failed) - sum(done[1:]), 0)
        cells = [HeatCell(ok + bad, bad) if ok + bad else None for ok, bad in zip(done, failed, strict=True)]
        if any(cells):
            found.append((name, cells))
    return sorted(found, key=lambda row: (-sum(cell.failed for cell in row[1] if cell), row[0]))


# -- the backlog over time -----------------------------------------------------------------------------


def backlog(flows: Destinations, levels: Mapping[str, Level], span: Span, now: datetime, limit: float | None) -> Chart:
    """Return how many deliveries were pending and dead, from their numbers now and the changes since."""
    steps = span.steps(now)
    columns: list[list[int]] = []
    for what, level in (
        ("pending", sum(one.pending for one in levels.values())),
        ("dead", sum(one.dead for one in levels.values())),
    ):
        changes: dict[int, int] = {}
        for own in flows.values():
            for at, n in own.get(what, ()):
                slot = int(at.timestamp() // span.step)
                changes[slot] = changes.get(slot, 0) + n
        late = steps[-1] + timedelta(seconds=span.step)
        level -= sum(n for slot, n in changes.items() if slot * span.step >= late.timestamp())
        values = []
        for at in reversed(steps):
            values.append(max(level, 0))
            level -= changes.get(int(at.timestamp() // span.step), 0)
        columns.append(values[::-1])
    pending, dead = columns
    top = max(range(len(steps)), key=pending.__getitem__)
    return Chart(
        [("pending", "wait"), ("dead", "dead")],
        [(span.label(at), row) for at, row in zip(steps, zip(pending, dead, strict=True), strict=True)],
        translate("{} pending and {} dead at the end; most {} pending at {}.").format(
            *map(number, (pending[-1], dead[-1], pending[top])), span.label(steps[top])
        ),
        steps,
        span.step,
        [] if limit is None else [("watermark of dead letters", limit)],
    )
