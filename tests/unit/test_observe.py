"""What people see: names and labels of metrics, one line per moment, and no line a stranger could forge (S26, S35)."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.leases import make_lease

from oncehook import __version__
from oncehook.errors import Overloaded, SignatureInvalid, TooLarge
from oncehook.inbox import Inbox
from oncehook.logs import plain, set_up_logging
from oncehook.model import Arrival, Expired, Item, Lease, Mark, Settle, Settlement, new_id
from oncehook.observe import Observer
from oncehook.sources import build
from oncehook.verify import Nothing

SOURCE = build("orders", verify=Nothing())
EVIL = 'a\r\n{"event":"forged"}\n12:00:00  arrival.accepted\x1b[2K\x1b]0;title\x07\x9b31m\u2028\u202eb\x00\ud800'


def item(key: str | None = "k", subject: str | None = "s", kind: str = "order.paid", marks: Mark = Mark.none) -> Item:
    return Item(new_id(), kind, key, None, 1.0, subject, b"the body", b"hash", marks=marks)


@pytest.fixture
def observer() -> Observer:
    return Observer("sqlite")


# -- metrics -----------------------------------------------------------------------------------


def numbers(observer: Observer) -> dict[str, float]:
    lines = observer.exposition(4096).decode().splitlines()
    return {name: float(n) for name, _, n in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def test_the_names_and_labels_people_build_boards_on(observer: Observer) -> None:
    observer.arrival("orders", ["accepted"], 0.003, 512, [item()], ["evt_1"])
    observer.unavailable("orders", Overloaded())
    seen = numbers(observer)
    assert seen['oncehook_arrivals_total{outcome="accepted",source="orders"}'] == 1
    assert seen['oncehook_arrivals_total{outcome="error",source="orders"}'] == 1
    assert seen['oncehook_ack_duration_seconds_count{source="orders"}'] == 1
    assert seen['oncehook_ack_duration_seconds_bucket{le="0.005",source="orders"}'] == 1
    assert seen['oncehook_ack_duration_seconds_bucket{le="0.0025",source="orders"}'] == 0
    assert seen['oncehook_arrival_size_bytes_sum{source="orders"}'] == 512
    assert seen['oncehook_store_errors_total{operation="record"}'] == 1
    assert seen["oncehook_store_size_bytes"] == 4096
    assert seen[f'oncehook_build_info{{store="sqlite",version="{__version__}"}}'] == 1
    kinds = {line for line in observer.exposition(None).decode().splitlines() if line.startswith("# TYPE")}
    assert kinds >= {
        "# TYPE oncehook_arrivals_total counter",
        "# TYPE oncehook_ack_duration_seconds histogram",
        "# TYPE oncehook_arrival_size_bytes histogram",
        "# TYPE oncehook_store_operation_duration_seconds histogram",
        "# TYPE oncehook_store_errors_total counter",
        "# TYPE oncehook_store_size_bytes gauge",
        "# TYPE oncehook_build_info gauge",
    }


def test_errors_are_at_nought_before_the_first(observer: Observer) -> None:
    assert numbers(observer)['oncehook_store_errors_total{operation="record"}'] == 0


def test_leases_that_were_taken_over_are_counted_from_nought(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    observer, shop = inbox.observer, inbox.destination("shop", url="http://127.0.0.1:1/", allow_private=True)
    assert numbers(observer)["oncehook_leases_expired_total"] == 0.0
    observer.lease_expired(shop, Expired(new_id(), new_id(), 1, fence=1, run=1, attempt=1, worker=None))
    assert numbers(observer)["oncehook_leases_expired_total"] == 1.0


def test_every_part_of_a_batch_is_counted(observer: Observer) -> None:
    outcomes = ["accepted", "accepted", "duplicate", "conflict", "ignored"]
    observer.arrival("orders", outcomes, 0.1, 1, [item()] * 4, ["evt_1"] * 4)
    seen = numbers(observer)
    for outcome in set(outcomes):
        assert seen[f'oncehook_arrivals_total{{outcome="{outcome}",source="orders"}}'] == outcomes.count(outcome)
    assert seen['oncehook_ack_duration_seconds_count{source="orders"}'] == 1


def test_what_is_odd_is_counted(observer: Observer) -> None:
    observer.arrival("orders", ["accepted"], 0.1, 1, [item(marks=Mark.unkeyed | Mark.unparsed)], ["evt_1"])
    seen = numbers(observer)
    assert seen['oncehook_unkeyed_total{source="orders"}'] == seen['oncehook_unparsed_total{source="orders"}'] == 1


def test_a_strangers_text_never_becomes_a_label(observer: Observer) -> None:
    for name in ("never-heard-of", EVIL, '"},x{'):
        observer.note_rejection(Arrival(name, [], b"body", peer="192.0.2.1"), None, SignatureInvalid("unknown source"))
    observer.arrival("orders", ["accepted"], 0.1, 1, [item(EVIL, EVIL, EVIL)], ["evt_1"])
    text = observer.exposition(None).decode()
    assert 'oncehook_arrivals_total{outcome="rejected",source="unknown"} 3.0' in text
    assert "heard" not in text
    assert "forged" not in text


# -- what was rejected -------------------------------------------------------------------------


def test_rejections_are_gathered_until_they_are_written(observer: Observer) -> None:
    SOURCE.id = 7
    observer.note_rejection(Arrival("orders", [], b"12345", peer="192.0.2.1"), SOURCE, SignatureInvalid("stale"))
    observer.note_rejection(Arrival("orders", [], b"", peer="192.0.2.1"), SOURCE, TooLarge())
    observer.note_rejection(Arrival(EVIL * 100, [], b""), None, SignatureInvalid("unknown source"))
    gathered, counts = observer.take_counts()
    assert [(r.source, r.code, r.reason, r.peer, r.size) for r in gathered[:2]] == [
        ("orders", "signature_invalid", "stale", "192.0.2.1", 5),
        ("orders", "too_large", "too_large", "192.0.2.1", 0),
    ]
    assert gathered[2].source.isprintable()
    assert len(gathered[2].source) < 500
    assert all(abs((datetime.now(UTC) - r.at).total_seconds()) < 60 for r in gathered)
    assert counts == {(7, 0, "rejected"): 2, (0, 0, "rejected"): 1}  # 0 stands for no source
    assert observer.take_counts() == ([], {})


def test_a_flood_of_rejections_is_bounded(observer: Observer) -> None:
    SOURCE.id = 7
    for _ in range(5000):
        observer.note_rejection(Arrival("orders", [], b""), SOURCE, SignatureInvalid())
    gathered, counts = observer.take_counts()
    assert (len(gathered), counts[7, 0, "rejected"]) == (1000, 5000)


# -- lines -------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["json", "people"])
def for_people(request: pytest.FixtureRequest) -> bool:
    kind: bool = request.param
    return kind


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("oncehook")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_one_json_line_for_what_somebody_may_have_to_act_on(observer: Observer, stream: io.StringIO) -> None:
    assert set_up_logging("info", stream) is False
    observer.arrival("orders", ["accepted"], 0.1, 1, [item()], ["evt_1"])
    observer.arrival("orders", ["duplicate"], 0.1, 1, [item()], ["evt_1"])
    observer.arrival("orders", ["conflict"], 0.12345678, 1, [item()], ["evt_1"])
    observer.note_rejection(Arrival("orders", [], b"12345", peer="192.0.2.1"), SOURCE, SignatureInvalid("stale"))
    observer.unavailable("orders", Overloaded())
    conflict, rejected, error = (json.loads(line) for line in lines_of(stream))
    assert conflict.pop("timestamp").endswith("Z")
    assert conflict == {
        "event": "arrival.conflict", "level": "warning", "source": "orders", "outcome": "conflict",
        "type": "order.paid", "duration_s": 0.123457, "event_id": "evt_1", "key": "k", "subject": "s",
    }  # fmt: skip
    assert (rejected["event"], rejected["level"], rejected["reason"]) == ("arrival.rejected", "info", "stale")
    assert (error["event"], error["level"], error["code"]) == ("arrival.error", "warning", "overloaded")


def leased() -> Lease:
    return make_lease(received_at=datetime.now(UTC))


def test_what_goes_well_is_told_in_sum(observer: Observer, stream: io.StringIO, tmp_path: Path) -> None:
    set_up_logging("info", stream)
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    crm = inbox.destination("crm", url="http://127.0.0.1:1/", allow_private=True)
    observer.sum_up()
    for outcome in ["accepted"] * 3 + ["duplicate"] * 2 + ["ignored", "handshake"]:
        observer.arrival("orders", [outcome], 0.1, 1, [item()], ["evt_1"])
    observer.arrival("hooks", ["accepted", "duplicate"], 0.1, 1, [item()] * 2, ["evt_1", "evt_2"])
    for _ in range(4):
        observer.note_attempt(crm, Settlement(leased(), Settle.done))
    assert lines_of(stream) == []
    observer.sum_up()
    came, made = (json.loads(line) for line in lines_of(stream))
    assert {**came, "timestamp": ""} == {
        "event": "arrival.summary", "level": "info", "timestamp": "", "accepted": 4, "duplicates": 3,
        "sources": {"orders": 5, "hooks": 2},
    }  # fmt: skip
    assert {**made, "timestamp": ""} == {
        "event": "attempt.summary", "level": "info", "timestamp": "", "done": 4, "destinations": {"crm": 4},
    }  # fmt: skip
    observer.sum_up()  # nothing more has come
    assert len(lines_of(stream)) == 2
    observer.arrival("orders", ["duplicate"], 0.1, 1, [item()], ["evt_1"])
    observer.sum_up()
    last = json.loads(lines_of(stream)[-1])
    assert (last["accepted"], last["duplicates"], last["sources"]) == (0, 1, {"orders": 1})


def test_where_each_is_told_there_is_no_sum(observer: Observer, stream: io.StringIO) -> None:
    set_up_logging("info", stream)
    observer.verbose = True
    observer.arrival("orders", ["duplicate"], 0.1, 1, [item()], ["evt_1"])
    observer.sum_up()
    assert [json.loads(line)["event"] for line in lines_of(stream)] == ["arrival.duplicate"]


async def test_an_inbox_sums_up_while_it_runs_and_when_it_stops(tmp_path: Path, stream: io.StringIO) -> None:
    set_up_logging("info", stream)
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    inbox.source("orders", verify="none", key="$.id")
    inbox.on("orders", name="ship")(lambda event: None)

    def told(word: str, field: str) -> int:
        found = [json.loads(line) for line in lines_of(stream)]
        return sum(one[field] for one in found if one["event"] == word)

    async with inbox.running():
        for body in (b'{"id":1}', b'{"id":1}', b'{"id":2}'):
            await inbox.receive("orders", {}, body)
        async with asyncio.timeout(60):
            while told("arrival.summary", "accepted") < 2:
                await asyncio.sleep(0.05)
        assert told("arrival.summary", "duplicates") == 1
        await inbox.receive("orders", {}, b'{"id":3}')
        await inbox.drain()
    assert told("arrival.summary", "accepted") == 3
    assert told("attempt.summary", "done") == 3


def test_a_conflict_inside_a_batch_is_told(observer: Observer, stream: io.StringIO) -> None:
    set_up_logging("info", stream)
    outcomes = ["accepted", "accepted", "conflict"]
    observer.arrival("orders", outcomes, 0.1, 1, [item()] * 3, ["evt_1", "evt_2", "evt_3"])
    (line,) = (json.loads(line) for line in lines_of(stream))
    assert line["event"] == "arrival.conflict"
    assert line["outcomes"] == {"accepted": 2, "conflict": 1}
    assert line["event_ids"] == ["evt_1", "evt_2", "evt_3"]


@pytest.mark.parametrize(("level", "verbose"), [("debug", False), ("info", True)])
def test_every_arrival_where_it_is_asked_for(
    observer: Observer, stream: io.StringIO, level: str, verbose: bool
) -> None:
    set_up_logging(level, stream)
    observer.verbose = verbose
    observer.arrival("orders", ["accepted"], 0.1, 1, [item(marks=Mark.unkeyed)], ["evt_1"])
    observer.arrival("orders", ["ignored"], 0.1, 1, [], [])
    accepted, ignored = (json.loads(line) for line in lines_of(stream))
    assert (accepted["event"], accepted["marks"]) == ("arrival.accepted", ["unkeyed"])
    assert ignored["event"] == "arrival.ignored"


def test_no_line_can_be_forged(observer: Observer, stream: io.StringIO, for_people: bool) -> None:
    set_up_logging("info", stream, for_people=for_people)
    observer.verbose = True
    observer.arrival("orders", ["accepted"], 0.1, 1, [item(EVIL, EVIL, EVIL)], ["evt_1"])
    observer.note_rejection(Arrival(EVIL, [], b"", peer=EVIL), None, SignatureInvalid(EVIL))
    logging.getLogger("oncehook.x").warning("said %s", EVIL, extra={"error": EVIL})
    logging.getLogger("uvicorn.error").error(EVIL)
    lines = lines_of(stream)
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    stream.getvalue().encode()  # a lone surrogate could not be written to a file


def test_a_traceback_cannot_forge_a_line_either(stream: io.StringIO, for_people: bool) -> None:
    set_up_logging("info", stream, for_people=for_people)
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("oncehook.x").exception("receive.failed")
    first, *rest = lines_of(stream)
    assert "receive.failed" in first
    assert bool(rest) is for_people
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_plain_extra_values_are_not_lost(stream: io.StringIO, for_people: bool) -> None:
    set_up_logging("info", stream, for_people=for_people)
    logging.getLogger("oncehook.store").error("store.failed", extra={"error": "disk I/O error", "group": 3})
    (line,) = lines_of(stream)
    for text in ("store.failed", "disk I/O error", "3"):
        assert text in line


def test_bodies_and_secrets_are_in_no_line(observer: Observer, stream: io.StringIO, for_people: bool) -> None:
    set_up_logging("debug", stream, for_people=for_people)
    secret = Arrival("orders", [(b"authorization", b"Bearer canary")], b"canary", b"token=canary", path="/in/canary")
    observer.arrival("orders", ["conflict"], 0.1, 1, [item()], ["evt_1"])
    observer.note_rejection(secret, SOURCE, SignatureInvalid("mismatch"))
    assert len(lines_of(stream)) == 2
    assert "canary" not in stream.getvalue()
    assert "the body" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal(observer: Observer, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, plain_terminal = Terminal(), Terminal()
    assert set_up_logging("info", terminal) is True
    observer.note_rejection(Arrival("orders", [], b""), SOURCE, SignatureInvalid())
    assert "\x1b[31marrival.rejected" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    assert set_up_logging("info", plain_terminal) is True
    observer.note_rejection(Arrival("orders", [], b""), SOURCE, SignatureInvalid())
    assert "\x1b" not in plain_terminal.getvalue()


def test_plain() -> None:
    assert plain("häuser 漢字 👍") == "häuser 漢字 👍"
    assert plain("a\r\nb\x1b[0m\x00") == r"a\x0d\x0ab\x1b[0m\x00"
    assert all(plain(chr(n)).isprintable() for n in range(0x3000) if chr(n) != " ")
