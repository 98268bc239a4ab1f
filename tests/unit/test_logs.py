"""Lines in a program with a logging of its own: the moment with its details, and nothing that forges a line (S35)."""

from __future__ import annotations

import ast
import io
import json
import logging
import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path

import pytest
from tests.unit.test_observe import EVIL, SOURCE, item

import oncehook
from oncehook import logs
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.observe import Observer

MODULES = sorted(Path(oncehook.__file__).parent.rglob("*.py"))
DETAIL = r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)'
LINE = re.compile(rf"[A-Z]+:oncehook\.\w+:([a-z]+\.[a-z_]+)((?: {DETAIL})*)")
FIELDS = {"source": "stripe", "destination": "crm", "attempts": 5, "error": "HTTP 422: none such", "note": None}

INBOX = """
import asyncio, logging, sys
logging.basicConfig(level=logging.INFO)
from oncehook import Event, GiveUp, Inbox

inbox = Inbox(f"sqlite:{sys.argv[1]}/inbox.db")

@inbox.on("app")
async def crm(event: Event) -> None:
    raise GiveUp("no such customer")

async def main() -> None:
    async with inbox.running():
        await inbox.emit("app", "invoice.paid", {"secret": "canary"}, key="k1")
        await inbox.drain()

asyncio.run(main())
"""
CLAIMS = """
import logging
logging.basicConfig(level=logging.INFO)
from oncehook.claims import Claims

print(Claims("redis://127.0.0.1:1/0", fail_open=True).claim("order 7").degraded)
"""


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a plain handler writes, as `logging.basicConfig` sets one up."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    logging.basicConfig(stream=stream, level=logging.INFO)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def run(program: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def details(line: str) -> dict[str, str]:
    """What a line tells, read strictly: a line that is anything but a moment and its details fails."""
    found = LINE.fullmatch(line)
    assert found, line
    return {"moment": found[1], **{name: text.strip('"') for name, text in re.findall(DETAIL, found[2])}}


# -- what is told ------------------------------------------------------------------------------


def test_a_program_with_plain_logging_reads_what_happened(tmp_path: Path) -> None:
    lines = run(INBOX, str(tmp_path))
    (dead,) = (details(line) for line in lines if "delivery.dead" in line)
    assert (dead["source"], dead["type"], dead["destination"], dead["key"]) == ("app", "invoice.paid", "crm", "k1")
    assert dead["error"].startswith("GiveUp: no such customer")
    assert dead["event_id"].startswith("evt_")
    assert "canary" not in "".join(lines)


def test_claims_without_an_inbox_tell_their_details_too() -> None:
    degraded = details(run(CLAIMS)[0])
    assert (degraded["moment"], degraded["key"]) == ("claim.degraded", "order 7")
    assert degraded["error"]


def test_how_a_line_looks(written: io.StringIO) -> None:
    log = logging.getLogger("oncehook.attempt")
    log.error("delivery.dead", extra={"fields": FIELDS | {"marks": ["unkeyed", "late"], "statuses": {400: 2, 431: 1}}})
    log.warning("lease.lost")
    assert written.getvalue() == (
        "ERROR:oncehook.attempt:delivery.dead source=stripe destination=crm attempts=5"
        ' error="HTTP 422: none such" marks=unkeyed,late statuses="2 400, 1 431"\n'
        "WARNING:oncehook.attempt:lease.lost\n"
    )


