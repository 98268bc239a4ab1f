"""The commands that look and act, from outside: beside a running server, through one that is named, and without any."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import pty
import re
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest

from oncehook.cli import COMMANDS, cli, main
from oncehook.cli.api import Api, Unreachable, Where
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, Receiver
from tests.wire import SECRET, hook, signed

TOKEN = "canary-admin-token-4471"
SETTINGS = (
    CONFIG
    + """
[server]
admin_token = {{ env = "ADMIN" }}

[[server.tokens]]
name = "vera"
role = "viewer"
token = {{ env = "VERA" }}

[destination.crm]
url = "http://127.0.0.1:PORT/hooks"
allow_private = true
retry = ["0.05s"]
lease = "60s"
breaker = {{ failures = 1000, open = "1s" }}

[[route]]
from = "orders"
to = "crm"
"""
)


class Sink(http.server.ThreadingHTTPServer):
    """A destination that answers as it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[bytes] = []
        self.heads: list[dict[str, str]] = []
        self.hold = threading.Event()
        self.hold.set()
        super().__init__(("127.0.0.1", 0), _Hook)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def end(self) -> None:
        self.hold.set()
        self.shutdown()
        self.server_close()


class _Hook(http.server.BaseHTTPRequestHandler):
    server: Sink

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.heads.append({name.lower(): value for name, value in self.headers.items()})
        self.server.bodies.append(body)
        self.server.hold.wait()
        with contextlib.suppress(OSError):
            self.send_response(self.server.status)
            self.send_header("content-length", "0")
            self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None: ...


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Admin:
    """An inbox, its destination, and somebody at a command line in its folder."""

    engine: Engine
    receiver: Receiver
    sink: Sink
    run: Callable[..., Done]
    keys: list[str] = field(default_factory=list)

    def good(self, *arguments: str) -> Done:
        """A command that succeeds."""
        done = self.run(*arguments)
        assert done.code == 0, done
        return done

    def send(self, *keys: str, **about: object) -> list[dict[str, Any]]:
        """Genuine arrivals, one after the other on one connection."""
        return [self.send_raw(hook(key, **about)) for key in keys]

    def send_raw(self, body: bytes) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.receiver.port)
        with contextlib.closing(connection):
            connection.request("POST", "/in/orders", body, signed(body))
            answer = connection.getresponse()
            assert answer.status == 200
            return dict(json.loads(answer.read()))

    def stand(self, query: str = "") -> dict[str, str]:
        """Key and status of every delivery that matches: by the running server, or without one."""
        process = self.receiver.process
        server = f"http://127.0.0.1:{self.receiver.port}" if process and process.poll() is None else None
        with Api(Where(server=server, token_env="ADMIN" if server else None)) as api:
            return {one["key"]: one["status"] for one in api.pages("deliveries", query=query)}

    def wait_for(self, status: str, *keys: str) -> None:
        """Until all of these stand so."""
        while not set(keys) <= {key for key, stands in self.stand().items() if stands == status}:
            time.sleep(0.05)

    def die(self, *keys: str, **about: object) -> list[str]:
        """Dead letters; returns the ids of their events."""
        self.sink.status = 400
        made = self.send(*keys, **about)
        self.wait_for("dead", *keys)
        return [one["event_id"] for one in made]

    def audit(self) -> list[tuple[str, str]]:
        return [(row[0], row[1]) for row in self.engine.rows("SELECT actor, act FROM audit ORDER BY n")]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """One command, as `oncehook …` would end."""
    for name in [name for name in os.environ if name.startswith("ONCEHOOK_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Done:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["oncehook", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capfd.readouterr()
        assert "Traceback" not in said.err, said.err
        code = int(end.value.code or 0)
        return Done(code, said.out, said.err)

    return run


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink()
    yield made
    made.end()


def make_desk(engine: Engine, sink: Sink, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Admin:
    receiver = engine.receiver()
    receiver.config = SETTINGS.replace("PORT", str(sink.port))
    for name, value in {"ADMIN": TOKEN, "VERA": "token-of-vera-4471", "ORDERS_SECRET": SECRET}.items():
        monkeypatch.setenv(name, value)
    receiver.start()
    monkeypatch.chdir(receiver.folder)
    return Admin(engine, receiver, sink, run)


@pytest.fixture
def admin(engine: Engine, sink: Sink, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    """On each engine: beside the server of a SQLite file, and on PostgreSQL in the command's own process."""
    made = make_desk(engine, sink, run, monkeypatch)
    yield made
    made.receiver.stop()
    assert TOKEN not in made.receiver.log.read_text()


@pytest.fixture
def here(sqlite: Engine, sink: Sink, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    """On SQLite alone."""
    made = make_desk(sqlite, sink, run, monkeypatch)
    yield made
    made.receiver.stop()


def replay_id(done: Done) -> str:
    found = re.search(r"rpl_[0-9a-f]{32}", done.out)
    assert found is not None, done
    return found[0]


# -- replay ------------------------------------------------------------------------------------


def test_a_dead_letter_is_replayed_and_done(admin: Admin) -> None:
    [event_id] = admin.die("o1")
    admin.sink.status = 200
    done = admin.good("replay", event_id, "--yes", "--wait", "--reason", "address mended")
    assert done.out.rstrip().endswith("1/1 done")
    assert "1 delivery, 1 dead" in done.err
    assert f"http://127.0.0.1:{admin.sink.port}/hooks" in done.err, "the plan names the recipient"
    shown = admin.good("show", event_id, "--json").json
    assert [(one["status"], one["run"]) for one in shown["deliveries"]] == [("done", 2)]
    assert admin.send("o1")[0]["status"] == "duplicate", "the key was not touched"
    actor = "local" if admin.engine.name == "sqlite" else "cli"
    assert any(line[0] == actor and "replay" in line[1] for line in admin.audit())


def test_the_plan_is_what_happens(admin: Admin) -> None:
    admin.die("a", "b", "c", customer="42")
    plan = admin.good("replay", "--query", "status:dead since:1h", "--dry-run", "--json").json
    assert (plan["total"], plan["by_destination"]) == (3, {"crm": 3})
    assert "until:" in plan["query"], "times are fixed"
    told = admin.good("replay", "--query", "status:dead", "--rate", "60/m", "--dry-run")
    for said in ("3 deliveries, 3 dead", "about 3s at 1/s", "oldest", "newest", "HTTP 400", "same as  oncehook replay"):
        assert said in told.out
    refused = admin.run("replay", "--query", "status:dead")
    assert (refused.code, refused.out) == (2, "")
    assert "--yes" in refused.err
    assert set(admin.stand().values()) == {"dead"}, "neither a dry run nor a question changes anything"
    failed = admin.run("replay", "--query", "status:dead", "--yes", "--wait", "--json")
    assert (failed.code, failed.json["dead"], failed.json["planned"]) == (1, 3, 3)
    again = admin.good("replay", failed.json["id"], "--dry-run", "--json").json
    assert again["total"] == 3, "those that failed, by the replay's id"
    for shown in (admin.good("replay", "--list").out.splitlines()[1], admin.good("show", failed.json["id"]).out):
        assert shown.split()[:2] == [failed.json["id"], "failed"]
    again = admin.run("replay", "--query", "status:dead", "--yes", "--wait")
    assert (again.code, "nothing was replayed: it was replayed less than a minute ago" in again.err) == (1, True)


def test_one_request_key_is_one_replay(admin: Admin) -> None:
    admin.die("a", "b")
    admin.sink.status = 200
    first = admin.good("replay", "--query", "status:dead", "--yes", "-q", "--request-key", "monday", "--wait")
    second = admin.good("replay", "--query", "status:dead", "--yes", "-q", "--request-key", "monday")
    assert replay_id(first) == replay_id(second)
    assert len(admin.good("replay", "--list", "--json").json["items"]) == 1


def test_one_request_key_is_one_replay_of_one_delivery(here: Admin) -> None:
    [event_id] = here.die("a")
    here.sink.status = 200
    delivery_id = here.good("show", event_id, "--json").json["deliveries"][0]["id"]
    asked = ("replay", delivery_id, "--yes", "-q", "--request-key", "monday")
    assert replay_id(here.good(*asked, "--wait")) == replay_id(here.good(*asked))
    assert len(here.sink.bodies) == 2


def test_done_ones_are_left_out_unless_asked_for(here: Admin) -> None:
    [sent] = here.send("o1")
    here.wait_for("done", "o1")
    for what in ((sent["event_id"],), ("--query", "key:o1")):
        nothing = here.good("replay", *what, "--yes")
        assert nothing.out == "", "nothing to do is no failure, by id as by query"
        assert "--force takes them too" in nothing.err
    assert here.good("replay", sent["event_id"], "--yes", "--force", "--wait").out.rstrip().endswith("1/1 done")
    too_soon = here.run("replay", sent["event_id"], "--yes", "--force")
    assert (too_soon.code, too_soon.out) == (1, "")
    assert "Try again in" in too_soon.err


def test_a_replay_is_paused_resumed_and_aborted(here: Admin) -> None:
    here.die("a", "b", "c")
    here.sink.status = 200
    made = replay_id(here.good("replay", "--query", "status:dead", "--rate", "1/h", "--yes"))
    for act, state in (("pause", "paused"), ("resume", "running"), ("abort", "aborted")):
        assert here.good("replay", f"--{act}", made).out.split() == [made, state]
    assert "aborted" in here.good("show", made).out
    assert here.run("replay", "--pause", made).code == 1
    assert "dead" in here.stand().values(), "what was not handed out stays where it was"


def test_on_a_terminal_it_asks(here: Admin) -> None:
    [event_id] = here.die("o1")
    here.sink.status = 200
    for answer, code, says in (("n", 1, "nothing was done"), ("y", 0, "rpl_")):
        ended, said = at_a_terminal(here.receiver.folder, ["replay", event_id, "--wait"], f"{answer}\n")
        assert "replay now? [y/N]" in said
        assert (ended, says in said) == (code, True), said
    assert here.stand() == {"o1": "done"}


def at_a_terminal(folder: Path, arguments: list[str], answer: str) -> tuple[int, str]:
    """Run a command on a terminal of its own; answers once it asks."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "oncehook", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder)
    os.close(theirs)
    said, answered = "", False
    with contextlib.suppress(OSError):  # the other end was closed
        while piece := os.read(ours, 4096):
            said += piece.decode()
            if not answered and "[y/N]" in said:
                os.write(ours, answer.encode())
                answered = True
    os.close(ours)
    return process.wait(), said


def test_on_a_terminal_it_says_how_to_look_after_a_replay(here: Admin) -> None:
    [event_id] = here.die("o1")
    here.sink.status = 200
    code, said = at_a_terminal(here.receiver.folder, ["replay", event_id], "y\n")
    assert code == 0, said
    [short] = re.findall(r"\n  oncehook show (rpl_…\w+) says how it goes; replay --wait waits for it\r\n", said)
    shown = here.good("show", short, "--json").json["id"]
    assert f"{shown}\r\n" in said
    here.sink.status = 400
    [other] = here.die("o2")
    assert "oncehook show" not in here.good("replay", other, "--yes").err, "in a pipe it is not said"


# -- dead letters, destinations, numbers -------------------------------------------------------


def test_dead_letters_are_grouped_and_discarded(admin: Admin) -> None:
    admin.die("a", "b")
    [cause] = admin.good("dead", "--json").json["items"]
    assert (cause["destination"], cause["count"]) == ("crm", 2)
    assert re.search(r"2 +crm +HTTP 400", admin.good("dead").out)
    without_reason = admin.run("dead", "discard", "key:a", "--yes")
    assert (without_reason.code, without_reason.out) == (2, "")
    unsure = admin.run("dead", "discard", "key:a", "--reason", "test order")
    assert (unsure.code, unsure.out) == (2, "")
    assert admin.good("dead", "discard", "key:a", "--reason", "x", "--dry-run").out == "1\n"
    assert set(admin.stand().values()) == {"dead"}
    assert admin.good("dead", "discard", "key:a", "--reason", "test order", "--yes").out == "discarded 1\n"
    assert admin.stand() == {"a": "discarded", "b": "dead"}
    assert admin.good("dead", "discard", "key:a", "--reason", "again", "--yes", "--json").json == {"discarded": 0}
    assert admin.run("dead", "discard", "status:done", "--reason", "x", "--yes").code == 2


def test_what_dies_while_it_asks_is_not_discarded(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.die("a", "b")
    monkeypatch.setattr(Api, "confirm", lambda *_, **__: admin.die("c"))
    done = admin.good("dead", "discard", "status:dead", "--reason", "test orders")
    assert "2 dead letters" in done.err
    assert done.out == "discarded 2\n"
    assert admin.stand() == {"a": "discarded", "b": "discarded", "c": "dead"}


def test_pause_and_resume(admin: Admin) -> None:
    assert "paused (night shift)" in admin.good("pause", "crm", "--reason", "night shift").out
    admin.send("o1")
    [shown] = admin.good("destinations", "--json").json["items"]
    assert (shown["paused"], shown["paused_why"], shown["pending"]) == (True, "night shift", 1)
    assert "paused (night shift)" in admin.good("destinations").out
    assert not admin.sink.bodies
    assert "ready" in admin.good("resume", "crm").out
    admin.wait_for("done", "o1")
    admin.die("o2")
    assert "failing (1 delivery failed)" in admin.good("destinations").out
    nobody = admin.run("pause", "crn")
    assert (nobody.code, nobody.out) == (1, "")
    assert 'Did you mean "crm"?' in nobody.err


def test_numbers_and_what_is_set_up(admin: Admin) -> None:
    admin.die("a")
    admin.send("a")
    stats = admin.good("stats", "--since", "1h", "--by", "destination", "--json").json
    assert (stats["total"], stats["duplicates"], stats["dead"]) == (1, 1, 1)
    assert stats["by"]["crm"]["dead"] == 1
    told = admin.good("stats", "--by", "source").out
    assert re.search(r"^events +1 accepted$", told, re.MULTILINE)
    assert re.search(r"^orders +1 ", told, re.MULTILINE)
    [source] = admin.good("sources", "--json").json["items"]
    assert (source["name"], source["destinations"]) == ("orders", ["crm"])
    assert SECRET not in admin.good("sources").out


# -- events ------------------------------------------------------------------------------------


def test_events_are_listed_by_query_and_page_by_page(here: Admin) -> None:
    here.good("pause", "crm")
    here.send(*(f"o{n}" for n in range(205)))
    lines = here.good("events", "--all", "--json").out.splitlines()
    assert [json.loads(one)["key"] for one in lines] == [f"o{n}" for n in reversed(range(205))]
    assert len(here.good("events", "--json").out.splitlines()) == 50
    assert len(here.good("events", "--limit", "203", "--json").out.splitlines()) == 203
    head, row = here.good("events", "key:o7", "status:pending").out.splitlines()
    assert head.split()[:3] == ["received", "id", "source"]
    assert row.endswith("crm:pending")
    nothing = here.good("events", "key:nobody")
    assert (nothing.out, nothing.err) == ("", "no events match\n")


def test_an_event_is_shown_whole(admin: Admin) -> None:
    body = b'{"id": "o1",  "name": "\xc3\xa9"}'
    event_id = admin.send_raw(body)["event_id"]
    admin.send_raw(b'{"id": "o1", "name": "another"}')
    admin.wait_for("done", "o1")
    assert admin.good("show", event_id, "--raw").out.encode() == body
    told = admin.good("show", event_id, "--body", "--headers", "--diff").out
    for said in ("crm: done", '"name": "é"', "x-signature: sha256=", "conflict  another body"):
        assert said in told
    assert re.search(r"^  key +o1$", told, re.MULTILINE)
    assert re.search(r"^ +-  content-length: \d+\n(?:.*\n)* +\+  content-length: \d+$", told, re.MULTILINE)
    shown = admin.good("show", event_id, "--json").json
    assert [one["outcome"] for one in shown["arrivals"]] == ["accepted", "conflict"]
    delivery = admin.good("show", shown["deliveries"][0]["id"], "--json").json
    [attempt] = delivery["timeline"]
    assert (attempt["outcome"], attempt["status"]) == ("done", 200)
    assert admin.good("show", attempt["id"]).out.startswith(delivery["id"])
    assert admin.good("show", shown["arrivals"][0]["id"]).out.startswith(event_id)


def test_a_later_arrival_is_found_by_its_event(admin: Admin) -> None:
    body, other = b'{"id": "o1", "total": 5, "lines": ["a"]}', b'{"lines": ["a"], "total": 6, "id": "o1"}'
    event_id = admin.send_raw(body)["event_id"]
    admin.send_raw(body), admin.send_raw(other), admin.send_raw(b'{"id":"o1","lines":["a"],"total":5}')
    first, same, conflict, _ = admin.good("show", event_id, "--json").json["arrivals"]
    assert (same["outcome"], conflict["outcome"]) == ("duplicate", "conflict")
    told = admin.good("show", event_id, "--diff").out
    diff = r'^ +@@ .* @@\n(?: .*\n)* +-  "total": 5\n +\+  "total": 6\n(?: .*\n)* +}$'
    assert re.search(diff, told, re.MULTILINE), told
    assert "the same headers" in told
    differing = [one for one in admin.good("show", event_id, "--diff", "--json").json["arrivals"] if "body" in one]
    assert differing[0] == {**conflict, "body": other.decode()}
    for came, bytes_ in ((first, body), (same, body), (conflict, other)):
        assert admin.good("show", event_id, "--arrival", came["id"], "--raw").out.encode() == bytes_
    assert '"total": 6' in admin.good("show", event_id, "--arrival", conflict["id"], "--body", "--headers").out
    for arguments in (("show", conflict["id"]), ("show", conflict["id"], "--raw")):
        unknown = admin.run(*arguments)
        assert (unknown.code, unknown.out) == (1, "")
        assert f"oncehook show evt_… --arrival {conflict['id']}" in unknown.err
        [came] = re.findall(r"It came at (\S+Z)\.", unknown.err)
        assert abs(datetime.fromisoformat(came) - datetime.fromisoformat(conflict["at"])) < timedelta(minutes=1)
    assert admin.run("show", "arr_of-nothing").code == 2
    for arguments in (("--arrival", "arr_" + "0" * 32), ("--arrival", "arr_" + "0" * 32, "--raw")):
        stranger = admin.run("show", event_id, *arguments)
        assert (stranger.code, stranger.out, "no longer" in stranger.err) == (1, "", True), stranger


def test_texts_are_compared_line_by_line(admin: Admin) -> None:
    event_id = admin.send_raw(b'{"id": "o1"}')["event_id"]
    admin.send_raw(b'{"id": "o1" }')
    assert "the same body, written in another way" in admin.good("show", event_id, "--diff").out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("show", "evt_" + "0" * 32), 1),
        (("show", "dlv_" + "0" * 32), 1),
        (("show", "rpl_" + "0" * 32), 1),
        (("show", "att_" + "0" * 32), 1),
        (("show", "att_nonsense"), 2),
        (("show", "att_e677d21fdbff" + "0" * 20), 1),  # the last millisecond that there is
        (("show", "evt_../../stats"), 1),
        (("show", "evt_0?limit=1"), 1),
        (("show", "nonsense"), 2),
        (("show", "rpl_" + "0" * 32, "--body"), 2),
        (("events", "statsu:dead"), 2),
        (("events", "--limit", "0"), 2),
        (("stats", "--since", "yesterday"), 2),
        (("replay",), 2),
        (("replay", "nonsense", "--yes"), 2),
        (("replay", "evt_" + "0" * 32, "--yes"), 1),
        (("replay", "--query", " ", "--yes"), 2),
        (("replay", "--query", "key:a", "--rate", "often", "--yes"), 2),
        (("replay", "--query", "key:a", "--to", "nowhere", "--yes"), 1),
        (("replay", "rpl_" + "0" * 32, "evt_" + "0" * 32, "--yes"), 2),
        (("replay", "--abort", "evt_" + "0" * 32), 2),
        (("replay", "--abort"), 2),
        (("replay", "--abort", "rpl_" + "0" * 32), 1),
        (("resume", "nowhere"), 1),
        (("dead", "--server", "http://127.0.0.1:1"), 3),
        (("dead", "--server", "ftp://127.0.0.1"), 2),
        (("dead", "--server", "http://["), 2),
        (("dead", "--server", "http://a..b"), 2),
        (("dead", "--app", "nothing:here"), 2),
        (("dead", "--config", "missing.toml"), 2),
        (("dead", "--server", "http://127.0.0.1:1", "--token-env", "NOT_SET"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_failure_is_a_code_and_a_sentence(quiet: Admin, arguments: tuple[str, ...], code: int) -> None:
    done = quiet.run(*arguments)
    assert (done.code, done.out) == (code, ""), "on failure stdout is empty"
    assert len(done.err) > 10


@pytest.fixture(scope="module")
def quiet_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Sink]]:
    folder = tmp_path_factory.mktemp("quiet")
    engine, sink = Engine("sqlite", f"sqlite:{folder / 'inbox.db'}", folder), Sink()
    receiver = engine.receiver()
    receiver.config = SETTINGS.replace("PORT", str(sink.port))
    receiver.start(env={"ADMIN": TOKEN, "VERA": "token-of-vera-4471"})
    yield engine, sink
    receiver.stop()
    sink.end()


@pytest.fixture
def quiet(quiet_engine: tuple[Engine, Sink], run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Admin:
    """One server for many looks at it."""
    engine, sink = quiet_engine
    for name, value in {"ADMIN": TOKEN, "VERA": "token-of-vera-4471", "ORDERS_SECRET": SECRET}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(engine.receivers[0].folder)
    return Admin(engine, engine.receivers[0], sink, run)


def test_a_strangers_text_cannot_act_up(admin: Admin) -> None:
    """S35: what a sender writes can neither colour, move the cursor, nor begin a line."""
    evil = "\x1b[2J\x1b]0;owned\x07\r\nrpl_forged  done"
    [event_id] = admin.die(f"k{evil}", customer=evil)
    delivery_id = admin.good("show", event_id, "--json").json["deliveries"][0]["id"]
    looks = [
        ("events",), ("show", event_id, "--body", "--headers", "--diff"), ("show", delivery_id), ("dead",),
        ("replay", event_id, "--dry-run"),
    ]  # fmt: skip
    for look in looks:
        told = admin.good(*look).out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", told), look
        assert not re.search(r"^ *rpl_forged", told, re.MULTILINE), look


# -- which server ------------------------------------------------------------------------------


def test_a_named_server_wants_a_token(quiet: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = f"http://127.0.0.1:{quiet.receiver.port}"
    refused = quiet.run("destinations", "--server", server)
    assert (refused.code, refused.out) == (2, "")
    assert "--token-env" in refused.err
    assert "crm" in quiet.good("destinations", "--server", server + "/", "--token-env", "ADMIN").out
    forbidden = quiet.run("pause", "crm", "--server", server, "--token-env", "VERA")
    assert (forbidden.code, "operator" in forbidden.err) == (2, True)
    monkeypatch.setenv("ONCEHOOK_SERVER", server)
    monkeypatch.setenv("ONCEHOOK_TOKEN", TOKEN)
    assert quiet.good("destinations").out
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    monkeypatch.setenv("ONCEHOOK_TOKEN", "two\nlines")
    assert quiet.run("destinations").code == 2


def test_who_is_no_oncehook_server_is_not_reachable(quiet: Admin) -> None:
    done = quiet.run("destinations", "--server", f"http://127.0.0.1:{quiet.sink.port}", "--token-env", "ADMIN")
    assert (done.code, done.out) == (3, "")
    assert TOKEN not in done.err


def test_without_a_server_the_same_routes_answer_in_this_process(here: Admin) -> None:
    [event_id] = here.die("o1")
    beside = here.good("show", event_id, "--json").json
    here.receiver.stop()
    alone = here.good("show", event_id, "--json").json
    assert alone == beside
    waiting = here.run("replay", event_id, "--yes", "--wait")
    assert (waiting.code, waiting.out) == (3, ""), "nobody would ever do it"
    made = here.good("replay", event_id, "--yes")
    assert "waits for a worker" in made.err
    assert ("cli", "replay") in [(actor, act.partition(".")[0].partition("_")[0]) for actor, act in here.audit()]
    here.sink.status = 200
    here.receiver.start()
    here.wait_for("done", "o1")


def test_looking_neither_makes_a_store_nor_changes_its_schema(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("events")
    assert (done.code, done.out) == (3, "")
    assert "oncehook serve" in done.err
    assert not list(tmp_path.iterdir())
    (tmp_path / "oncehook.db").touch()
    behind = run("events")
    assert (behind.code, behind.out) == (1, "")
    assert "oncehook db migrate" in behind.err


class Forgetful(socketserver.ThreadingTCPServer):
    """A server that hangs up on the first request, and answers the second."""

    daemon_threads = True

    def __init__(self) -> None:
        self.heads: list[str] = []
        super().__init__(("127.0.0.1", 0), _Forget)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class _Forget(socketserver.StreamRequestHandler):
    server: Forgetful

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.rfile.readline()
        self.server.heads.append(head.decode())
        if len(self.server.heads) > 1:
            self.wfile.write(b'HTTP/1.1 202 Accepted\r\ncontent-length: 19\r\n\r\n{"replay_id":"rpl"}')


@pytest.fixture
def forgetful() -> Iterator[Forgetful]:
    with Forgetful() as server:
        yield server
        server.shutdown()


def test_a_lost_answer_is_asked_for_again_under_the_same_key(forgetful: Forgetful) -> None:
    """R47: the server makes one replay of the two, because their Idempotency-Key is the same."""
    with Api(Where(server=f"http://127.0.0.1:{forgetful.server_address[1]}")) as api:
        assert api.post("replays", {}, key="one") == {"replay_id": "rpl"}
    keys = [re.findall(r"idempotency-key: (\w+)", head) for head in forgetful.heads]
    assert keys == [["one"], ["one"]]


def test_an_act_without_a_key_is_not_repeated(forgetful: Forgetful) -> None:
    with Api(Where(server=f"http://127.0.0.1:{forgetful.server_address[1]}")) as api, pytest.raises(Unreachable):
        api.post("dead/discard", {})
    assert len(forgetful.heads) == 1


# -- the store itself --------------------------------------------------------------------------


def test_a_restored_backup_has_no_leases(admin: Admin) -> None:
    """R69: all leases void, all fences raised."""
    admin.sink.hold.clear()
    admin.send("o1")
    while not admin.sink.bodies:
        time.sleep(0.02)
    refused = admin.run("db", "restored")
    assert (refused.code, refused.out) == (2, "")
    assert admin.stand() == {"o1": "leased"}
    admin.receiver.kill()
    done = admin.good("db", "restored", *(["--yes"] if admin.engine.name == "postgres" else []))
    assert done.out == "1 lease ended, all fences raised\n"
    assert admin.stand() == {"o1": "pending"}
    admin.sink.hold.set()
    admin.receiver.start()
    admin.wait_for("done", "o1")


def test_prune_removes_what_is_finished_and_nothing_else(admin: Admin) -> None:
    """R67: a dead letter stays, however old it is."""
    admin.send("well")
    admin.wait_for("done", "well")
    admin.die("dead")
    assert admin.good("db", "prune").out.startswith("removed 0 events"), "beside a server, too"
    admin.receiver.stop()
    settings = admin.receiver.folder / "oncehook.toml"
    settings.write_text(settings.read_text().replace("[source.orders]", '[source.orders]\nkeep_events = "1s"'))
    time.sleep(1.1)
    assert len(admin.good("events", "--json").out.splitlines()) == 2, "looking keeps no house"
    assert admin.good("db", "prune", "--json").json["events"] == 1
    assert admin.good("db", "prune").out.startswith("removed 0 events")
    assert admin.stand() == {"dead": "dead"}


def test_prune_keeps_what_a_stored_source_keeps(admin: Admin) -> None:
    """A source that was made while the server ran says how long its events are kept; the file says nothing of it."""
    admin.good("sources", "create", "kept", "verify=none", "keep_events=90d")
    admin.good("send", "kept", "--to", f"http://127.0.0.1:{admin.receiver.port}")
    admin.receiver.stop()
    settings = admin.receiver.folder / "oncehook.toml"
    settings.write_text(settings.read_text() + '\n[retention]\nkeep_events = "1s"\n')
    time.sleep(1.1)
    assert admin.good("db", "prune", "--json").json["events"] == 0


# -- documents ---------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()


def commands(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Every command and what is below it, by its whole name."""
    if names and not (isinstance(command, click.Group) and not command.invoke_without_command):
        yield " ".join(names), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, *names, name)


EVERY = dict(commands(cli))
SECTIONS = dict(re.findall(r"^#+ `oncehook ([a-z -]+)`\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE))


def test_every_command_has_its_section() -> None:
    assert set(SECTIONS) == set(EVERY)
    assert {name.split()[0] for name in EVERY} == set(COMMANDS)


@pytest.mark.parametrize("name", EVERY)
def test_the_page_names_every_option_and_no_other(name: str) -> None:
    options = [one for one in EVERY[name].params if isinstance(one, click.Option)]
    longest = {max(one.opts, key=len) for one in options if one.expose_value}  # -q and -v are told once for all
    server = {"--config", "--app", "--server", "--token-env"}
    whatsapp = {
        "--destination", "--api", "--base-url", "--instance", "--phone-number-id", "--version", "--country",
        "--allow-private",
    }  # fmt: skip
    if server <= longest:
        assert "*Asks the server.*" in SECTIONS[name]
        longest -= server
    if whatsapp <= longest:
        assert "*Speaks to WhatsApp.*" in SECTIONS[name]
        longest -= {*whatsapp, "--config"}
    named = set(re.findall(r"^\| `(--[a-z-]+)", SECTIONS[name], re.MULTILINE))
    assert named == longest
