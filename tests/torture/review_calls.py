"""Signatures that were altered, over every sample of every preset; and addresses that lead inside, however written."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from oncehook import presets, samples
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.http_client.addresses import TABLE, Guard
from oncehook.model import Arrival
from oncehook.sources import Source, build
from tests.acceptance.test_http_destination import Sink, attempt, guarded, serving
from tests.presets.test_every import SAMPLES, UNSIGNED, given_to
from tests.torture.review import Budget, Tally
from tests.unit.test_addresses import PUBLIC, REGISTRIES

# -- signatures --------------------------------------------------------------------------------


def signatures(tally: Tally, budget: Budget, folder: Path) -> None:
    """Alter genuine samples where their sender vouches for them: each must be refused, and raise nothing else."""
    sources = {name: build(name, preset=presets.load(name), **given_to(presets.load(name))) for name, _ in SAMPLES}
    for name, kind in SAMPLES:
        for what, arrival in altered(sources[name], kind):
            verify(tally, sources[name], f"{name} {kind}: {what}", arrival)
    while budget.is_left:
        name, kind = budget.chance.choice(SAMPLES)
        for what, arrival in altered_by_chance(budget.chance, sources[name], kind):
            verify(tally, sources[name], f"{name} {kind}: {what}", arrival)


def verify(tally: Tally, source: Source, what: str, arrival: Arrival) -> None:
    with tally.trying():
        try:
            source.verifier(arrival)
        except SignatureInvalid:
            return
        except Exception as error:
            tally.crash(f"{what}: {error!r}")
            return
    tally.accept(f"{what}: {arrival.headers!r} {arrival.query!r} {arrival.body[:200]!r}")


def proofs(source: Source, kind: str) -> tuple[Arrival, list[int], bool]:
    """Return a genuine arrival, the places of the headers that prove it, and whether its query is a proof as well."""
    draft = samples.draft(source, kind)
    arrival = samples.sign(source, draft, url=source.settings.public_url)
    before = set(draft.headers)
    places = [n for n, pair in enumerate(arrival.headers) if pair not in before and pair[0] not in UNSIGNED]
    return arrival, places, arrival.query != draft.query


def with_header(arrival: Arrival, place: int, *pairs: tuple[bytes, bytes]) -> Arrival:
    headers = list(arrival.headers)
    return replace(arrival, headers=[*headers[:place], *pairs, *headers[place + 1 :]])


def altered(source: Source, kind: str) -> Iterator[tuple[str, Arrival]]:
    arrival, places, in_query = proofs(source, kind)
    source.verifier(arrival)  # it is genuine: otherwise its refusals would prove nothing
    other, other_places, _ = proofs(source, kind)
    for place in places:
        name, value = list(arrival.headers)[place]
        for at in range(len(value)):
            yield f"byte {at} of {name!r}", with_header(arrival, place, (name, flipped(value, at)))
        for cut in {0, 1, len(value) // 2, len(value) - 1}:
            yield f"{name!r} cut to {cut}", with_header(arrival, place, (name, value[:cut]))
        yield f"{name!r} left out", with_header(arrival, place)
        yield f"{name!r} twice", with_header(arrival, place, (name, value), (name, value))
        if b"-" in name:
            twin = name.replace(b"-", b"_")
            yield f"{name!r} and its twin", with_header(arrival, place, (name, value), (twin, value))
            yield f"{name!r} as its twin", with_header(arrival, place, (twin, value))
        for end in (b"0", b"A", b"\xff"):  # not `,` or `=`: behind them the genuine value is still there, in a list
            yield f"{name!r} with {end[:9]!r} behind", with_header(arrival, place, (name, value + end))
        yield f"{name!r} of 10 kB", with_header(arrival, place, (name, value * (10_000 // len(value) + 1)))
    if in_query:
        yield "query left out", replace(arrival, query=b"")
        for at in range(len(arrival.query)):
            yield f"byte {at} of the query", replace(arrival, query=flipped(arrival.query, at))
    if source.preset is not None and source.preset.body_authenticated:
        for at in range(0, len(arrival.body), max(1, len(arrival.body) // 64)):
            yield f"byte {at} of the body", replace(arrival, body=flipped(arrival.body, at))
        for body in (b"", arrival.body[:-1], arrival.body + b" ", arrival.body * 2):
            yield "another body", replace(arrival, body=body)
        if other.body != arrival.body and other_places:
            yield "the body of another one", replace(arrival, body=other.body)


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


def is_still_genuine(value: bytes, other: bytes) -> bool:
    """Tell whether another value says the same: white space and case do not count, nor what is added to a list."""
    value, other = value.lower(), other.lower()
    whole, rest = b"".join(value.split()), b"".join(other.split())
    return whole in rest or set(re.split(rb"[,;\s]", value)) <= set(re.split(rb"[,;\s]", other))


def altered_by_chance(chance: random.Random, source: Source, kind: str) -> Iterator[tuple[str, Arrival]]:
    arrival, places, _ = proofs(source, kind)
    for place in places:
        name, value = list(arrival.headers)[place]
        for _ in range(20):
            at = chance.randrange(len(value))
            other = value[:at] + chance.randbytes(chance.randint(1, 3)) + value[at + chance.randint(0, 3) :]
            if not is_still_genuine(value, other):
                yield f"{name!r} {other!r}", with_header(arrival, place, (name, other))


# -- addresses ---------------------------------------------------------------------------------


def spelled(address: str) -> Iterator[str]:
    """Yield an IPv4 address in every way that some resolver understands."""
    a, b, c, d = map(int, address.split("."))
    number = int(ipaddress.IPv4Address(address))
    yield from (
        address,
        f"{address}.",
        f"{number}",
        f"{number:#x}",
        f"0{number:o}",
        f"{a}.{number & 0xFFFFFF}",
        f"{a}.{b}.{c * 256 + d}",
    )
    yield from (
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"{a:#x}.{b}.0{c:o}.{d}",
        f"0x{a:08x}.{b}.{c}.{d}",
    )
    yield from (
        f"{a:03}.{b:03}.{c:03}.{d:03}",
        "。".join(map(str, (a, b, c, d))),
        _wide(address),
        f"{a + 256}.{b}.{c}.{d}",
        f"%{ord(address[0]):x}{address[1:]}",
    )
    yield from (
        f"[::ffff:{address}]",
        f"[::{address}]",
        f"[64:ff9b::{address}]",
        f"[2002:{a:02x}{b:02x}:{c:02x}{d:02x}::1]",
        f"[::ffff:0:{address}]",
    )
    yield from (
        f"user@{address}",
        f"{address}#@a.example",
        f"a.example\\@{address}",
        f"{address}\t",
        f"a.example@{address}",
    )


def _wide(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in text)


HOME = ("127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0")


def addresses(tally: Tally, budget: Budget, folder: Path) -> None:
    """Call a server on loopback by every address and name that leads to it: none may connect; then try the table."""
    asyncio.run(call_home(tally))
    for first, last, _ in REGISTRIES:
        for text in (first, last):
            judge(tally, text, is_public=False)
    for text in PUBLIC:
        judge(tally, text, is_public=True)
    networks = [ipaddress.ip_network(text) for text, _ in TABLE]
    while budget.is_left:
        network = budget.chance.choice(networks)
        inside = network[budget.chance.randrange(network.num_addresses)]
        judge(tally, str(inside), is_public=False)
        anywhere = ipaddress.IPv4Address(budget.chance.getrandbits(32))
        if not anywhere.is_global or anywhere.is_multicast:  # Python's own list knows it as well
            judge(tally, str(anywhere), is_public=False)


def judge(tally: Tally, text: str, *, is_public: bool) -> None:
    with tally.trying():
        refused = Guard().refuses(text) is not None
    if not refused and not is_public:
        tally.accept(f"the address {text}")
    elif refused and is_public:
        tally.crash(f"the public address {text} is refused")


async def call_home(tally: Tally) -> None:
    async with serving(Sink()) as home, serving(Sink(port=home.port), "::1") as home6:
        hosts = [host for address in HOME for host in spelled(address)]
        hosts += ["localhost", "LOCALHOST.", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:7f00:1]", "[::1%25lo]"]
        for host in hosts:
            for path in ("/", "/?x=http://a.example/", "//a.example/"):
                await call(tally, f"http://{host}:{home.port}{path}")
        for names in (["127.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], ["0.0.0.0"], ["::"], ["127.0.0.2", "::1"]):
            client, _ = guarded(names, allow=())
            await call(tally, f"http://hooks.example:{home.port}/", client=client)
        for sink in (home, home6):
            for _ in range(sink.connections):
                tally.accept("a call reached a server on loopback")


async def call(tally: Tally, url: str, **how: object) -> None:
    with tally.trying():
        try:
            result = await attempt(url, **({"allow_private": False, "timeout": 5.0} | how))  # type: ignore[arg-type]
        except ConfigError:
            return
        except Exception as error:
            tally.crash(f"{url}: {error!r}")
            return
    if result.category is None:
        tally.accept(url)
