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
from itertools import pairwise
from math import inf
from typing import Final

from oncehook.human import show_span
from oncehook.model import (
    AttemptOutcome,
    Category,
    DeliveryStatus,
    Level,
    Outcome,
    StoredAttempt,
    StoredDelivery,
    StoredReplay,
)
from oncehook.reports import ShownArrival
from oncehook.retry import Policy
from oncehook.web.dashboard.render import first_line, took, utc
from oncehook.web.language import plural, translate


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
    levels: Mapping[str, Level] = field(default_factory=dict)
    """The state of each destination now."""

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
            translate("Arrival {}, {}").format(shown, translate(str(arrival.outcome))),
            _about(history, arrival),
            compare=number if arrival.body_differs else None,
        )


def _about(history: EventHistory, arrival: ShownArrival) -> str:
    if arrival.outcome is Outcome.accepted:
        count = len(history.deliveries)
        if not count:
            return translate("stored, no route matches")
        return f"{translate('stored')}, {count} {plural(count, 'delivery', 'deliveries')}"
    return translate("same key, another body" if arrival.body_differs else "same body, folded into this event")


def _replays(history: EventHistory) -> Iterator[Moment]:
    for replay in history.replays.values():
        reason = f": “{first_line(replay.reason)}”" if replay.reason else ""
        kind = translate("one of {} deliveries").format(replay.planned) if replay.planned > 1 else ""
        kind = kind or translate("one delivery")
        yield Moment(replay.created_at, "replay", translate("Replay by {}").format(replay.actor), f"{kind}{reason}")


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
        + ("" if attempt.outcome is AttemptOutcome.retry else f", {translate(str(attempt.outcome))}"),
        evidence(attempt),
        waited=translate("waited {}").format(show_span(wait)) if wait >= 1 else "",
    )


def attempt_state(attempt: StoredAttempt) -> str:
    """Return the stylesheet's word for an attempt's outcome."""
    states = {AttemptOutcome.done: "done", AttemptOutcome.dead: "dead"}
    return states.get(attempt.outcome, "failed")


def _number(history: EventHistory, delivery: StoredDelivery, run: int, n: int) -> str:
    most = history.most(delivery.destination)
    count = translate("attempt {}").format(n) if most is None else translate("attempt {} of {}").format(n, max(most, n))
    return f"{count}, {translate('run {}').format(run)}" if run > 1 else count


def evidence(attempt: StoredAttempt) -> str:
    """Return the details of an attempt, in one line."""
    took_ = took((attempt.ended_at - attempt.started_at).total_seconds())
    if attempt.outcome is AttemptOutcome.done:
        status = attempt.evidence.status
        if status is not None:
            return f"{status} · {took_}"
        parts = [translate("in {}").format(took_)]
        if attempt.result is not None:
            parts.append(translate("returned {}").format(first_line(attempt.result.decode(), 60)))
        return " · ".join(parts)
    parts = [translate("{} after {}").format(answer(attempt), took_)]
    if attempt.category is Category.permanent:  # the others are tried again, which the timeline shows
        parts.append(translate("refused for good"))
    return " · ".join(parts)


def answer(attempt: StoredAttempt) -> str:
    """Return the answer to an attempt: the error, the status, or the fate of the worker."""
    if attempt.outcome is AttemptOutcome.crashed:
        return translate("the worker was lost")
    if attempt.evidence.error:
        return first_line(attempt.evidence.error)
    return translate("no answer") if attempt.evidence.status is None else str(attempt.evidence.status)


def _ahead(history: EventHistory, delivery: StoredDelivery) -> Moment:
    name = delivery.destination
    if delivery.status is DeliveryStatus.leased:
        number = _number(history, delivery, delivery.run, max(delivery.attempts, 1))
        return Moment(history.now, "leased", f"{name}, {number}, {translate('in progress')}", "", due_at=history.now)
    number = _number(history, delivery, delivery.run, delivery.attempts + 1)
    level = history.levels.get(name)
    next_ = next_step(delivery, level, history.now)
    if delivery.due_at is None or is_held(delivery, level, history.now):
        state = "pending" if delivery.due_at is None else "paused"
        return Moment(history.now, state, f"{name}, {number}", next_, due_at=history.now)
    return Moment(delivery.due_at, "future", f"{name}, {number}", next_, due_at=delivery.due_at)


