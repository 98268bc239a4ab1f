"""What a person at a terminal of 80 columns sees, and what the short forms there can be used for."""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from fcntl import ioctl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import click
import pytest
from click.shell_completion import ShellComplete

from oncehook.cli import cli, output, tail
from oncehook.cli.api import Api, Failed, Where
from oncehook.cli.browse import held_back, list_dead, list_destinations
from oncehook.cli.help import EXAMPLES
from oncehook.cli.output import TableColumn, cut, table
from oncehook.human import show_id
from oncehook.logs import set_up_logging
from oncehook.model import DeliveryId, EventId, ReplayId, new_id
from tests.acceptance.test_admin_cli import EVERY, Admin, Done, at_a_terminal
from tests.cli.conftest import Process
from tests.cli.test_docs import parse, words_of

Run = Callable[..., Done]
Begin = Callable[..., Process]
SHORT = r"evt_…[0-9a-f]{6}\b"


def see(here: Admin, *arguments: str) -> list[str]:
    """What a command that succeeds prints on a terminal of 80 columns, without colours."""
    code, said = at_a_terminal(here.receiver.folder, list(arguments), "")
    assert code == 0, said
    return click.unstyle(said).replace("\r", "").splitlines()


# -- tables and short ids ----------------------------------------------------------------------


def test_lists_fit_and_their_ids_are_taken_back(admin: Admin) -> None:
    """On both engines."""
    [dead] = admin.die("order-with-a-rather-long-key-0001", customer="a-customer-with-a-long-name-42")
    admin.sink.status = 200
    listed = see(admin, "events")
    assert max(map(len, listed)) <= 80
    assert listed[0].split()[:4] == ["received", "id", "source", "type"]
    [short] = re.findall(SHORT, "\n".join(listed))
    assert short == show_id(dead)
    assert "ago" in listed[1] or "now" in listed[1]
    for command in (["dead"], ["sources"], ["destinations"], ["replay", "--list"], ["stats"], ["show", dead]):
        shown = see(admin, *command)
        assert max((len(line) for line in shown if "http" not in line), default=0) <= 80, shown
    assert admin.good("show", short, "--json").json["id"] == dead
    assert admin.good("show", f"evt_{short[-4:]}", "--json").json["id"] == dead, "the last four digits are enough"
    delivery = admin.good("show", dead, "--json").json["deliveries"][0]["id"]
    assert admin.good("show", show_id(delivery), "--json").json["id"] == delivery
    assert admin.good("events", f"event:{short}", "--json").out.count(dead) == 1
    done = admin.good("replay", short, "--yes", "--wait", "--json").json
    assert admin.good("show", show_id(done["id"]), "--json").json["id"] == done["id"]


