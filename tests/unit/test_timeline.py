"""The drawing above an event: moments in order, what took longer never shorter, breaks where it is not to scale."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from oncehook.model import (
    ArrivalId,
    AttemptOutcome,
    DeliveryId,
    DeliveryStatus,
    EventId,
    Evidence,
    Outcome,
    StoredAttempt,
    StoredDelivery,
)
from oncehook.reports import ShownArrival, ShownRequest
from oncehook.web.dashboard.timeline import EventHistory, TimelineChart, draw

START = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)


def at(milliseconds: float) -> datetime:
    return START + timedelta(milliseconds=milliseconds)


def delivery(number: int, **fields: object) -> StoredDelivery:
    known = {
        "id": DeliveryId(bytes([number] * 16)), "event_id": EventId(bytes(16)), "source": "orders", "type": "paid",
        "destination": f"shop-{number}", "key": None, "subject": None, "status": DeliveryStatus.done, "note": None,
        "run": 1, "attempts": 1, "category": None, "last_status": None, "last_error": None, "due_at": None,
        "received_at": START, "settled_at": None, "last_replay_at": None, "replay_id": None, "reason": None,
    }  # fmt: skip
    return StoredDelivery(**(known | fields))  # type: ignore[arg-type]


def attempt(of: StoredDelivery, start: float, end: float, n: int = 1) -> StoredAttempt:
    return StoredAttempt(of.id, n, 1, n, at(start), at(end), AttemptOutcome.done, None, Evidence())


def drawn(arrivals: list[float], tries: list[list[tuple[float, float]]], now: float = 10_000_000) -> TimelineChart:
    """Draw arrivals and the attempts of some deliveries, in milliseconds."""
    came = [
        ShownArrival(ArrivalId(bytes(16)), Outcome.conflict if n else Outcome.accepted, at(when), REQUEST, bool(n))
        for n, when in enumerate(arrivals)
    ]
    deliveries = [delivery(number) for number, _ in enumerate(tries)]
    made = {
        one.id: [attempt(one, start, end, n) for n, (start, end) in enumerate(spans, 1)]
        for one, spans in zip(deliveries, tries, strict=True)
    }
    chart = draw(EventHistory(came, len(came), deliveries, made, {}, {}, at(now)))
    assert chart is not None
    return chart


REQUEST = ShownRequest("POST", "/in/orders", [])


def test_what_happened_during_an_attempt_is_drawn_inside_it() -> None:
    chart = drawn([0, 40], [[(3, 76)], [(2, 20)]])
    long, short = chart.tries
    conflict = chart.seen[1].x
    assert long.x < conflict < long.x + long.width
    assert short.x + short.width < conflict


def test_what_took_longer_is_drawn_longer() -> None:
    chart = drawn([0], [[(3, 76), (10_076, 10_081), (70_000, 70_400)]])
    first, second, third = [one.width for one in chart.tries]
    assert second < first < third
    assert abs(first / third - 73 / 400) < 0.01
    assert chart.tries[0].x - chart.seen[0].x < 20  # three milliseconds
    assert not chart.is_long


def test_an_attempt_of_minutes_is_never_shorter_than_one_of_milliseconds() -> None:
    chart = drawn([0], [[(5, 85), (10_000, 190_000), (260_000, 260_030)]])
    quick, slow, last = [one.width for one in chart.tries]
    assert slow >= quick > last
    x = chart.tries[1].x
    assert any(x < fold < x + slow for fold in chart.folds)  # it says that this is not to scale


def test_moments_of_all_lanes_are_in_order() -> None:
    chart = drawn([0, 1, 2, 500], [[(n * 7, n * 7 + 5) for n in range(1, 40)], [(2.5, 400)]])
    starts = [(one.x, one.x + one.width) for one in chart.tries[:39]]
    for (_, end), (start, _) in pairwise(starts):
        assert end <= start
    assert chart.tries[-1].x + chart.tries[-1].width > starts[-1][1]
