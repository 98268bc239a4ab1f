"""The life of one event, from its first arrival to its next attempt, newest first.

Arrivals, deliveries and attempts come in. `moments` builds the list of the event's page, and `draw` the chart above it:
one lane for arrivals, one for each delivery, time to the right, long waits folded. The list has the same content, so
the chart is hidden from screen readers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import log2, log10
from typing import Final

from oncehook.human import show_span
from oncehook.model import AttemptOutcome, DeliveryStatus, Outcome, StoredAttempt, StoredDelivery, StoredReplay
from oncehook.reports import ShownArrival
from oncehook.retry import Policy
from oncehook.web.dashboard.render import first_line, took


@dataclass(frozen=True, slots=True)
class EventHistory:
    arrivals: Sequence[ShownArrival]
    copies: int
    deliveries: Sequence[StoredDelivery]
    attempts: Mapping[bytes, Sequence[StoredAttempt]]
    """By delivery, oldest first."""
    replays: Mapping[bytes, StoredReplay]
    policies: Mapping[str, Policy | None]
    now: datetime

    def most(self, destination: str) -> int | None:
        policy = self.policies.get(destination)
        return None if policy is None else policy.attempts


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, or is planned."""

    at: datetime
    state: str
    """The stylesheet's word, which also selects its symbol."""
    what: str
    more: str = ""
    waited: str = ""
    """Time without any event before it."""
    due_at: datetime | None = None
    """Set for a planned moment."""
    compare: int | None = None
    """The number of an arrival whose body differs."""


def moments(history: EventHistory) -> list[Moment]:
    """Return all moments, newest first, planned ones on top."""
    found = [*_arrivals(history), *_replays(history)]
    for delivery in history.deliveries:
        found += _delivery(history, delivery)
    found.sort(key=lambda moment: (moment.due_at is not None, moment.at), reverse=True)
    return found


# -- arrivals ----------------------------------------------------------------------------------


def _arrivals(history: EventHistory) -> Iterator[Moment]:
    known = len(history.arrivals)
    for number, arrival in enumerate(history.arrivals, 1):
        # Only the latest of many copies are stored, so their numbers are counted from the end.
        shown = number if number == 1 else history.copies - known + number
        yield Moment(
            arrival.at,
            str(arrival.outcome),
            f"Arrival {shown}, {arrival.outcome}",
            _about(history, arrival),
            compare=number if arrival.body_differs else None,
        )


def _about(history: EventHistory, arrival: ShownArrival) -> str:
    if arrival.outcome is Outcome.accepted:
        count = len(history.deliveries)
        made = "no route matches" if not count else f"{count} deliver{'y' if count == 1 else 'ies'} made"
        return f"stored, {made}"
    return "same key, another body" if arrival.body_differs else "same body, folded into this event"


def _replays(history: EventHistory) -> Iterator[Moment]:
    for replay in history.replays.values():
        reason = f": “{first_line(replay.reason)}”" if replay.reason else ""
        kind = f"one of {replay.planned} deliveries" if replay.planned > 1 else "one delivery"
        yield Moment(replay.created_at, "replay", f"Replay by {replay.actor}", f"{kind}{reason}")


# -- deliveries --------------------------------------------------------------------------------


def _delivery(history: EventHistory, delivery: StoredDelivery) -> Iterator[Moment]:
    previous: StoredAttempt | None = None
    for attempt in history.attempts.get(delivery.id, ()):
        yield _attempt(history, delivery, attempt, previous)
        previous = attempt
    if delivery.status in (DeliveryStatus.pending, DeliveryStatus.leased):
        yield _ahead(history, delivery)
    elif end := _end(delivery, previous):
        yield end


