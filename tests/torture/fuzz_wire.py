"""Things to say to an HTTP server: ordinary, odd, crooked, and any of them damaged by chance.

`CORPUS` makes each thing for a name that keeps its keys apart from all others; `damaged` and `pieces` take a seeded
random generator, so that whatever was said can be said again. Used by `test_two_ways` and by the flood.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

from tests.wire import SECRET, hook, request, signed

Made = Callable[[str], bytes]
END: Final = b"\r\n\r\n"


def post(
    name: str,
    path: str = "/in/orders",
    *,
    body: bytes | None = None,
    secret: str = SECRET,
    **headers: str,
) -> bytes:
    """A hook that is genuine unless told otherwise."""
    body = hook(name, customer="c1") if body is None else body
    return request("POST", path, body, {**signed(body, secret), **{k.replace("_", "-"): v for k, v in headers.items()}})


def padded(name: str, size: int) -> bytes:
    """A hook of exactly this many bytes."""
    bare = len(hook(name, padding=""))
    return hook(name, padding="x" * (size - bare))


def chunked(name: str, path: str = "/in/orders", size: int = 7, coding: str = "chunked") -> bytes:
    body = hook(name)
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Transfer-Encoding: {coding}"]
    lines += [f"{key}: {value}" for key, value in signed(body).items()]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return "\r\n".join(lines).encode() + END + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


def swapped(old: bytes, new: bytes) -> Made:
    return lambda name: post(name).replace(old, new, 1)


def with_header(line: bytes) -> Made:
    return lambda name: post(name).replace(END, b"\r\n" + line + END, 1)


def with_length(make: Callable[[int], bytes]) -> Made:
    def made(name: str) -> bytes:
        data, size = post(name), len(hook(name, customer="c1"))
        return data.replace(b"Content-Length: %d" % size, b"Content-Length: " + make(size), 1)

    return made


def at(path: str) -> Made:
    return lambda name: post(name, path)


def of_size(size: int, source: str = "orders") -> Made:
    return lambda name: post(name, f"/in/{source}", body=padded(name, size))


def _plain() -> Iterator[tuple[str, Made]]:
    yield "valid", post
    yield "empty body", lambda name: post(name, body=b"")
    yield "not JSON", lambda name: post(name, body=b"\x00\xff{")
    yield "no key", lambda name: post(name, body=b'{"a": 1}')
    yield "wrong signature", lambda name: post(name, secret="another")
    yield "no signature", lambda name: request("POST", "/in/orders", hook(name))
    yield "twice", lambda name: post(name) * 2
    yield "three in a row", lambda name: b"".join(post(f"{name}-{n}") for n in range(3))
    yield "conflict", lambda name: post(name) + post(name, body=hook(name, other=1))
    yield "refused conflict", lambda name: post(name, "/in/choosy") + post(name, "/in/choosy", body=hook(name, other=1))
    yield "key required", lambda name: post(name, "/in/strict", body=b"{}")
    yield "ignored", at("/in/quiet")
    yield "fenced", at("/in/fenced")
    yield "hidden by its name", at("/in/hidden")
    yield "hidden by its path", at("/in/k7_Qm2ZxN4vT9sLdR1wYhE")
    yield "revived", lambda name: post(name, "/in/revived") * 2 + post(name, "/in/revived", secret="another")
    yield "revived alone", at("/in/revived")
    yield "to nobody", at("/in/nobody")
    yield "to nobody, twice", lambda name: post(name, "/in/nobody") * 2
    yield "open", lambda name: request("POST", "/in/open", hook(name))
    yield "local", lambda name: request("POST", "/in/local", hook(name))
    yield "not local", lambda name: request("POST", "/in/local", hook(name), {"X-Forwarded-For": "203.0.113.1"})
    yield "odd statuses", lambda name: post(name, "/in/odd") + post(name, "/in/odd", secret="another")
    yield "handshake", lambda name: post(name, "/in/odd", body=b'{"challenge": 1}')
    yield "answer of its own", at("/in/told")
    events = b'{"events": [{"id": "%s-1", "type": "a"}, {"id": "%s-2", "type": "b"}]}'
    yield "batch", lambda name: post(name, "/in/batch", body=events % (name.encode(), name.encode()))
    yield "empty batch", lambda name: post(name, "/in/batch", body=b'{"events": []}')
    yield "encoded", lambda name: post(name, Content_Encoding="gzip")
    yield "content type missing", lambda name: post(name).replace(b"Content-Type: application/json\r\n", b"")


def _lines() -> Iterator[tuple[str, Made]]:
    yield "HTTP/1.0", swapped(b"HTTP/1.1", b"HTTP/1.0")
    yield "HTTP/1.0 keep-alive", lambda name: swapped(b"HTTP/1.1", b"HTTP/1.0\r\nConnection: keep-alive")(name)
    yield "no host", swapped(b"Host: test\r\n", b"")
    yield "HTTP/1.0 without a host", lambda name: swapped(b"HTTP/1.1\r\nHost: test", b"HTTP/1.0")(name)
    yield "two spaces before", swapped(b"POST ", b"POST  ")
    yield "two spaces behind", swapped(b" HTTP", b"  HTTP")
    yield "two spaces in the second", lambda name: post(name) + post(f"{name}-2").replace(b" HTTP", b"  HTTP", 1)
    for version in (b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2", b"HTTP/9.9", b"http/1.1", b"HTTP/1.1 ", b""):
        yield f"version {version!r}", swapped(b"HTTP/1.1", version)
    for path in (
        *("/in/orders/", "/in//orders", "/in/orders?", "/in/orders?a=b", "/in/orders?a=b?c", "/in/orders#f"),
        *("/in/orders?a#f", "/in/orders?#", "/in/orders#f?a=b", "/in/%6frders", "/in/orders%20", "/in/orders?%zz"),
        *("/in/orders/more", "/in/ORDERS", "/in/nobody", "/in/", "/in", "http://test/in/orders", "*", "in/orders"),
        *("http://test/in/orders?a=b#c", "https://u:p@test:99/in/orders", "http:///in/orders", "//test/in/orders"),
        *("/in/orders;a=b", "/in/orders?" + "q" * 3000, "/in/../in/orders", "/in/orders?a=b&a=c", "test:443"),
    ):
        yield f"target {path[:40]}", at(path)
    for byte in range(0x21, 0x100):
        yield f"query byte {byte:#x}", swapped(b"/in/orders", b"/in/orders?a" + bytes([byte]) + b"b")
    for method in ("GET", "HEAD", "PUT", "OPTIONS", "PATCH", "DELETE", "post", "POSTS", "CONNECT", "PRI", "SOURCE"):
        yield f"method {method}", swapped(b"POST", method.encode())
    yield "leading line ends", lambda name: b"\r\n\r\n" + post(name)
    yield "trailing line ends", lambda name: post(name) + b"\r\n\r\n" + post(f"{name}-2")
    yield "lines by LF", lambda name: post(name).replace(b"\r\n", b"\n")
    yield "garbage behind", lambda name: post(name) + b"\x00\x01garbage\r\n\r\n"
    yield "half a head behind", lambda name: post(name) + b"POST /in/or"
    yield "half a body", lambda name: post(name)[:-5]
    yield "nothing", lambda name: b""


def _headers() -> Iterator[tuple[str, Made]]:
    for line in (
        *(b"Connection: close", b"connection: Close", b"Connection: keep-alive", b"Connection: close, x"),
        *(b"Connection: Upgrade\r\nUpgrade: h2c", b"Upgrade: websocket", b"Connection: upgrade\r\nUpgrade: websocket"),
        *(
            b"Expect: 100-continue",
            b"EXPECT: 100-Continue",
            b"Expect: 200-ok",
            b"Expect:",
            b"X-Empty:",
            b"X-A: b\r\n c",
        ),
        *(
            b"X-NUL: a\0b",
            b"X-Bare: a\rb",
            b"X-Space : a",
            b"No colon",
            b": no name",
            b"X\xe4: a",
            b"X-Value: \xe4\xff",
        ),
        *(b"Proxy-Connection: close", b"Keep-Alive: timeout=1", b"TE: trailers", b"Trailer: X-Late", b"X-Tab:\ta\t"),
        *(b"Content-Encoding: identity", b"Content-Encoding: br", b"Content_Length: 3", b"Transfer_Encoding: chunked"),
        *(b"X-Forwarded-For: 203.0.113.9", b"Host: other", b"X-Signature: sha256=00", b'Idempotency-Key: "a"'),
    ):
        yield f"header {line!r}", with_header(line)
    yield "many headers", with_header(b"\r\n".join(b"X-%d: v" % n for n in range(900)))
    yield (
        "upper case",
        lambda name: post(name).replace(b"X-Signature", b"X-SIGNATURE").replace(b"Content-L", b"CONTENT-L"),
    )
    yield (
        "lower case",
        lambda name: post(name).replace(b"X-Signature", b"x-signature").replace(b"Content-L", b"content-l"),
    )
    yield "close and one more", lambda name: with_header(b"Connection: close")(name) + post(f"{name}-2")
    yield (
        "refused, close and one more",
        lambda name: post(name, secret="another", Connection="close") + post(f"{name}-2") + post(f"{name}-3"),
    )
    yield (
        "1.0 refused and one more",
        lambda name: post(name, secret="another").replace(b"HTTP/1.1", b"HTTP/1.0") + post(f"{name}-2"),
    )
    yield "refused and one more", lambda name: post(name, secret="another") + post(f"{name}-2")
    yield "ignored and half of one more", lambda name: post(name, "/in/quiet") + post(f"{name}-2")[:60]
    yield "ignored and half a body", lambda name: post(name, "/in/quiet") + post(f"{name}-2")[:-9]
    yield "refused and garbage", lambda name: post(name, secret="another") + b"garbage\r\n\r\n"
    yield "a hundred", lambda name: b"".join(post(f"{name}-{n}") for n in range(100))
    yield "a hundred refused", lambda name: post(name, secret="another") * 100
    for size in (60_000, 65_200, 65_400, 65_535, 66_000, 70_000, 140_000):
        yield f"long head {size}", with_header(b"X-Long: " + b"x" * size)
        yield f"long target {size}", swapped(b"/in/orders", b"/in/orders?" + b"q" * size)


def _framing() -> Iterator[tuple[str, Made]]:
    forms: dict[str, Callable[[int], bytes]] = {
        **{f"zeros {zeros}": lambda n, zeros=zeros: b"%0*d" % (zeros, n) for zeros in (4, 5, 6, 20)},  # type: ignore[misc]
        "plus": lambda n: b"+%d" % n,
        "minus": lambda n: b"-%d" % n,
        "hex": lambda n: b"0x%x" % n,
        "space behind": lambda n: b"%d  " % n,
        "tab before": lambda n: b"\t%d" % n,
        "list": lambda n: b"%d, %d" % (n, n),
        "nothing": lambda n: b"",
        "shorter": lambda n: b"%d" % (n - 3),
        "longer": lambda n: b"%d" % (n + 3),
        "zero": lambda n: b"0",
        "huge": lambda n: b"9" * 25,
        "over the cap": lambda n: b"%d" % (1 << 21),
        "letters": lambda n: b"ten",
        "foreign digits": lambda n: "٩٩".encode(),
        "twice": lambda n: b"%d\r\nContent-Length: %d" % (n, n),
        "twice, unlike": lambda n: b"%d\r\nContent-Length: %d" % (n, n + 1),
    }
    for what, make in forms.items():
        yield f"length {what}", with_length(make)
    yield "no length", lambda name: post(name).replace(b"Content-Length: ", b"X-Length: ")
    yield "length and chunked", with_header(b"Transfer-Encoding: chunked")
    yield "chunked", chunked
    yield "chunked, then plain", lambda name: chunked(name) + post(f"{name}-2")
    yield "plain, then chunked", lambda name: post(name) + chunked(f"{name}-2")
    yield "chunked with a trailer", lambda name: chunked(name)[:-2] + b"Content-Length: 3\r\nExpect: x\r\n\r\n"
    yield "chunked with an extension", lambda name: chunked(name).replace(b"\r\n7\r\n", b"\r\n7;a=b\r\n")
    for coding in ("gzip, chunked", "identity", "xchunked", "Chunked", "chunked, chunked", ""):
        yield f"coding {coding}", lambda name, coding=coding: chunked(name, coding=coding)  # type: ignore[misc]
    for size in (65_535, 65_536, 65_537, 70_000):
        yield f"body of {size}", of_size(size)
    for size in (1999, 2000, 2001):
        yield f"small body of {size}", of_size(size, "small")
        yield f"body of {size} to nobody", of_size(size, "nobody")


CORPUS: Final[dict[str, Made]] = dict([*_plain(), *_lines(), *_headers(), *_framing()])


# -- damage ------------------------------------------------------------------------------------

_SPLICES: Final = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"%", b"#", b"?", b"\r\n\r\n", b"0\r\n\r\n", b"Content-Length: 1\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"HTTP/1.0", b"\xff"),
    *(b"POST /in/orders HTTP/1.1\r\n", b"Upgrade: h2c\r\nConnection: upgrade\r\n", b"Host: a\r\n", b"x" * 5000),
)


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The same with one to three accidents, most of them in the head."""
    for _ in range(chance.randint(1, 3)):
        end = len(data) if chance.random() < 0.3 else max(data.find(END), 0) + 4
        here = chance.randrange(min(end, len(data)) + 1)
        match chance.randrange(6):
            case 0:
                data = data[:here] + bytes([chance.randrange(256)]) + data[here + 1 :]
            case 1:
                data = data[:here] + data[here + chance.randint(1, 12) :]
            case 2:
                data = data[:here] + chance.choice(_SPLICES) + data[here:]
            case 3:
                data = data[:here] + data[max(here - chance.randint(1, 40), 0) :]
            case 4:
                data = data[:here] + data[here : here + 30].swapcase() + data[here + 30 :]
            case _:
                line = data.find(b"\r\n", here) + 2
                data = data[:line] + chance.choice(_SPLICES) + data[line:]
    return data


def pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """The same in one to five pieces."""
    cuts = sorted({0, len(data), *(chance.randrange(len(data) + 1) for _ in range(chance.randrange(5)))})
    return [data[start:end] for start, end in pairwise(cuts)]
