"""The front door, without HTTP: a real inbox on a SQLite file, arrivals handed to it or pushed through bare ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from tests.kept import kept_events

from oncehook import ingest
from oncehook.errors import SignatureInvalid, StoreUnavailable
from oncehook.inbox import Inbox
from oncehook.ingest import is_direct
from oncehook.model import Arrival, EventDetails, Intake, Mark, Outcome, new_id, unpack_head
from oncehook.rules import RuleContext
from oncehook.sources import Odd, Preset, Reply, Source, build
from oncehook.store.base import Pending
from oncehook.verify import Hmac, Nothing, Token
from oncehook.web import server
from oncehook.web.asgi import App, HookApp, OnDemand
from oncehook.web.hooks import Hooks
from oncehook.web.peers import direct_peer, peer_finder, plain

REFUSAL = {"error": "Unknown source, or the signature does not match.", "code": "signature_invalid"}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about arrivals; what the store says of its library depends on the machine."""
    return [vars(record)["moment"] for record in caplog.records if record.name != "oncehook.store"]


class Unhurried(Inbox):
    """An inbox whose senders wait: how busy this machine is decides nothing."""

    def add(self, source: Source) -> Source:
        source.settings.budget = 90.0
        return super().add(source)


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    made = Unhurried(f"sqlite:{tmp_path / 'inbox.db'}")
    yield made
    if made.is_started:
        await made.stop()


async def send(inbox: Inbox, source: str, body: object, **headers: str) -> ingest.Receipt:
    return await inbox.receive(source, headers, body if isinstance(body, bytes) else json.dumps(body).encode())


def said(receipt: ingest.Receipt) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(receipt.reply.body)
    return answer


async def stored(inbox: Inbox) -> list[EventDetails]:
    """Oldest first."""
    return [await inbox.bodies.load(event) for event in (await kept_events(inbox.store))[::-1]]


# -- verify first (R8, S1) ---------------------------------------------------------------------


async def test_nothing_is_read_before_it_is_verified(inbox: Inbox) -> None:
    seen: list[bytes] = []

    def key(context: RuleContext) -> str:
        seen.append(context.body)
        return "key"

    inbox.source("signed", verify=Hmac(header="X-Signature"), secret="s", key=key, split=lambda data, _: [seen.append])
    await inbox.start()
    receipt = await send(inbox, "signed", {"id": 1}, **{"X-Signature": "00" * 32})
    assert (receipt.reply.status, said(receipt)) == (401, REFUSAL)
    assert seen == []
    assert await stored(inbox) == []


async def test_a_program_may_only_reach_sources_that_exist(inbox: Inbox) -> None:
    await inbox.start()
    assert said(await send(inbox, "nobody", {})) == REFUSAL


async def test_a_handed_over_body_has_a_cap_too(inbox: Inbox) -> None:
    inbox.source("small", verify=Nothing(), max_body=10)
    await inbox.start()
    assert (await send(inbox, "small", b"x" * 11)).reply.status == 413
    assert (await send(inbox, "small", b"x" * 10)).reply.status == 200


# -- never raises, never lies ------------------------------------------------------------------