def _attempt(
    history: EventHistory, delivery: StoredDelivery, attempt: StoredAttempt, previous: StoredAttempt | None
) -> Moment:
    wait = 0.0 if previous is None else (attempt.started_at - previous.ended_at).total_seconds()
    number = _number(history, delivery, attempt.run, attempt.n)
    return Moment(
        attempt.started_at,
        attempt_state(attempt),
        f"{delivery.destination}, {number}"
        + ("" if attempt.outcome is AttemptOutcome.retry else f", {attempt.outcome}"),
        evidence(attempt),
        waited=f"waited {show_span(wait)}" if wait >= 1 else "",
    )


def attempt_state(attempt: StoredAttempt) -> str:
    """Return the stylesheet's word for an attempt's outcome."""
    states = {AttemptOutcome.done: "done", AttemptOutcome.dead: "dead"}
    return states.get(attempt.outcome, "failed")


def _number(history: EventHistory, delivery: StoredDelivery, run: int, n: int) -> str:
    most = history.most(delivery.destination)
    count = f"attempt {n}" if most is None else f"attempt {n} of {max(most, n)}"
    return f"run {run}, {count}" if run > 1 else count


def evidence(attempt: StoredAttempt) -> str:
    """Return the details of an attempt, in one line."""
    took_ = took((attempt.ended_at - attempt.started_at).total_seconds())
    if attempt.outcome is AttemptOutcome.done:
        status = attempt.evidence.status
        returned = "" if attempt.result is None else f" · returned {first_line(attempt.result.decode(), 60)}"
        return f"in {took_}{returned}" if status is None else f"{status} in {took_}"
    parts = [f"{answer(attempt)} after {took_}"]
    if attempt.category is not None:
        parts.append(str(attempt.category))
    return " · ".join(parts)


def answer(attempt: StoredAttempt) -> str:
    """Return the answer to an attempt: the error, the status, or the fate of the worker."""
    if attempt.outcome is AttemptOutcome.crashed:
        return "the worker was lost"
    if attempt.evidence.error:
        return first_line(attempt.evidence.error)
    return "no answer" if attempt.evidence.status is None else str(attempt.evidence.status)


def _ahead(history: EventHistory, delivery: StoredDelivery) -> Moment:
    name = delivery.destination
    if delivery.status is DeliveryStatus.leased:
        number = _number(history, delivery, delivery.run, max(delivery.attempts, 1))
        return Moment(history.now, "leased", f"{name}, {number}, in progress", "a worker has it", due_at=history.now)
    number = _number(history, delivery, delivery.run, delivery.attempts + 1)
    if delivery.due_at is None:
        behind = "waiting for an earlier event of its subject" if delivery.blocked_by else "held"
        return Moment(history.now, "pending", f"{name}, {number}", behind, due_at=history.now)
    if delivery.due_at <= history.now:
        return Moment(delivery.due_at, "future", f"{name}, {number}", "due now", due_at=delivery.due_at)
    return Moment(delivery.due_at, "future", f"{name}, {number}", "", due_at=delivery.due_at)


def _end(delivery: StoredDelivery, last: StoredAttempt | None) -> Moment | None:
    """Return the end of a delivery that has no attempt, such as a discard."""
    at = delivery.settled_at
    if at is None:
        return None
    name = delivery.destination
    if delivery.status is DeliveryStatus.discarded:
        return Moment(at, "discarded", f"{name}, discarded", f"“{delivery.reason}”" if delivery.reason else "")
    if delivery.note == "stale":
        return Moment(at, "stale", f"{name}, stale", "a later state was delivered before it")
    if delivery.note == "coalesced":
        return Moment(at, "done", f"{name}, coalesced", "covered by a newer event of its subject")
    if delivery.status is DeliveryStatus.dead and (last is None or last.outcome is not AttemptOutcome.dead):
        return Moment(at, "dead", f"{name}, dead", delivery.reason or "")
    return None


LEFT: Final = 120.0
WIDTH: Final = 1040.0
"""Width that a small laptop shows without scrolling."""
COLUMNS: Final = 18
"""Moments that fit; with more, the latest."""
NARROWEST: Final = 96.0
LANES: Final = 8


@dataclass(frozen=True, slots=True)
class AttemptBlock:
    ink: str
    x: float
    y: float
    width: float
    label: str