def is_held(delivery: StoredDelivery, level: Level | None, now: datetime) -> bool:
    """Tell whether a pending delivery waits for its destination, and not for its own time."""
    if level is None or delivery.due_at is None or not held_back(level, now):
        return False
    return delivery.due_at <= (level.open_until if level.paused_at is None and level.open_until else now)


def next_step(delivery: StoredDelivery, level: Level | None, now: datetime) -> str:
    """Return what a pending delivery waits for: its subject, its destination, or a time."""
    if delivery.blocked_by is not None:
        return translate("waiting for an earlier event of its subject")
    if delivery.due_at is None:
        return translate("held")
    if is_held(delivery, level, now):
        return held_back(level, now)
    if delivery.due_at <= now:
        return translate("due now")
    return translate("retry at {}" if delivery.attempts else "due at {}").format(utc(delivery.due_at))


def held_back(level: Level | None, now: datetime) -> str:
    """Return why a destination gets nothing now, and until when; empty where it does."""
    if level is None:
        return ""
    if level.paused_at is not None:
        return translate("paused by {} since {}").format(level.paused_by, utc(level.paused_at))
    if level.open_until is None:
        return ""
    if level.open_until > now:
        return translate("held back until {}: {} failures in a row").format(utc(level.open_until), level.failures)
    return translate("held back: the next attempt of its destination decides")


def _end(delivery: StoredDelivery, last: StoredAttempt | None) -> Moment | None:
    """Return the end of a delivery that has no attempt, such as a discard."""
    at = delivery.settled_at
    if at is None:
        return None
    name = delivery.destination
    if delivery.status is DeliveryStatus.discarded:
        reason = f"“{delivery.reason}”" if delivery.reason else ""
        return Moment(at, "discarded", f"{name}, {translate('discarded')}", reason)
    if delivery.note == "stale":
        return Moment(at, "stale", f"{name}, {translate('stale')}", translate("a later state was delivered before it"))
    if delivery.note == "coalesced":
        covered = translate("covered by a newer event of its subject")
        return Moment(at, "done", f"{name}, {translate('coalesced')}", covered)
    if delivery.status is DeliveryStatus.dead and (last is None or last.outcome is not AttemptOutcome.dead):
        return Moment(at, "dead", f"{name}, {translate('dead')}", delivery.reason or "")
    return None


LEFT: Final = 120.0
WIDTH: Final = 1040.0
"""Width that a small laptop shows without scrolling."""
COLUMNS: Final = 60
"""Moments that fit; with more, the latest."""
LEAST: Final = 9.0
"""Pixels between two moments, however near they are: both are seen."""
FOLDED: Final = 92.0
"""Pixels of a gap that is too long to be drawn to scale."""
TICK: Final = 64.0
LETTER: Final = 5.9
"""Pixels of a letter of a label, about."""
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
    """The horizontal positions of moments: to one scale, except that long gaps are folded to one width."""

    def __init__(self, points: Sequence[tuple[datetime, int]], room: float) -> None:
        self.columns: list[_Column] = []
        for at, lane in sorted(points):
            last = self.columns[-1] if self.columns else None
            if last is None or at != last.at:
                self.columns.append(_Column(at, {lane}))
            else:
                last.lanes.add(lane)
        self.columns = self.columns[-COLUMNS:]
        self._place(room)

    def _place(self, room: float) -> None:
        pairs = list(zip(self.columns, self.columns[1:], strict=False))
        gaps = [max((after.at - before.at).total_seconds(), 0.0) for before, after in pairs]
        longest = fold_above(gaps)
        folded = sum(gap > longest for gap in gaps)
        short = sum(gap for gap in gaps if gap <= longest)
        least = LEAST * (len(gaps) - folded)
        self.per_second = max(room - folded * FOLDED - least, 200.0) / short if short else 0.0
        """Pixels of a second, where nothing is folded."""
        x = LEFT
        self.folds: list[float] = []
        for column, gap in zip(self.columns, [*gaps, 0.0], strict=True):
            column.x = round(x, 1)
            if gap > longest:
                self.folds.append(round(x + FOLDED / 2, 1))
            x += FOLDED if gap > longest else LEAST + gap * self.per_second
        self.end = self.columns[-1].x if self.columns else LEFT

    def holds(self, at: datetime) -> bool:
        """Tell whether a moment is late enough to be drawn."""
        return bool(self.columns) and at >= self.columns[0].at

    def column(self, at: datetime, lane: int) -> _Column:
        """Return the column of a moment of a lane."""
        fits = [column for column in self.columns if lane in column.lanes and column.at <= at]
        return fits[-1] if fits else self.columns[0]

    def room_after(self, x: float, lane: int) -> float:
        """Return the pixels up to the next moment of a lane."""
        return next((column.x for column in self.columns if lane in column.lanes and column.x > x), x + 140) - x

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


