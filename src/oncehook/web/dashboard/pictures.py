"""The page of charts: what fails, how long it takes, what waits, and at which attempt deliveries recover.

All of it comes from one read of the counters of all destinations, which is kept for a few seconds: many open pages cost
no more than one. The map of sources, routes and destinations is drawn from the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from starlette.responses import Response

from oncehook import clock
from oncehook.admin import Admin, Flows
from oncehook.reports import ShownRoute
from oncehook.web.dashboard import charts
from oncehook.web.dashboard.charts import SPANS, Span
from oncehook.web.dashboard.context import PageContext
from oncehook.web.language import translate

FRESH: Final = 5.0
"""Seconds for which what was read is shown again."""
MOST_KEPT: Final = 20


class DestinationFlows:
    """The counters of all destinations over a span, read at most every few seconds."""

    def __init__(self) -> None:
        self._kept: dict[tuple[datetime, float], tuple[Mapping[str, Flows], float]] = {}

    async def get(self, admin: Admin, span: Span, now: datetime) -> Mapping[str, Flows]:
        """Return the counters by destination, only those of the span."""
        if admin.scope.is_limited:
            return {}
        start, clock_now = span.steps(now)[0], clock.steady()
        self._kept = {key: kept for key, kept in self._kept.items() if kept[1] > clock_now}
        if (start, span.step) not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            found = await admin.destination_series(start, span.step)
            self._kept[start, span.step] = found, clock_now + FRESH
        return self._kept[start, span.step][0]


def within(flows: Mapping[str, Flows], span: Span, now: datetime) -> dict[str, Flows]:
    """Return what was counted within a span that ends before now."""
    until = span.end(now)
    return {
        name: {what: [point for point in points if point[0] < until] for what, points in own.items()}
        for name, own in flows.items()
    }


async def pictures(context: PageContext) -> Response:
    """Show what failed, how long it took, what waited and at which attempt it was done, by destination."""
    admin, now = context.admin, context.now
    span = context.span()
    flows = await context.flows.get(admin, span, now)
    inside = within(flows, span, now)
    frame = await context.frames.get(admin)
    mark = next((mark for mark in frame.system.watermarks if mark.name == "dead"), None)
    return await context.page(
        "charts.html",
        span=span,
        spans=SPANS,
        failures=charts.failure_rates(inside, span, now),
        latencies=charts.latencies(inside, span, now),
        heat=charts.heat_map(inside),
        backlog=charts.backlog(flows, frame.levels, span, now, None if mark is None else mark.limit),
        volume=await _volume(context, span),
        marks=charts.place_marks(await admin.marks(span.steps(now)[0]), span, now),
        is_limited=admin.scope.is_limited,
        first=span.steps(now)[0],
        last=span.steps(now)[-1] + timedelta(seconds=span.step),
    )


INKS: Final = ("done", "twin", "wait", "odd", "dead")


async def _volume(context: PageContext, span: Span) -> charts.Chart:
    """Return what was received, by source: the largest ones, and all others together."""
    steps = span.steps(context.now)
    found: dict[str, list[int]] = {}
    for source in await context.admin.sources():
        flows = await context.admin.series(steps[0], span.step, source=source.name)
        values = charts.fill(flows.get("received"), steps, span.step)
        if any(values):
            found[source.name] = values
    ranked = sorted(found, key=lambda name: -sum(found[name]))
    shown, rest = ranked[:4], ranked[4:]
    columns = {name: found[name] for name in shown}
    if rest:
        columns[translate("others")] = [sum(values) for values in zip(*(found[name] for name in rest), strict=True)]
    rows = [(span.label(at), [values[n] for values in columns.values()]) for n, at in enumerate(steps)]
    parts = [f"{name} {sum(values):,}" for name, values in columns.items()]
    sentence = translate("Received: {}.").format(", ".join(parts) or translate("nothing in this time"))
    return charts.Chart(list(zip(columns, INKS, strict=False)), rows, sentence, steps, span.step)


# -- the map -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MapEnd:
    name: str
    y: float
    about: str


@dataclass(frozen=True, slots=True)
class MapLink:
    path: str
    y: float
    label: str
    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class RouteMap:
    """Sources on the left, destinations on the right, a curve for each route."""

    height: float
    sources: Sequence[MapEnd]
    destinations: Sequence[MapEnd]
    links: Sequence[MapLink]


ROW: Final = 34.0
MOST_MAPPED: Final = 40


def draw_map(routes: Iterable[ShownRoute], about: Mapping[str, str]) -> RouteMap | None:
    """Return the map of these routes; None where there is none. `about`: a line on each destination's state."""
    known = list(routes)[:MOST_MAPPED]
    if not known:
        return None
    sources = list(dict.fromkeys(route.source for route in known))
    destinations = list(dict.fromkeys(route.destination for route in known))
    tall = max(len(sources), len(destinations))
    left = _spread(sources, tall)
    right = _spread(destinations, tall)
    links = []
    for route in known:
        y1, y2 = left[route.source], right[route.destination]
        path = f"M212 {y1:g}C420 {y1:g} 380 {y2:g} 588 {y2:g}"
        links.append(MapLink(path, (y1 + y2) / 2, route.condition, route.source, route.destination))
    return RouteMap(
        tall * ROW + 8,
        [MapEnd(name, y, "") for name, y in left.items()],
        [MapEnd(name, y, about.get(name, "")) for name, y in right.items()],
        links,
    )


def _spread(names: Sequence[str], tall: int) -> dict[str, float]:
    """Return the height of each name: evenly over the whole."""
    step = tall * ROW / len(names)
    return {name: round(step * (n + 0.5) + 4, 1) for n, name in enumerate(names)}