@dataclass(frozen=True, slots=True)
class WaitLine:
    """A dotted line between two attempts, or to the next one."""

    start: float
    end: float
    y: float
    label: str
    is_ahead: bool = False


@dataclass(frozen=True, slots=True)
class ArrivalMark:
    outcome: str
    x: float


@dataclass(frozen=True, slots=True)
class NextAttempt:
    x: float
    y: float
    label: str
    due_at: datetime


@dataclass(slots=True)
class TimelineChart:
    width: float
    height: float
    now: float | None
    names: list[tuple[str, float]] = field(default_factory=list)
    ticks: list[tuple[float, str]] = field(default_factory=list)
    folds: list[float] = field(default_factory=list)
    seen: list[ArrivalMark] = field(default_factory=list)
    tries: list[AttemptBlock] = field(default_factory=list)
    waits: list[WaitLine] = field(default_factory=list)
    nexts: list[NextAttempt] = field(default_factory=list)

    @property
    def is_long(self) -> bool:
        """Tell whether the chart is wider than the page: then it scrolls."""
        return self.width > WIDTH


@dataclass(slots=True)
class _Column:
    at: datetime
    lanes: set[int] = field(default_factory=set)
    x: float = 0.0


class _Scale:
    """The horizontal positions of moments: columns wide enough for their labels, wider where more time passes."""

    def __init__(self, points: Sequence[tuple[datetime, int]], room: float) -> None:
        self.columns: list[_Column] = []
        for at, lane in sorted(points):
            last = self.columns[-1] if self.columns else None
            if last is None or (at - last.at).total_seconds() > 1.0 or lane in last.lanes:
                self.columns.append(_Column(at, {lane}))
            else:
                last.lanes.add(lane)
        self.columns = self.columns[-COLUMNS:]
        self._place(room)

    def _place(self, room: float) -> None:
        gaps = [
            NARROWEST + 26 * log10(1 + max((after.at - before.at).total_seconds(), 0))
            for before, after in zip(self.columns, self.columns[1:], strict=False)
        ]
        stretch = max(min(room / sum(gaps), 2.2), 1.0) if gaps else 1.0
        x = LEFT
        for column, gap in zip(self.columns, [*gaps, 0.0], strict=True):
            column.x = round(x, 1)
            x += gap * stretch
        self.end = self.columns[-1].x if self.columns else LEFT

    def holds(self, at: datetime) -> bool:
        """Tell whether a moment is late enough to be drawn."""
        return bool(self.columns) and at >= self.columns[0].at

    def column(self, at: datetime, lane: int) -> _Column:
        """Return the column of a moment of a lane."""
        fits = [column for column in self.columns if lane in column.lanes and column.at <= at]
        return fits[-1] if fits else self.columns[0]

    def x(self, at: datetime) -> float:
        """Return the x of any moment, interpolated between its columns."""
        place = bisect_right([column.at for column in self.columns], at)
        if place == 0:
            return self.columns[0].x
        before = self.columns[place - 1]
        if place == len(self.columns):
            return before.x + 60.0
        after = self.columns[place]
        whole = (after.at - before.at).total_seconds() or 1.0
        share = (at - before.at).total_seconds() / whole
        return before.x + (after.x - before.x) * min(max(share, 0.12), 0.94)


