"""A hostile sender at the front door, over real HTTP: what is refused leaves no trace, the genuine is kept as it came.

One server per engine serves the whole module; tests keep apart by their keys. R6-R10, R16-R18, R21, S1-S16, S25, S26.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from oncehook.model import Arrival, Mark, unpack_head
from oncehook.verify import Hmac
from tests.acceptance.conftest import Engine, make_engine
from tests.acceptance.processes import Receiver
from tests.wire import SECRET, Answer, hook, request, signed

PATH = "k7_Qm2ZxN4vT9sLdR1wYhE"
API_KEY, BEARER, QUERY_TOKEN, BODY_TOKEN = (f"canary-{name}-5d1c0e" for name in ("api", "bearer", "query", "body"))

SETTINGS = f"""
store = "STORE"

[server]
trusted_proxies = ["127.0.0.2"]

[source.open]
verify = "none"
key = "$.id"

[source.hidden]
verify = {{ scheme = "none", confirm = "anyone may send" }}
path = "{PATH}"
key = "$.id"

[source.bearer]
verify = "bearer"
secret = {{ env = "BEARER" }}
key = "$.id"

[source.api]
verify = {{ scheme = "token", header = "X-Api-Key" }}
secret = {{ env = "API_KEY" }}
key = "$.id"

[source.query]
verify = {{ scheme = "token", query = "token" }}
secret = {{ env = "QUERY_TOKEN" }}
key = "$.id"

[source.inbody]
verify = {{ scheme = "token", body = "auth.token" }}
secret = {{ env = "BODY_TOKEN" }}
key = "$.id"
"""

SIGNED = {
    "orders": 'key = "$.id"\nsubject = "$.customer"',
    "others": 'key = "$.id"',
    "small": 'key = "$.id"\nmax_body = 2000',
    "fenced": 'key = "$.id"\nip_allow = ["203.0.113.0/24"]',
    "plain": "",
    "listed": 'key = ["header:Idempotency-Key"]',
    "strict": 'key = "$.id"\non_missing_key = "reject"',
    "hashed": 'key = "$.id"\non_missing_key = "body_hash"',
    "bucket": 'key = "$.id"\non_missing_key = "body_hash:1s"',
    "choosy": 'key = "$.id"\non_conflict = "reject"',
    "quiet": 'key = "$.id"\nignore = ["ping.*"]',
    "batch": 'split = "$.events"\nkey = "$.events[0].id"\ntype = "$.events[0].type"\nignore = ["ping"]',
}
"""Sources with the generic HMAC verifier, and what is special about each."""

for name, special in SIGNED.items():
    SETTINGS += f"""
[source.{name}]
verify = {{ scheme = "hmac", header = "X-Signature", prefix = "sha256=" }}
secret = {{ env = "ORDERS_SECRET" }}
budget = "20s"
{special}
"""
CONFIG = SETTINGS.replace("{", "{{").replace("}", "}}").replace("STORE", "{store}")


@dataclass
class House:
    """The server under attack, and what its store holds."""

    engine: Engine
    receiver: Receiver

    def events(self, source: str) -> list[dict[str, Any]]:
        """All events of a source, oldest first."""
        names = ("source", "key", "subject", "type", "marks", "head", "body", "batch_id")
        rows = self.engine.rows(
            "SELECT s.name, e.key, e.subject, e.type, e.marks, e.head, e.body, e.batch_id"
            " FROM events e JOIN sources s ON s.id = e.source_id ORDER BY e.id"
        )
        return [dict(zip(names, row, strict=True)) for row in rows if row[0] == source]

    def event(self, source: str, key: str | None) -> dict[str, Any]:
        (found,) = [event for event in self.events(source) if event["key"] == key]
        return found

    def extent(self) -> tuple[int, ...]:
        """How much is stored: events, keys, arrivals, batches."""
        (row,) = self.engine.rows(
            "SELECT (SELECT count(*) FROM events), (SELECT sum(copies) FROM keys),"
            " (SELECT count(*) FROM arrivals), (SELECT count(*) FROM batches)"
        )
        return row

    async def post(self, source: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        client = self.receiver.client()
        answer = await client.post(f"/in/{source}", body, signed(body) if headers is None else headers)
        client.close()
        return answer

    async def send(self, data: bytes, *, from_: str = "127.0.0.1") -> Answer:
        """One request as raw bytes, and its answer."""
        client = self.receiver.client()
        client._streams = await asyncio.open_connection(client.host, client.port, local_addr=(from_, 0))
        answer = await client.send_raw(data)
        client.close()
        return answer

    async def break_off(self, data: bytes) -> None:
        """Say this and hang up."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.receiver.port)
        writer.write(data)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    engine = make_engine(request.param, tmp_path_factory.mktemp(request.param))
    receiver = Receiver(engine.folder / "receiver", engine.url, CONFIG).start(
        env={"API_KEY": API_KEY, "BEARER": BEARER, "QUERY_TOKEN": QUERY_TOKEN, "BODY_TOKEN": BODY_TOKEN}
    )
    yield House(engine, receiver)
    assert receiver.stop() == 0
    log = receiver.log.read_text()
    assert "Traceback" not in log, log


