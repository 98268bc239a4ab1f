"""Commands beside a program that writes the SQLite file and serves no API, and where there is no store to speak of."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oncehook.cli import api
from oncehook.store.base import Timeouts
from oncehook.store.sqlite import SqliteStore, connection
from oncehook.store.sqlite.connection import FileHolder, Hold, holder
from tests.acceptance.test_admin_cli import Done, Sink
from tests.cli.conftest import Process
from tests.contrib.running import post

Begin = Callable[..., Process]
Run = Callable[..., Done]

APP = """
from fastapi import FastAPI

from oncehook import Event, GiveUp, Inbox

inbox = Inbox("sqlite:./oncehook.db")
inbox.source("orders", verify="none", key="$.id", subject="$.customer", type="$.type", budget="90s")


@inbox.on("orders")
async def ship(event: Event) -> None:
    raise GiveUp("out of stock")


app = FastAPI(lifespan=inbox.lifespan)
app.mount("/hooks", inbox.asgi())
"""


@dataclass
class Program:
    """Somebody's application, which has the store and no dashboard."""

    folder: Path
    port: int
    pid: int
    event_id: str = ""

    def send(self, key: str, customer: str = "c1") -> str:
        answer = post(
            f"http://127.0.0.1:{self.port}/hooks/orders", {"id": key, "customer": customer, "type": "order.paid"}
        )
        assert answer.said == (200, "accepted")
        return str(answer.json["event_id"])

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(f"file:{self.folder}/oncehook.db?mode=ro", uri=True)) as store:
            return store.execute(statement).fetchall()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("program")
    (folder / "app.py").write_text(APP)
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", "0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        while not (ready := re.search(r"Uvicorn running on http://127\.0\.0\.1:(\d+) ", (folder / "log").read_text())):
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        program = Program(folder, int(ready[1]), process.pid)
        program.event_id = program.send("o1")
        while program.rows("SELECT status FROM deliveries") != [("dead",)]:
            time.sleep(0.05)
        yield program
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    said = (folder / "log").read_text()
    assert ("Application shutdown complete" in said, "Traceback" in said) == (True, False), said