def test_everything_in_full_when_asked_for_and_in_a_pipe(here: Admin) -> None:
    [sent] = here.send("o1")
    assert any(sent["event_id"] in line for line in see(here, "events", "--wide"))
    piped = here.good("events").out
    assert sent["event_id"] in piped
    assert re.search(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", piped)


def test_an_event_is_shown_with_its_attempts_and_its_page(here: Admin) -> None:
    [dead] = here.die("o1")
    shown = "\n".join(see(here, "show", dead))
    assert "attempts for crm" in shown
    assert "run 1 attempt 1" in shown
    assert f"http://127.0.0.1:{here.receiver.port}/events/{dead}" in shown


def test_what_waits_for_a_destination_is_not_called_due(here: Admin) -> None:
    here.good("pause", "crm")
    [sent] = here.send("o1")
    assert "paused" in next(line for line in see(here, "show", sent["event_id"]) if "crm: pending" in line)
    delivery = here.good("show", sent["event_id"], "--json").json["deliveries"][0]["id"]
    assert any(line.split() == ["due", "paused"] for line in see(here, "show", delivery))
    assert "1 event since midnight UTC" in here.good("stats").out
    assert sent["event_id"] in here.good("events", "--query", "key:o1").out
    assert sent["event_id"] not in here.good("events", "--query", "key:o2").out


def test_until_when_a_breaker_holds_deliveries_back() -> None:
    now = output.clock.now_utc()
    ago, soon, later = (now + timedelta(seconds=s) for s in (-9, 60, 3600))

    def say(until: datetime | None, due: datetime) -> str:
        destination = {"state": "held_back", "open_until": until and until.isoformat()}
        return held_back(destination, due.isoformat())

    assert say(soon, ago) == f"held back until {soon:%H:%M:%S} UTC"
    assert say(soon, later) == ""
    assert say(ago, ago) == "held back until one attempt succeeds"
    assert say(None, ago) == ""


def test_a_wrong_id_is_told_its_form(here: Admin) -> None:
    done = here.run("show", "evt_nope")
    assert "No event evt_nope." in done.err
    assert "An id is evt_ and 32 digits" in done.err


class Listed(Api):
    """An API that knows these ids and nothing else."""

    def __init__(self, *ids: str) -> None:
        super().__init__(Where())
        self.ids = ids
        self.asked: list[str] = []

    def pages(self, path: str, *, most: int | None = None, **parameters: object) -> Iterator[dict[str, Any]]:
        self.asked.append(path)
        return iter([{"id": one} for one in self.ids])


def test_a_short_id_is_unique_or_refused() -> None:
    one, other = "evt_0199a4e8aaaa7bbb8ccc3a5d2c000000", "evt_0199a4e8aaaa7bbb8ccc775d2c000000"
    api = Listed(one, other)
    assert api.full_id("evt_…3a5d2c") == api.full_id("evt_3a5d2c") == api.full_id("evt_...3a5d2c") == one
    with pytest.raises(Failed) as several:
        api.full_id("evt_…5d2c")
    assert one in several.value.message
    assert other in several.value.message
    with pytest.raises(Failed, match="None of the newest 2,000 events is evt_…ffff"):
        api.full_id("evt_…ffff")
    api.asked.clear()
    for whole in (one, "evt_0199-a4e8aaaa7bbb8ccc3a5d2c-000000", "rubbish", "evt_12"):
        assert api.full_id(whole) == whole
    assert not api.asked, "a whole id costs no question"
    assert api.full_query(["key:evt_3a5d2c", "event:evt_…3a5d2c"]) == f"key:evt_3a5d2c event:{one}"


def test_a_deliverys_short_id_tells_its_destination() -> None:
    event = new_id()
    first, second = (str(DeliveryId.of(event, number)) for number in (1, 0x1F))
    assert show_id(str(EventId(event))) == f"evt_…{event.hex()[20:26]}"
    assert show_id(second).endswith("-1f")
    api = Listed(first, second)
    assert api.full_id(show_id(first)) == first
    assert api.full_id(show_id(second)) == second
    with pytest.raises(Failed, match="is short for 2 deliveries"):
        api.full_id(show_id(first).partition("-")[0])


def test_columns_give_way_in_their_order() -> None:
    head = (
        TableColumn("id"),
        TableColumn("type", 6),
        TableColumn("subject", 6, spare=1),
        TableColumn("key", 6, spare=2),
    )
    rows = [["evt_…3a5d2c", "checkout.session.completed", "customer-42-of-many", "a-very-long-key-of-theirs"]]
    for width in range(20, 100):
        lines = table(head, rows, width=width)
        assert max(map(len, map(click.unstyle, lines))) <= width
        assert "evt_…3a5d2c" in lines[1], "an id is never cut"
    names = [set(click.unstyle(table(head, rows, width=width)[0]).split()) for width in (90, 30, 20)]
    assert names == [{"id", "type", "subject", "key"}, {"id", "type", "subject"}, {"id", "type"}]


def test_a_line_that_is_cut_keeps_its_colours() -> None:
    line = f"12:00:00  {click.style('dead', fg='red')}  {click.style('HTTP 400 with much to say', fg='yellow')}"
    for width in range(2, 60):
        shown = cut(line, width)
        assert len(click.unstyle(shown)) <= width
        assert click.unstyle(shown) == click.unstyle(line) or click.unstyle(shown).endswith("…")
    assert "\x1b[31mdead\x1b[0m" in cut(line, 20)
    assert cut(line, 20).endswith("\x1b[0m"), "what comes after it has no colour"


def test_the_cause_of_dead_letters_is_kept_before_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "room", lambda: 80)
    head = ("count", output.TableColumn("cause", 20, is_main=True), output.TableColumn("first", spare=1), "sample")

    def row(cause: str) -> str:
        return output.table(head, [("12", cause, "f" * 20, "dlv_…3a5d2c-1")])[1]

    assert "f" * 20 in row("KeyError: 'x' (app.py:9)")
    long = "LookupError: no address for 17 in the stock (app.py:9)"
    assert row(long) == f"12     {long}  dlv_…3a5d2c-1"
    assert "LookupError: no address" in row(f"{long[:-10]} of today, as it seems (app.py:9)")
    assert "…" in row(f"{long[:-10]} of today, as it seems (app.py:9)")
    assert "(app.py:9)  dlv_…3a5d2c-1" in row(f"{long[:-10]} of today, as it seems (app.py:9)")