def draw(history: EventHistory) -> TimelineChart | None:
    """Return the drawing; None where everything happened at one moment."""
    deliveries = list(history.deliveries[:LANES])
    points = [(arrival.at, 0) for arrival in history.arrivals]
    for lane, delivery in enumerate(deliveries, 1):
        points += [(attempt.started_at, lane) for attempt in history.attempts.get(delivery.id, ())]
        if _is_ahead(delivery, history.now) and delivery.due_at is not None:
            points.append((delivery.due_at, lane))
    if not deliveries:
        return None
    scale = _Scale(points, WIDTH - LEFT - 150)
    if len(scale.columns) < 2:
        return None
    height = 46.0 * (len(deliveries) + 1) + 20
    now = round(scale.x(history.now), 1) if any(_is_ahead(d, history.now) for d in history.deliveries) else None
    drawn = TimelineChart(max(WIDTH, scale.end + 150), height + 30, now)
    drawn.names = [("arrivals", 38.0), *[(d.destination, _y(lane)) for lane, d in enumerate(deliveries, 1)]]
    _draw_time(drawn, scale, history.now)
    last_x = -100.0
    for arrival in history.arrivals:
        x = scale.column(arrival.at, 0).x
        if scale.holds(arrival.at) and x - last_x > 8:
            drawn.seen.append(ArrivalMark(str(arrival.outcome), x))
            last_x = x
    for lane, delivery in enumerate(deliveries, 1):
        _draw_lane(drawn, scale, history, delivery, lane)
    return drawn


def _y(lane: int) -> float:
    return 38.0 + 46.0 * lane


def _is_ahead(delivery: StoredDelivery, now: datetime) -> bool:
    return delivery.status is DeliveryStatus.pending and delivery.due_at is not None and delivery.due_at > now


def _draw_time(drawn: TimelineChart, scale: _Scale, now: datetime) -> None:
    for before, after in zip(scale.columns, scale.columns[1:], strict=False):
        if (after.at - before.at).total_seconds() > 30:
            drawn.folds.append(round((before.x + after.x) / 2, 1))
    for column in scale.columns:
        is_today = (now - column.at).total_seconds() < 43_200
        drawn.ticks.append((column.x, column.at.strftime("%H:%M:%S" if is_today else "%d %b %H:%M")))


def _draw_lane(drawn: TimelineChart, scale: _Scale, history: EventHistory, delivery: StoredDelivery, lane: int) -> None:
    y = _y(lane)
    end: float | None = None
    previous: StoredAttempt | None = None
    for attempt in history.attempts.get(delivery.id, ()):
        if scale.holds(attempt.started_at):
            x = scale.column(attempt.started_at, lane).x
            if previous is not None and end is not None and x - end > 34:
                wait = (attempt.started_at - previous.ended_at).total_seconds()
                drawn.waits.append(WaitLine(end + 8, x - 6, y, show_span(wait)))
            block = _block(attempt, x, y)
            drawn.tries.append(block)
            end = x + block.width
        previous = attempt
    if _is_ahead(delivery, history.now) and delivery.due_at is not None:
        x = scale.column(delivery.due_at, lane).x
        start = (end if end is not None else LEFT) + 8
        since = previous.ended_at if previous else history.now
        drawn.waits.append(
            WaitLine(start, x - 10, y, show_span((delivery.due_at - since).total_seconds()), is_ahead=True)
        )
        most = history.most(delivery.destination)
        number = f"attempt {delivery.attempts + 1}" + ("" if most is None else f" of {most}")
        drawn.nexts.append(NextAttempt(x, y, number, delivery.due_at))


def _block(attempt: StoredAttempt, x: float, y: float) -> AttemptBlock:
    seconds = max((attempt.ended_at - attempt.started_at).total_seconds(), 0.0)
    inks = {AttemptOutcome.done: "done", AttemptOutcome.crashed: "wait"}
    result = "done" if attempt.outcome is AttemptOutcome.done else _describe(attempt)
    width = min(10 + 16 * log2(1 + seconds), 70)
    return AttemptBlock(inks.get(attempt.outcome, "dead"), x, y, round(width, 1), f"{result} · {took(seconds)}")


def _describe(attempt: StoredAttempt) -> str:
    if attempt.outcome is AttemptOutcome.crashed:
        return "crashed"
    if attempt.evidence.status is not None:
        return str(attempt.evidence.status)
    word = answer(attempt).partition(":")[0]
    if " " in word:  # a whole sentence, because its first word alone is meaningless
        return "no answer"
    return word if len(word) <= 10 else f"{word[:9]}…"