@pytest.fixture
def program(served: Program, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """In its folder; the application's module is loaded anew by every command that names it."""
    monkeypatch.chdir(served.folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield served
    sys.modules.pop("app", None)


KNOWN = ("--app", "app:inbox")


@pytest.mark.parametrize("act", ["pause", "resume"])
def test_what_only_the_program_defines_is_not_denied(program: Program, run: Run, act: str) -> None:
    done = run(act, "ship")
    assert (done.code, done.out) == (1, "")
    assert '"ship" is defined by a program, not by these settings.' in done.err
    assert f"oncehook {act} ship --app module:inbox" in done.err
    unknown = run(act, "shop")
    assert 'There is no destination "shop".' in unknown.err
    assert "--app module:inbox" in unknown.err


def test_who_sends_to_nobody_is_told_how_to_name_the_app(
    program: Program, run: Run, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEHOOK_SERVER_PORT", str(unused_tcp_port))
    done = run("send", "orders", *KNOWN)
    assert done.code == 3
    for word in ("oncehook serve", "--to http://127.0.0.1:8000", "--app module:inbox"):
        assert word in done.err.replace("\n  ", " ")
    wrong = run("send", "orders", *KNOWN, "--to", f"http://127.0.0.1:{program.port}/nothere")
    assert wrong.code == 1
    assert "→ 404" in wrong.out
    assert "Hooks arrive at /in/SOURCE below the server's address" in wrong.err


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        (("events",), "ship:dead"),
        (("events", "status:dead", "--json"), "order.paid"),
        (("show", "EVENT"), "out of stock"),
        (("show", "EVENT", "--body"), '"customer"'),
        (("dead",), "GiveUp: out of stock"),
        (("stats", "--by", "destination"), "ship"),
        (("sources", *KNOWN), "/in/orders"),
        (("destinations", *KNOWN), "app.ship"),
        (("export",), '"body": {"id": "o1"'),
        (("replay", "--list"), "planned"),
        (("replay", "EVENT", "--dry-run", *KNOWN), "app.ship"),
        (("dead", "discard", "status:dead", "--reason", "old", "--dry-run"), "1"),
        (("erase", "--subject", "c1", "--source", "orders", "--dry-run", *KNOWN), "1 event"),
        (("doctor",), "process PID"),
        (("db", "status"), "version"),
    ],
)
def test_who_only_looks_is_answered(program: Program, run: Run, command: tuple[str, ...], shows: str) -> None:
    done = run(*(program.event_id if word == "EVENT" else word for word in command))
    assert done.code == 0, done
    assert shows.replace("PID", str(program.pid)) in done.out


def test_it_is_said_who_writes_and_how_to_know_more(program: Program, run: Run) -> None:
    without = run("destinations")
    assert (without.code, f"beside process {program.pid}" in without.err, "--app" in without.err) == (0, True, True)
    assert "app.ship" not in without.out
    assert "beside" not in run("destinations", *KNOWN).err
    assert not run("sources", "-q").err
    assert "whatsapp-cloud" not in run("sources").out, "those of the development inbox are not the program's"


ACTS = [
    ("replay", "EVENT", "--yes"),
    ("replay", "--query", "status:dead", "--yes", "--request-key", "k"),
    ("pause", "ship", *KNOWN),
    ("resume", "ship", *KNOWN),
    ("dead", "discard", "status:dead key:ACT", "--reason", "old", "--yes"),
    ("import", "keys", "KEYS", "--source", "orders", *KNOWN),
    ("erase", "--subject", "c2", "--reason", "asked for", "--yes"),
]


def dead_one(program: Program, key: str) -> str:
    """An event whose delivery has died."""
    event_id = program.send(key, "c2")
    while program.rows(
        f"SELECT d.status FROM deliveries d JOIN events e ON e.id = d.event_id WHERE e.key = '{key}'"
    ) != [("dead",)]:
        time.sleep(0.05)
    return event_id


@pytest.mark.parametrize(("n", "command"), list(enumerate(ACTS)), ids=[" ".join(act) for act in ACTS])
def test_what_acts_is_done_beside_it(program: Program, run: Run, n: int, command: tuple[str, ...]) -> None:
    """The program owns the file; the command is its client."""
    key = f"act{n}"
    (program.folder / "keys.txt").write_text(f"imported{n}\n")
    is_steering = command[0] in ("pause", "resume")
    words = {"EVENT": "" if is_steering else dead_one(program, key), "KEYS": "keys.txt"}
    before = program.rows("SELECT count(*) FROM audit")
    done = run(*(words.get(word, word).replace("ACT", key) for word in command))
    assert done.code == 0, done
    assert program.rows("SELECT count(*) FROM audit") > before
    if is_steering:
        paused = program.rows("SELECT count(*) FROM destination_state WHERE paused_at IS NOT NULL")
        assert paused == [(command[0] == "pause",)]


def test_who_takes_no_clients_is_only_read_beside(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "oncehook.db")
    monkeypatch.setattr(Timeouts, "__init__", functools.partialmethod(Timeouts.__init__, connect=1))
    monkeypatch.setattr(api, "SETTLED", 0.1)
    other = Hold(tmp_path / "oncehook.db")
    looked, acted = run("dead"), run("replay", "--abort", "rpl_" + "0" * 32)
    other.release()
    assert (looked.code, acted.code, acted.out) == (0, 3, "")
    assert "takes no clients" in acted.err


def test_what_happens_is_seen_by_looking(program: Program, begin: Begin, sink: Sink) -> None:
    tail = begin(program.folder, "tail")
    forward = begin(program.folder, "forward", "orders", "--to", f"http://127.0.0.1:{sink.port}/", *KNOWN)
    tail.wait_for("watching", "err")
    forward.wait_for("forwarding", "err")
    sent = program.send("o9")
    tail.wait_for(f"{sent}  orders order.paid  → ship  dead")
    forward.wait_for("→ 200")
    assert [json.loads(body)["id"] for body in sink.bodies] == ["o9"]
    assert (tail.end(), forward.end()) == (0, 0)


def test_a_program_writes_on_while_it_is_read(program: Program) -> None:
    """Many read and leave beside it: what it was told to keep is there, once each, and the file is sound."""
    reading = [
        subprocess.Popen(
            [sys.executable, "-m", "oncehook", command],
            cwd=program.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for command in ("events", "dead", "export", "stats")
    ]  # fmt: skip
    sent = []
    for n in itertools.count():
        sent.append(program.send(f"w{n}"))
        if n >= 50 and all(one.poll() is not None for one in reading):
            break
    for one in reading:
        _, said = one.communicate()
        assert one.returncode == 0, said
    kept = {f"evt_{id_.hex()}" for (id_,) in program.rows("SELECT id FROM events WHERE key LIKE 'w%'")}
    assert kept == set(sent)
    assert program.rows("PRAGMA integrity_check") == [("ok",)]


# -- who has just begun --------------------------------------------------------------------------


def make_store(path: Path) -> None:
    async def make() -> None:
        store = SqliteStore(path)
        await store.open()
        await store.close()

    asyncio.run(make())


def after_a_look(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Let something happen as soon as a command has seen that somebody has just taken the file."""
    left = [then]

    def looked(path: Path) -> FileHolder | None:
        seen = holder(path)
        if left:
            assert seen is not None
            left.pop()()
        return seen

    monkeypatch.setattr(connection, "holder", looked)
    monkeypatch.setattr(api, "SETTLED", 3600.0)  # however long it takes us


def test_a_server_that_begins_is_waited_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "oncehook.db")
    begins = Hold(tmp_path / "oncehook.db")
    after_a_look(monkeypatch, lambda: begins.announce("http://127.0.0.1:1", "a token"))
    done = run("events")
    begins.release()
    assert (done.code, "http://127.0.0.1:1" in done.err) == (3, True), done


def test_a_command_that_is_at_it_is_waited_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "oncehook.db")
    after_a_look(monkeypatch, Hold(tmp_path / "oncehook.db").release)
    done = run("replay", "--abort", "rpl_" + "0" * 32)
    assert (done.code, "no such thing" in done.err) == (1, True), done


# -- no store to speak of ------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("events",), ("dead",), ("stats",), ("tail",), ("export",)], ids=" ".join)
def test_no_store_and_nothing_that_names_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*command)
    assert (done.code, done.out) == (3, "")
    assert re.search(r"no store at oncehook\.db yet\.\n.*oncehook serve.*--app module:inbox.*ONCEHOOK_STORE", done.err)
    assert not list(tmp_path.iterdir())
    (tmp_path / "oncehook.toml").write_text('store = "sqlite:./mine.db"\n')
    named = run(*command)
    assert (named.code, "mine.db" in named.err, "--app" in named.err) == (3, True, False)
    assert [one.name for one in tmp_path.iterdir()] == ["oncehook.toml"]


def test_an_empty_store_that_nothing_names(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "oncehook.db")
    done = run("dead")
    assert (done.code, done.out) == (0, "")
    assert re.search(r"nothing is kept in oncehook\.db yet\. .*--app module:inbox", done.err)
    assert "--app" not in run("dead", "-q").err
    monkeypatch.setenv("ONCEHOOK_STORE", "sqlite:./oncehook.db")
    assert "--app" not in run("dead").err
    monkeypatch.delenv("ONCEHOOK_STORE")

    async def emit() -> None:
        from oncehook import Inbox

        async with Inbox("sqlite:./oncehook.db").running() as inbox:
            await inbox.emit("app", "t", {})

    asyncio.run(emit())
    assert "--app" not in run("dead").err