def test_a_header_is_whole_while_the_main_column_can_be_cut() -> None:
    head = ("count", TableColumn("destination", 8), TableColumn("cause", 20, is_main=True), "sample")
    rows = [("12", "crm", "LookupError: no address for 17 in the stock of today (app.py:9)", "dlv_…3a5d2c-1")]
    for width in range(56, 80):
        header, line = map(click.unstyle, table(head, rows, width=width))
        assert header.split() == ["count", "destination", "cause", "sample"]
        assert len(line) == width
    header, line = map(click.unstyle, table(head, rows, width=52))
    assert header.split() == ["count", "destina…", "cause", "sample"], "only where there is no room at all"


def test_an_address_is_not_cut_to_a_stump_before_other_columns_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "name": "crm", "kind": "http", "address": "POST http://127.0.0.1:8000/hooks", "state": "ready", "failures": 0,
        "paused_why": None, "pending": 0, "leased": 0, "dead": 0, "oldest_due": None, "retry": "standard",
        "origin": "oncehook.toml",
    }  # fmt: skip
    api = Api(Where())
    monkeypatch.setattr(api, "pages", lambda path: [found])
    for width, gone in (
        (90, {"origin"}),
        (80, {"retry", "origin"}),
        (70, {"kind", "retry", "origin"}),
        (66, {"kind", "leased", "retry", "origin"}),
    ):
        monkeypatch.setattr(output, "room", lambda width=width: width)
        list_destinations(api, as_json=False)
        header, line = click.unstyle(capsys.readouterr().out).splitlines()
        assert {"kind", "leased", "retry", "origin"} - set(header.split()) == gone, header
        assert found["address"] in line


def test_a_cause_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cause, address = "LookupError: " + "x" * 200, "POST https://crm.example/" + "y" * 100
    now = "2026-11-18T10:00:00Z"
    dead = {"count": 2, "destination": "crm", "cause": cause, "first_at": now, "last_at": now, "sample": "dlv_1"}
    api = Api(Where())
    monkeypatch.setattr(api, "get", lambda path, **_: {"items": [dead]})
    list_dead(api, None, as_json=False)
    assert cause in capsys.readouterr().out
    found = {
        "name": "crm", "kind": "http", "address": address, "state": "ready", "failures": 0, "paused_why": None,
        "pending": 0, "leased": 0, "dead": 0, "oldest_due": None, "retry": "standard", "origin": "oncehook.toml",
    }  # fmt: skip
    monkeypatch.setattr(api, "pages", lambda path: [found])
    list_destinations(api, as_json=False)
    assert address in capsys.readouterr().out


def test_why_a_destination_fails_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "room", lambda: 80)
    found = {
        "name": "a-destination", "kind": "handler", "address": "shop.handlers.ship", "state": "failing", "failures": 3,
        "paused_why": None, "pending": 1234, "leased": 2, "dead": 3, "oldest_due": 100.0, "retry": "quick",
        "origin": "app",
    }  # fmt: skip
    api = Api(Where())
    monkeypatch.setattr(api, "pages", lambda path: [found])
    list_destinations(api, as_json=False)
    _, line = click.unstyle(capsys.readouterr().out).splitlines()
    assert "failing (3 deliveries failed in a row)" in line
    assert len(line) <= 80


