"""An HTTP destination against a real server on loopback: what it sends, how it judges, where it does not go.

The server speaks raw bytes, so that it can also be slow, rude and wrong.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from standardwebhooks import Webhook

from oncehook import clock
from oncehook.categories import FailureRules
from oncehook.destinations.base import Destination, Result, Terms
from oncehook.destinations.http import HttpDestination
from oncehook.errors import ConfigError
from oncehook.http_client.addresses import Network
from oncehook.http_client.client import HttpClient
from oncehook.model import (
    Arrival,
    Category,
    Evidence,
    Exchange,
    Lease,
    Options,
    Priority,
    ReplayId,
    join_answer,
    pack_head,
    read_exchange,
    split_answer,
)
from oncehook.verify.standard import StandardWebhooks
from tests import certificates
from tests.leases import make_lease

SECRET, OLD_SECRET = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b"whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
EVENT = bytes.fromhex("0199a4e80a007000800000000000") + b"\0\0"
EVENT_ID = "evt_0199a4e80a0070008000000000000000"
REPLAY = ReplayId(b"r" * 16)
BODY = '{"hello": "wörld"}'.encode()
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LOOPBACK = [ip_network("127.0.0.1/32")]


# -- the other end -----------------------------------------------------------------------------


@dataclass
class Received:
    """One request as it came over the wire."""

    line: str
    pairs: list[tuple[str, str]]
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        names = [name for name, _ in self.pairs]
        assert len(set(names)) == len(names), "a header came twice"
        return dict(self.pairs)


Behaviour = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Sink:
    """A server that says what it is told to say, byte for byte."""

    port: int = 0
    says: bytes | Behaviour = OK
    seen: list[Received] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                self.seen.append(await read_request(reader))
                if callable(self.says):
                    await self.says(self.seen[-1], writer)
                else:
                    writer.write(self.says)
                if writer.is_closing():
                    return
                await writer.drain()
        writer.close()


async def read_request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n")
    line, *lines = head.split("\r\n")
    pairs = [(name.lower(), value) for name, _, value in (text.partition(": ") for text in lines)]
    length = next(int(value) for name, value in pairs if name == "content-length")
    return Received(line, pairs, await reader.readexactly(length))


@asynccontextmanager
async def serving(sink: Sink, host: str = "127.0.0.1", **options: Any) -> AsyncIterator[Sink]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.CancelledError):
            await sink.serve(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, host, sink.port, limit=1 << 25, **options)
    sink.port = server.sockets[0].getsockname()[1]
    try:
        yield sink
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    async with serving(Sink()) as made:
        yield made


JSON = ("content-type", "application/json; charset=utf-8")


def lease(**changes: Any) -> Lease:
    return make_lease(EVENT, **{"subject": "42", "request_head": head(JSON), "body": BODY, **changes})


def head(*headers: tuple[str, str]) -> bytes:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return pack_head(Arrival("orders", pairs, b"", path="/in/orders"))


@asynccontextmanager
async def opened(url: str | Sink, **options: Any) -> AsyncIterator[HttpDestination]:
    where = url if isinstance(url, str) else f"http://127.0.0.1:{url.port}/hook"
    options.setdefault("allow_private", LOOPBACK)
    terms = Terms(timeout=options.pop("timeout", 60.0), rules=options.pop("rules", FailureRules()))
    made = HttpDestination("sink", where, terms=terms, **options)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def attempt(url: str | Sink, work: Lease | None = None, **options: Any) -> Result:
    async with opened(url, **options) as destination:
        return await destination.attempt(work or lease())


def guarded(*addresses: Sequence[str], allow: Sequence[Network] = LOOPBACK) -> tuple[HttpClient, list[str]]:
    """A client whose names lead to these addresses, the next ones each time they are looked up."""
    asked: list[str] = []

    async def look_up(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return addresses[min(len(asked), len(addresses)) - 1]

    return HttpClient(allow_private=allow, look_up=look_up), asked


# -- what is sent ------------------------------------------------------------------------------


async def test_the_request_is_exactly_this(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1_700_000_000.9)
    result = await attempt(sink, sign=[SECRET], headers={"Authorization": "Bearer abcdef", "X-Team": "billing"})
    assert result.category is None
    (seen,) = sink.seen
    assert seen.line == "POST /hook HTTP/1.1"
    assert seen.body == BODY
    headers = seen.headers
    moment = datetime.fromtimestamp(1_700_000_000, UTC)
    assert headers.pop("webhook-signature") == Webhook(SECRET.decode()).sign(EVENT_ID, moment, BODY.decode())
    assert headers == {
        "host": f"127.0.0.1:{sink.port}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "user-agent": "oncehook",
        "content-type": "application/json; charset=utf-8",
        "content-length": str(len(BODY)),
        "authorization": "Bearer abcdef",
        "x-team": "billing",
        "webhook-id": EVENT_ID,
        "webhook-timestamp": "1700000000",
        "idempotency-key": EVENT_ID,
        "oncehook-attempt": "1",
        "oncehook-run": "1",
        "oncehook-trigger": "initial",
        "oncehook-source": "orders",
        "oncehook-subject": "42",
        "oncehook-hops": "1",
    }


# -- what is kept of it ------------------------------------------------------------------------


def kept(result: Result) -> Exchange:
    assert result.evidence.exchange is not None
    return read_exchange(result.evidence.exchange)


async def test_request_and_answer_are_kept_without_secrets(sink: Sink) -> None:
    """S25: neither our credentials nor the receiver's cookies, also where the answer repeats ours."""
    sink.says = (
        b"HTTP/1.1 200 OK\r\nX-Echo: Bearer abcdef-canary\r\nSet-Cookie: session=theirs\r\nContent-Length: 2\r\n\r\nok"
    )
    result = await attempt(sink, sign=[SECRET], headers={"Authorization": "Bearer abcdef-canary"})
    exchange, sent = kept(result), sink.seen[0].headers
    assert (exchange.method, exchange.address) == ("POST", f"http://127.0.0.1:{sink.port}/hook")
    shown = {name.lower(): value for name, value in exchange.headers.items()}
    assert shown.pop("authorization") == "[masked]"
    signature = shown.pop("webhook-signature")
    assert sent["webhook-signature"].startswith(signature.rstrip("…"))
    assert len(signature) < 15
    assert shown == {name: sent[name] for name in shown}
    assert {"webhook-id", "webhook-timestamp", "oncehook-attempt", "content-type"} <= set(shown)
    assert exchange.received == b"X-Echo: [masked]\r\nSet-Cookie: [masked]\r\nContent-Length: 2"
    held = join_answer(result.evidence)
    assert held is not None
    assert b"canary" not in held
    assert split_answer(held) == (b"ok", result.evidence.exchange)


