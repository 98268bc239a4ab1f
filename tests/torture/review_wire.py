"""Bytes on a socket: framings that can be read in two ways, damaged requests, and everything that reads bytes.

Each framing carries a second request inside the first, for a source that takes anything. Were the frame read in another
way than a proxy before us reads it, the inner one would be worked off: so it must never arrive.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count, product
from pathlib import Path

from oncehook.model import unpack_head
from tests.torture.fuzz_pair import LAST, WAYS, Served, served
from tests.torture.fuzz_targets import TARGETS, seeds
from tests.torture.fuzz_wire import CORPUS, END, damaged, pieces
from tests.torture.review import Budget, Tally
from tests.wire import SECRET, hook, request, signed

TOGETHER = 150
PATIENCE, SILENCE = 1.0, 0.1
"""Seconds to the first byte and to the next, after which none is expected: a request was not complete."""

CODINGS = (
    *("chunked", " chunked", "chunked ", "\tchunked", "Chunked", "xchunked", "chunked, identity", "identity, chunked"),
    *("chunked;q=1", '"chunked"', "chunked\x0b", "\x0bchunked", "chun\0ked", "x\r\n chunked", "gzip, chunked"),
    *("chunked, chunked", ",chunked", "chunked,", "identity", ""),
)
NAMES = (
    *("Transfer-Encoding: ", "transfer-encoding:", "Transfer-Encoding : ", "Transfer-Encoding\t: "),
    *("X: y\nTransfer-Encoding: ", "X: y\rTransfer-Encoding: ", "Transfer-Encoding: identity\r\nTransfer-Encoding: "),
)
IGNORED = ("Transfer_Encoding: ", "X-Transfer-Encoding: ", "TransferEncoding: ")
"""No coding for us, but for somebody in front of us it may be: then the stated length decides, and covers all of it."""
LENGTHS = (
    *("+{n}", "-{n}", "0x{n:x}", "{n}, {n}", "{n},{m}", "", "{n} {n}", "{n}\x0b", "\x0b{n}", "{n}.0", "{n}e0", "ten"),
    *("٩", "{n}\r\nContent-Length: {m}", "{m}\r\nContent-Length: {n}", "{n}\r\nContent-Length: {n}", "{n};", "{n}_0"),
    *("99999999999999999999999", "\0{n}", "{n}\0", '"{n}"', "0\r\nContent-Length : {n}", "{n}\r\nContent_Length: 0"),
)


Frame = tuple[str, Callable[[bytes], bytes]]
"""Its name, and how it is put around an inner request."""


def frames() -> Iterator[Frame]:
    """Yield every framing."""
    for version, name, coding, is_first in product(("HTTP/1.1", "HTTP/1.0"), NAMES, CODINGS, (False, True)):
        line = f"{name}{coding}"
        yield f"TE ends early {version} {line!r} {is_first}", partial(ending_early, version, line, is_first)
        yield f"CL ends early {version} {line!r} {is_first}", partial(cut_short, version, line, is_first)
    for name, coding in product(IGNORED, CODINGS):
        line = f"{name}{coding}"
        yield f"ignored coding {line!r}", partial(ending_early, "HTTP/1.1", line, True)
    for version, form, is_bare in product(("HTTP/1.1", "HTTP/1.0"), LENGTHS, (False, True)):
        yield f"length {version} {form!r} {is_bare}", partial(odd_length, version, form, is_bare)


def ending_early(version: str, coding: str, is_first: bool, inner: bytes) -> bytes:
    """Return a request that ends before the inner one by its chunks, and behind it by its length."""
    body = b"0\r\n\r\n" + inner
    lines = [f"Content-Length: {len(body)}", coding]
    return outer(version, lines[::-1] if is_first else lines, body)


def cut_short(version: str, coding: str, is_first: bool, inner: bytes) -> bytes:
    """Return a request that ends before the inner one by its length, and behind it by its chunks."""
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner)
    lines = [f"Content-Length: {body.index(inner)}", coding]
    return outer(version, lines[::-1] if is_first else lines, body)


def odd_length(version: str, form: str, is_bare: bool, inner: bytes) -> bytes:
    """Return a request whose body is the inner one, with a length that is written oddly."""
    data = outer(version, ["Content-Length: " + form.format(n=len(inner), m=0)], inner)
    head, _, body = data.partition(END)
    return head.replace(b"\r\n", b"\n") + b"\n\n" + body if is_bare else data


def outer(version: str, lines: list[str], body: bytes) -> bytes:
    """Return a request that is genuine but for its frame."""
    headers = [*lines, *(f"{name}: {value}" for name, value in signed(body).items())]
    return "\r\n".join([f"POST /in/orders {version}", "Host: test", *headers]).encode() + END + body


async def exchange(port: int, data: list[bytes]) -> tuple[bytes, float]:
    """Send this and a last word; return what is answered, and the seconds until the last byte of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = last = time.perf_counter()
    heard = b""
    with suppress(OSError, TimeoutError):
        for piece in data:
            writer.write(piece)
            await writer.drain()
        writer.write(LAST)
        while piece := await asyncio.wait_for(reader.read(1 << 16), SILENCE if heard else PATIENCE):
            heard += piece
            last = time.perf_counter()
    writer.close()  # not a reset: what was sent is still read
    return heard, last - began