async def test_a_fault_of_ours_is_503_and_is_told(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    inbox.source("broken", verify=Nothing(), key="$.id")
    await inbox.start()
    inbox.receiver._plan = lambda source, arrival, item: 1 // 0  # type: ignore[assignment,return-value]
    receipt = await send(inbox, "broken", {"id": 1})
    assert receipt.reply.status == 503
    assert dict(receipt.reply.headers)[b"retry-after"] == b"5"
    assert said(receipt) == {"error": "Cannot store this now; try again.", "code": "store_unavailable"}
    assert "receive.failed" in told(caplog)
    assert await stored(inbox) == []


async def test_the_sender_is_not_told_what_is_wrong_with_the_store(inbox: Inbox) -> None:
    inbox.source("open", verify=Nothing())
    await inbox.start()

    def record(intake: object) -> None:
        raise StoreUnavailable("disk /srv/secret/place is full")

    inbox.receiver._store.record = record  # type: ignore[assignment,method-assign]
    assert b"secret" not in (await send(inbox, "open", {})).reply.body


async def test_a_preset_says_how_its_provider_is_answered(inbox: Inbox) -> None:
    preset = Preset(
        name="moody", title="Moody", scheme=Token(place="header:X-Token"), key="$.id",
        answer=Reply(202, b"ok", ((b"content-type", b"text/plain"),)), unavailable=500,
    )  # fmt: skip
    inbox.add(build("moody", preset=preset, secret=[b"t"]))
    await inbox.start()
    receipt = await send(inbox, "moody", {"id": 1}, **{"X-Token": "t"})
    assert (receipt.reply.status, receipt.reply.body, receipt.outcome) == (202, b"ok", "accepted")
    assert (await send(inbox, "moody", {"id": 1})).reply.status == 401, "as for a source that does not exist"
    inbox.receiver._plan = lambda source, arrival, item: 1 // 0  # type: ignore[assignment,return-value]
    assert (await send(inbox, "moody", {"id": 2}, **{"X-Token": "t"})).reply.status == 500


# -- keys --------------------------------------------------------------------------------------


async def test_composite_keys_are_not_concatenated(inbox: Inbox) -> None:
    inbox.source("orders", verify=Nothing(), key=[["$.a", "$.b"]])
    await inbox.start()
    pairs = [("a", "bc"), ("ab", "c"), ("a:b", "c"), ("a", "b:c"), ("a\\", ":b"), ("a", "\\:b")]
    receipts = [await send(inbox, "orders", {"a": a, "b": b}) for a, b in pairs]
    assert [receipt.outcome for receipt in receipts] == ["accepted"] * len(pairs)
    assert len({event.key for event in await stored(inbox)}) == len(pairs)


async def test_the_default_places_of_a_key(inbox: Inbox) -> None:
    inbox.source("n8n", verify=Nothing())
    await inbox.start()
    bodies: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"idempotency_key": "body"}, {"Idempotency-Key": "header"}),
        ({"idempotency_key": "one", "messageId": "not this"}, {}),
        ({"messageId": "two", "data": {"messageId": "not this"}}, {}),
        ({"data": {"messageId": "not this", "idempotency_key": "three"}}, {}),
        ({"data": {"idempotency_key": 4}}, {}),
        ({"data": {"id": "nothing"}}, {}),
        ({"idempotency_key": None, "messageId": ""}, {}),
    ]
    for body, headers in bodies:
        assert (await send(inbox, "n8n", body, **headers)).outcome == "accepted"
    events = await stored(inbox)
    assert [event.key for event in events] == ["header", "one", "two", "three", "4", None, None]
    assert [event.marks for event in events][-2:] == [Mark.unkeyed] * 2
    assert b'oncehook_unkeyed_total{source="n8n"} 2.0' in await inbox.metrics()


async def test_two_keys_for_one_message_are_two_events(inbox: Inbox) -> None:
    inbox.source("triggers", verify=Nothing())
    await inbox.start()
    for word, outcome in (("received", "accepted"), ("read", "accepted"), ("read", "duplicate")):
        body = {"data": {"messageId": "M7", "idempotency_key": f"M7:{word}"}}
        assert (await send(inbox, "triggers", body)).outcome == outcome
    assert [event.key for event in await stored(inbox)] == ["M7:received", "M7:read"]


async def test_a_conflict_is_kept_with_its_body_and_counted(inbox: Inbox) -> None:
    inbox.source("orders", verify=Nothing(), key="$.id")
    await inbox.start()
    first = await send(inbox, "orders", {"id": 1, "amount": 1})
    receipts = [await send(inbox, "orders", {"id": 1, "amount": n}) for n in (2, 1, 3)]
    assert [receipt.outcome for receipt in receipts] == ["conflict", "duplicate", "conflict"]
    assert {receipt.event_ids[0] for receipt in receipts} == {first.event_ids[0]}
    (event,) = await stored(inbox)
    assert (event.body, event.copies) == (b'{"id": 1, "amount": 1}', 4)
    arrivals = await inbox.store.arrivals_of(event.id)
    assert sorted((a.outcome, a.body) for a in arrivals) == [
        (Outcome.conflict, b'{"id": 1, "amount": 2}'),
        (Outcome.conflict, b'{"id": 1, "amount": 3}'),
        (Outcome.duplicate, None),
    ]
    assert (await inbox.store.figures()).by_source["orders"] == {
        "received": 4, "accepted": 1, "duplicate": 1, "conflict": 2,
    }  # fmt: skip


