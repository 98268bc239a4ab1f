"""The life of one event, from its first arrival to its next attempt, newest first.

Arrivals, deliveries and attempts come in; moments go out, which the event's page lists and `lanes` draws. Called by
`events`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from oncehook.model import AttemptOutcome, DeliveryStatus, Outcome, StoredAttempt, StoredDelivery, StoredReplay
from oncehook.reports import ShownArrival, span
from oncehook.retry import Policy
from oncehook.web.dashboard.render import first_line, took


@dataclass(frozen=True, slots=True)
class EventHistory:
    """Everything that is known about one event's way."""

    arrivals: Sequence[ShownArrival]
    copies: int
    deliveries: Sequence[StoredDelivery]
    attempts: Mapping[bytes, Sequence[StoredAttempt]]
    """By delivery, oldest first."""
    replays: Mapping[bytes, StoredReplay]
    policies: Mapping[str, Policy | None]
    now: datetime

    def most(self, destination: str) -> int | None:
        """Return how many attempts a destination gets."""
        policy = self.policies.get(destination)
        return None if policy is None else policy.attempts


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, or will."""

    at: datetime
    state: str
    """The stylesheet's word, which also names its shape."""
    what: str
    more: str = ""
    waited: str = ""
    """How long nothing happened before it."""
    due_at: datetime | None = None
    """Set for what lies ahead."""
    compare: int | None = None
    """The number of an arrival whose body differs."""


def moments(story: EventHistory) -> list[Moment]:
    """Return all of it, newest first; what lies ahead on top."""
    found = [*_arrivals(story), *_replays(story)]
    for delivery in story.deliveries:
        found += _delivery(story, delivery)
    found.sort(key=lambda moment: (moment.due_at is not None, moment.at), reverse=True)
    return found


# -- arrivals ----------------------------------------------------------------------------------


def _arrivals(story: EventHistory) -> Iterator[Moment]:
    known = len(story.arrivals)
    for number, arrival in enumerate(story.arrivals, 1):
        # Of many copies the latest are kept: their own numbers are counted from the end.
        shown = number if number == 1 else story.copies - known + number
        yield Moment(
            arrival.at,
            str(arrival.outcome),
            f"Arrival {shown}, {arrival.outcome}",
            _about(story, arrival),
            compare=number if arrival.body_differs else None,
        )


def _about(story: EventHistory, arrival: ShownArrival) -> str:
    if arrival.outcome is Outcome.accepted:
        count = len(story.deliveries)
        made = "no route matches" if not count else f"{count} deliver{'y' if count == 1 else 'ies'} made"
        return f"stored, {made}"
    return "same key, another body" if arrival.body_differs else "same body, folded into this event"


def _replays(story: EventHistory) -> Iterator[Moment]:
    for replay in story.replays.values():
        reason = f": “{first_line(replay.reason)}”" if replay.reason else ""
        kind = f"one of {replay.planned} deliveries" if replay.planned > 1 else "one delivery"
        yield Moment(replay.created_at, "replay", f"Replay by {replay.actor}", f"{kind}{reason}")


# -- deliveries --------------------------------------------------------------------------------


def _delivery(story: EventHistory, delivery: StoredDelivery) -> Iterator[Moment]:
    previous: StoredAttempt | None = None
    for attempt in story.attempts.get(delivery.id, ()):
        yield _attempt(story, delivery, attempt, previous)
        previous = attempt
    if delivery.status in (DeliveryStatus.pending, DeliveryStatus.leased):
        yield _ahead(story, delivery)
    elif end := _end(delivery, previous):
        yield end


def _attempt(
    story: EventHistory, delivery: StoredDelivery, attempt: StoredAttempt, previous: StoredAttempt | None
) -> Moment:
    wait = 0.0 if previous is None else (attempt.started_at - previous.ended_at).total_seconds()
    return Moment(
        attempt.started_at,
        attempt_state(attempt),
        f"{delivery.destination}, {_number(story, delivery, attempt.run, attempt.n)}{_ended(attempt)}",
        evidence(attempt),
        waited=f"waited {span(wait)}" if wait >= 1 else "",
    )


def attempt_state(attempt: StoredAttempt) -> str:
    """Return the stylesheet's word for how an attempt ended."""
    states = {AttemptOutcome.done: "done", AttemptOutcome.dead: "dead"}
    return states.get(attempt.outcome, "failed")


def _ended(attempt: StoredAttempt) -> str:
    return "" if attempt.outcome is AttemptOutcome.retry else f", {attempt.outcome}"


def _number(story: EventHistory, delivery: StoredDelivery, run: int, n: int) -> str:
    most = story.most(delivery.destination)
    count = f"attempt {n}" if most is None else f"attempt {n} of {max(most, n)}"
    return f"run {run}, {count}" if run > 1 else count


def evidence(attempt: StoredAttempt) -> str:
    """Return what is known about an attempt, in one line."""
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
    """Return what came back: the error, the status, or what became of the worker."""
    if attempt.outcome is AttemptOutcome.crashed:
        return "the worker was lost"
    if attempt.evidence.error:
        return first_line(attempt.evidence.error)
    return "no answer" if attempt.evidence.status is None else str(attempt.evidence.status)


def _ahead(story: EventHistory, delivery: StoredDelivery) -> Moment:
    name = delivery.destination
    if delivery.status is DeliveryStatus.leased:
        number = _number(story, delivery, delivery.run, max(delivery.attempts, 1))
        return Moment(story.now, "leased", f"{name}, {number}, in progress", "a worker has it", due_at=story.now)
    number = _number(story, delivery, delivery.run, delivery.attempts + 1)
    if delivery.due_at is None:
        behind = "waiting for an earlier event of its subject" if delivery.blocked_by else "held"
        return Moment(story.now, "pending", f"{name}, {number}", behind, due_at=story.now)
    if delivery.due_at <= story.now:
        return Moment(delivery.due_at, "future", f"{name}, {number}", "due now", due_at=delivery.due_at)
    return Moment(delivery.due_at, "future", f"{name}, {number}", "", due_at=delivery.due_at)


def _end(delivery: StoredDelivery, last: StoredAttempt | None) -> Moment | None:
    """Return an end that no attempt tells of."""
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