async def test_of_a_secret_address_only_the_host_is_kept(sink: Sink) -> None:
    url = f"http://127.0.0.1:{sink.port}/hook/canary-path?token=canary-token"
    async with opened(url, is_secret=True) as destination:
        result = await destination.attempt(lease())
    assert b"canary" not in (join_answer(result.evidence) or b"")


async def test_steps_are_timed_as_they_happen(sink: Sink) -> None:
    client, _ = guarded(["127.0.0.1"])
    async with opened(f"http://sink.example:{sink.port}/", client=client) as destination:
        first, second = kept(await destination.attempt(lease())), kept(await destination.attempt(lease()))
    dns, connect, tls, first_byte, total = first.times
    assert dns is not None
    assert connect is not None
    assert first_byte is not None
    assert total is not None
    assert tls is None
    assert dns + connect + first_byte <= total
    assert second.times[:3] == (None, None, None)  # the connection was there
    assert second.times[3] is not None


async def test_what_got_no_answer_is_kept_too(sink: Sink) -> None:
    async def silent(seen: Received, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    sink.says = silent
    exchange = kept(await attempt(sink))
    assert exchange.headers["webhook-id"] == EVENT_ID
    assert exchange.received == b""
    assert exchange.times[3] is None
    assert exchange.times[4] is not None


async def test_what_is_kept_is_bounded(sink: Sink) -> None:
    lines = b"".join(b"X-%d: %b\r\n" % (n, b"y" * 300) for n in range(60))
    sink.says = b"HTTP/1.1 200 OK\r\n" + lines + b"Content-Length: 9000\r\n\r\n" + b"z" * 9000
    forwarded = [(f"x-{n}", "v" * 3000) for n in range(40)]
    work = lease(request_head=head(JSON, *forwarded), subject="s" * 3000)
    result = await attempt(sink, work, forward_headers=[name for name, _ in forwarded])
    assert len(kept(result).received) == 2048
    assert sum(map(len, kept(result).headers.values())) <= 4096
    assert len(join_answer(result.evidence) or b"") < 12_000


@pytest.mark.parametrize("answer", [None, b"plain", b"\xc1", b"\xc1\0\0\0\x05abcde", b"\xc1 looks like one"])
@pytest.mark.parametrize("exchange", [None, b"encoded"])
def test_an_answer_cannot_pose_as_an_exchange(answer: bytes | None, exchange: bytes | None) -> None:
    assert split_answer(join_answer(Evidence(200, None, answer, exchange))) == (answer, exchange)


async def test_the_signature_satisfies_the_reference_library(sink: Sink) -> None:
    await attempt(sink, sign=[SECRET, OLD_SECRET])
    (seen,) = sink.seen
    assert len(seen.headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, OLD_SECRET):
        Webhook(secret.decode()).verify(seen.body, seen.headers)
        own = Arrival("", [(name.encode(), value.encode()) for name, value in seen.pairs], seen.body)
        StandardWebhooks().verifier([secret])(own)


async def test_it_signs_as_the_scheme_does(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """One signing policy: the signature is the scheme's own, with a shared secret and with a private key."""
    monkeypatch.setattr(clock, "now", lambda: 1_700_000_000.9)
    private = b"whsk_" + base64.b64encode(bytes(range(32)))
    await attempt(sink, sign=[SECRET, private])
    draft = Arrival("", [(b"webhook-id", EVENT_ID.encode())], BODY)
    for shown, secret in zip(sink.seen[0].headers["webhook-signature"].split(" "), (SECRET, private), strict=True):
        signed = StandardWebhooks().sign(draft, secret, at=1_700_000_000.9)
        assert dict(signed.headers)[b"webhook-signature"].decode() == shown


async def test_without_a_secret_there_is_no_signature_and_without_a_subject_no_subject(sink: Sink) -> None:
    await attempt(sink, lease(subject=None, request_head=head()))
    headers = sink.seen[0].headers
    assert not {"webhook-signature", "oncehook-subject", "oncehook-replay"} & set(headers)
    assert headers["webhook-id"] == EVENT_ID
    assert headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attempt": 3}, ("3", "1", "retry")),
        ({"run": 2, "replay_id": REPLAY}, ("1", "2", "replay")),
        ({"run": 2, "replay_id": REPLAY, "priority": Priority.replay}, ("1", "2", "bulk-replay")),
        ({"run": 2, "attempt": 2, "replay_id": REPLAY}, ("2", "2", "retry")),
    ],
)
async def test_it_says_which_attempt_this_is_and_why(sink: Sink, changes: Any, expected: tuple[str, str, str]) -> None:
    await attempt(sink, lease(**changes))
    headers = sink.seen[0].headers
    assert (headers["oncehook-attempt"], headers["oncehook-run"], headers["oncehook-trigger"]) == expected
    assert headers.get("oncehook-replay") == ("rpl_" + REPLAY.hex() if "replay_id" in changes else None)


