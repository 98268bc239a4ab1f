"""Flask under a real gunicorn, and the bridge beneath it: one loop per process, started late, stopped at the end."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from wsgiref.validate import validator

import flask
import pytest
import werkzeug.test
from flask import Flask, Request
from werkzeug.exceptions import NotFound
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import TestResponse

from oncehook import Event, Inbox, clock
from oncehook.contrib import bridge as bridges
from oncehook.contrib import wsgi
from oncehook.contrib.bridge import Bridge
from oncehook.contrib.flask import init_app
from oncehook.errors import ConfigError, StoreUnavailable
from oncehook.model import Arrival
from oncehook.store.sqlite import SqliteStore
from oncehook.store.sqlite.connection import Hold, holder
from tests.contrib.running import ROOT, Database, Example, ask, database, post
from tests.servers import Postgres

__all__ = ["database"]

PAGE = ROOT / "docs/how-to/flask.md"
ONE_PROCESS = "gunicorn --threads 8 --bind 127.0.0.1:8000 app:app"
THREE_PROCESSES = "gunicorn --workers 3 --threads 8 --bind 127.0.0.1:8000 app:app"


def order(key: str) -> dict[str, str]:
    return {"id": key, "type": "order.paid", "customer": "c1"}


# -- the example -------------------------------------------------------------------------------


def test_on_sqlite_one_process_receives_and_works(tmp_path: Path) -> None:
    with Example("flask_app", tmp_path) as example:
        program = example.start(ONE_PROCESS).wait_for_port()
        first, second = (post(f"{program.url}/hooks/orders", order("1")) for _ in range(2))
        assert (first.said, second.said) == ((200, "accepted"), (200, "duplicate"))
        placed = [post(f"{program.url}/orders/7", {}).json["event_id"] for _ in range(2)]
        assert placed[0] == placed[1]
        assert sorted(example.wait_for_lines("shipped.txt", 2)) == ["1", "placed-7"]
        assert ask("GET", f"{program.url}/inbox/events").status == 403
        page = ask("GET", f"{program.url}/inbox/events", headers={"X-User": "staff"})
        assert (page.status, b"order.placed" in page.body) == (200, True)
        log = program.stop()
        assert program.process.returncode == 0
        assert "Traceback" not in log
        assert holder(tmp_path / "oncehook.db") is None


def test_on_postgres_many_processes_receive_and_a_worker_works(tmp_path: Path, database: Database) -> None:
    with Example("flask_app", tmp_path, {"STORE": database.url}) as example:
        receiver = example.start(THREE_PROCESSES).wait_for_port()
        keys = [str(n % 10) for n in range(120)]
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda key: post(f"{receiver.url}/hooks/orders", order(key)), keys))
        assert Counter(a.said for a in answers) == {(200, "accepted"): 10, (200, "duplicate"): 110}
        assert example.read("shipped.txt") == []
        worker = example.start("oncehook worker app:inbox").wait_for("ready")
        assert sorted(example.wait_for_lines("shipped.txt", 10)) == sorted(set(keys))
        assert "Traceback" not in receiver.stop()
        assert "Traceback" not in worker.stop()


def test_on_sqlite_many_processes_receive_and_work(tmp_path: Path) -> None:
    with Example("flask_app", tmp_path) as example:
        program = example.start(THREE_PROCESSES).wait_for_port()
        keys = [str(n % 10) for n in range(120)]
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda key: post(f"{program.url}/hooks/orders", order(key)), keys))
        assert Counter(a.said for a in answers) == {(200, "accepted"): 10, (200, "duplicate"): 110}
        assert sorted(example.wait_for_lines("shipped.txt", 10)) == sorted(set(keys))
        assert "Traceback" not in program.stop()


def test_a_process_may_start_before_its_first_request(tmp_path: Path) -> None:
    """The snippet of docs/how-to/flask.md."""
    (snippet,) = re.findall(r"```python\n(def post_worker_init.*?)```", PAGE.read_text(), re.DOTALL)
    with Example("flask_app", tmp_path) as example:
        (tmp_path / "gunicorn.conf.py").write_text(snippet)
        program = example.start(THREE_PROCESSES).wait_for_port()
        while holder(tmp_path / "oncehook.db") is None:
            assert program.process.poll() is None
        assert "Traceback" not in program.stop()


# -- the dashboard -----------------------------------------------------------------------------


class Staff:
    """A Flask application with a session of its own, and the dashboard for whoever it knows."""

    def __init__(self, inbox: Inbox, prefix: str = "/staff/inbox") -> None:
        self.inbox, self.prefix = inbox, prefix
        self.app = Flask(__name__)
        self.app.secret_key = "only for this test"
        self.bridge = init_app(inbox, self.app, dashboard=prefix, authorize=self._authorize)
        self.client = self.app.test_client()

    def _authorize(self, request: Request) -> Any:
        assert request.path == flask.request.path  # within the request's context: Flask's own session can be asked
        name = flask.session.get("name")
        return None if name is None else (name, flask.session["role"])

    def log_in(self, name: str, role: str) -> None:
        with self.client.session_transaction() as session:
            session["name"], session["role"] = name, role

    def ask(self, path: str, **more: Any) -> TestResponse:
        return self.client.get(self.prefix + path, **more)

    def act(self, path: str, *, site: str = "same-origin", **more: Any) -> TestResponse:
        return self.client.post(self.prefix + path, headers={"Sec-Fetch-Site": site}, **more)

    def audit(self) -> list[tuple[str, str]]:
        return [(line.actor, line.act) for line in self.bridge.call(self.inbox.admin.audit(limit=9))]


@pytest.fixture
def staff(inbox: Inbox) -> Iterator[Staff]:
    @inbox.on("orders", retry=[])
    def ship(event: Event) -> None:
        if event.run == 1:
            raise RuntimeError("the printer is out of paper")

    made = Staff(inbox)
    yield made
    made.bridge.stop()


def test_flask_has_the_dashboard_for_whom_it_lets_in(staff: Staff) -> None:
    assert staff.ask("/events").status_code == 403
    assert staff.ask("/api/v1/events").status_code == 401
    staff.log_in("anna", "operator")
    assert staff.client.post("/hooks/orders", json=order("größe 1")).status_code == 200
    staff.bridge.call(staff.inbox.drain())
    assert staff.ask("").headers["Location"].endswith("/staff/inbox/")
    page = staff.ask("/events?query=status:dead").text
    assert "order.paid" in page
    assert 'href="/staff/inbox/dead"' in page
    assert "ui/stream" not in page  # a stream would hold one of the server's threads
    assert 'hx-trigger="refresh, every 5s"' in page
    assert "http://localhost/hooks/orders" in staff.ask("/sources").text
    (event,) = staff.ask("/api/v1/events").json["items"]  # type: ignore[index]
    assert (event["key"], staff.ask(f"/events/{event['id']}").status_code) == ("größe 1", 200)
    style = staff.ask("/static/oncehook.css")
    assert (style.status_code, style.mimetype, len(style.data) > 1000) == (200, "text/css", True)
    unchanged = {"If-None-Match": style.headers["ETag"]}
    assert staff.ask("/static/oncehook.css", headers=unchanged).status_code == 304
    assert staff.client.head("/staff/inbox/").status_code == 200
    assert staff.ask("/static/../../pages.py").status_code == 404
    assert staff.ask("/nowhere/größe").status_code == 404


def test_what_is_done_in_flask_is_audited_in_the_persons_name(staff: Staff) -> None:
    staff.client.post("/hooks/orders", json=order("1"))
    staff.bridge.call(staff.inbox.drain())
    staff.log_in("anna", "operator")
    (dead,) = staff.ask("/api/v1/deliveries?query=status:dead").json["items"]  # type: ignore[index]
    assert staff.act(f"/deliveries/{dead['id']}/discard", site="cross-site", data={"reason": "x"}).status_code == 403
    assert staff.act(f"/api/v1/deliveries/{dead['id']}/replay", site="cross-site", json={}).status_code == 403
    assert staff.audit() == []
    assert staff.act(f"/api/v1/deliveries/{dead['id']}/replay", json={"reason": "paper"}).status_code == 202
    staff.bridge.call(staff.inbox.drain())
    assert staff.ask("/api/v1/events?query=status:done").json["items"]  # type: ignore[index]
    staff.log_in("vera", "viewer")
    assert staff.act("/destinations/ship/pause", data={}).status_code == 403
    staff.log_in("olaf", "operator")
    assert staff.act("/destinations/ship/pause", data={"reason": "no paper"}).status_code == 303
    assert staff.audit() == [("olaf", "pause"), ("vera", "refused"), ("anna", "replay")]
    assert "no paper" in staff.ask("/destinations").text


def test_under_wsgi_nobody_holds_a_thread_and_nothing_large_is_read(staff: Staff) -> None:
    staff.log_in("anna", "admin")
    for path in ("/ui/stream", "/ui/stream?page=live", "/api/v1/stream"):
        assert (staff.ask(path).status_code, b"would give a whole thread" in staff.ask(path).data) == (501, True)
    assert "asks every 5 s" in staff.ask("/live").text
    assert staff.act("/destinations/ship/pause", data=b"x" * (1 << 21)).status_code == 413


def test_a_dashboard_whose_store_is_away_is_503_and_told(
    staff: Staff, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = staff.inbox.store
    assert isinstance(store, SqliteStore)
    store._timeouts.connect = 1
    other = Hold(store.path)
    staff.log_in("anna", "admin")
    assert staff.ask("/").status_code == 503
    assert "takes no clients" in caplog.text
    other.release()


def test_dashboard_and_authorize_belong_together(inbox: Inbox) -> None:
    for given in ({"dashboard": "/inbox"}, {"authorize": lambda request: "admin"}):
        with pytest.raises(ConfigError, match="belong together"):
            init_app(inbox, Flask(__name__), **given)  # type: ignore[arg-type]


def test_any_wsgi_server_can_mount_it(inbox: Inbox) -> None:
    bridge = Bridge(inbox)
    app = wsgi.dashboard(
        bridge,
        authorize=lambda environ: ("anna", "admin") if environ.get("HTTP_X_USER") == "anna" else None,
        hooks="/hooks",
    )
    client = werkzeug.test.Client(DispatcherMiddleware(NotFound(), {"/inbox": validator(app)}))
    assert client.get("/inbox/events", buffered=True).status_code == 403
    page = client.get("/inbox/sources", headers={"X-User": "anna"}, buffered=True)
    assert (page.status_code, "/hooks/orders" in page.text) == (200, True)
    bridge.stop()


# -- the bridge --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def present() -> Iterator[None]:
    """A clock that a test has moved is moved back: others of this process read it, too."""
    before = clock._skew
    yield
    clock.forward(before - clock._skew)


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    made = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    made.source("orders", verify="none", key="$.id", max_body="1KiB", budget="60s")
    scheme = {"scheme": "none", "confirm": "anyone may send"}
    made.source("hidden", verify=scheme, key="$.id", path="k7QmZxN4vT9sLdR1", budget="60s")
    return made


@pytest.fixture
def bridge(inbox: Inbox) -> Iterator[Bridge]:
    made = Bridge(inbox)
    yield made
    made.stop()


def test_nothing_is_started_before_the_first_request(inbox: Inbox, tmp_path: Path) -> None:
    app = Flask(__name__)
    bridge = init_app(inbox, app, url_prefix="/in")
    assert app.extensions["oncehook"] is bridge
    assert not (tmp_path / "inbox.db").exists()
    client = app.test_client()
    assert client.post("/in/orders", json=order("1")).json["status"] == "accepted"  # type: ignore[index]
    assert client.post("/in/orders/what/follows", json=order("1")).json["status"] == "duplicate"  # type: ignore[index]
    assert client.get("/in/orders").status_code == 401
    bridge.stop()
    assert client.post("/in/orders", json=order("2")).status_code == 503


def test_the_path_decides_and_is_not_kept(inbox: Inbox) -> None:
    app = Flask(__name__)
    bridge = init_app(inbox, app)
    client = app.test_client()
    assert client.post("/hooks/hidden", json=order("1")).status_code == 401
    answered = client.post("/hooks/k7QmZxN4vT9sLdR1?token=1", json=order("1"))
    assert answered.status_code == 200
    bridge.stop()
    kept = inbox.store.path.read_bytes()  # type: ignore[attr-defined]
    assert b"POST /hooks/hidden?token=1" in kept
    assert b"k7QmZxN4vT9sLdR1" not in kept


def test_many_threads_start_it_once(bridge: Bridge) -> None:
    before = set(threading.enumerate())
    with ThreadPoolExecutor(32) as threads:
        told = list(threads.map(lambda n: bridge.receive("orders", {}, b'{"id": "1"}').outcome, range(64)))
    assert Counter(told) == {"accepted": 1, "duplicate": 63}
    assert sum(thread.name == "oncehook-bridge" for thread in set(threading.enumerate()) - before) == 1


def test_a_body_is_read_up_to_the_cap_and_no_further(bridge: Bridge) -> None:
    """R7: neither a length that is too large nor one that was never said makes us hold more."""
    given = 0

    def read(count: int) -> bytes:
        nonlocal given
        part = b" " * min(count, 100)
        given += len(part)
        return part

    assert bridge.answer(Arrival("orders", [], b"", peer="127.0.0.1"), read).status == 413
    assert given == (1 << 20) + 1, "the largest of all sources: a smaller one would tell them from none (S8)"
    given = 0
    said = [(b"content-length", b"%d" % ((1 << 20) + 1))]
    assert bridge.answer(Arrival("orders", said, b"", peer="127.0.0.1"), read).status == 413
    assert bridge.answer(Arrival("orders", [(b"content-length", b"-1")], b"", peer="127.0.0.1"), read).status == 400
    assert given == 0


def test_a_file_whose_owner_cannot_be_asked_is_503_until_it_is_let_go(
    bridge: Bridge, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridges, "AGAIN", 600.0)
    store = bridge.inbox.store
    assert isinstance(store, SqliteStore)
    store._timeouts.connect = 1
    other = Hold(store.path)
    with caplog.at_level(logging.ERROR, "oncehook.bridge"):
        receipt = bridge.receive("orders", {}, b'{"id": "1"}')
    assert (receipt.outcome, receipt.reply.status) == ("error", 503)
    assert (b"retry-after", b"5") in receipt.reply.headers
    assert "takes no clients" in caplog.text
    assert b"inbox.db" not in receipt.reply.body
    other.release()
    assert bridge.receive("orders", {}, b'{"id": "1"}').outcome == "error"  # not asked again so soon
    clock.forward(600.0)
    assert bridge.receive("orders", {}, b'{"id": "1"}').outcome == "accepted"


def test_two_processes_are_one_inbox(bridge: Bridge) -> None:
    other = Bridge(Inbox(f"sqlite:{bridge.inbox.store.path}"))  # type: ignore[attr-defined]
    other.start()
    assert bridge.receive("orders", {}, b'{"id": "1"}').outcome == "accepted"
    other.stop()
    assert bridge.receive("orders", {}, b'{"id": "1"}').outcome == "duplicate"


def test_a_database_that_is_away_is_503_until_it_is_back() -> None:
    with Postgres() as server:
        inbox = Inbox(server.url)
        inbox.source("orders", verify="none", key="$.id", budget="60s")
        bridge = Bridge(inbox)
        server.stop()
        assert bridge.receive("orders", {}, b'{"id": "1"}').reply.status == 503
        with pytest.raises(StoreUnavailable):
            bridge.call(inbox.emit("app", "started", {}))
        server.start()
        clock.forward(bridges.AGAIN)
        assert bridge.receive("orders", {}, b'{"id": "1"}').outcome == "accepted"
        bridge.stop()


def test_a_handler_may_be_waited_for_but_the_loop_not(bridge: Bridge) -> None:
    inbox, told = bridge.inbox, []

    @inbox.on("orders")
    def on_a_thread(event: Event) -> None:
        told.append(bridge.call(inbox.emit("app", "seen", {}, key="seen")))

    @inbox.on("orders")
    async def on_the_loop(event: Event) -> None:
        with pytest.raises(ConfigError, match="own loop"):
            bridge.call(inbox.emit("app", "seen", {}, key="seen"))
        told.append("refused")

    bridge.receive("orders", {}, b'{"id": "1"}')
    bridge.call(inbox.drain())
    assert len(told) == 2
    assert "refused" in told


def test_waiting_ends_at_its_limit(bridge: Bridge) -> None:
    with pytest.raises(TimeoutError):
        bridge.call(asyncio.sleep(60), timeout=0.05)


def test_what_waits_when_it_stops_is_told(bridge: Bridge) -> None:
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.sleep(600)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(bridge.call, wait())
        begun.wait()
        bridge.stop()
        with pytest.raises(StoreUnavailable):
            waiting.result()


# -- processes ---------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from oncehook import Inbox
from oncehook.contrib.bridge import Bridge

inbox = Inbox("sqlite:inbox.db")
inbox.source("orders", verify="none", key="$.id", budget="60s")

@inbox.on("orders")
def ship(event): ...

bridge = Bridge(inbox)
"""
IN_THE_CHILD = """
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(bridge.receive("orders", {}, b'{"id": "2"}').outcome)
"""


def run(tmp_path: Path, program: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_end_of_the_process_is_the_end_of_the_inbox(tmp_path: Path) -> None:
    """It closes its store in order: no error, no lock, and what was taken in is there."""
    said, complaints = run(tmp_path, "print(bridge.receive('orders', {}, b'{\"id\": \"1\"}').outcome)")
    assert said == "accepted\n"
    assert "Error" not in complaints, complaints
    assert holder(tmp_path / "inbox.db") is None
    assert not (tmp_path / "inbox.db-wal").exists()
    assert run(tmp_path, "print(bridge.receive('orders', {}, b'{\"id\": \"1\"}').outcome)")[0] == "duplicate\n"


def test_an_inbox_that_was_not_started_may_be_forked(tmp_path: Path) -> None:
    assert run(tmp_path, IN_THE_CHILD)[0] == "accepted\n"


def test_an_inbox_that_was_started_is_refused_in_the_child(tmp_path: Path) -> None:
    said, complaints = run(tmp_path, "bridge.start()\n" + IN_THE_CHILD)
    assert said == "error\n"
    assert "started before its process was forked" in complaints