def fold_above(gaps: Sequence[float]) -> float:
    """Return the longest gap that is drawn to scale: a longer one would leave no room for what is short."""
    short = sorted(gap for gap in gaps if gap > 0)
    limit = inf
    for shorter, longer in pairwise(short):
        if longer > 6 * max(sum(gap for gap in short if gap <= shorter), 0.02):
            limit = shorter
            break
    return limit


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
    drawn.names = [(translate("arrivals"), 38.0), *[(d.destination, _y(lane)) for lane, d in enumerate(deliveries, 1)]]
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
    drawn.folds = scale.folds
    is_fine = scale.per_second > 40  # seconds alone would repeat themselves
    last = -100.0
    for column in scale.columns:
        if column.x - last < (TICK + 18 if is_fine else TICK):
            continue
        last = column.x
        is_today = (now - column.at).total_seconds() < 43_200
        text = column.at.strftime("%H:%M:%S" if is_today else "%d %b %H:%M")
        drawn.ticks.append((column.x, f"{text}.{column.at.microsecond // 1000:03}" if is_fine and is_today else text))


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
            block = _block(attempt, x, y, scale.per_second, scale.room_after(x, lane))
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
        n = delivery.attempts + 1
        number = translate("attempt {}").format(n) if most is None else translate("attempt {} of {}").format(n, most)
        drawn.nexts.append(NextAttempt(x, y, number, delivery.due_at))


def _block(attempt: StoredAttempt, x: float, y: float, per_second: float, room: float) -> AttemptBlock:
    """Return the block of an attempt, as long as it took, and what fits of its label before the next one."""
    seconds = max((attempt.ended_at - attempt.started_at).total_seconds(), 0.0)
    inks = {AttemptOutcome.done: "done", AttemptOutcome.crashed: "wait"}
    result = "done" if attempt.outcome is AttemptOutcome.done else _describe(attempt)
    # Where the time after it is folded, only a part of the room is to scale.
    width = max(min(seconds * per_second, room - 3 if room > FOLDED else 0.4 * room), 6.0)
    letters = int((room - 6) / LETTER)
    label = f"{result} · {took(seconds)}"
    if len(label) > letters:
        label = took(seconds) if len(took(seconds)) <= letters else ""
    return AttemptBlock(inks.get(attempt.outcome, "dead"), x, y, round(width, 1), label)


def _describe(attempt: StoredAttempt) -> str:
    if attempt.outcome is AttemptOutcome.crashed:
        return "crashed"
    if attempt.evidence.status is not None:
        return str(attempt.evidence.status)
    word = answer(attempt).partition(":")[0]
    if " " in word:  # a whole sentence, because its first word alone is meaningless
        return "no answer"
    return word if len(word) <= 24 else f"{word[:23]}…"