async def test_the_id_stays_the_same_over_all_attempts_unless_a_fresh_one_is_ordered(sink: Sink) -> None:
    """R50, R53, R48."""
    async with opened(sink, sign=[SECRET]) as destination:
        for work in (lease(), lease(attempt=2), lease(run=2, replay_id=REPLAY)):
            await destination.attempt(work)
        await destination.attempt(lease(run=2, options=Options.fresh_id | Options.hold))
        await destination.attempt(lease(run=2, attempt=2, options=Options.fresh_id))
    ids = [seen.headers["webhook-id"] for seen in sink.seen]
    assert ids == [EVENT_ID] * 3 + [f"{EVENT_ID}.2"] * 2
    assert [seen.headers["idempotency-key"] for seen in sink.seen] == ids
    for seen in sink.seen:
        Webhook(SECRET.decode()).verify(seen.body, seen.headers)


@pytest.mark.parametrize(
    "subject",
    ["5511@s.whatsapp.net", "a b", "100%", "é", "x\r\nX-Evil: 1", "  ", "acme/shop#12", "\x00\x7f", "日本" * 85],
)
async def test_any_subject_fits_into_a_header_and_comes_back_out(sink: Sink, subject: str) -> None:
    await attempt(sink, lease(subject=subject, source=subject))
    headers = sink.seen[0].headers
    assert unquote(headers["oncehook-subject"]) == unquote(headers["oncehook-source"]) == subject
    assert "x-evil" not in headers


