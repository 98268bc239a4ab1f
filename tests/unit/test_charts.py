"""Charts from counters: percentiles of buckets, spans by hand, levels backwards, and what retries look like."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from oncehook.model import ChartMark, Level
from oncehook.reports import show_route
from oncehook.routes import Route
from oncehook.web.dashboard import charts
from oncehook.web.dashboard.charts import SPANS, choose_span
from oncehook.web.dashboard.pictures import draw_map

NOW = datetime(2026, 11, 18, 12, 0, 30, tzinfo=UTC)
HOUR = SPANS[0]


def at(minutes: float) -> datetime:
    """So many minutes ago, at the beginning of a minute."""
    return NOW.replace(second=0) - timedelta(minutes=minutes)


# -- how long it took --------------------------------------------------------------------------


def test_a_percentile_lies_inside_its_bucket() -> None:
    counts = {0.1: 90, 1.0: 9, float("inf"): 1}
    assert 10 <= (charts.spread(counts, 0.5) or 0) <= 100
    assert 400 <= (charts.spread(counts, 0.95) or 0) <= 1000
    assert charts.spread(counts, 0.999) == pytest.approx(2000, rel=0.6)
    assert charts.spread({}, 0.5) is None


def test_percentiles_of_a_destination() -> None:
    flows = {"took:0.05": [(at(3), 50), (at(2), 45)], "took:5": [(at(2), 5)], "succeeded": [(at(2), 100)]}
    p50, p95 = charts.percentiles(flows)
    assert p50 is not None
    assert p95 is not None
    assert 20 <= p50 <= p95 <= 50


# -- spans -------------------------------------------------------------------------------------


def test_a_range_by_hand() -> None:
    span = choose_span("24h", at(90), at(30), NOW)
    assert (span.seconds, span.step, span.word) == (3600.0, 60.0, "")
    assert span.steps(NOW)[0] == at(90)
    assert span.steps(NOW)[-1] == at(31)
    assert span.title == "10:30 to 11:30"
    assert "from=2026-11-18T10%3A30Z" in span.query


@pytest.mark.parametrize(
    ("since", "until"),
    [
        (at(30), at(90)),
        (at(1), at(0)),
        (at(-500), at(-900)),
        (at(60 * 24 * 400), at(60 * 24 * 300)),
        (at(9e5), at(-9e5)),
    ],
)
def test_any_range_is_one_that_can_be_drawn(since: datetime, until: datetime) -> None:
    span = choose_span("", since, until, NOW)
    steps = span.steps(NOW)
    assert 1 <= len(steps) <= 220
    assert steps[0] < steps[-1] or len(steps) == 1
    assert span.end(NOW) <= NOW + timedelta(seconds=span.step)


def test_without_both_ends_it_is_a_named_span() -> None:
    assert choose_span("7d", at(3), None, NOW).word == "7d"
    assert choose_span("nonsense", None, None, NOW).word == "1h"


# -- levels ------------------------------------------------------------------------------------


def test_the_backlog_is_counted_back_from_now() -> None:
    flows = {"crm": {"pending": [(at(10), 5), (at(4), -3)], "dead": [(at(4), 2)]}, "mail": {"pending": [(at(2), 1)]}}
    levels = {"crm": Level(pending=2, dead=2), "mail": Level(pending=1)}
    made = charts.backlog(flows, levels, HOUR, NOW, 100)
    pending = [values[0] for _, values in made.rows]
    assert pending[-1] == 3
    assert pending[-3] == 3
    assert pending[-4] == 2
    assert pending[-6] == 5
    assert pending[0] == 0
    assert [values[1] for _, values in made.rows][-6:] == [0, 2, 2, 2, 2, 2]
    assert made.limits == [("watermark of dead letters", 100)]


def test_what_came_after_a_range_does_not_count_in_it() -> None:
    flows = {"crm": {"pending": [(at(10), 5), (at(4), -3)]}}
    made = charts.backlog(flows, {"crm": Level(pending=2)}, choose_span("", at(30), at(6), NOW), NOW, None)
    assert [values[0] for _, values in made.rows][-1] == 5


# -- failures and retries ----------------------------------------------------------------------


def test_failure_rates_share_their_axis() -> None:
    flows = {
        "good": {"succeeded": [(at(3), 99)], "retry": [(at(3), 1)]},
        "bad": {"succeeded": [(at(3), 10)], "died": [(at(3), 20)], "retry": [(at(3), 10)]},
        "idle": {"pending": [(at(3), 4)]},
    }
    made = charts.failure_rates(flows, HOUR, NOW)
    assert [one.name for one in made.charts] == ["bad", "good"]
    assert made.top == "100 %"
    assert [one.is_bad for one in made.charts] == [True, False]
    assert made.charts[0].figure == "75 % of 40" or made.charts[0].figure == "75.0 % of 40"
    assert [label for label, _ in made.table.rows] == [HOUR.label(at(3))]


def test_the_heat_map_knows_what_the_first_attempt_did() -> None:
    flows = {
        "crm": {
            "took:0.1": [(at(3), 100)],
            "failed:1": [(at(3), 30)],
            "failed:2": [(at(2), 10)],
            "done:2": [(at(2), 20)],
        },
        "mail": {"took:1": [(at(3), 7)]},
    }
    [(crm, cells), (mail, calm)] = charts.heat_map(flows)
    assert (crm, mail) == ("crm", "mail")
    assert cells[0] is not None
    assert (cells[0].tried, cells[0].failed) == (70, 30)
    assert cells[1] is not None
    assert (cells[1].tried, cells[1].failed, cells[1].share) == (30, 10, "33.3")
    assert cells[2] is None
    assert calm[0] is not None
    assert (calm[0].tried, calm[0].failed, calm[0].heat) == (7, 0, 0)


# -- marks and the map -------------------------------------------------------------------------


def test_marks_are_placed_by_their_time() -> None:
    marks = [ChartMark(at(30), "v1", "ana"), ChartMark(at(600), "old", "ana")]
    [placed] = charts.place_marks(marks, HOUR, NOW)
    assert placed.mark.text == "v1"
    assert 45 < placed.x < 55


def test_the_map_has_a_curve_for_each_route() -> None:
    routes = [Route("shop", "crm", when={"type": "order.*"}), Route("shop", "mail"), Route("bank", "crm")]
    made = draw_map(map(show_route, routes), {"crm": "held_back"})
    assert made is not None
    assert [(one.source, one.destination, one.label) for one in made.links] == [
        ("shop", "crm", "order.*"),
        ("shop", "mail", ""),
        ("bank", "crm", ""),
    ]
    assert [end.about for end in made.destinations] == ["held_back", ""]
    assert draw_map([], {}) is None


def test_a_sparkline_colours_only_what_failed() -> None:
    line = charts.spark([10.0, 20.0, 10.0], [0.0, 5.0, 0.0])
    assert (line.top, line.line) == (20.0, "M0.0 15.0L50.0 3.0L100.0 15.0")
    assert line.failed == "M0.0 27.0L50.0 21.0L100.0 27.0V27H0z"
    assert charts.spark([10.0, 20.0], [0.0, 0.0]).failed == ""