async def send(tally: Tally, one: Served, name: str, data: list[bytes]) -> None:
    heard, seconds = await exchange(one.port, data)
    tally.tried += 1
    tally.slowest = max(tally.slowest, seconds)
    if any(status.startswith(b"5") and not status.startswith(b"501") for status in _statuses(heard)):
        tally.fail(f"{name}: {heard[:200]!r}")


def _statuses(heard: bytes) -> Iterator[bytes]:
    for part in heard.split(b"HTTP/1.1 ")[1:]:
        yield part[:3]


async def send_all(tally: Tally, one: Served, talks: list[tuple[str, list[bytes]]]) -> None:
    for start in range(0, len(talks), TOGETHER):
        await asyncio.gather(*(send(tally, one, name, data) for name, data in talks[start : start + TOGETHER]))


def framings(tally: Tally, budget: Budget, folder: Path) -> None:
    """Send requests inside requests, on both ways in: none of the inner ones may arrive."""

    async def main() -> None:
        for way, share in zip(WAYS, (0.5, 1.0), strict=True):
            async with served(folder, way) as one:
                sent: dict[bytes, str] = {}
                for number in count():
                    chosen = list(frames())
                    if number:  # after all of them whole, some of them in pieces
                        if time.monotonic() - budget.began > share * budget.seconds:
                            break
                        chosen = budget.chance.sample(chosen, TOGETHER)
                    talks = []
                    for name, put in chosen:
                        body = hook(f"smuggled-{len(sent):06}")
                        sent[body] = name
                        data = put(request("POST", "/in/open", body))
                        talks.append((name, pieces(budget.chance, data) if number else [data]))
                    await send_all(tally, one, talks)
                for body in kept(one, "open"):
                    tally.accept(f"{way} way: the request inside {sent[body]}")

    asyncio.run(main())


def damaged_requests(tally: Tally, budget: Budget, folder: Path) -> None:
    """Send ordinary, odd and crooked requests, damaged by chance: nothing may be kept that was not signed."""

    async def main() -> None:
        async with served(folder, "short") as one:
            talks = [(name, [make(f"whole-{name[:40]}")]) for name, make in CORPUS.items()]
            await send_all(tally, one, talks)
            number = 0
            while number == 0 or budget.is_left:
                await send_all(tally, one, [by_chance(budget.chance, number * TOGETHER + n) for n in range(TOGETHER)])
                number += 1
            for source in ("orders", "small", "strict", "choosy", "odd", "told"):
                for head, body in kept_whole(one, source):
                    if not is_genuine(head, body):
                        tally.accept(f"{source}: {body!r}")

    asyncio.run(main())


def by_chance(chance: random.Random, number: int) -> tuple[str, list[bytes]]:
    name, make = chance.choice(list(CORPUS.items()))
    return f"{name} damaged", pieces(chance, damaged(chance, make(f"chance-{number}")))


def kept_whole(one: Served, source: str) -> list[tuple[bytes, bytes]]:
    """Return head and body of every event of a source."""
    with closing(sqlite3.connect(one.path)) as connection:
        return connection.execute(
            "SELECT e.head, e.body FROM events e JOIN sources s ON s.id = e.source_id WHERE s.name = ?", (source,)
        ).fetchall()


def kept(one: Served, source: str) -> list[bytes]:
    return [body for _, body in kept_whole(one, source)]


def is_genuine(head: bytes, body: bytes) -> bool:
    """Tell whether a kept event has a signature of its body."""
    given = [value.strip().lower() for name, value in unpack_head(head)[2] if name.lower() == "x-signature"]
    return given == [f"sha256={hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()}"]


def readers(tally: Tally, budget: Budget, folder: Path) -> None:
    """Give bytes, made from seeds, to everything that reads bytes; whatever it raises is a crash."""
    made = {name: sorted(set(seeds(name))) for name in TARGETS}
    for name, target in TARGETS.items():
        for data in made[name]:
            read(tally, name, target, data)
    while budget.is_left:
        name = budget.chance.choice(list(TARGETS))
        data = budget.chance.choice(made[name])
        for _ in range(budget.chance.randint(1, 4)):
            data = mutated(budget.chance, data, budget.chance.choice(made[name]))
        read(tally, name, TARGETS[name], data)


def read(tally: Tally, name: str, target: object, data: bytes) -> None:
    with tally.trying():
        try:
            target(data)  # type: ignore[operator]
        except Exception as error:
            tally.crash(f"{name} {data!r}: {error!r}")


def mutated(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Return the same with one accident: a byte, a cut, a piece of another seed, or a repetition."""
    at = chance.randrange(len(data) + 1)
    upto = min(len(data), at + chance.randint(0, 8))
    start = chance.randrange(len(other) + 1)
    into = (
        chance.randbytes(chance.randint(1, 4)),
        b"",
        other[start : start + chance.randint(1, 20)],
        data[at:upto] * 3,
    )
    return data[:at] + chance.choice(into) + data[upto:]