async def test_only_listed_headers_are_passed_on(sink: Sink) -> None:
    """S24."""
    arrived = head(
        ("content-type", "text/plain"),
        ("authorization", "Bearer theirs"),
        ("cookie", "a=b"),
        ("proxy-authorization", "theirs"),
        ("x-github-event", "push"),
        ("x-twice", "1"),
        ("x-twice", "2"),
        ("x-hop", "for us"),
        ("connection", "close, X-Hop"),
        ("x-token", "[masked]"),
        ("x-utf8", "wörld".encode().decode("latin-1")),
        ("x-latin", "w\xf6rld"),
        ("x-bad", "a\nb"),
        ("x-team", "theirs"),
        ("user-agent", "GitHub-Hookshot"),
        ("x-other", "not listed"),
    )
    listed = ["X-GitHub-Event", "X-Twice", "X-Hop", "X-Token", "X-Utf8", "X-Latin", "X-Bad", "X-Team", "X-Absent"]
    await attempt(
        sink, lease(request_head=arrived), forward_headers=[*listed, "User-Agent"], headers={"X-Team": "ours"}
    )
    headers = sink.seen[0].headers
    assert headers["content-type"] == "text/plain"
    assert headers["x-github-event"] == "push"
    assert headers["x-twice"] == "1, 2"
    assert headers["x-utf8"].encode("latin-1").decode() == "wörld"
    assert headers["x-team"] == "ours"
    assert headers["user-agent"] == "GitHub-Hookshot"
    gone = {"authorization", "cookie", "proxy-authorization", "x-hop", "connection", "x-token", "x-latin", "x-bad"}
    assert not (gone | {"x-other", "x-absent"}) & set(headers)


