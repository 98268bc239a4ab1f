"""The life of one event, from its first arrival to its next attempt, newest first.

Arrivals, deliveries and attempts come in. `moments` builds the list of the event's page, and `draw` the chart above it:
one lane for arrivals, one for each delivery, time to the right, long waits folded. The list has the same content, so
the chart is hidden from screen readers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        failed = f"{level.failures} {plural(level.failures, 'delivery failed', 'deliveries failed in a row')}"
        return translate("held back until {}: {}").format(utc(level.open_until), failed)
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
COLUMNS: Final = 100
"""Moments that fit; with more, the latest."""
LEAST: Final = 4.0
"""Pixels between two moments, however near they are: their order is seen."""
FOLDED: Final = 92.0
"""Least pixels of a gap that is too long to be drawn to scale."""
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
    label: str = ""
    """Its outcome, where there is room for the word."""


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


class _Scale:
    """The horizontal positions of moments: linear in time, except that the axis is broken at gaps that are too long.

    All breaks have one width, and no stretch without a break is wider: what took longer is never drawn shorter.
    """

    def __init__(self, moments: Iterable[datetime], room: float) -> None:
        self.times = sorted(set(moments))[-COLUMNS:]
        gaps = [(after - before).total_seconds() for before, after in pairwise(self.times)]
        longest = fold_above(gaps)
        stretches = [0.0]
        for gap in gaps:
            if gap > longest:
                stretches.append(0.0)
            else:
                stretches[-1] += gap
        breaks, widest = len(stretches) - 1, max(stretches)
        room -= LEAST * (len(gaps) - breaks)
        self.per_second = 0.0
        """Pixels of a second, where the axis is not broken."""
        if widest:
            whole = room / (sum(stretches) + breaks * widest)
            self.per_second = min(whole, max(room - breaks * FOLDED, 60.0) / sum(stretches))
        broken = max(FOLDED, widest * self.per_second)
        self.folds: list[float] = []
        self.places = [LEFT]
        for gap in gaps:
            width = broken if gap > longest else max(gap * self.per_second, LEAST)
            if gap > longest:
                self.folds.append(round(self.places[-1] + width / 2, 1))
            self.places.append(self.places[-1] + width)

    @property
    def end(self) -> float:
        return self.places[-1]

    def holds(self, at: datetime) -> bool:
        """Tell whether a moment is late enough to be drawn."""
        return bool(self.times) and at >= self.times[0]

    def x(self, at: datetime) -> float:
        """Return the x of a moment; of one that has no place of its own, between its neighbours."""
        place = bisect_right(self.times, at) - 1
        if place < 0:
            return self.places[0]
        if place == len(self.times) - 1:
            return round(self.places[place] + (60.0 if at > self.times[place] else 0.0), 1)
        before, after = self.times[place : place + 2]
        share = (at - before) / (after - before)
        return round(self.places[place] + (self.places[place + 1] - self.places[place]) * share, 1)


def fold_above(gaps: Sequence[float]) -> float:
    """Return the longest gap that is drawn to scale: a longer one would leave no room for what is short."""
    short = sorted(gap for gap in gaps if gap > 0)
    limit = inf
    for shorter, longer in pairwise(short):
        if longer > 6 * max(sum(gap for gap in short if gap <= shorter), 0.05):
            limit = shorter
            break
    return limit


def draw(history: EventHistory) -> TimelineChart | None:
    """Return the drawing; None where everything happened at one moment."""
    deliveries = list(history.deliveries[:LANES])
    moments = [arrival.at for arrival in history.arrivals]
    for delivery in deliveries:
        for attempt in history.attempts.get(delivery.id, ()):
            moments += [attempt.started_at, max(attempt.started_at, attempt.ended_at)]
        if next_at := _next_at(delivery, history.now):
            moments.append(next_at)
    if not deliveries:
        return None
    scale = _Scale(moments, WIDTH - LEFT - 150)
    if len(scale.times) < 2:
        return None
    height = 46.0 * (len(deliveries) + 1) + 20
    now = scale.x(history.now) if any(_next_at(d, history.now) for d in history.deliveries) else None
    drawn = TimelineChart(max(WIDTH, round(scale.end + 150, 1)), height + 30, now)
    drawn.names = [(translate("arrivals"), 38.0), *[(d.destination, _y(lane)) for lane, d in enumerate(deliveries, 1)]]
    _draw_time(drawn, scale, history.now)
    _draw_arrivals(drawn, scale, history.arrivals)
    for lane, delivery in enumerate(deliveries, 1):
        _draw_lane(drawn, scale, history, delivery, lane)
    return drawn


def _draw_arrivals(drawn: TimelineChart, scale: _Scale, arrivals: Sequence[ShownArrival]) -> None:
    """Draw each arrival; of several alike at one place, the first."""
    shown: list[tuple[str, float]] = []
    for arrival in arrivals:
        outcome, x = str(arrival.outcome), scale.x(arrival.at)
        if scale.holds(arrival.at) and not (shown and shown[-1][0] == outcome and x - shown[-1][1] <= 8):
            shown.append((outcome, x))
    ends = [*(x for _, x in shown[1:]), drawn.width]
    for (outcome, x), end in zip(shown, ends, strict=False):
        fits = len(outcome) * LETTER < end - x - 14
        drawn.seen.append(ArrivalMark(outcome, x, outcome if fits else ""))


def _y(lane: int) -> float:
    return 38.0 + 46.0 * lane


def _next_at(delivery: StoredDelivery, now: datetime) -> datetime | None:
    """Return the time of a delivery's next attempt, if that is still to come."""
    is_ahead = delivery.status is DeliveryStatus.pending and delivery.due_at is not None and delivery.due_at > now
    return delivery.due_at if is_ahead else None