# -- tail and the log --------------------------------------------------------------------------


def test_moments_are_columns_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "room", lambda: 80)
    monkeypatch.setattr(tail, "room", lambda: 80)
    event = str(EventId(new_id()))
    about = {"source": "stripe", "type": "checkout.session.completed", "event_id": event, "duration_s": 0.0042}
    moments = [
        ("arrival", {**about, "outcome": "accepted", "subject": "cs_test_0123456789abcdef"}),
        ("arrival", {"source": "github", "outcome": "rejected", "reason": "signature_invalid", "peer": "203.0.113.9"}),
        ("attempt", {**about, "outcome": "done", "destination": "crm", "attempt": 1}),
        ("attempt", {**about, "outcome": "retry", "destination": "a-long-destination", "attempt": 2, "again_in_s": 9.1,
                     "error": "ConnectionError: nobody is at home"}),
    ]  # fmt: skip
    lines = [tail.moment_line(kind, fields, output.clock.now_utc()) for kind, fields in moments]
    bare = [click.unstyle(line) for line in lines]
    assert max(map(len, bare)) <= 80
    places = {line.index(word) for line, (_, fields) in zip(bare, moments, strict=True) for word in [fields["outcome"]]}
    assert len(places) == 1, bare
    assert show_id(event) in bare[0]
    assert event not in bare[0]
    assert "signature_invalid from 203.0.113.9" in bare[1]
    assert "ConnectionError: nobody is at" in bare[3], "the error comes before names and ids"


