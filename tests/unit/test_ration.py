"""A flood of requests is no flood of lines: what an outsider can cause is a few lines a second, and a sum."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path

import pytest

import oncehook
from oncehook import clock
from oncehook.errors import Encoded, Overloaded, Rejected, SignatureInvalid, TooLarge
from oncehook.logs import FEW, Ration
from oncehook.model import Arrival
from oncehook.observe import Observer, Refusals
from oncehook.sources import Source, build
from oncehook.verify.schemes import Nothing

PACKAGE = Path(oncehook.__file__).parent
ORDERS = build("orders", verify=Nothing(), key="$.id")

Caught = pytest.LogCaptureFixture


@pytest.fixture
def caught(caplog: Caught) -> Caught:
    caplog.set_level(logging.INFO, "oncehook")
    caplog.clear()
    return caplog


def told(caught: Caught) -> list[tuple[str, dict[str, object]]]:
    return [(getattr(one, "moment", one.msg), getattr(one, "fields", {})) for one in caught.records]


def forge(observer: Observer, times: int, source: Source | None, error: Rejected) -> None:
    for n in range(times):
        name = f"guess-{n}" if source is None else source.name
        observer.note_rejection(Arrival(name, [], b"{}", peer="192.0.2.1"), source, error)


def test_of_a_flood_of_forgeries_a_few_are_logged_and_the_rest_in_sum(caught: Caught) -> None:
    observer = Observer("sqlite")
    forge(observer, 1000, ORDERS, SignatureInvalid("mismatch"))
    forge(observer, 200, None, SignatureInvalid("unknown source"))
    forge(observer, 30, ORDERS, TooLarge())
    forge(observer, 4, ORDERS, Encoded())
    assert [moment for moment, _ in told(caught)] == ["arrival.rejected"] * FEW
    observer.sum_up()
    moment, fields = told(caught)[-1]
    assert (len(told(caught)), moment) == (FEW + 1, "arrival.rejected.summary")
    kinds = {
        "orders: mismatch": 1000 - FEW,
        "unknown: unknown source": 200,
        "orders: too_large": 30,
        "orders: encoded": 4,
    }
    assert fields == {"count": 1234 - FEW, "kinds": kinds}, "a name that a stranger made up is told in no sum"
    caught.clear()
    observer.sum_up()
    assert told(caught) == [], "what was told is not told again"
    forge(observer, 1, ORDERS, SignatureInvalid("stale"))
    assert [fields["reason"] for _, fields in told(caught)] == ["stale"], "in the next second there is a new ration"


def test_what_cannot_be_stored_and_conflicts_are_rationed_too(caught: Caught) -> None:
    observer = Observer("sqlite")
    for _ in range(100):
        observer.unavailable("orders", Overloaded())
        observer.arrival("orders", ["conflict"], 0.1, 1, [], [])
    observer.sum_up()
    words = [moment for moment, _ in told(caught)]
    assert words.count("arrival.error") == words.count("arrival.conflict") == FEW
    assert dict(told(caught))["arrival.error.summary"]["kinds"] == {"orders: overloaded": 100 - FEW}
    assert dict(told(caught))["arrival.conflict.summary"]["kinds"] == {"orders": 100 - FEW}


def test_where_nobody_sums_up_a_later_line_does(caught: Caught) -> None:
    one, log = Ration(), logging.getLogger("oncehook.web")
    for _ in range(20):
        one.log(log, logging.ERROR, "page.failed", {}, kind="/")
    clock.forward(3)
    try:
        one.log(log, logging.ERROR, "page.failed", {}, kind="/")
    finally:
        clock.forward(-3)
    assert [moment for moment, _ in told(caught)] == ["page.failed"] * FEW + ["page.failed.summary", "page.failed"]


def test_a_sum_is_bounded_and_costs_nothing_where_nobody_reads_it(caught: Caught) -> None:
    one, log = Ration(), logging.getLogger("oncehook.web")
    for n in range(1000):
        one.log(log, logging.DEBUG, "page.failed", {}, kind=str(n))
    assert one._rest == {}
    for n in range(1000):
        one.log(log, logging.ERROR, "page.failed", {}, kind=str(n))
    one.sum_up()
    assert len(json.dumps(told(caught)[-1])) < 1000


def test_refusals_fill_no_audit_log() -> None:
    refusals, rows = Refusals(), []
    try:
        for second in range(1800):
            for n in range(10):
                refusals.add("token", f"192.0.2.{(second * 10 + n) % 256}")
            if row := refusals.take():
                rows.append(row)
            clock.forward(1)
    finally:
        clock.forward(-1800)
    assert len(rows) == 3, "one at once, then one in ten minutes"
    assert [row["by"] for row in rows] == [{"token": 10}, {"token": 6000}, {"token": 6000}]
    assert all(len(row["from"]) <= Refusals.MOST + 1 for row in rows)
    assert refusals.take() == {}
    last = refusals.take(is_last=True)
    assert last["by"] == {"token": 5990}
    refusals.put_back(last)
    assert refusals.take() == last, "what could not be written is told as soon as it can be"


# -- nothing is forgotten ----------------------------------------------------------------------

WATCHED = [*sorted((PACKAGE / "web").rglob("*.py")), *sorted((PACKAGE / "contrib").rglob("*.py"))]
WATCHED += [PACKAGE / f"{name}.py" for name in ("ingest", "observe", "sources", "rules", "payload")]
UNBOUND = {
    "web/connection.py: connections.refused": "one line a second by itself",
    "web/connection.py: server.drain_timeout": "once in a server's life",
    "web/receivers.py: receiver.ended": "a process of ours, started again after a pause that grows",
    "web/receivers.py: receiver.hung": "the same",
    "observe.py: arrival.summary": "one line a second by itself",
    "observe.py: attempt.summary": "one line a second by itself",
    "observe.py: f'arrival.{outcome}'": "verified, and at info only on a terminal",
    "observe.py: _MOMENTS[settled.what]": "an attempt of ours",
    "observe.py: lease.lost": "a worker of ours",
    "observe.py: lease.expired": "a worker of ours",
    "observe.py: breaker.opened": "a destination that fails, at most once in the time that it stays open",
    "observe.py: breaker.closed": "the same",
    "observe.py: destination.disabled": "a destination that has failed for days, once",
    "observe.py: replay.done": "an act of an operator",
    "observe.py: moment": "a watermark, once when it is crossed and once when it is back",
    "contrib/django/transactions.py: handler.on_commit_failed": "an attempt of ours",
}


def unbound_lines() -> set[str]:
    found = set()
    for path in WATCHED:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, verb = ast.unparse(node.func.value), node.func.attr
            if owner.endswith("log") and verb in ("debug", "info", "warning", "error", "exception", "critical", "log"):
                word = node.args[1] if verb == "log" else node.args[0]
                text = word.value if isinstance(word, ast.Constant) else ast.unparse(word)
                found.add(f"{path.relative_to(PACKAGE)}: {text}")
    return found


def test_every_line_that_an_outsider_can_cause_is_rationed() -> None:
    assert unbound_lines() == set(UNBOUND), "log it by `ration`, or say here why an outsider cannot cause a flood of it"
