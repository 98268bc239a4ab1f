"""The overview: six numbers, two charts, what waits and what died recently. Open pages reload it as things happen.

Numbers come from counters, so a million events cost no more than one; latency comes from a sample of deliveries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import urlencode

from starlette.responses import Response

from oncehook.model import Filter
from oncehook.web.dashboard import charts
from oncehook.web.dashboard.charts import SPANS, Chart, Span, Spark, fill, spark, total
from oncehook.web.dashboard.context import Frame, PageContext
from oncehook.web.dashboard.render import number, percent, stopwatch
from oncehook.web.language import plural, translate


@dataclass(frozen=True, slots=True)
class Stat:
    label: str
    value: str
    unit: str
    sub: str
    link: str
    ink: str = ""
    line: Spark | None = None
    is_crossed: bool = False
    share: float | None = None
    """Part of its watermark that is reached, where there is no sparkline."""


async def overview(context: PageContext) -> Response:
    admin, now = context.admin, context.now
    if not (await admin.events(Filter(), limit=1)).items:
        sources = await admin.sources()
        kinds = await admin.sample_types(sources[0].name) if sources else ()
        return await context.page("welcome.html", sources=sources, sample=next(iter(kinds), None))
    span = context.span()
    steps, until = span.steps(now), span.end(now)
    flows = await admin.series(steps[0], span.step)
    flows = {name: [point for point in points if point[0] < until] for name, points in flows.items()}
    before = await admin.series(steps[0] - timedelta(seconds=span.seconds), span.step)
    before = {name: [point for point in points if point[0] < steps[0]] for name, points in before.items()}
    frame = await context.frames.get(context.admin)
    destinations = await admin.destinations()
    return await context.page(
        "overview.html",
        span=span,
        spans=SPANS,
        stats=_stats(span, steps, flows, before, frame),
        arrivals=_arrivals(span, steps, flows),
        latency=await _latency(context, span, flows),
        shows_ack=context.parameter("latency") == "ack",
        backlog=charts.backlog(await context.flows.get(admin, span, now), frame.levels, span, now, _limit(frame))
        if not admin.scope.is_limited
        else None,
        marks=charts.place_marks(await admin.marks(steps[0]), span, now),
        destinations=sorted(destinations, key=lambda one: (-one.level.pending, -one.level.dead, one.name)),
        most=max((one.level.pending + one.level.dead for one in destinations), default=0),
        causes=sorted(await admin.causes(), key=lambda cause: cause.last_at, reverse=True)[:6],
        bar=charts.bar,
        callouts=await context.callouts(),
    )


async def _latency(context: PageContext, span: Span, flows: charts.Flows) -> Chart:
    if context.parameter("latency") == "ack":
        return charts.ack_chart(flows, span, context.now)
    return await context.latency.get(context.admin, span, context.now)


def _limit(frame: Frame) -> float | None:
    return next((mark.limit for mark in frame.system.watermarks if mark.name == "dead"), None)


# -- six numbers -------------------------------------------------------------------------------


def _stats(
    span: Span, steps: Sequence[datetime], flows: charts.Flows, before: charts.Flows, frame: Frame
) -> list[Stat]:

    def flow(*names: str) -> list[float]:
        columns = [fill(flows.get(name), steps, span.step) for name in names]
        return [float(sum(values)) for values in zip(*columns, strict=True)]

    received, rejected = total(flows, "received"), total(flows, "rejected")
    folded, conflicts = total(flows, "duplicate"), total(flows, "conflict")
    done = total(flows, "succeeded")
    taken = f"{number(received - folded - conflicts)} {translate('accepted')}"
    return [
        Stat("Received", *_rate(received, span), _change(received, total(before, "received"), span) or taken,
             _events(span.words), line=spark(flow("received"))),
        Stat("Duplicates", percent(folded + conflicts, received), "%",
             f"{number(folded)} {translate('identical')}, {number(conflicts)}"
             f" {plural(conflicts, 'conflict', 'conflicts')}",
             _events(f"(outcome:duplicate OR outcome:conflict) {span.words}"), "twin",
             spark(flow("duplicate", "conflict"))),
        Stat("Rejected", percent(rejected, received + rejected), "%", f"{number(rejected)} {translate('rejected')}",
             f"/rejected?{span.query}", "odd", spark(flow("rejected"))),
        Stat("Delivered", *_rate(done, span),
             _change(done, total(before, "succeeded"), span) or f"{number(done)} {translate('in total')}",
             _events(f"status:done {span.words}"), line=spark(flow("succeeded"))),
        _oldest(frame),
        _dead(frame, spark(flow("died"))),
    ]  # fmt: skip


def _events(query: str) -> str:
    """Return the address of the list behind a number."""
    return f"/events?{urlencode({'query': query})}"


RATES: Final = ((60.0, "/min"), (3600.0, "/h"), (86_400.0, "/day"))


def _unit(count: int, span: Span) -> tuple[float, str]:
    """Return the unit of time for a rate, and its sign: the shortest in which it is at least 1."""
    return next((unit for unit in RATES if count * unit[0] >= span.seconds), RATES[-1] if count else RATES[0])


def _rate(count: int, span: Span) -> tuple[str, str]:
    """Return a rate and its unit."""
    seconds, sign = _unit(count, span)
    value = count * seconds / span.seconds
    return number(round(value, 1) if value < 100 else round(value)), sign


def _change(now: int, before: int, span: Span) -> str:
    """Return the difference to the span before, in the unit of the rate; empty where nothing was counted then."""
    if not before:
        return ""
    change = (now - before) * _unit(now, span)[0] / span.seconds
    return f"{'+' if change >= 0 else '−'}{number(abs(round(change, 1)))} vs {translate(span.before)}"


def _oldest(frame: Frame) -> Stat:
    waits = [level.oldest_due for level in frame.levels.values() if level.oldest_due is not None]
    mark = next((mark for mark in frame.system.watermarks if mark.name == "oldest_due"), None)
    waiting = sum(level.pending for level in frame.levels.values())
    sub = f"{number(waiting)} {translate('waiting')}"
    sub += "" if mark is None else f", {translate('watermark')} {stopwatch(mark.limit)}"
    return Stat(
        "Oldest due", stopwatch(max(waits)) if waits else "–", "min" if waits and max(waits) < 3600 else "",
        sub, "/events?query=status:pending", is_crossed=mark is not None and mark.crossed,
        share=None if mark is None else min((mark.level or 0) / mark.limit, 1.0),
    )  # fmt: skip


def _dead(frame: Frame, line: Spark) -> Stat:
    mark = next((mark for mark in frame.system.watermarks if mark.name == "dead"), None)
    sub = translate("to replay or discard") if mark is None else f"{translate('watermark')} {number(mark.limit)}"
    is_crossed = mark is not None and mark.crossed
    ink = "dead" if is_crossed else "wait"
    return Stat("Dead letters", number(frame.dead), "", sub, "/dead", ink, line, is_crossed)


# -- charts ------------------------------------------------------------------------------------


def _arrivals(span: Span, steps: Sequence[datetime], flows: charts.Flows) -> Chart:
    accepted, twins, conflicts, rejected = (
        fill(flows.get(name), steps, span.step) for name in ("accepted", "duplicate", "conflict", "rejected")
    )
    folded = [one + other for one, other in zip(twins, conflicts, strict=True)]
    sums = [sum(three) for three in zip(accepted, folded, rejected, strict=True)]
    top = max(range(len(sums)), key=sums.__getitem__)
    return Chart(
        [("accepted", "done"), ("duplicate", "twin"), ("rejected", "odd")],
        [(span.label(at), row) for at, row in zip(steps, zip(accepted, folded, rejected, strict=True), strict=True)],
        plural(
            sum(sums),
            "{} arrival: {} accepted, {} duplicate, {} rejected. Highest {} at {}.",
            "{} arrivals: {} accepted, {} duplicate, {} rejected. Highest {} at {}.",
        ).format(
            *map(number, (sum(sums), sum(accepted), sum(folded), sum(rejected), sums[top])), span.label(steps[top])
        ),
        steps,
        span.step,
    )
