"""How long deliveries take from received to done: quantiles of a sample, for the chart of the overview.

Read off the store's own deliveries, a few for each part of the time, so that it survives a restart and costs the same
with a million events. Called by `overview`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from oncehook.admin import Admin
from oncehook.model import DeliveryStatus, Filter
from oncehook.web.drawing import Chart, Span, quantile

PARTS: Final = 12
SAMPLE: Final = 40
"""Deliveries looked at for each part."""
SHARES: Final = (0.5, 0.95, 0.99)

Values = Sequence[float | None]


class Latency:
    """Makes the chart, and keeps what is past."""

    def __init__(self) -> None:
        self._past: dict[tuple[str, int, frozenset[str] | None], Values] = {}

    async def get(self, admin: Admin, span: Span, now: datetime) -> Chart:
        """The chart of a stretch of time, in a dozen parts."""
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
    said = [f"p{100 * share:.0f} {_spoken(value or 0)}" for share, value in zip(SHARES, last, strict=True)]
    return f"Lately {', '.join(said)}."


def _spoken(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
