"""A hostile sender at the front door, over real HTTP: what is refused leaves no trace (R7, R8, S1-S10, S14-S16)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import pytest

from oncehook.model import unpack_head
from tests.acceptance.house import PATH, House, house
from tests.wire import hook, request, signed

__all__ = ["house"]


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
@pytest.mark.parametrize(("source", "cap"), [("small", 2000), ("orders", 1 << 20), ("large", 2 << 20)])
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
    body = padded("patient", 3 << 20)
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
        "no host": straight.replace(b"Host: test\r\n", b""),
        "two hosts": straight.replace(b"Host: test\r\n", b"Host: test\r\nHost: other\r\n"),
        "the same host twice": straight.replace(b"Host: test\r\n", b"Host: test\r\nhost: test\r\n"),
        "HTTP/2.0": straight.replace(b"HTTP/1.1", b"HTTP/2.0"),
        "HTTP/0.9": straight.replace(b"HTTP/1.1", b"HTTP/0.9"),
        "two spaces before the path": straight.replace(b"POST ", b"POST  "),
        "two spaces behind the path": straight.replace(b" HTTP", b"  HTTP"),
    }
    return forms[name]


CROOKED = [
    *("length and chunked", "chunked and length", "two lengths", "two different lengths", "list of lengths"),
    *("signed length", "foreign digits", "length beyond numbers", "space before colon", "coding with tab"),
    *("coding not ASCII", "coding twice", "coding unknown", "coding in a coding", "chunk end", "chunk size with 0x"),
    *("chunk size not ASCII", "chunk lines by LF", "folded line", "NUL", "bare CR", "lines by LF", "no colon"),
    *("path not ASCII", "no host", "two hosts", "the same host twice", "HTTP/2.0", "HTTP/0.9"),
    *("two spaces before the path", "two spaces behind the path"),
]


@pytest.mark.parametrize("name", CROOKED)
async def test_crooked_framing_is_refused_and_leaves_nothing(house: House, name: str) -> None:
    before = house.extent()
    answer = await house.send(crooked(name))
    assert (answer.status, answer.json["code"]) == (400, "malformed")
    assert answer.headers["connection"] == "close"
    assert house.extent() == before


BAD_HEADS = [
    *(b"GET /livez HTTP/1.1", b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: a", b"GET /livez HTTP/2.0\r\nHost: a"),
    *(b"GET  /livez HTTP/1.1\r\nHost: a", b"GET /livez  HTTP/1.1\r\nHost: a", b"GET /livez\r\nHost: a"),
    b"GET /livez HTTP/2.0\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c",
    b"GET  /livez HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c",
]


@pytest.mark.parametrize("before", ["alone", "behind another", "byte by byte", "behind empty lines"])
@pytest.mark.parametrize("head", BAD_HEADS)
async def test_a_head_that_others_read_in_another_way_is_refused_everywhere(
    house: House, head: bytes, before: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.receiver.port)
    good = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    data = {"behind another": good, "behind empty lines": b"\r\n\r\n"}.get(before, b"") + head + b"\r\n\r\n"
    writer.transport.set_write_buffer_limits(0)
    for at in range(0, len(data), step := 1 if before == "byte by byte" else len(data)):
        writer.write(data[at : at + step])
        await asyncio.sleep(0)
    async with asyncio.timeout(20):  # or else it was taken, and the connection kept
        answers = [part[:3] for part in (await reader.read()).split(b"HTTP/1.1 ")[1:]]
    writer.close()
    # Behind another that is not answered yet there is no answer; the connection ends all the same.
    assert answers in ([[b"200"], [b"200", b"400"]] if before == "behind another" else [[b"400"]])


async def test_http_1_0_needs_no_host(house: House) -> None:
    # Health checks of proxies are written like this.
    assert (await house.send(b"OPTIONS /in/nobody HTTP/1.0\r\n\r\n")).status == 401


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


@pytest.mark.parametrize("target", ["/in/orders", "http://test/in/orders", "test:443"])
async def test_nobody_gets_a_tunnel(house: House, target: str) -> None:
    body, before = hook("tunnel"), house.extent()
    answer = await house.send(request("CONNECT", target, body, signed(body)))
    assert answer.status in (400, 401)
    assert answer.headers["connection"] == "close"
    assert house.extent() == before


async def test_a_huge_head_is_refused(house: House) -> None:
    body, before = hook("huge-head"), house.extent()
    answer = await house.send(request("POST", "/in/orders", body, {**signed(body), "X-Big": "x" * 70_000}))
    assert answer.status == 431
    assert house.extent() == before


@pytest.mark.parametrize("size", [200_000, 2_000_000])
async def test_an_even_larger_head_is_not_heard_out(house: House, size: int) -> None:
    body, before = hook("huge-head"), house.extent()
    with contextlib.suppress(OSError):  # it may be hung up on in the middle of its own talk
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
        *(("/in", 405), ("/in/", 401), ("/in//orders", 401), ("//in/orders", 405), ("/IN/orders", 405)),
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


@pytest.mark.parametrize("framing", ["length", "chunked", "in pieces"])
@pytest.mark.parametrize("size", [0, 100, 2001, 70_000, (1 << 20) + 1, (2 << 20) + 1])
async def test_a_source_cannot_be_told_from_none_by_what_it_takes(house: House, size: int, framing: str) -> None:
    """Neither by its largest body, nor by the status of a refusal, nor by how that is framed (S8)."""
    body, before = b"x" * size, house.extent()
    answers = set()
    for source in ("nobody-lives-here", "hidden", "orders", "small", "large", "fenced", "bearer"):
        path, headers = f"/in/{source}", {"X-Signature": "sha256=00"}
        if framing == "chunked":
            data = [chunked(path, body, piece=30_000, **headers)]
        else:
            data = [request("POST", path, body, headers)]
        if framing == "in pieces":
            data = [data[0][: -size // 2], data[0][-size // 2 :]] if size else data
        reader, writer = await asyncio.open_connection("127.0.0.1", house.receiver.port)
        for piece in data:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await house.receiver.client()._read(reader)
        writer.close()
        answers.add((answer.status, answer.body, tuple(answer.headers.items())))
    assert len(answers) == 1, answers
    assert answers.pop()[0] == (413 if size > 2 << 20 else 401)
    assert house.extent() == before


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS"])
async def test_a_source_cannot_be_told_from_none_by_other_methods(house: House, method: str) -> None:
    query = "?hub.mode=subscribe&hub.verify_token=guess&hub.challenge=1"
    answers = set()
    for source in ("nobody-lives-here", "orders", "small", "fenced", "meta"):
        reader, writer = await asyncio.open_connection("127.0.0.1", house.receiver.port)
        writer.write(request(method, f"/in/{source}{query}", b"", {"Connection": "close"}))
        answers.add(await reader.read())
        writer.close()
    assert len(answers) == 1, answers


async def test_a_source_with_a_path_of_its_own_is_not_found_under_its_name(house: House) -> None:
    body, before = hook("hidden"), house.extent()
    assert (await house.post("hidden", body, {})).status == 401
    assert (await house.post("hidden", b"x" * 3_000_000, {})).status == 413
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


# -- who leaves --------------------------------------------------------------------------------


async def test_who_leaves_with_a_reset_makes_no_traceback(house: House) -> None:
    body = hook("left")
    whole = request("POST", "/in/orders", body, signed(body))
    said = [
        *(b"", whole[:20], whole[:-3], whole, whole * 20, request("GET", "/in/orders", b"") * 30),
        *(request("GET", path, b"") * 40 for path in ("/livez", "/metrics", "/login", "/openapi.json")),
        *(request("POST", "/login", b"password=x")[:-3], request("POST", "/in/orders", b"x" * 300_000)[:200_000]),
    ]
    for pause in (0.0, 0.001, 0.003, 0.01) * 5:
        for data in said:
            with socket.socket() as line:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                line.connect(("127.0.0.1", house.receiver.port))
                line.setblocking(False)
                with contextlib.suppress(OSError):
                    line.send(data)
                await asyncio.sleep(pause)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert (await house.post("orders", hook("stayed"))).json["status"] == "accepted"
    told = house.receiver.log.read_text()
    assert "Traceback" not in told, told[told.index("Traceback") - 200 :][:5000]