# -- batches -----------------------------------------------------------------------------------


async def test_a_batch_that_would_explode_is_kept_whole(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    # Each part repeats the envelope: half a megabyte of it, and a hundred thousand parts.
    inbox.source("batch", verify=Nothing(), split="$.events", key="$.events[0].id")
    await inbox.start()
    bombs = [
        json.dumps({"padding": "x" * 500_000, "events": [1] * 100_000}).encode(),
        json.dumps({"events": [{"id": n} for n in range(20_000)]}).encode(),
        json.dumps({**{f"k{n}": n for n in range(50_000)}, "events": [1] * 50_000}).encode(),
    ]
    for bomb in bombs:
        assert (await send(inbox, "batch", bomb)).outcome == "accepted"
    assert [event.body for event in await stored(inbox)] == bombs
    assert {event.marks for event in await stored(inbox)} == {Mark.unparsed | Mark.unkeyed}
    assert told(caplog) == ["split.too_large"] * 3


@pytest.mark.parametrize(
    "body", [b"{}", b'{"events": 1}', b'{"events": null}', b"[1, 2]", b"null", b"not json", b"", b'{"events": {}}']
)
async def test_what_cannot_be_split_is_kept_whole(inbox: Inbox, body: bytes) -> None:
    inbox.source("batch", verify=Nothing(), split="$.events")
    await inbox.start()
    receipt = await send(inbox, "batch", body)
    assert said(receipt) == {"status": "accepted", "event_id": receipt.event_ids[0]}
    (event,) = await stored(inbox)
    assert (event.body, event.batch_id) == (body, None)


async def test_a_splitter_that_stumbles_loses_nothing(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    def stumble(data: Any, arrival: Arrival) -> Iterable[Any]:
        yield data
        raise KeyError("messages")

    inbox.source("batch", verify=Nothing(), split=stumble, key="$.id")
    await inbox.start()
    assert (await send(inbox, "batch", {"id": "x"})).outcome == "accepted"
    (event,) = await stored(inbox)
    # Under the key of one of its parts, it would stand in that part's way.
    assert (event.key, event.body, event.marks) == (None, b'{"id": "x"}', Mark.unparsed | Mark.unkeyed)
    assert told(caplog) == ["split.failed"]


async def test_an_odd_part_is_kept_and_takes_nobodys_key(inbox: Inbox) -> None:
    def apart(data: Any, arrival: Arrival) -> Iterator[Any]:
        for item in data:
            yield item if "id" in item else Odd(item)

    inbox.source("batch", verify=Nothing(), split=apart, key=["$.id", "$.other"])
    await inbox.start()
    receipt = await send(inbox, "batch", [{"id": "a"}, {"other": "a"}])
    assert said(receipt)["accepted"] == 2
    assert (await send(inbox, "batch", [{"other": "a"}])).outcome == "accepted"
    assert [(event.key, event.marks) for event in await stored(inbox)] == [
        ("a", Mark.none),
        (None, Mark.unparsed | Mark.unkeyed),
        (None, Mark.unparsed | Mark.unkeyed),
    ]


async def test_an_empty_batch_is_acknowledged(inbox: Inbox) -> None:
    inbox.source("batch", verify=Nothing(), split="$.events")
    await inbox.start()
    assert said(await send(inbox, "batch", {"events": []})) == {"status": "ignored"}


async def test_a_batch_is_refused_for_conflicts_only_when_nothing_else_is_in_it(inbox: Inbox) -> None:
    inbox.source("batch", verify=Nothing(), split="$", key="$[0].id", on_conflict="reject")
    await inbox.start()
    await send(inbox, "batch", [{"id": 1, "n": 1}, {"id": 2, "n": 1}])
    assert (await send(inbox, "batch", [{"id": 1, "n": 2}, {"id": 2, "n": 1}])).reply.status == 200
    assert (await send(inbox, "batch", [{"id": 1, "n": 2}, {"id": 2, "n": 2}])).reply.status == 422


async def test_each_part_is_counted(inbox: Inbox) -> None:
    inbox.source("batch", verify=Nothing(), split="$", key="$[0].id", type="$[0].type", ignore=["ping"])
    await inbox.start()
    await send(inbox, "batch", [{"id": 1}, {"id": 2}, {"id": 3, "type": "ping"}])
    await send(inbox, "batch", [{"id": 1}, {"id": 2, "n": 1}, {"id": 4}])
    metrics = (await inbox.metrics()).decode()
    counts = {"accepted": 3, "duplicate": 1, "conflict": 1, "ignored": 1}
    for outcome, n in counts.items():
        assert f'oncehook_arrivals_total{{outcome="{outcome}",source="batch"}} {n}.0' in metrics


@pytest.mark.parametrize(
    ("policy", "outcome", "marks"),
    [
        ("accept", "accepted", Mark.unparsed | Mark.unkeyed),
        ("body_hash", "accepted", Mark.unparsed),
        ("reject", "rejected", None),
    ],
)
async def test_a_key_over_its_budget_is_missing(
    inbox: Inbox, caplog: pytest.LogCaptureFixture, policy: str, outcome: str, marks: Mark | None
) -> None:
    inbox.source("deep", verify=Nothing(), key="$..*..id", on_missing_key=policy, max_body="4MiB")
    await inbox.start()
    below: Any = 1
    for _ in range(60):
        below = {"a": below}
    with caplog.at_level(logging.WARNING, "oncehook"):
        receipt = await send(inbox, "deep", {"list": [below] * 2000, "last": {"id": 7}})
    assert receipt.outcome == outcome
    assert [vars(one)["fields"] for one in caplog.records if one.message.startswith("rule.over_budget")] == [
        {"source": "deep", "path": "$..*..id"}
    ]
    if marks is not None:
        [event] = await kept_events(inbox.store)
        assert event.marks == marks


async def test_redaction_covers_raw_bytes_and_parts(inbox: Inbox, tmp_path: Path) -> None:
    inbox.source("batch", verify=Nothing(), split="$.events", key="$.events[0].id", redact=["$.token"])
    await inbox.start()
    await send(inbox, "batch", {"token": "canary-5d1c", "events": [{"id": 1}, {"id": 2}]})
    await send(inbox, "batch", {"token": "canary-5d1c", "events": [{"id": 3}]})
    assert len(await stored(inbox)) == 3
    assert not any(b"canary-5d1c" in file.read_bytes() for file in tmp_path.glob("inbox.db*") if file.is_file())


# -- handshakes --------------------------------------------------------------------------------


def shake(arrival: Arrival, source: Source) -> Reply | None:
    if arrival.query == b"boom":
        raise RuntimeError("boom")
    return Reply(200, b"challenge") if arrival.query == b"token=right" else None


async def test_handshakes_are_answered_counted_and_refused(inbox: Inbox) -> None:
    preset = Preset(name="shaky", title="Shaky", scheme=Nothing(), needs=(), handshake=shake)
    source = inbox.add(build("shaky", preset=preset, ip_allow=[ip_network("203.0.113.0/24")]))
    await inbox.start()

    def get(query: bytes, peer: str = "203.0.113.1") -> Reply:
        return inbox.receiver.greet(source, Arrival("shaky", [], b"", query, "GET", "/in/shaky", peer))

    assert get(b"token=right").body == b"challenge"
    assert [get(b"token=wrong").status, get(b"token=right", "198.51.100.1").status, get(b"boom").status] == [
        *(401, 401, 503),
    ]  # fmt: skip
    assert json.loads(get(b"").body) == REFUSAL
    metrics = (await inbox.metrics()).decode()
    for outcome, n in {"handshake": 1, "rejected": 3, "error": 1}.items():
        assert f'oncehook_arrivals_total{{outcome="{outcome}",source="shaky"}} {n}.0' in metrics
    assert await stored(inbox) == []


# -- who is at the other end (S16, DESIGN.md 8.11) ---------------------------------------------


@pytest.mark.parametrize(
    ("peer", "headers", "direct"),
    [
        ("", [(b"x-forwarded-for", b"1.2.3.4")], True),
        ("127.0.0.1", [], True),
        ("127.8.8.8", [], True),
        ("::1", [(b"host", b"anything")], True),
        ("192.168.1.7", [], False),
        ("unknown", [], False),
        ("127.0.0.1", [(b"x-forwarded-for", b"127.0.0.1")], False),
        ("127.0.0.1", [(b"x-forwarded-server", b"a")], False),
        ("127.0.0.1", [(b"forwarded", b"")], False),
        ("127.0.0.1", [(b"origin", b"null")], False),
    ],
)
def test_is_direct(peer: str, headers: list[tuple[bytes, bytes]], direct: bool) -> None:
    assert is_direct(Arrival("dev", headers, b"", peer=peer)) is direct


@pytest.mark.parametrize(
    ("text", "address"),
    [
        *(("192.0.2.1", "192.0.2.1"), ("192.0.2.1:80", "192.0.2.1"), ("[2001:db8::1]:80", "2001:db8::1")),
        *(("2001:db8::1", "2001:db8::1"), ("[::1]", "::1"), ("::ffff:192.0.2.1", "192.0.2.1")),
        *(("", "unknown"), ("localhost", "unknown"), ("192.0.2.1 ", "unknown"), ("_hidden", "unknown")),
        *(("192.0.2.300", "unknown"), ("[]", "unknown"), ("\r\n", "unknown")),
    ],
)
def test_plain_addresses(text: str, address: str) -> None:
    assert plain(text) == address


@pytest.mark.parametrize(
    ("client", "forwarded", "peer"),
    [
        (None, [b"192.0.2.9"], "unknown"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("192.0.2.1", [b"198.51.100.1"], "192.0.2.1"),
        ("10.0.0.1", [b"198.51.100.1"], "198.51.100.1"),
        ("::ffff:10.0.0.1", [b"198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"203.0.113.1, 198.51.100.1, 10.0.0.2"], "198.51.100.1"),
        ("10.0.0.1", [b"203.0.113.1", b"198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"203.0.113.1, forged"], "unknown"),
        ("10.0.0.1", [b"10.0.0.3, 10.0.0.2"], "10.0.0.1"),
        ("10.0.0.1", [b" , ,"], "10.0.0.1"),
    ],
)
def test_the_last_address_nobody_vouches_for(client: str | None, forwarded: list[bytes], peer: str) -> None:
    scope = {"client": client and (client, 1), "headers": [(b"x-forwarded-for", value) for value in forwarded]}
    assert peer_finder([ip_network("10.0.0.0/8")])(scope) == peer
    assert peer_finder(())(scope) == ("unknown" if client is None else plain(client))


# -- bare ASGI: under any server, at any place --------------------------------------------------


class Talk:
    """One request through an ASGI application, in pieces as another server might give them."""

    def __init__(self, *pieces: bytes, disconnect: bool = False, **scope: Any) -> None:
        more = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        last: dict[str, Any] = {"type": "http.disconnect"} if disconnect else {"type": "http.request"}
        self.messages = [*more, last]
        self.sent: list[Any] = []
        self.scope = {
            "type": "http", "method": "POST", "path": "/open", "query_string": b"", "headers": [],
            "client": ("127.0.0.1", 1), **scope,
        }  # fmt: skip

    async def through(self, app: Any) -> int | None:
        async def take() -> Any:
            return self.messages.pop(0)

        async def give(message: Any) -> None:
            self.sent.append(message)

        await app(self.scope, take, give)
        return self.sent[0]["status"] if self.sent else None


async def test_mounted_anywhere(inbox: Inbox) -> None:
    inbox.source("open", verify=Nothing())
    mount = inbox.asgi()
    async with inbox.running():
        assert await Talk(b"1").through(mount) == 200
        assert await Talk(b"2", path="/hooks/open", root_path="/hooks").through(mount) == 200
        assert await Talk(b"3", root_path="/taken/off/by/the/host").through(mount) == 200
        assert await Talk(b"4", path="/hooks/open/more", root_path="/hooks").through(mount) == 200
        assert await Talk(b"5", path="/").through(mount) == 401
        assert await Talk(b"6", type="websocket").through(mount) is None
        assert [event.body for event in await stored(inbox)] == [b"1", b"2", b"3", b"4"]


async def test_bodies_in_pieces(inbox: Inbox) -> None:
    inbox.source("open", verify=Nothing(), max_body=10)
    async with inbox.running():
        app = inbox.asgi()
        assert await Talk(b"12345", b"", b"67890").through(app) == 200
        assert await Talk(b"12345", b"67890", b"1").through(app) == 413
        assert await Talk(b"12345678901").through(app) == 413
        assert await Talk(b"12345", disconnect=True).through(app) is None
        assert await Talk(disconnect=True).through(app) is None
        assert await Talk(headers=[(b"content-length", b"9" * 5000)]).through(app) == 413
        assert await Talk(headers=[(b"content-length", b"1e3")]).through(app) == 400
        assert [event.body for event in await stored(inbox)] == [b"1234567890"]


async def test_a_too_large_arrival_is_counted_and_told(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    inbox.source("open", verify=Nothing(), max_body=10)
    caplog.set_level(logging.INFO, "oncehook")
    async with inbox.running():
        await Talk(b"12345678901").through(inbox.asgi())
        assert b'oncehook_arrivals_total{outcome="rejected",source="open"} 1.0' in await inbox.metrics()
    assert told(caplog) == ["arrival.rejected"]


async def test_the_path_is_kept_as_it_was_written(inbox: Inbox) -> None:
    inbox.source("open", verify=Nothing())
    inbox.source("hidden", verify=Nothing(), path="s3cret")
    async with inbox.running():
        app = HookApp(Hooks(inbox.receiver, "/", direct_peer))
        await Talk(b"1", path="/open/\r\nX: 1").through(app)
        await Talk(b"2", path="/open/ä", raw_path=b"/open/%C3%A4").through(app)
        await Talk(b"3", path="/s3cret/more", raw_path=b"/s3cre%74/more").through(app)
        targets = [unpack_head(event.request_head)[1] for event in await stored(inbox)]
        assert targets == ["/open/%0D%0AX%3A%201", "/open/%C3%A4", "/hidden/more"]


async def test_without_a_client_address_it_is_a_stranger(inbox: Inbox) -> None:
    inbox.source("local", verify=Nothing(), loopback_only=True)
    inbox.source("fenced", verify=Nothing(), ip_allow=["0.0.0.0/0", "::/0"])
    async with inbox.running():
        for path in ("/local", "/fenced"):
            assert await Talk(b"1", path=path, client=None).through(inbox.asgi()) == 401
            assert await Talk(b"1", path=path).through(inbox.asgi()) == 200


@pytest.mark.parametrize(
    ("client", "headers", "told"),
    [
        (("127.0.0.1", 1), [], "password authentication failed for user x at 10.0.0.5"),
        (("127.0.0.1", 1), [(b"x-forwarded-for", b"192.0.2.1")], "failing"),
        (("192.0.2.1", 1), [], "failing"),
        (None, [], "failing"),
    ],
)
async def test_strangers_are_not_told_why_we_are_not_ready(
    client: tuple[str, int] | None, headers: list[tuple[bytes, bytes]], told: str
) -> None:
    async def probe() -> dict[str, str]:
        return {"store": "password authentication failed for user x at 10.0.0.5"}

    talk = Talk(method="GET", path="/readyz", client=client, headers=headers)
    assert await talk.through(Starlette(routes=server.probe_routes(probe))) == 503
    assert json.loads(talk.sent[1]["body"]) == {"status": "not ready", "checks": {"store": told}}


async def test_an_application_is_built_by_its_first_requests_once_and_beside_the_loop() -> None:
    async def no_probe() -> dict[str, str]:
        return {}

    built: list[threading.Thread] = []

    def build() -> App:
        built.append(threading.current_thread())
        time.sleep(0.05)  # so that the others come meanwhile
        if len(built) == 1:
            raise ImportError("half an installation")
        return Starlette(routes=server.probe_routes(no_probe))

    app = OnDemand(build)
    assert built == []
    with pytest.raises(ImportError):
        await Talk(method="GET", path="/livez").through(app)
    talks = [Talk(method="GET", path="/livez") for _ in range(3)]
    assert await asyncio.gather(*(talk.through(app) for talk in talks)) == [200, 200, 200]
    assert len(built) == 2
    assert threading.main_thread() not in built


def test_a_refusal_tells_nothing_but_its_code() -> None:
    assert str(SignatureInvalid("the secret reason")) == REFUSAL["error"]


# -- deadlines -----------------------------------------------------------------------------------


class SlowLoop(asyncio.SelectorEventLoop):
    """A loop whose time stands still until it is moved, with one timer."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 1000.0
        self._timers: list[tuple[float, Callable[..., object], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.at

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, **_: Any) -> Any:
        self._timers.append((self.at + delay, callback, args))
        return self

    def move(self, seconds: float) -> None:
        end = self.at + seconds
        while self._timers and self._timers[0][0] <= end:
            self.at, callback, args = self._timers.pop(0)
            callback(*args)
        self.at = end


def test_what_is_not_decided_within_its_budget_is_given_up_and_never_late() -> None:
    """R9: nor is what comes between two looks. (How late a busy machine looks is not measured here.)"""
    loop = SlowLoop()
    deadlines = ingest.AckDeadlines()
    took: dict[float, list[float]] = {0.1: [], 0.2: []}
    for _ in range(5):
        for budget, times in took.items():
            pending, began = Pending(Intake(new_id(), 1, b"", ()), loop), loop.time()
            pending.call_back(lambda times=times, began=began: times.append(loop.time() - began))
            deadlines.watch(pending, budget)
        loop.move(0.007)
    decided = Pending(Intake(new_id(), 1, b"", ()), loop)
    deadlines.watch(decided, 0.1)
    decided.answer([])
    loop.move(1)
    loop.close()
    assert [len(times) for times in took.values()] == [5, 5]
    assert all(budget - 3 * ingest.STEP <= one <= budget for budget, times in took.items() for one in times), took
    assert (decided.abandoned, decided.result()) == (False, [])
    assert pending.abandoned
    with pytest.raises(StoreUnavailable):
        pending.result()


async def test_a_caller_that_gives_no_bytes_is_told_so(tmp_path: Path) -> None:
    """Otherwise its senders would be asked to try again for ever."""
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    inbox.source("orders", verify="none", key="$.id")
    async with inbox.running():
        with pytest.raises(TypeError, match="The body must be bytes"):
            await inbox.receive("orders", {}, '{"id": 1}')  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="headers must be text or bytes, not int"):
            await inbox.receive("orders", {"a": 5}, b"{}")  # type: ignore[dict-item]
        for n, headers in enumerate(({"A": "b"}, [("A", "b")], [(b"A", b"b")])):
            assert (await inbox.receive("orders", headers, b'{"id": %d}' % n)).outcome == "accepted"
        for wrong in ({"key": 5}, {"subject": 5}):
            with pytest.raises(TypeError, match="must be text, not int"):
                await inbox.emit("app", "made", {}, **wrong)  # type: ignore[arg-type]