@pytest.mark.parametrize(
    "name",
    ["Authorization", "cookie", "Set-Cookie", "Proxy-Authorization", "Proxy-Anything", "Connection", "Keep-Alive", "TE",
     "Transfer-Encoding", "Trailer", "Upgrade", "Host", "Content-Length", "Content-Encoding", "Expect", "webhook-id",
     "Idempotency-Key", "Oncehook-Run", "X Bad", "X-Bad\r\nX-Evil", ""],
)  # fmt: skip
def test_what_is_never_passed_on_cannot_be_listed(name: str) -> None:
    with pytest.raises(ConfigError):
        HttpDestination("sink", "https://example.org/", forward_headers=[name])


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-A", "a\r\nX-Evil: 1"), ("X-A", "a\nb"), ("X-A", "a\0b"), ("X-A", "é"), ("X-A\r\nX-Evil", "1"), ("X:A", "1"),
     ("Host", "evil"), ("content-length", "0"), ("Transfer-Encoding", "chunked"), ("Connection", "close"),
     ("webhook-signature", "v1,x"), ("Oncehook-Run", "9"), ("Accept-Encoding", "gzip"), ("Proxy-Authorization", "x")],
)  # fmt: skip
def test_configured_headers_cannot_break_the_request(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        HttpDestination("sink", "https://example.org/", headers={name: value})
    assert value not in str(raised.value) or len(value) < 3


@pytest.mark.parametrize("secret", [b"whsec_not base64!", b"whpk_aGVsbG8=", b"whsk_c2hvcnQ=", b"", b" "])
def test_a_secret_that_cannot_sign_is_an_error_at_the_start(secret: bytes) -> None:
    with pytest.raises(ConfigError):
        HttpDestination("sink", "https://example.org/", sign=[secret])


async def test_the_content_type_may_be_configured(sink: Sink) -> None:
    await attempt(sink, headers={"content-type": "application/cloudevents+json"})
    assert sink.seen[0].headers["content-type"] == "application/cloudevents+json"


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 5 << 20])
async def test_a_body_arrives_as_it_was_received(sink: Sink, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    result = await attempt(sink, lease(body=body), sign=[SECRET])
    assert result.category is None
    assert sink.seen[0].body == body
    assert sink.seen[0].headers["content-length"] == str(size)


def test_it_is_a_destination_and_shows_no_secret() -> None:
    made = HttpDestination("sink", "https://example.org/in?token=hush-hush", headers={"Authorization": "hush-hush"})
    kept: Destination = made
    assert (kept.kind, kept.crash_tolerance, kept.name, kept.id) == ("http", 3, "sink", 0)
    assert kept.address == "POST https://example.org/in?token=…"
    assert "hush-hush" not in repr(made)


# -- how it is judged --------------------------------------------------------------------------

STATUSES = [
    *((status, None) for status in (200, 201, 202, 204, 206, 299)),
    *((status, Category.transient) for status in (408, 425, 429, 500, 502, 503, 504, 599)),
    *((status, Category.permanent) for status in (300, 301, 302, 303, 304, 307, 308)),
    *((status, Category.permanent) for status in (400, 401, 403, 404, 405, 409, 410, 413, 415, 422, 451, 499)),
    (600, Category.unknown),
    (999, Category.unknown),
]


@pytest.mark.parametrize(("status", "category"), STATUSES)
async def test_the_status_decides(sink: Sink, status: int, category: Category | None) -> None:
    bodiless = status in (204, 304)
    sink.says = b"HTTP/1.1 %d Whatever\r\nContent-Length: %d\r\n\r\n%b" % (
        *((status, 0, b"") if bodiless else (status, 4, b"said")),
    )
    result = await attempt(sink)
    assert result.category == category
    assert result.evidence.status == status
    assert result.evidence.answer == (None if bodiless else b"said")
    assert (result.evidence.error is None) == (category is None)
    assert result.pause == ("answered 410 Gone" if status == 410 else None)


@pytest.mark.parametrize(
    ("status", "category"),
    [
        (404, Category.transient),
        (410, Category.transient),
        (409, Category.permanent),
        (503, Category.permanent),
        (422, Category.permanent),
        (502, Category.transient),
        (204, None),
    ],
)
async def test_statuses_that_a_destination_names_count_before_the_table(
    sink: Sink, status: int, category: Category | None
) -> None:
    sink.says = b"HTTP/1.1 %d Whatever\r\nContent-Length: 0\r\n\r\n" % status
    rules = FailureRules(transient=frozenset({404, 410}), permanent=frozenset({409, 503}))
    result = await attempt(sink, rules=rules)
    assert (result.category, result.pause) == (category, None), "who is to be tried again is not paused"
    assert len(sink.seen) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(sink: Sink, status: int) -> None:
    """S20, R39."""
    async with serving(Sink()) as trap:
        place = f"http://127.0.0.1:{trap.port}/".encode()
        sink.says = b"HTTP/1.1 %d X\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % (status, place)
        result = await attempt(sink)
        assert result.category is Category.permanent
        assert result.evidence.error == f"HTTP {status}; redirects are not followed"
        assert not trap.seen
    assert len(sink.seen) == 1


async def test_retry_after_in_seconds_and_as_a_date(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """R39."""
    monkeypatch.setattr(clock, "now", lambda: 1_700_000_000.9)
    async with opened(sink) as destination:

        async def asked(value: str, status: int = 503) -> float | None:
            sink.says = f"HTTP/1.1 {status} X\r\nRetry-After: {value}\r\nContent-Length: 0\r\n\r\n".encode()
            return (await destination.attempt(lease())).retry_after

        assert await asked("7") == 7.0
        assert await asked("120", 429) == 120.0
        date = format_datetime(datetime.fromtimestamp(1_700_000_090, UTC), usegmt=True)
        assert await asked(date) == pytest.approx(89.1)
        assert await asked("soon") is None
        assert await asked("10", 200) is None


async def test_what_it_said_is_kept_up_to_4_kb(sink: Sink) -> None:
    poured = 0

    async def pour(seen: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal poured
        writer.write(b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            poured += 65536

    sink.says = pour
    async with opened(sink) as destination:
        result = await destination.attempt(lease())
        assert result.category is Category.transient
        assert result.evidence.answer == b"x" * 4096
        assert poured < 32 << 20, "no more than the buffers of the system hold was taken off it"
        sink.says = OK
        assert (await destination.attempt(lease())).category is None
    assert sink.connections == 2, "a connection with something unread in it is not used again"


async def test_a_small_answer_keeps_the_connection(sink: Sink) -> None:
    async with opened(sink) as destination:
        for _ in range(5):
            assert (await destination.attempt(lease())).evidence.answer == b"ok"
        sink.says = b"HTTP/1.1 500 X\r\nContent-Length: 4096\r\n\r\n" + b"x" * 4096
        for _ in range(3):
            await destination.attempt(lease())
    assert sink.connections == 1


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br"])
async def test_nothing_is_decompressed(sink: Sink, encoding: bytes) -> None:
    """S23: a bomb stays as small as it came."""
    bomb = gzip.compress(b"\0" * 10_000_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, len(bomb))
    sink.says = head + bomb
    result = await attempt(sink)
    assert result.category is None
    assert result.evidence.answer == bomb[:4096]
    assert sink.seen[0].headers["accept-encoding"] == "identity"


async def test_our_own_credentials_do_not_come_back_into_the_store(sink: Sink) -> None:
    """S25: many receivers repeat the request in their answer."""

    async def repeat(seen: Received, writer: asyncio.StreamWriter) -> None:
        text = repr(seen.headers).encode() + b" hush-hush-token"
        writer.write(b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))

    sink.says = repeat
    result = await attempt(sink, headers={"Authorization": "Bearer hush-hush-token", "X-Key": "another-secret"})
    assert result.evidence.answer is not None
    assert b"[masked]" in result.evidence.answer
    assert b"hush" not in result.evidence.answer
    assert b"another-secret" not in result.evidence.answer


@pytest.mark.parametrize("shown", [6, 12, 20, 27])
async def test_a_credential_that_is_cut_off_by_the_limit_is_masked_too(sink: Sink, shown: int) -> None:
    secret = "hush-hush-of-twenty-eight-xx"
    said = b"." * (4096 - shown) + secret.encode() + b"!"
    sink.says = b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
    result = await attempt(sink, headers={"X-Token": secret})
    assert result.evidence.answer is not None
    assert b"hush" not in result.evidence.answer
    assert len(result.evidence.answer) <= 4096


async def test_cookies_do_not_last(sink: Sink) -> None:
    sink.says = b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b; Path=/\r\nContent-Length: 0\r\n\r\n"
    async with opened(sink) as destination:
        await destination.attempt(lease())
        await destination.attempt(lease())
    assert "cookie" not in sink.seen[1].headers


# -- one deadline over everything (R55) --------------------------------------------------------


async def never(seen: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def drip_head(seen: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-A: b\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_body(seen: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n")
    while True:
        writer.write(b".")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("behaviour", [never, drip_head])
async def test_silence_and_a_slow_head_end_at_the_deadline(sink: Sink, behaviour: Behaviour) -> None:
    sink.says = behaviour
    result = await attempt(sink, timeout=0.3)
    assert (result.category, result.evidence.status) == (Category.transient, None)
    assert result.evidence.error == "no answer within 0.3 s"


async def test_a_drip_fed_body_ends_at_the_deadline_and_the_status_stands(sink: Sink) -> None:
    sink.says = drip_body
    async with opened(sink, timeout=0.3) as destination:
        # On a busy machine the time may be over before there is a status.
        while (result := await destination.attempt(lease())).evidence.answer is None:
            destination.terms = replace(destination.terms, timeout=2 * destination.terms.timeout)
        assert result.category is None
        assert result.evidence.status == 200
        assert set(result.evidence.answer) == set(b".")
        sink.says, before = OK, sink.connections
        destination.terms = replace(destination.terms, timeout=60.0)
        assert (await destination.attempt(lease())).evidence.answer == b"ok"
    assert sink.connections == before + 1


async def test_a_status_stands_when_the_body_is_cut_off(sink: Sink) -> None:
    async def cut(seen: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 X\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    sink.says = cut
    result = await attempt(sink)
    assert (result.category, result.evidence.answer) == (Category.permanent, b"half")


async def test_a_destination_that_reads_nothing_ends_at_the_deadline() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        writer.transport.abort()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    result = await attempt(f"http://127.0.0.1:{port}/", lease(body=b"x" * (32 << 20)), timeout=0.5)
    assert result.evidence.error == "no answer within 0.5 s"
    server.close()


async def test_a_name_server_that_hangs_ends_at_the_deadline() -> None:
    async def hang(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return ()

    result = await attempt("http://hooks.example/", client=HttpClient(look_up=hang), timeout=0.2)
    assert (result.category, result.evidence.error) == (Category.transient, "no answer within 0.2 s")


async def test_whoever_stops_the_worker_is_obeyed(sink: Sink) -> None:
    sink.says = never
    async with opened(sink) as destination:
        task = asyncio.create_task(destination.attempt(lease()))
        while not sink.seen:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# -- when nobody answers -----------------------------------------------------------------------


@contextmanager
def refusing() -> Iterator[int]:
    """A port of ours that nobody listens to, nor anybody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


async def test_a_refused_connection_is_transient() -> None:
    with refusing() as port:
        result = await attempt(f"http://127.0.0.1:{port}/path?token=hush-hush")
    assert result.category is Category.transient
    assert result.evidence.error == f"cannot connect to 127.0.0.1:{port}: Connection refused"


async def test_a_name_that_is_not_found_is_transient() -> None:
    result = await attempt("http://no-such-host.invalid/?token=hush-hush")
    assert result.category is Category.transient
    assert result.evidence.error is not None
    assert result.evidence.error.startswith("the address of no-such-host.invalid cannot be found: ")


async def test_a_name_that_leads_nowhere_is_transient() -> None:
    client, _ = guarded([])
    result = await attempt("http://hooks.example/", client=client)
    assert result.category is Category.transient
    assert result.evidence.error == "the address of hooks.example cannot be found: the name leads to no address"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", "closed the connection before it answered"),
        (b"SSH-2.0-OpenSSH\r\n", "did not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", "did not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", "did not answer in HTTP"),
    ],
)
async def test_nonsense_is_transient(sink: Sink, said: bytes, error: str) -> None:
    async def say(seen: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        writer.close()

    sink.says = say
    result = await attempt(sink)
    assert (result.category, result.evidence.status) == (Category.transient, None)
    assert result.evidence.error == f"127.0.0.1:{sink.port} {error}"
    assert len(sink.seen) == 1, "over a fresh connection it is sent once"


async def test_a_kept_connection_that_was_just_closed_costs_no_attempt(sink: Sink) -> None:
    async def rude(seen: Received, writer: asyncio.StreamWriter) -> None:
        if len(sink.seen) == 2:  # the second request over the first connection
            writer.close()
        else:
            writer.write(OK)

    sink.says = rude
    async with opened(sink, sign=[SECRET]) as destination:
        assert (await destination.attempt(lease())).category is None
        assert (await destination.attempt(lease())).category is None
    assert (len(sink.seen), sink.connections) == (3, 2)
    assert sink.seen[1].headers == sink.seen[2].headers


async def test_an_answer_before_the_body_was_read_still_counts(sink: Sink) -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await writer.drain()
        with suppress(ConnectionError, asyncio.CancelledError):
            while await reader.read(1 << 16):
                pass
        writer.close()

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    result = await attempt(f"http://127.0.0.1:{port}/", lease(body=b"x" * (8 << 20)))
    assert (result.category, result.evidence.status) == (Category.permanent, 413)
    server.close()


# -- where it may go (S17, S18, S19, S20) ------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "0x7f000001", "2130706433", "0177.0.0.1", "localhost", "127.0.0.1.", "１２７.１"]
)
async def test_loopback_is_not_called_however_it_is_spelt(sink: Sink, host: str) -> None:
    result = await attempt(f"http://{host}:{sink.port}/?token=hush-hush", allow_private=False)
    assert result.category is Category.permanent
    assert result.evidence.error is not None
    assert "allow_private" in result.evidence.error
    assert "loopback" in result.evidence.error
    assert "hush" not in result.evidence.error
    assert sink.connections == 0


@pytest.mark.parametrize("host", ["[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::]", "[::127.0.0.1]"])
async def test_loopback_is_not_called_over_ipv6_either(host: str) -> None:
    async with serving(Sink(), "::1") as sink:
        result = await attempt(f"http://{host}:{sink.port}/", allow_private=False)
        assert result.category is Category.permanent
        assert sink.connections == 0
        assert (await attempt(f"http://[::1]:{sink.port}/", allow_private=[ip_network("::1/128")])).category is None


async def test_zero_is_not_called_although_it_leads_home(sink: Sink) -> None:
    result = await attempt(f"http://0.0.0.0:{sink.port}/", allow_private=LOOPBACK)
    assert result.category is Category.permanent
    assert sink.connections == 0


async def test_private_addresses_are_called_when_allowed(sink: Sink) -> None:
    assert (await attempt(sink, allow_private=True)).category is None
    assert (await attempt(sink, allow_private=[ip_network("127.0.0.0/8")])).category is None
    assert (await attempt(sink, allow_private=[ip_network("10.0.0.0/8")])).category is Category.permanent


@pytest.mark.parametrize("address", ["127.0.0.2", "10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "fd00::1", "::1"])
async def test_a_name_that_leads_inside_is_refused(sink: Sink, address: str) -> None:
    client, _ = guarded([address])
    result = await attempt(f"http://hooks.example:{sink.port}/", client=client)
    assert result.category is Category.permanent
    assert result.evidence.error is not None
    assert result.evidence.error.startswith(
        f"hooks.example:{sink.port} is not called: {address} is not a public address"
    )
    assert sink.connections == 0


async def test_of_two_addresses_only_the_allowed_one_is_called(sink: Sink) -> None:
    async with serving(Sink(port=sink.port), "127.0.0.2") as inside:
        for addresses in (["127.0.0.2", "127.0.0.1"], ["127.0.0.1", "127.0.0.2"]):
            client, _ = guarded(addresses)
            result = await attempt(f"http://hooks.example:{sink.port}/", client=client)
            assert result.category is None
        assert (sink.connections, inside.connections) == (2, 0)
    assert sink.seen[0].headers["host"] == f"hooks.example:{sink.port}"


async def test_the_inner_address_is_no_way_out_when_the_allowed_one_is_down() -> None:
    with refusing() as port:
        async with serving(Sink(port), "127.0.0.2") as inside:
            client, _ = guarded(["127.0.0.1", "127.0.0.2"])
            result = await attempt(f"http://hooks.example:{port}/", client=client)
            assert result.category is Category.transient
            assert inside.connections == 0


async def test_a_name_that_changes_its_mind_reaches_nothing_inside(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """S17: allowed when first looked up, inside the next time, and at last allowed again."""
    monkeypatch.setattr("oncehook.http_client.addresses.KEPT", 0)
    async with serving(Sink(port=sink.port), "127.0.0.2") as inside:
        client, asked = guarded(["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1"])
        sink.says = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        async with opened(f"http://hooks.example:{sink.port}/", client=client) as destination:
            categories = [(await destination.attempt(lease())).category for _ in range(3)]
        assert categories == [None, Category.permanent, None]
        assert (len(asked), sink.connections, inside.connections) == (3, 2, 0)


async def test_the_socket_itself_is_judged_whatever_was_resolved(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """S17: were the check of names to miss something, the address about to be connected to is still refused."""
    monkeypatch.setattr("oncehook.http_client.addresses.Names.resolve", unguarded(["127.0.0.1"]))
    result = await attempt(f"http://hooks.example:{sink.port}/", allow_private=False)
    assert result.category is Category.permanent
    monkeypatch.setattr("oncehook.http_client.addresses.Names.resolve", unguarded(["127.0.0.1", "127.0.0.2", "::1"]))
    result = await attempt(f"http://hooks.example:{sink.port}/", allow_private=False)
    assert result.category is not None
    assert sink.connections == 0


def unguarded(addresses: Sequence[str]) -> Any:
    async def resolve(self: Any, host: str, port: int) -> Sequence[str]:
        return addresses

    return resolve


async def test_proxies_and_netrc_of_the_environment_are_ignored(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with serving(Sink()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        netrc = tmp_path / "netrc"
        netrc.write_text("machine 127.0.0.1 login user password hush\n")
        netrc.chmod(0o600)
        monkeypatch.setenv("NETRC", str(netrc))
        assert (await attempt(sink)).category is None
        assert proxy.connections == 0
    assert "authorization" not in sink.seen[0].headers


@pytest.mark.parametrize(
    "url", ["https://user:hush@example.org/", "ftp://example.org/", "file:///etc/passwd", "http://a\r\nb/"]
)
def test_an_address_that_cannot_be_meant_is_an_error_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpDestination("sink", url)


# -- TLS (S23) ---------------------------------------------------------------------------------


certificate = certificates.fixture("hooks.example")


async def over_tls(port: int, host: str = "hooks.example", ca: Path | None = None) -> Result:
    async def look_up(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    client = HttpClient(allow_private=LOOPBACK, ca=ca, look_up=look_up)
    return await attempt(f"https://{host}:{port}/", client=client)


async def test_a_certificate_is_checked_and_a_destination_may_name_its_own_authority(
    certificate: certificates.Certificate,
) -> None:
    async with serving(Sink(), ssl=certificates.served(certificate)) as sink:
        strange = await over_tls(sink.port)
        assert strange.category is Category.permanent
        assert strange.evidence.error is not None
        assert strange.evidence.error.startswith(f"the certificate of hooks.example:{sink.port} is not trusted: self")
        other = await over_tls(sink.port, "other.example", ca=certificate[0])
        assert other.category is Category.permanent
        assert not sink.seen, "nothing is sent to who cannot prove who it is"
        assert (await over_tls(sink.port, ca=certificate[0])).category is None


async def test_speaking_tls_to_who_does_not_is_transient() -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    result = await over_tls(server.sockets[0].getsockname()[1])
    assert result.category is Category.transient
    assert result.evidence.error is not None
    assert result.evidence.error.startswith("cannot connect to hooks.example")
    server.close()


def test_an_authority_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for path in (tmp_path / "ca.pem", tmp_path / "absent.pem"):
        with pytest.raises(ConfigError):
            HttpClient(ca=path)