def padded(key: str, size: int) -> bytes:
    """A hook of exactly this many bytes."""
    bare = hook(key, padding="")
    return hook(key, padding="x" * (size - len(bare)))


def chunked(path: str, body: bytes, *, piece: int = 1000, trailer: bytes = b"", **headers: str) -> bytes:
    """The same request without Content-Length."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Transfer-Encoding: chunked"]
    lines += [f"{name}: {value}" for name, value in (headers or signed(body)).items()]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    pieces = [body[at : at + piece] for at in range(0, len(body), piece)]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n" + trailer + b"\r\n"


# -- size (R7, S9) -----------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(("source", "cap"), [("small", 2000), ("orders", 1 << 20)])
async def test_a_body_over_the_cap_is_refused_and_at_the_cap_is_kept(
    house: House, framing: str, source: str, cap: int
) -> None:
    exact, over = padded(f"exact-{framing}", cap), padded(f"over-{framing}", cap + 1)
    before = house.extent()
    make = chunked if framing == "chunked" else lambda path, body: request("POST", path, body, signed(body))
    answer = await house.send(make(f"/in/{source}", over))
    assert (answer.status, answer.json["code"]) == (413, "too_large")
    assert house.extent() == before
    assert (await house.send(make(f"/in/{source}", exact))).status == 200
    assert bytes(house.event(source, f"exact-{framing}")["body"]) == exact


@pytest.mark.parametrize("size", [3 << 20, 40 << 20])
async def test_a_sender_that_writes_everything_first_still_sees_the_413(house: House, size: int) -> None:
    # Were the connection closed with bytes unread, the sender would see a reset and try for ever.
    body = b"x" * size
    assert (await house.send(request("POST", "/in/small", body, signed(body)))).status == 413


async def test_after_a_413_the_connection_is_in_step(house: House) -> None:
    client = house.receiver.client()
    over, good = padded("over-step", 5000), hook("in-step")
    assert (await client.post("/in/small", over, signed(over))).status == 413
    assert (await client.post("/in/small", good, signed(good))).json["status"] == "accepted"
    client.close()


async def test_a_sender_that_waits_for_continue_is_told_before_it_sends(house: House) -> None:
    body = padded("patient", 3000)
    head = request("POST", "/in/small", body, {**signed(body), "Expect": "100-continue"}).partition(b"\r\n\r\n")[0]
    answer = await house.send(head + b"\r\n\r\n")
    assert answer.status == 413
    assert answer.headers["connection"] == "close", "the next request would be read as this one's body"


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_that_breaks_off_leaves_nothing(house: House, framing: str) -> None:
    body = hook(f"broken-off-{framing}", padding="x" * 5000)
    whole = chunked("/in/orders", body) if framing == "chunked" else request("POST", "/in/orders", body, signed(body))
    before = house.extent()
    for end in (len(whole) - 1, len(whole) - 600, len(whole) - len(body)):
        await house.break_off(whole[:end])
    # The same bytes whole are taken as new: nothing of the broken ones was kept, no key was used up.
    assert (await house.send(whole)).json["status"] == "accepted"
    assert house.extent()[0] == before[0] + 1


# -- encoding and framing (S10, S15) -----------------------------------------------------------


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "br", "identity, gzip"])
async def test_an_encoded_body_is_refused(house: House, coding: str) -> None:
    body, before = hook(f"encoded-{coding}"), house.extent()
    answer = await house.post("orders", body, {**signed(body), "Content-Encoding": coding})
    assert (answer.status, answer.json["code"]) == (415, "encoded")
    assert house.extent() == before


def crooked(name: str) -> bytes:
    """A genuine hook whose framing two readers could understand in two ways."""
    body = hook(f"crooked-{name}")
    straight, pieces = request("POST", "/in/orders", body, signed(body)), chunked("/in/orders", body)
    coding, end = b"Transfer-Encoding: chunked", b"\r\n\r\n"
    forms = {
        "length and chunked": pieces.replace(coding, coding + b"\r\nContent-Length: 5"),
        "chunked and length": pieces.replace(coding, b"Content-Length: 5\r\n" + coding),
        "two lengths": straight.replace(end, b"\r\nContent-Length: %d" % len(body) + end, 1),
        "two different lengths": straight.replace(end, b"\r\nContent-Length: 5" + end, 1),
        "list of lengths": straight.replace(b"Length: %d" % len(body), b"Length: %d, %d" % (len(body), len(body))),
        "signed length": straight.replace(b"Length: ", b"Length: +"),
        "foreign digits": straight.replace(b"Length: %d" % len(body), "Length: ٩٩".encode()),
        "length beyond numbers": straight.replace(b"Length: ", b"Length: 99999999999999999999"),
        "space before colon": pieces.replace(b"Encoding:", b"Encoding :"),
        "coding with tab": pieces.replace(b"Encoding: chunked", b"Encoding: \x0bchunked"),
        "coding not ASCII": pieces.replace(b"Encoding: chunked", b"Encoding: chunke\xe4"),
        "coding twice": pieces.replace(coding, coding + b"\r\n" + coding),
        "coding unknown": pieces.replace(b"Encoding: chunked", b"Encoding: xchunked"),
        "coding in a coding": pieces.replace(b"Encoding: chunked", b"Encoding: gzip, chunked"),
        "chunk end": pieces.replace(b"\r\n0\r\n", b"XX0\r\n"),
        "chunk size with 0x": pieces.replace(end, end + b"0x", 1),
        "chunk size not ASCII": pieces.replace(end, end + "٤".encode(), 1),
        "chunk lines by LF": pieces.replace(end, b"\r\n\r\n", 1).replace(b"\r\n0\r\n\r\n", b"\n0\n\n"),
        "folded line": straight.replace(end, b"\r\nX-A: b\r\n c" + end, 1),
        "NUL": straight.replace(end, b"\r\nX-A: b\0c" + end, 1),
        "bare CR": straight.replace(end, b"\r\nX-A: b\rX-B: c" + end, 1),
        "lines by LF": straight.partition(end)[0].replace(b"\r\n", b"\n") + b"\n\n" + body,
        "no colon": straight.replace(end, b"\r\nX-A" + end, 1),
        "path not ASCII": straight.replace(b"/in/orders", b"/in/orders\xff"),
    }
    return forms[name]


CROOKED = [
    *("length and chunked", "chunked and length", "two lengths", "two different lengths", "list of lengths"),
    *("signed length", "foreign digits", "length beyond numbers", "space before colon", "coding with tab"),
    *("coding not ASCII", "coding twice", "coding unknown", "coding in a coding", "chunk end", "chunk size with 0x"),
    *("chunk size not ASCII", "chunk lines by LF", "folded line", "NUL", "bare CR", "lines by LF", "no colon"),
    "path not ASCII",
]


@pytest.mark.parametrize("name", CROOKED)
async def test_crooked_framing_is_refused_and_leaves_nothing(house: House, name: str) -> None:
    before = house.extent()
    answer = await house.send(crooked(name))
    assert (answer.status, answer.json["code"]) == (400, "malformed")
    assert answer.headers["connection"] == "close"
    assert house.extent() == before


async def test_a_trailer_is_not_a_header(house: House) -> None:
    # A proxy that vouches for headers has not looked at what comes after the body.
    body, before = hook("trailer"), house.extent()
    trailer = f"X-Signature: {signed(body)['X-Signature']}\r\n".encode()
    answer = await house.send(chunked("/in/orders", body, trailer=trailer, Accept="*/*"))
    assert answer.status == 401
    assert house.extent() == before
    kept = await house.send(chunked("/in/orders", body, trailer=b"X-Late: 1\r\n"))
    assert kept.json["status"] == "accepted"
    assert b"x-late" not in bytes(house.event("orders", "trailer")["head"])


async def test_an_offer_to_upgrade_does_not_lose_the_body(house: House) -> None:
    # Java's client offers h2c with every first POST; the parser would leave the body unread.
    client = house.receiver.client()
    first, second = hook("offer-1"), hook("offer-2")
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}
    for body in (first, second):
        assert (await client.post("/in/orders", body, {**signed(body), **offer})).json["status"] == "accepted"
    client.close()
    stored = house.event("orders", "offer-1")
    assert bytes(stored["body"]) == first
    assert b"upgrade: h2c" in bytes(stored["head"])


@pytest.mark.parametrize("size", [70_000, 200_000, 2_000_000])
async def test_a_huge_head_is_refused(house: House, size: int) -> None:
    body, before = hook("huge-head"), house.extent()
    answer = await house.send(request("POST", "/in/orders", body, {**signed(body), "X-Big": "x" * size}))
    assert answer.status == 431
    assert house.extent() == before


async def test_an_endless_trailer_is_refused(house: House) -> None:
    body, before = hook("endless"), house.extent()
    data = chunked("/in/orders", body)[:-2] + b"X-Late: " + b"x" * 5_000_000
    with contextlib.suppress(OSError):  # it may be hung up on in the middle of its own talk
        assert (await house.send(data)).status == 431
    assert house.extent() == before


async def test_a_large_body_in_small_chunks_is_no_reason_to_refuse(house: House) -> None:
    body = padded("small-chunks", 500_000)
    assert (await house.send(chunked("/in/orders", body, piece=10))).json["status"] == "accepted"


# -- several requests, other versions, other methods, other paths ------------------------------


async def test_pipelined_requests_are_answered_in_order(house: House) -> None:
    bodies = [hook(f"pipe-{n}") for n in range(20)]
    reader, writer = await asyncio.open_connection("127.0.0.1", house.receiver.port)
    writer.write(b"".join(request("POST", "/in/orders", body, signed(body)) for body in bodies))
    client = house.receiver.client()
    answers = [await client._read(reader) for _ in bodies]
    writer.close()
    assert [answer.json["status"] for answer in answers] == ["accepted"] * 20
    again = [(await house.post("orders", body)).json["event_id"] for body in bodies]
    assert [answer.json["event_id"] for answer in answers] == again


async def test_garbage_behind_a_genuine_request_does_not_take_its_answer(house: House) -> None:
    body = hook("before-garbage")
    answer = await house.send(request("POST", "/in/orders", body, signed(body)) + b"\x00\x01garbage\r\n\r\n")
    assert answer.json["status"] == "accepted"
    assert answer.headers["connection"] == "close"


async def test_http_1_0(house: House) -> None:
    body = hook("one-point-nought")
    answer = await house.send(request("POST", "/in/orders", body, signed(body)).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.json["status"] == "accepted"
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_other_methods_store_nothing(house: House, method: str) -> None:
    body, before = hook("method"), house.extent()
    reader, writer = await asyncio.open_connection("127.0.0.1", house.receiver.port)
    writer.write(request(method, "/in/orders", body, {**signed(body), "Connection": "close"}))
    assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    writer.close()
    assert house.extent() == before


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("/in", 404), ("/in/", 401), ("/in//orders", 401), ("//in/orders", 404), ("/IN/orders", 404)),
        *(("/in/%2e%2e/in/orders", 401), ("/in/../in/orders", 401), ("/in/orders%00", 401), ("/in/ORDERS", 401)),
        *(("/in/%2Forders", 401), ("/in/" + "x" * 20_000, 401), ("/in/%ff%fe", 401), ("/in/orders;a=b", 401)),
        *(("/in/orders/", 200), ("/in/%6frders", 200), ("/in/orders?in=%2f", 200), ("/in/orders/messages-upsert", 200)),
    ],
)  # fmt: skip
async def test_paths(house: House, path: str, status: int) -> None:
    body = hook(f"path {path[:40]}")
    before = house.extent()
    answer = await house.send(request("POST", path, body, signed(body)))
    assert answer.status == status
    assert (house.extent() != before) is (status == 200)


async def test_a_line_end_in_the_path_forges_no_stored_header(house: House) -> None:
    body = hook("crlf-path")
    path = "/in/orders/%0d%0aX-Signature:%20forged%0d%0a"
    assert (await house.send(request("POST", path, body, signed(body)))).json["status"] == "accepted"
    _, target, headers = unpack_head(bytes(house.event("orders", "crlf-path")["head"]))
    assert target == path
    assert [value for name, value in headers if name == "x-signature"] == [signed(body)["X-Signature"]]


# -- who may send (S2, S4, S7, S8, S16) ---------------------------------------------------------


async def test_strangers_learn_nothing(house: House) -> None:
    body, before = hook("stranger"), house.extent()
    good = signed(body)["X-Signature"]
    attempts: list[tuple[str, dict[str, str]]] = [
        ("nobody-lives-here", signed(body)),
        ("hidden", {}),
        ("orders", signed(body, "another secret")),
        ("orders", {}),
        ("orders", {"X-Signature": ""}),
        ("orders", {"X-Signature": "sha256="}),
        ("orders", {"X-Signature": good[:-1]}),
        ("orders", {"X-Signature": good + "0"}),
        ("orders", {"X-Signature": "sha256=" + "zz" * 32}),
        ("orders", {"X-Signature": "sha256=" + "0" * 10_000}),
        ("orders", {"X-Signature": "x" * 10_000}),
        ("orders", {"X-Signature": "ü" * 100}),
        ("orders", {"X-Signature": f"{good}, {good}"}),
        ("orders", {"X-Signature": good, "x-signature": good}),
        ("orders", {"X-Signature": good, "X_Signature": good}),
        ("orders", {"X_Signature": good}),
        ("fenced", signed(body)),
    ]
    answers = [await house.post(source, body, headers) for source, headers in attempts]
    assert {(answer.status, answer.body, tuple(answer.headers)) for answer in answers} == {
        (401, answers[0].body, tuple(answers[0].headers))
    }
    assert answers[0].json["code"] == "signature_invalid"
    assert house.extent() == before
    # None of them has used up the key (R8).
    assert (await house.post("orders", body)).json["status"] == "accepted"


async def test_a_source_with_a_path_of_its_own_is_not_found_under_its_name(house: House) -> None:
    body, before = hook("hidden"), house.extent()
    assert (await house.post("hidden", body, {})).status == 401
    assert (await house.post("hidden", b"x" * 2_000_000, {})).status == 413
    assert house.extent() == before
    assert (await house.post(PATH, body, {})).json["status"] == "accepted"
    assert PATH.encode() not in bytes(house.event("hidden", "hidden")["head"])


async def test_x_forwarded_for_is_believed_from_a_configured_proxy_only(house: House) -> None:
    body = hook("forwarded")

    async def through(sender: str, **forwarded: str) -> int:
        headers = signed(body) | {name.replace("_", "-"): value for name, value in forwarded.items()}
        return (await house.send(request("POST", "/in/fenced", body, headers), from_=sender)).status

    assert await through("127.0.0.1", X_Forwarded_For="203.0.113.9") == 401
    assert await through("127.0.0.2") == 401
    assert await through("127.0.0.2", X_Forwarded_For="198.51.100.1") == 401
    assert await through("127.0.0.2", X_Forwarded_For="203.0.113.9, 198.51.100.1") == 401
    assert await through("127.0.0.2", X_Forwarded_For="203.0.113.9, junk") == 401
    assert await through("127.0.0.2", X_Real_IP="203.0.113.9", Forwarded="for=203.0.113.9") == 401
    assert not house.events("fenced")
    assert await through("127.0.0.2", X_Forwarded_For="10.0.0.1, 203.0.113.9:4711, 127.0.0.2") == 200


@pytest.mark.parametrize(
    "headers",
    [
        *({"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}, {"X-Forwarded-Proto": "https"}),
        *({"Via": "1.1 tunnel"}, {"X-Real-IP": "127.0.0.1"}, {"CF-Connecting-IP": "127.0.0.1"}),
        *({"X-Forwarded-Anything": "1"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}),
    ],
)
async def test_unverified_sources_are_closed_to_tunnels_and_browsers(house: House, headers: dict[str, str]) -> None:
    body, before = hook("tunnel"), house.extent()
    assert (await house.post("open", body, headers)).status == 401
    assert house.extent() == before


async def test_unverified_sources_are_open_to_direct_requests(house: House) -> None:
    assert (await house.post("open", hook("direct"), {})).json["status"] == "accepted"


# -- what is kept (R6, S25, S26) ---------------------------------------------------------------


async def test_the_row_is_what_came_and_its_signature_can_be_checked_again(house: House) -> None:
    body = b'{ "id" :"as-it-came",  "n": 1.10, "n": 2, "\\u0041": "\xc3\xa4" }\r\n'
    headers = signed(body)
    names = ["X-One: 1", "x-two: a", f"X-Signature: {headers['X-Signature']}", "X-Two: b", "X-One: 1", "X-Empty:"]
    lines = ["POST /in/orders?a=%20b&a=c HTTP/1.1", "Host: test", *names, f"Content-Length: {len(body)}"]
    answer = await house.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    assert answer.json["status"] == "accepted"
    stored = house.event("orders", "as-it-came")
    assert bytes(stored["body"]) == body
    method, target, kept = unpack_head(bytes(stored["head"]))
    assert (method, target) == ("POST", "/in/orders?a=%20b&a=c")
    wanted = [line.partition(":") for line in lines[1:]]
    assert kept == [(name.lower(), value.strip()) for name, _, value in wanted]
    again = Arrival("orders", [(name.encode(), value.encode()) for name, value in kept], bytes(stored["body"]))
    verify = Hmac(header="X-Signature", prefix="sha256=").verifier([SECRET.encode()])
    verify(again)


async def test_no_secret_reaches_store_or_log(house: House) -> None:
    body = hook("canary")
    withtoken = json.dumps({"id": "canary", "auth": {"token": BODY_TOKEN}}).encode()
    sent = [
        await house.post("bearer", body, {"Authorization": f"Bearer {BEARER}", "Cookie": "a=canary-cookie-5d1c0e"}),
        await house.post("api", body, {"X-Api-Key": API_KEY, "Proxy-Authorization": "Basic canary-proxy-5d1c0e"}),
        await house.post(f"query?a=b&token={QUERY_TOKEN}&c=d", body, {}),
        await house.post("inbody", withtoken, {"Content-Type": "application/json"}),
        # The same as conflicts, whose heads and bodies are kept as well.
        await house.post("api", hook("canary", other=1), {"X-Api-Key": API_KEY}),
        await house.post("inbody", withtoken.replace(b'"id"', b'"x":1,"id"'), {"Content-Type": "application/json"}),
        # Refused ones, which are logged.
        await house.post("bearer", body, {"Authorization": f"Bearer {BEARER}x"}),
        await house.post("api", body, {"X-Api-Key": f"{API_KEY}x"}),
    ]  # fmt: skip
    assert [answer.status for answer in sent] == [200, 200, 200, 200, 200, 200, 401, 401]
    everything = house.receiver.log.read_bytes() + dump(house.engine)
    assert b"canary" in everything
    for secret in (API_KEY, BEARER, QUERY_TOKEN, BODY_TOKEN, SECRET, PATH, "canary-cookie", "canary-proxy"):
        assert secret.encode() not in everything


def dump(engine: Engine) -> bytes:
    """All bytes of the store: its files, or what its tables show."""
    if engine.name == "sqlite":
        return b"".join(
            file.read_bytes() for file in sorted(engine.folder.glob("inbox.db*")) if "lock" not in file.name
        )
    tables = ("events", "arrivals", "batches", "rejections", "keys")
    rows = [value for table in tables for row in engine.rows(f"SELECT * FROM {table}") for value in row]
    return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for value in rows)


# -- bodies (S11, S12, S13) --------------------------------------------------------------------


async def test_a_verified_body_that_is_not_json_is_kept_raw(house: House) -> None:
    for body in (b"", b"not json", b"\xff\xfe\x00", b'{"id": "half'):
        answer = await house.post("orders", body)
        assert (answer.status, answer.json["status"]) == (200, "accepted")
        stored = house.events("orders")[-1]
        assert bytes(stored["body"]) == body
        assert Mark(stored["marks"]) == Mark.unparsed | Mark.unkeyed


async def test_an_unreadable_body_is_keyed_by_the_policy(house: House) -> None:
    body = b"{not json"
    assert [(await house.post("hashed", body)).json["status"] for _ in range(2)] == ["accepted", "duplicate"]
    assert Mark(house.events("hashed")[-1]["marks"]) == Mark.unparsed
    before = house.extent()
    answer = await house.post("strict", body)
    assert (answer.status, answer.json["code"]) == (422, "key_missing")
    assert house.extent() == before


ODD_JSON = {
    "deep": b"[" * 10_000 + b"]" * 10_000,
    "deep object": b'{"id":"deep","a":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "NaN": b'{"id":"nan","a":NaN}',
    "Infinity": b'{"id":"inf","a":-Infinity}',
    "huge integer": b'{"id":"int","a":' + b"9" * 5000 + b"}",
    "huge key": b'{"id":' + b"9" * 5000 + b"}",
    "huge exponent": b'{"id":"exp","a":1e999999}',
    "lone surrogate": b'{"id":"lone \\ud800","customer":"\\udfff"}',
    "surrogate in UTF-8": b'{"id":"lone \xed\xa0\x80"}',
    "many values": b'{"id":"many","a":[' + b"1," * 300_000 + b"1]}",
}


@pytest.mark.parametrize("name", ODD_JSON)
async def test_odd_json_is_never_lost(house: House, name: str) -> None:
    body = ODD_JSON[name]
    answer = await house.post("orders", body)
    assert (answer.status, answer.json["status"]) == (200, "accepted")
    stored = house.events("orders")[-1]
    assert bytes(stored["body"]) == body
    assert Mark.unparsed in Mark(stored["marks"])


async def test_of_a_name_that_occurs_twice_one_value_counts_everywhere(house: House) -> None:
    body = b'{"id":"twice-1","customer":"a","id":"twice-2","customer":"b"}'
    assert (await house.post("orders", body)).json["status"] == "accepted"
    stored = house.event("orders", "twice-2")
    assert stored["subject"] == "b" == json.loads(body)["customer"]


@pytest.mark.parametrize(
    "text",
    [
        *("nul \\u0000 inside", "\\u0000", "x" * 100_000, "ä" * 60_000, "\\ud83d\\ude00"),
        *("\\u202e right to left", "line\\r\\nend \\u001b[31m", "'; DROP TABLE events; --"),
    ],
)
async def test_odd_keys_and_subjects_stay_what_they_are(house: House, text: str) -> None:
    body, other = (f'{{"id":"{text}{end}","customer":"{text}{end}"}}'.encode() for end in ("", "!"))
    first = await house.post("orders", body)
    again = await house.post("orders", body)
    different = await house.post("orders", other)
    assert [a.json["status"] for a in (first, again, different)] == ["accepted", "duplicate", "accepted"]
    assert first.json["event_id"] == again.json["event_id"] != different.json["event_id"]
    assert bytes(house.events("orders")[-2]["body"]) == body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-www-form-urlencoded", b"id=1&payload=%7B%22id%22%3A%22in+a+form%22%7D"),
        ("multipart/form-data; boundary=b", b'{"id":"in an upload","type":"x"}'),
        ("Multipart/Mixed", b'--b\r\nContent-Type: application/json\r\n\r\n{"id":"x"}\r\n--b--'),
    ],
)
async def test_forms_and_uploads_are_opaque(house: House, kind: str, body: bytes) -> None:
    answer = await house.post("orders", body, {**signed(body), "Content-Type": kind})
    assert answer.json["status"] == "accepted"
    stored = house.events("orders")[-1]
    assert (stored["key"], stored["subject"], bytes(stored["body"])) == (None, None, body)
    assert Mark(stored["marks"]) == Mark.unkeyed


# -- keys (R10, R17, R18, R21) -----------------------------------------------------------------


async def test_retry_headers_decide_nothing(house: House) -> None:
    body = hook("retried")
    retry = {"X-Slack-Retry-Num": "3", "X-Slack-Retry-Reason": "http_timeout", "X-Retry-Count": "1"}
    assert (await house.post("orders", body, {**signed(body), **retry})).json["status"] == "accepted"
    assert (await house.post("orders", body)).json["status"] == "duplicate"


async def test_a_missing_key_follows_the_policy(house: House) -> None:
    body = b'{"no":"key"}'
    twice = [(await house.post("orders", body)).json for _ in range(2)]
    assert [answer["status"] for answer in twice] == ["accepted", "accepted"]
    assert Mark(house.events("orders")[-1]["marks"]) == Mark.unkeyed
    assert (await house.post("strict", body)).status == 422
    twice = [(await house.post("hashed", body)).json for _ in range(2)]
    assert [answer["status"] for answer in twice] == ["accepted", "duplicate"]
    twice = [(await house.post("bucket", body)).json for _ in range(2)]
    assert [answer["status"] for answer in twice] == ["accepted", "duplicate"]
    await asyncio.sleep(1.1)
    later = (await house.post("bucket", body)).json
    assert later["status"] == "accepted"
    assert later["event_id"] != twice[0]["event_id"]


@pytest.mark.parametrize("source", ["orders", "choosy"])
async def test_same_key_other_body_is_a_conflict(house: House, source: str) -> None:
    body, other = hook("contested", amount=1), hook("contested", amount=2)
    first = await house.post(source, body)
    answer = await house.post(source, other)
    if source == "choosy":
        assert (answer.status, answer.json["code"]) == (422, "key_conflict")
    else:
        assert answer.status == 200
        assert answer.json == {"status": "conflict", "skipped": True, "event_id": first.json["event_id"]}
    assert bytes(house.event(source, "contested")["body"]) == body
    kept = house.engine.rows("SELECT event_id, outcome, body FROM arrivals WHERE outcome = 'conflict'")
    ids = {(f"evt_{bytes(id_).hex() if isinstance(id_, bytes) else id_.hex}", bytes(kept_)) for id_, _, kept_ in kept}
    assert (first.json["event_id"], other) in ids


async def test_ignored_types_are_acknowledged_and_not_kept(house: House) -> None:
    before = house.extent()
    answer = await house.post("quiet", json.dumps({"id": "p", "type": "ping.hello"}).encode())
    assert (answer.status, answer.json) == (200, {"status": "ignored"})
    assert house.extent() == before
    assert (await house.post("quiet", hook("kept"))).json["status"] == "accepted"


async def test_a_header_is_a_key_only_where_it_is_listed(house: House) -> None:
    body = json.dumps({"hello": "world"}).encode()
    key = {"Idempotency-Key": '"from the header"'}
    answers = [(await house.post("plain", body, {**signed(body), **key})).json["status"] for _ in range(2)]
    assert answers == ["accepted", "accepted"], "a relay could burn the key of a real event"
    assert house.events("plain")[-1]["key"] is None
    answers = [(await house.post("listed", body, {**signed(body), **key})).json["status"] for _ in range(2)]
    assert answers == ["accepted", "duplicate"]
    assert house.events("listed")[-1]["key"] == "from the header"


async def test_keys_belong_to_their_source(house: House) -> None:
    body = hook("shared")
    first, second = await house.post("orders", body), await house.post("others", body)
    assert first.json["status"] == second.json["status"] == "accepted"
    assert first.json["event_id"] != second.json["event_id"]


# -- batches -----------------------------------------------------------------------------------


def batch(*items: tuple[str, int], kind: str = "t") -> bytes:
    return json.dumps({"from": "us", "events": [{"id": id_, "n": n, "type": kind} for id_, n in items]}).encode()


async def test_each_item_of_a_batch_is_an_event_in_its_envelope(house: House) -> None:
    body = batch(("b1", 1), ("b2", 2))
    answer = (await house.post("batch", body)).json
    assert {**answer, "event_ids": len(answer["event_ids"])} == {
        "status": "accepted", "accepted": 2, "duplicates": 0, "conflicts": 0, "event_ids": 2,
    }  # fmt: skip
    assert json.loads(bytes(house.event("batch", "b1")["body"])) == json.loads(batch(("b1", 1)))
    batch_id = house.event("batch", "b1")["batch_id"]
    raw = {str(id_): bytes(kept) for id_, kept in house.engine.rows("SELECT id, body FROM batches")}
    assert raw[str(batch_id)] == body
    # Half of it again, then all of it; then one item with another body; then alone.
    answer = (await house.post("batch", batch(("b2", 2), ("b3", 3)))).json
    assert (answer["status"], answer["accepted"], answer["duplicates"]) == ("accepted", 1, 1)
    answer = (await house.post("batch", body)).json
    assert (answer["status"], answer["accepted"], answer["duplicates"], answer["conflicts"]) == ("duplicate", 0, 2, 0)
    answer = (await house.post("batch", batch(("b1", 1), ("b2", 99)))).json
    assert (answer["status"], answer["duplicates"], answer["conflicts"]) == ("duplicate", 1, 1)
    alone = (await house.post("batch", batch(("b1", 1)))).json
    assert alone["status"] == "duplicate"
    assert alone["skipped"] is True


async def test_the_same_key_twice_in_one_batch(house: House) -> None:
    answer = (await house.post("batch", batch(("c1", 1), ("c1", 1), ("c1", 2)))).json
    assert (answer["accepted"], answer["duplicates"], answer["conflicts"]) == (1, 1, 1)
    assert len(set(answer["event_ids"])) == 1


async def test_a_batch_of_which_one_item_counts_keeps_its_raw_bytes(house: House) -> None:
    body = json.dumps({"events": [{"id": "d1", "type": "t"}, {"id": "d2", "type": "ping"}]}).encode()
    answer = (await house.post("batch", body)).json
    assert (answer["accepted"], len(answer["event_ids"])) == (1, 1)
    batch_id = house.event("batch", "d1")["batch_id"]
    raw = {str(id_): bytes(kept) for id_, kept in house.engine.rows("SELECT id, body FROM batches")}
    assert raw[str(batch_id)] == body, "the signature could not be checked again"


# -- being seen (UX.md 9) ----------------------------------------------------------------------


async def test_every_outcome_is_counted_under_the_name_of_its_source(house: House) -> None:
    async def counted() -> dict[str, float]:
        client = house.receiver.client()
        text = (await client.get("/metrics")).body.decode()
        client.close()
        lines = [line for line in text.splitlines() if line.startswith("oncehook_arrivals_total{")]
        return {line.partition("{")[2].rpartition("}")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = await counted()
    body, large = hook("counted"), b"x" * 3000
    await house.post("small", body)
    await house.post("small", body)
    await house.post("small", hook("counted", other=1))
    await house.post("small", body, {})
    await house.post("small", large)
    await house.post("never-heard-of", body)
    after = await counted()
    moved = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert moved == {
        'outcome="accepted",source="small"': 1,
        'outcome="duplicate",source="small"': 1,
        'outcome="conflict",source="small"': 1,
        'outcome="rejected",source="small"': 2,
        'outcome="rejected",source="unknown"': 1,
    }


async def test_the_log_has_one_line_for_what_somebody_may_have_to_act_on(house: House) -> None:
    start = house.receiver.log.stat().st_size
    evil = "%0d%0a%7B%22event%22:%22forged%22%7D%1b%5b31m"
    body = hook("logged \r\n\x1b[31m forged")
    await house.post(evil, body)
    await house.post("orders", body)
    await house.post("orders", hook("logged \r\n\x1b[31m forged", other=1))
    lines = house.receiver.log.read_bytes()[start:].split(b"\n")
    told = [json.loads(line) for line in lines if line]
    assert [line["event"] for line in told] == ["arrival.rejected", "arrival.conflict"]
    assert told[0]["reason"] == "unknown source"
    assert told[0]["peer"] == "127.0.0.1"
    assert told[1]["source"] == "orders"
    assert not any(b"\x1b" in line or b"\r" in line for line in lines)


# -- the end: all adds up ----------------------------------------------------------------------


async def test_rejections_are_written_down_without_bodies(house: House) -> None:
    body = hook("rejected-and-noted")
    await house.post("orders", body, {})
    await house.post("nobody%00here", body, {})
    await asyncio.sleep(1.5)
    rows = house.engine.rows("SELECT source, code, reason, peer, size FROM rejections ORDER BY n DESC LIMIT 2")
    assert [tuple(row) for row in rows] == [
        ("nobody\\x00here", "signature_invalid", "unknown source", "127.0.0.1", len(body)),
        ("orders", "signature_invalid", "missing", "127.0.0.1", len(body)),
    ]