@contextmanager
def narrow_terminal() -> Iterator[tuple[Any, Callable[[], str]]]:
    """A terminal of 80 columns, as a stream to write to, and what it has shown so far."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(theirs, "w", buffering=1) as stream:
        yield stream, lambda: os.read(ours, 65536).decode()
    os.close(ours)


def test_a_log_line_about_an_event_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    event = str(EventId(new_id()))
    fields = {"source": "stripe", "type": "invoice.paid", "event_id": event, "key": "k" * 60, "duration_s": 0.004}
    with narrow_terminal() as (stream, shown):
        set_up_logging("info", stream)
        logging.getLogger("oncehook.arrival").info("arrival.accepted", extra={"fields": fields})
        [line, _] = click.unstyle(shown()).split("\r\n")
        assert len(line) <= 80
        assert f"arrival.accepted   {show_id(event)}  stripe invoice.paid" in line
        attempt_log, failed = logging.getLogger("oncehook.attempt"), {**fields, "attempt": 3, "destination": "ship"}
        attempt_log.error("delivery.dead", extra={"fields": failed | {"error": "LookupError: order 17\nin app.py"}})
        line = click.unstyle(shown()).strip()
        assert line[10:] == f"delivery.dead  → ship  LookupError: order 17  {show_id(event)}  stripe inv…"
        attempt_log.error("delivery.dead", extra={"fields": failed | {"error": "x" * 200}})
        line = click.unstyle(shown()).strip()
        assert line.endswith(f"{'x' * 30}…  {show_id(event)}")
        attempt_log.error("delivery.dead", extra={"fields": failed | {"error": "x" * 200, "destination": "d" * 20}})
        assert click.unstyle(shown()).strip().endswith(f"  {'x' * 30}…")
        for logger, moment, about, says in (
            ("arrival", "arrival.rejected", {"source": "stripe", "reason": "mismatch", "peer": "203.0.113.9",
             "code": "signature_invalid", "size": 12345}, "stripe  reason=mismatch  code=signature_invalid"),
            ("arrival", "arrival.accepted", {**fields, "type": "checkout.session.completed", "size": 1},
             "stripe checko…on.completed     4.0 ms"),
            ("replay", "replay.done", {"replay_id": str(ReplayId(new_id())), "state": "done", "planned": 12345,
             "done": 12345, "dead": 12345, "actor": "a" * 40}, "state=done  planned=12345  done=12345"),
            ("attempt", "breaker.opened", {"destination": "ship", "failures": 5,
             "until": "2026-11-18T10:00:30.123+00:00", "worker": "w" * 40}, "→ ship  failures=5  until=10:00:30"),
        ):  # fmt: skip
            logging.getLogger(f"oncehook.{logger}").warning(moment, extra={"fields": about})
            line = click.unstyle(shown()).strip()
            assert says in line
            assert len(line) <= 80
            assert not line.endswith("…"), "what does not fit is left out, not cut"
        logging.getLogger("oncehook.store").warning("store.full", extra={"fields": {"error": "e" * 200}})
        assert "e" * 200 in shown().replace("\r\n", ""), "a warning is never cut"
    with io.StringIO() as pipe:
        set_up_logging("info", pipe, for_people=True)
        logging.getLogger("oncehook.arrival").info("arrival.accepted", extra={"fields": fields})
        assert "key=" in pipe.getvalue()


# -- help and errors ---------------------------------------------------------------------------


def test_every_command_has_an_example_that_works() -> None:
    assert set(EXAMPLES) == set(EVERY)
    for name, example in EXAMPLES.items():
        found = re.search(r"oncehook (.*?)(?:\)\")?$", example)
        assert found is not None, example
        words = words_of(found[1])
        assert " ".join(words).startswith(name), example
        parse(words)


def test_help_is_grouped_and_ends_with_the_example(run: Run) -> None:
    said = run("--help").out
    assert [said.index(f"\n{group}:") for group in ("Run", "Look", "Act", "Set up")] == sorted(
        said.index(f"\n{group}:") for group in ("Run", "Look", "Act", "Set up")
    )
    events = run("events", "--help").out
    assert f"Example:\n  {EXAMPLES['events']}\n" in events
    assert events.count("ONCEHOOK_EVENTS_LIMIT") == 1
    assert "..." not in run("db", "--help").out.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serv",), 'Did you mean "serve"?'),
        (("db", "bakup", "x"), 'Did you mean "backup"?'),
        (("dead", "discrad", "x"), 'Did you mean "discard"?'),
        (("send", "strpe"), 'Did you mean "stripe"?'),
        (("send", "stripe", "invoice.payd", "--to", "http://127.0.0.1:1"), 'Did you mean "invoice.paid"?'),
        (("init", "--from", "strip", "--to", "python", "--store", "sqlite:./x.db"), 'Did you mean "stripe"?'),
        (("replay", "--forc"), "--force"),
        (("pause",), "Try: oncehook pause --help"),
        (("completion", "tcsh"), "bash"),
        (("doctor", "app:one", "--app", "app:two"), "one of them is enough"),
    ],
)
def test_wrong_use_is_told_in_one_form(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("oncehook: ")
    assert says in done.err
    assert "Usage:" not in done.err
    assert not any("Error" in line for line in done.err.splitlines())


APP = """
from oncehook import Inbox