def _draw_time(drawn: TimelineChart, scale: _Scale, now: datetime) -> None:
    drawn.folds = scale.folds
    is_fine = scale.per_second > 40  # seconds alone would repeat themselves
    last, before = -100.0, ""
    for at in scale.times:
        x = scale.x(at)
        is_today = (now - at).total_seconds() < 43_200
        text = at.strftime("%H:%M:%S" if is_today else "%d %b %H:%M")
        text += f".{at.microsecond // 1000:03}" if is_fine and is_today else ""
        if x - last >= (TICK + 18 if is_fine else TICK) and text != before:
            drawn.ticks.append((x, text))
            last, before = x, text


def _draw_lane(drawn: TimelineChart, scale: _Scale, history: EventHistory, delivery: StoredDelivery, lane: int) -> None:
    y = _y(lane)
    end: float | None = None
    previous: StoredAttempt | None = None
    attempts = history.attempts.get(delivery.id, ())
    next_at = _next_at(delivery, history.now)
    starts = [scale.x(one.started_at) for one in attempts]
    starts.append(drawn.width if next_at is None else scale.x(next_at))
    for attempt, (x, next_x) in zip(attempts, pairwise(starts), strict=True):
        if scale.holds(attempt.started_at):
            if previous is not None and end is not None and x - end > 34:
                wait = (attempt.started_at - previous.ended_at).total_seconds()
                drawn.waits.append(WaitLine(end + 8, x - 6, y, show_span(wait)))
            block = _block(attempt, x, y, max(scale.x(attempt.ended_at) - x, LEAST), next_x - x)
            drawn.tries.append(block)
            end = x + block.width
        previous = attempt
    if next_at is not None:
        x = starts[-1]
        start = (end if end is not None else LEFT) + 8
        since = previous.ended_at if previous else history.now
        drawn.waits.append(WaitLine(start, x - 10, y, show_span((next_at - since).total_seconds()), is_ahead=True))
        most = history.most(delivery.destination)
        n = delivery.attempts + 1
        number = translate("attempt {}").format(n) if most is None else translate("attempt {} of {}").format(n, most)
        drawn.nexts.append(NextAttempt(x, y, number, next_at))


def _block(attempt: StoredAttempt, x: float, y: float, width: float, room: float) -> AttemptBlock:
    """Return the block of an attempt, from its start to its end, and what fits of its label before the next one."""
    seconds = max((attempt.ended_at - attempt.started_at).total_seconds(), 0.0)
    inks = {AttemptOutcome.done: "done", AttemptOutcome.crashed: "wait"}
    result = "done" if attempt.outcome is AttemptOutcome.done else _describe(attempt)
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
