"""`oncehook demo`, seen by somebody without script: the first look, the callouts, and a replay that works."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import pytest
from starlette.routing import Route

from oncehook.demo import running
from oncehook.demo.running import busyness
from oncehook.inbox import Inbox
from oncehook.web import dashboard
from oncehook.web.auth import Access
from oncehook.web.live import Broadcast
from oncehook.web.session import Auth

T = TypeVar("T")
CALLOUT = r'id="callout-(\w+)"'


def eventually(look: Callable[[], T | None], what: str) -> T:
    """What is found in the end; the test's own time limit is the only one."""
    while (found := look()) is None:
        time.sleep(0.1)
    assert found, what
    return found


@dataclass
class Demo:
    """A demo that runs, and a browser without script that has come in by its link."""

    folder: Path
    options: tuple[str, ...] = ()
    cookie: str = ""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "oncehook", "demo", "--port", "0", *self.options],
                env={**os.environ, "TMPDIR": str(self.folder)},
                stderr=log,
                cwd=self.folder,
            )
        link = eventually(self._link, "a link")
        self.port = urlsplit(link).port
        answer, _ = self.ask("GET", f"/?{urlsplit(link).query}")
        assert answer.status == 303
        self.cookie = str(answer.getheader("set-cookie")).partition(";")[0]

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def stores(self) -> list[Path]:
        return list(self.folder.glob("oncehook-demo-*"))

    def _link(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        found = re.search(r"dashboard  (\S+)", self.log.read_text())
        return found and found[1]

    def ask(self, method: str, path: str, form: dict[str, str] | None = None) -> tuple[http.client.HTTPResponse, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
        headers = {"cookie": self.cookie, "sec-fetch-site": "same-origin"}
        if form is not None:
            headers["content-type"] = "application/x-www-form-urlencoded"
        connection.request(method, path, urlencode(form) if form is not None else None, headers)
        answer = connection.getresponse()
        text = unescape(answer.read().decode())
        connection.close()
        return answer, text

    def see(self, path: str) -> str:
        answer, text = self.ask("GET", path)
        assert answer.status == 200, text
        return text

    def press(self, path: str, **fields: str) -> str:
        """Send a form, and see where it leads."""
        answer, text = self.ask("POST", path, fields)
        assert answer.status == 303, text
        return self.see(str(answer.getheader("location")))

    def callouts(self, path: str = "/") -> list[str]:
        return re.findall(CALLOUT, self.see(path))

    def found(self, query: str) -> int:
        """How many events match, on the first page."""
        return int(
            (re.search(r"<span>(\d+) shown</span>", self.see(f"/events?{urlencode({'query': query})}")) or "00")[1]
        )

    def accepted(self, path: str) -> list[int]:
        """How many events were accepted in each step of the overview's chart of arrivals, oldest first."""
        chart = self.see(path).partition('id="arrivals"')[2].partition('id="latency"')[0]
        row = r'<tr data-at="[^"]+"><td>\d\d:\d\d</td><td data-value="(\d+)">'
        return [int(count) for count in re.findall(row, chart)]

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(90)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    made = Demo(tmp_path_factory.mktemp("demo"), ("--rate", "15"))
    assert len(made.stores) == 1
    yield made
    assert made.stop() == 0
    assert made.stores == []
    log = made.log.read_text()
    assert "Traceback" not in log, log
    assert re.search(r"\d+ hooks sent, .*: \d+ events kept", log)


@pytest.mark.parametrize(
    "query",
    [
        "source:whatsapp", "source:stripe", "source:github", "source:bookings",
        "to:ledger status:done attempts:>1",
        "to:crm status:dead code:401",
        "to:crm status:done",
        "to:answers status:done",
        "to:calendar note:coalesced",
        "to:receipts note:stale",
    ],
)  # fmt: skip
def test_there_is_something_of_everything(demo: Demo, query: str) -> None:
    eventually(lambda: demo.found(query) or None, query)


def test_the_hour_before_the_first_look_is_there(demo: Demo) -> None:
    minutes = demo.accepted("/")
    assert len(minutes) == 60
    assert sum(count > 0 for count in minutes) > 50


def test_the_day_before_has_a_shape_and_an_incident(demo: Demo) -> None:
    halves = demo.accepted("/?since=24h")
    assert len(halves) == 48
    assert min(halves[:-1]) > 0, "somebody writes at night, too"
    night, evening = min(halves[:-1]), max(halves[:-3])
    assert evening > 5 * night
    assert demo.found("to:ledger is:replayed status:done") > 0, "what died while the ledger was down was replayed"
    assert "the ledger is back" in demo.see("/replays")


def test_live_traffic_goes_on_as_the_history_ended() -> None:
    assert busyness(0) == 1
    assert 0.9 < busyness(1800) < 1.2
    assert busyness(12 * 3600) < 0.1


def test_the_destinations_look_like_anybodys(demo: Demo) -> None:
    page = demo.see("/destinations")
    assert "oncehook.demo.shop.ledger" in page
    assert "&lt;locals&gt;" not in page
    assert "<locals>" not in page
    assert "10,000" not in page


def test_the_history_is_as_quick_as_a_day_of_its_kind(demo: Demo) -> None:
    """Nothing waits while the clock jumps: a retry takes its seconds, not a quarter of an hour."""
    [store] = [found / "demo.db" for found in demo.stores]
    with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        [(slowest,)] = connection.execute(
            "SELECT max(d.settled_at - e.received_at) / 1e6 FROM deliveries d JOIN events e ON e.id = d.event_id"
            " JOIN destinations t ON t.id = d.destination_id"
            " WHERE d.status = 'done' AND d.run = 1 AND t.name = 'ledger'"
        )
    assert slowest < 150


def test_the_progress_counts_all_steps_of_the_day() -> None:
    steps = list(running._steps())
    assert sum(step for _, step in steps) == running.DAY
    late = sum(running._work(0.2, *one) for one in steps if one[0] <= running.FINE)
    assert 0.1 < late / sum(running._work(0.2, *one) for one in steps) < 0.3, "the last hour is a fifth of the work"


def test_every_event_has_a_key(demo: Demo) -> None:
    assert demo.found("source:bookings type:rescheduled") > 0
    assert "unkeyed" not in demo.see("/events?query=source:bookings")


def test_a_customer_who_writes_much_waits_in_line(demo: Demo) -> None:
    line = "waiting for an earlier event of its subject"
    eventually(lambda: line in demo.see("/events?query=to:reply+status:pending") or None, line)


def test_forgeries_and_conflicts_are_seen(demo: Demo) -> None:
    eventually(lambda: re.search("signature_invalid|mismatch", demo.see("/sources")), "a forgery")
    eventually(lambda: re.search(r"[1-9]\d* conflict", demo.see("/")), "a conflict")


def test_a_callout_is_dismissed_for_this_run(demo: Demo) -> None:
    def with_all_of_them() -> str | None:
        page = demo.see("/")
        return page if set(re.findall(CALLOUT, page)) == {"twice", "again", "replay"} else None

    page = eventually(with_all_of_them, "three callouts")
    assert "This came twice" in page
    assert re.search(r"This will be tried again at <time [^>]*>\d\d:\d\d:\d\d</time>", page)
    assert 'aria-label="Dismiss: This came twice"' in page
    (arrivals,) = re.findall(r'href="(/events/evt_\w+\?tab=arrivals)"', page)
    assert "folded into this event" in demo.see(arrivals)
    assert "callout-twice" not in demo.press("/callouts/twice/dismiss", **{"from": "overview"})
    assert "twice" not in demo.callouts()
    assert "replay" in demo.callouts()
    assert demo.callouts("/dead") == ["replay"]


def test_dead_letters_are_replayed_once_the_destination_is_mended(demo: Demo) -> None:
    before = demo.see("/dead")
    assert "Renew the key" in before
    assert re.search(r"renewed by itself at <time ", before)
    assert "Fixed" in demo.press("/callouts/replay/act", **{"from": "dead"})
    plan = re.search(r'href="(/replays/plan\?query=[^"]+)"[^>]*>Replay \d+…', demo.see("/"))
    assert plan is not None
    asked = demo.see(plan[1])
    fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', asked))
    assert fields, asked
    answer, text = demo.ask("POST", "/replays", fields)
    assert answer.status == 303, text
    eventually(lambda: "The CRM has everything that died" in demo.see("/") or None, "a replay that is over")
    assert demo.found("to:crm status:dead") == 0
    assert not re.search(r"crm</td>|is failing", demo.see("/dead"))


def test_the_demo_stops_before_it_has_begun(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "oncehook", "demo", "--port", "0"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    eventually(lambda: list(tmp_path.glob("oncehook-demo-*/demo.db")) or None, "a store")
    process.terminate()
    _, said = process.communicate(timeout=90)
    assert b"Traceback" not in said, said
    assert not list(tmp_path.glob("oncehook-demo-*"))


def test_where_there_is_no_guide_there_is_nothing_to_dismiss(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    routes = dashboard.routes(inbox.admin, Auth(Access()), Broadcast())
    assert not [route for route in routes if isinstance(route, Route) and "callouts" in route.path]