inbox = Inbox("sqlite:./own.db")
inbox.source("orders", verify="none", key="$.id")
"""


def test_an_app_is_named_in_two_ways_and_by_one_variable(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_app.py").write_text(APP)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for way in (("own_app:inbox",), ("--app", "own_app:inbox")):
        sys.modules.pop("own_app", None)  # a program is loaded once, and its store closed with the command
        assert "1 source" in run("config", "check", *way).out
        assert "own_app:inbox: 1 source" in run("doctor", *way).out
    monkeypatch.setenv("ONCEHOOK_APP", "own_app:inbox")
    sys.modules.pop("own_app")
    done = run("doctor")
    assert "own_app:inbox: 1 source" in done.out
    assert "not a setting" not in done.err
    sys.modules.pop("own_app")
    run("db", "migrate")
    assert (tmp_path / "own.db").exists(), "the app's store"
    sys.modules.pop("own_app")


# -- completion --------------------------------------------------------------------------------


def complete(*words: str) -> list[str]:
    """What a shell is offered for the last of these words."""
    shell = ShellComplete(cli, {}, "oncehook", "_ONCEHOOK_COMPLETE")
    return [one.value for one in shell.get_completions(list(words[:-1]), words[-1])]


def test_names_come_from_the_running_server(here: Admin) -> None:
    [dead] = here.die("o1")
    assert complete("pause", "") == ["crm"]
    assert complete("dead", "--destination", "c") == ["crm"]
    assert complete("forward", "o") == ["orders"]
    assert complete("show", "evt_") == [show_id(dead)]
    assert complete("show", f"evt_…{show_id(dead)[5:7]}") == [show_id(dead)]
    assert complete("events", "sta") == ["status:"]
    assert complete("events", "status:de") == ["status:dead"]
    assert complete("events", "status:dead", "to:") == ["to:crm"]
    assert complete("events", "status", ":", "de") == ["dead"], "as bash takes words apart"
    assert complete("events", "source", ":") == ["orders"]


def test_names_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete("send", "strip") == ["stripe"]
    assert {"invoice.paid", "invoice.payment_failed"} <= set(complete("send", "stripe", "invoice"))
    assert complete("init", "--from", "whats") == ["whatsapp-cloud"]
    assert complete("pause", "") == []
    (tmp_path / "oncehook.toml").write_text(
        '[source.pay]\npreset = "stripe"\nsecret = { env = "X" }\n'
        '[destination.crm]\nurl = "https://crm.example/"\n[[route]]\nfrom = "pay"\nto = "crm"\n'
    )
    assert complete("pause", "") == ["crm"]
    assert complete("events", "source:p") == ["source:pay"]
    assert "invoice.paid" in complete("send", "pay", "invoice.p")
    assert list(tmp_path.iterdir()) == [tmp_path / "oncehook.toml"], "completion leaves nothing behind"


# -- open --------------------------------------------------------------------------------------


def test_open_leads_into_the_dashboard_logged_in(here: Admin) -> None:
    [sent] = here.send("o1")
    link = here.good("open", show_id(sent["event_id"]), "--print").out.strip()
    parts = urlsplit(link)
    assert parts.port == here.receiver.port
    assert parse_qs(parts.query)["to"] == [f"/events/{sent['event_id']}"]
    connection = http.client.HTTPConnection("127.0.0.1", here.receiver.port)
    connection.request("GET", f"/?{parts.query}")
    answer = connection.getresponse()
    answer.read()
    assert (answer.status, answer.getheader("location")) == (303, f"/events/{sent['event_id']}")
    cookie = str(answer.getheader("set-cookie")).partition(";")[0]
    connection.request("GET", str(answer.getheader("location")), headers={"cookie": cookie})
    page = connection.getresponse()
    assert (page.status, sent["event_id"] in page.read().decode()) == (200, True)
    connection.request("GET", f"/?{parts.query}")
    assert connection.getresponse().status == 401, "once"
    connection.close()


def test_a_token_gets_no_link(here: Admin) -> None:
    """A link would make it a session that outlives the token, and has none of its limits."""
    server = f"http://127.0.0.1:{here.receiver.port}"
    link = here.good("open", "--print", "--server", server, "--token-env", "ADMIN").out.strip()
    assert link == f"{server}/"
    here.receiver.stop()
    assert here.run("open", "--print").code == 3


# -- send and init -----------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server without settings, on a port of its own; gives its address."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    command = [sys.executable, "-m", "oncehook", "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("oncehook ready on "), f"the first line is no warning: {first}"
    yield first.split()[-1]
    process.send_signal(signal.SIGTERM)
    process.communicate()


def test_send_finds_the_server_and_changes_values(run: Run, elsewhere: str) -> None:
    assert "accepted" in run("send", "stripe", "invoice.paid").out
    changed = ("--set", "data.object.amount_paid=500", "--set", "data.object.lines.note=two words")
    sent = run("send", "stripe", "checkout.session.completed", "--to", elsewhere, "--json", *changed)
    body = json.loads(run("show", sent.json["event_id"], "--raw").out)
    assert body["data"]["object"]["amount_paid"] == 500
    assert body["data"]["object"]["lines"] == {"note": "two words"}
    assert run("send", "twilio", "message.received", "--set", "Body=5 & more").code == 0
    [form] = run("events", "source:twilio", "--json").out.splitlines()
    assert "Body=5+%26+more" in run("show", json.loads(form)["id"], "--raw").out
    for wrong in ("data.object.id.below=1", "nothing", "=5"):
        refused = run("send", "stripe", "--set", wrong)
        assert (refused.code, refused.out) == (2, "")


def test_an_answer_that_cannot_be_is_asked_for_again(tmp_path: Path, begin: Begin) -> None:
    asking = begin(tmp_path, "init", terminal=True)
    asking.wait_for("Where do hooks come from?")
    asking.type("strip\n")
    asking.wait_for('Did you mean "stripe"?')
    asking.wait_for("Where do hooks come from?", times=2)
    asking.type("stripe\n")
    asking.wait_for("Where do they go?")
    asking.type("nowhere\n")
    asking.wait_for("must be a web address")
    asking.wait_for("Where do they go?", times=2)
    asking.type("https://example.org/hook\n")
    asking.wait_for("Which store?")
    asking.type("mysql://x\n")
    asking.wait_for("postgresql://host/database")
    asking.wait_for("Which store?", times=2)
    asking.type("\n")
    asking.process.wait()
    assert asking.end() == 0
    assert "line " not in asking.out.partition("next:")[0]
    assert 'url = "https://example.org/hook"' in (tmp_path / "oncehook.toml").read_text()


def test_a_sentence_ends_with_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "the plan of a replay or a finding of doctor is longer than this, with evt_0123456789abcdef0123456789 in it"
    label = click.style("warn  ", fg="yellow")
    assert output.sentence(words, label, "      ") == [label + words], "one line in a pipe"
    monkeypatch.setattr(output, "room", lambda **_: 40)
    lines = output.sentence(words, label, "      ")
    assert lines[0] == f"{label}the plan of a replay or a finding"
    assert all(len(click.unstyle(line)) <= 40 for line in lines)
    assert " ".join(click.unstyle(line)[6:] for line in lines) == words
    assert output.sentence("", label) == [label]
    steps = "Give every process the same one: export ONCEHOOK_SECRET_KEY=$(openssl rand -base64 32)"
    assert steps.partition(": ")[2] in output.sentence(steps), "a command is copied as a whole"
    assert "`oncehook db migrate --config oncehook.toml`." in output.sentence(
        "There is something that runs it: `oncehook db migrate --config oncehook.toml`."
    )


def test_each_line_of_a_message_is_broken_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "a.toml:2: unknown key in [server]; did you mean host?\n  a.toml:5: another one that is rather long, too"
    assert output.message(words, "oncehook: ") == [f"oncehook: {words}"], "as it is in a pipe"
    monkeypatch.setattr(output, "room", lambda *, err=False: 40 if err else None)
    assert output.message(words, "oncehook: ") == [
        "oncehook: a.toml:2: unknown key in",
        "          [server]; did you mean host?",
        "  a.toml:5: another one that is rather",
        "  long, too",
    ]


def test_errors_and_notes_are_broken_between_words(tmp_path: Path, begin: Begin) -> None:
    """Also where stdout is a pipe: they are printed on stderr."""
    (tmp_path / "oncehook.toml").write_text('[source.shop]\npreset = "stripe"\nbudget = "as long as they wait"')
    with narrow_terminal() as (stream, shown):
        command = [sys.executable, "-m", "oncehook", "serve"]
        env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stream, cwd=tmp_path, env=env)
        said = shown().replace("\r", "")
    piped = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env).stderr
    assert done.returncode == 2
    assert max(map(len, piped.splitlines())) > 80 >= max(map(len, said.splitlines()))
    assert said.split() == piped.split(), "no word is broken"
    (tmp_path / "oncehook.toml").unlink()
    served = begin(tmp_path, "serve", "--port", "0", terminal=True, COLUMNS="60")
    served.wait_for("try ")
    note = click.unstyle(served.out).replace("\r", "").partition("  note ")[2].splitlines()
    assert note[0].strip() == "no oncehook.toml here: every preset under its"
    assert note[1] == "             own name, from this machine only"