def test_lines_can_still_be_told_apart_by_their_moment(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("oncehook.attempt")
    log.error("delivery.dead", extra={"fields": FIELDS})
    log.error("delivery.dead", extra={"fields": {"source": "another"}})
    one, other = caplog.records
    assert vars(one)["moment"] == vars(other)["moment"] == "delivery.dead"
    assert vars(one)["fields"] == FIELDS
    assert one.msg == other.msg  # what groups by the unformatted message, as Sentry does, finds one group


def test_a_line_that_goes_through_a_queue_is_told_once(written: io.StringIO) -> None:
    root, waiting = logging.getLogger(), queue.SimpleQueue[logging.LogRecord]()
    listener = QueueListener(waiting, *root.handlers)
    root.handlers[:] = [QueueHandler(waiting)]
    listener.start()
    logging.getLogger("oncehook.attempt").error("delivery.dead", extra={"fields": {"source": "stripe"}})
    listener.stop()
    assert written.getvalue() == "ERROR:oncehook.attempt:delivery.dead source=stripe\n"


def test_a_record_of_another_process_is_told_once(written: io.StringIO) -> None:
    """As the socket server of the logging cookbook does: what was received goes to the logger of its name."""
    log = logging.getLogger("oncehook.attempt")
    record = log.makeRecord(log.name, logging.ERROR, "", 0, "delivery.dead", (), None, extra={"fields": {"run": 2}})
    log.handle(record)
    log.handle(logging.makeLogRecord({**vars(record), "msg": record.getMessage(), "args": None}))
    assert written.getvalue() == "ERROR:oncehook.attempt:delivery.dead run=2\n" * 2


# -- what cannot be forged ---------------------------------------------------------------------


@pytest.mark.parametrize("text", [EVIL, 'x" event_id="evt_forged', "x event_id=evt_forged", 'x\\" a=b', "\\", '"', "="])
def test_no_line_and_no_field_can_be_forged(written: io.StringIO, text: str) -> None:
    observer = Observer("sqlite")
    observer.verbose = True
    observer.arrival("orders", ["accepted"], 0.1, 1, [item(text, text, text)], ["evt_1"])
    observer.arrival("orders", ["accepted"] * 2, 0.1, 1, [item()] * 2, ["evt_1", text])
    observer.note_rejection(Arrival(text, [], b"", peer=text), None, SignatureInvalid(text))
    logging.getLogger("oncehook.store").error("store.failed", extra={"fields": {"error": text, "group": {text: 1}}})
    lines = written.getvalue().splitlines()
    one, batch, rejected, failed = map(details, lines)
    assert all(line.isprintable() for line in lines)
    assert list(one) == ["moment", "source", "outcome", "duration_s", "type", "event_id", "key", "subject"]
    assert one["event_id"] == "evt_1"
    assert list(batch) == ["moment", "source", "outcome", "duration_s", "outcomes", "event_ids"]
    assert list(rejected) == ["moment", "source", "reason", "peer", "code", "size"]
    assert list(failed) == ["moment", "error", "group"]
    written.getvalue().encode()  # a lone surrogate could not be written to a file


def test_a_traceback_cannot_forge_a_line_either(written: io.StringIO) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("oncehook.receive").exception("receive.failed", extra={"fields": {"source": "orders"}})
    first, *rest = written.getvalue().splitlines()
    assert details(first) == {"moment": "receive.failed", "source": "orders"}
    assert "ValueError: a" in "".join(rest)
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_bodies_and_secrets_are_in_no_line(written: io.StringIO) -> None:
    observer = Observer("sqlite")
    secret = Arrival("orders", [(b"authorization", b"Bearer canary")], b"canary", b"token=canary", path="/in/canary")
    observer.arrival("orders", ["conflict"], 0.1, 1, [item()], ["evt_1"])
    observer.note_rejection(secret, SOURCE, SignatureInvalid("mismatch"))
    assert len(written.getvalue().splitlines()) == 2
    assert "canary" not in written.getvalue()
    assert "the body" not in written.getvalue()


# -- our own output ----------------------------------------------------------------------------


@pytest.mark.parametrize("for_people", [False, True])
def test_our_own_lines_are_as_ever_and_no_details_are_worded_for_them(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch, for_people: bool
) -> None:
    monkeypatch.setattr(logs._Details, "__str__", lambda self: pytest.fail("words that nobody reads"))
    ours = logging.getLogger("oncehook")
    level = ours.level
    logs.set_up_logging("info", written, for_people=for_people)
    logging.getLogger("oncehook.attempt").error("delivery.dead", extra={"fields": FIELDS})
    logging.getLogger("uvicorn.error").error("Started [%d]", 7, extra={"port": 80})
    ours.setLevel(level)
    dead, started = written.getvalue().splitlines()
    if for_people:
        assert dead[8:] == "  delivery.dead      stripe" + " " * 22 + "→ crm  attempts=5  error=HTTP 422: none such"
        assert started[8:] == "  Started [7]        port=80"
    else:
        assert json.loads(dead).items() >= {"event": "delivery.dead", "level": "error", **FIELDS}.items()
        assert list(json.loads(dead)) == ["event", "level", "timestamp", *FIELDS]
        assert list(json.loads(started).items())[0::3] == [("event", "Started [7]"), ("port", 80)]


# -- what can be seen without running anything -------------------------------------------------


def test_every_logger_of_ours_is_known() -> None:
    found = {name for path in MODULES for name in re.findall(r'getLogger\("oncehook\.(\w+)"\)', path.read_text())}
    assert found == set(logs.LOGGERS)


def test_what_is_logged_along_stands_in_fields() -> None:
    nodes = ((path, node) for path in MODULES for node in ast.walk(ast.parse(path.read_text())))
    for path, node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "extra" and isinstance(node.value, ast.Dict):
            assert [ast.literal_eval(name) for name in node.value.keys if name] == ["fields"], f"{path}:{node.lineno}"
