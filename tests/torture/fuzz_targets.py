"""What reads bytes of strangers, one target each: any bytes go in, and nothing comes out but its own kind of error.

A target is a function of bytes; whatever it raises is a finding. `SEEDS` are bytes worth beginning with, made here and
kept nowhere. The same targets are driven by Hypothesis (`test_fuzz.py`), by chance (`scripts/fuzz`) and by atheris:

    python -m tests.torture.fuzz_targets NAME [libFuzzer's own options]
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from oncehook import human, payload, presets, query, settings
from oncehook.errors import ConfigError, QueryInvalid, Rejected, SignatureInvalid
from oncehook.ingest import Receiver, is_direct
from oncehook.model import Arrival, Headers, key_hash, pack_head, unpack_head
from oncehook.rules import Rule, RuleContext, Rules, bound_text
from oncehook.settings import development
from oncehook.sources import Network, Source
from oncehook.web.peers import UNKNOWN, peer_finder, plain

NOW: Final = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
Target = Callable[[bytes], None]


class Bytes:
    """Bytes that are eaten from the front: choices, texts, headers."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def number(self, below: int) -> int:
        first, self._data = self._data[:1], self._data[1:]
        return (first[0] if first else 0) % below

    def piece(self) -> bytes:
        """Up to the next unit separator."""
        piece, _, self._data = self._data.partition(b"\x1f")
        return piece

    def rest(self) -> bytes:
        rest, self._data = self._data, b""
        return rest

    def headers(self) -> Headers:
        """Names as the parser hands them over: in lower case, without what it refuses."""
        pairs = [(self.piece(), self.piece()) for _ in range(self.number(6))]
        bad = bytes([*range(32), 127])
        return [(n.translate(None, bad + b" :").lower() or b"x", v.translate(None, bad).strip()) for n, v in pairs]


@cache
def sources() -> list[Source]:
    """One source for each preset, with keys of its own."""
    return [development.fleeting(name) for name in presets.names()]


# -- targets -----------------------------------------------------------------------------------


def fuzz_body(data: bytes) -> None:
    """A JSON body, read as a whole: it is shallow, bound_text, and hashes without an error."""
    with suppress(payload.Unreadable):
        value = payload.parse(data)
        assert _depth(value) <= payload.MAX_DEPTH
    assert len(payload.BodyHash(["$.a", "$..b"])(data)) == 16
    payload.Redaction(["$.token", "form:token"])(data)


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level := [c for v in level if isinstance(v, list | dict) for c in (v.values() if isinstance(v, dict) else v)]:
        deepest += 1
    return deepest


def fuzz_form(data: bytes) -> None:
    """A form, or a query string."""
    with suppress(payload.Unreadable):
        fields = payload.parse_form(data)
        assert sum(map(len, fields.values())) <= payload.MAX_FIELDS


def fuzz_path(data: bytes) -> None:
    """A JSONPath and a body to look into; what it finds is there."""
    eaten = Bytes(data)
    text, body = "$" + eaten.piece().decode("utf-8", "replace"), eaten.rest()
    with suppress(ConfigError, payload.Unreadable):
        path = payload.Path(text)
        value = payload.parse(body)
        if text.count("..") < 2:  # two of them may find the square of what there is; only we write paths
            for location in path.locations(value):
                assert payload.walk(value, location) is not payload.MISSING
            payload.text_of(path.first(value))


def fuzz_rule(data: bytes) -> None:
    """A rule of a key as it may stand in the settings, read from an arrival that may be anything."""
    eaten = Bytes(data)
    spec: list[Any] = [eaten.piece().decode("utf-8", "replace") for _ in range(1 + eaten.number(3))]
    if eaten.number(2):
        spec = [spec]
    arrival = Arrival("s", eaten.headers(), eaten.piece(), eaten.piece())
    with suppress(ConfigError):
        rule = Rule.parse(spec)
        if any(path.text.count("..") > 1 for path in rule.paths):
            return
        found = rule.read(RuleContext(arrival, arrival.body))
        assert found is None or any(found)
        reading = Rules(key=spec, subject=spec, type=spec, event_time=spec, rank=spec).read(arrival)
        for text in (reading.subject, reading.type):
            assert text is None or len(text.encode()) <= 512


def fuzz_key(data: bytes) -> None:
    """Two keys are the same only if source and parts are; what is shown of them is bounded."""
    eaten = Bytes(data)
    one, other = [
        (eaten.piece().decode("latin-1"), [eaten.piece().decode("latin-1") for _ in range(1 + eaten.number(4))])
        for _ in range(2)
    ]
    assert (key_hash(*one) == key_hash(*other)) == (one == other)
    joined = "".join([one[0], *one[1]])
    cut = len(joined) // 2
    moved = (joined[:cut], [joined[cut:]])
    assert (key_hash(*one) == key_hash(*moved)) == (one == moved)
    assert len(bound_text(joined).encode()) <= 512


def fuzz_query(data: bytes) -> None:
    """The query language; what it understood it can say again."""
    with suppress(QueryInvalid):
        meant = query.parse(data.decode("utf-8", "surrogateescape"), NOW)
        assert query.parse(query.write_query(meant), NOW) == meant


def fuzz_config(data: bytes) -> None:
    """A settings file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "oncehook.toml"
        file.write_bytes(data)
        with suppress(ConfigError):
            list(settings.load(file, env={}, secrets=False).settings())


def fuzz_units(data: bytes) -> None:
    """Durations, sizes, rates."""
    text = data.decode("utf-8", "replace")
    for read in (human.seconds, human.size, human.rate):
        with suppress(ConfigError):
            assert read(text) >= 0


def fuzz_verifier(data: bytes) -> None:
    """The verifier of any preset, with its own header names among those that come."""
    eaten = Bytes(data)
    source = sources()[eaten.number(len(sources()))]
    names = _signature_names(source)
    headers = [(names[eaten.number(len(names))], eaten.piece()) for _ in range(eaten.number(4))] + list(eaten.headers())
    arrival = Arrival(source.name, headers, eaten.piece(), eaten.piece(), peer="127.0.0.1")
    with suppress(SignatureInvalid):
        source.verifier(arrival)


@cache
def _names_of(name: str) -> tuple[bytes, ...]:
    (source,) = [one for one in sources() if one.name == name]
    draft = Arrival(name, [(b"content-type", b"application/json")], b'{"id": 1}')
    with suppress(Exception):  # some need a body of their own shape to sign
        signed = source.scheme.sign(draft, source.signing, at=NOW.timestamp(), url=source.settings.public_url)
        return tuple(sorted({header for header, _ in signed.headers} | {b"authorization"}))
    return (b"authorization", b"x-signature", b"content-type")


def _signature_names(source: Source) -> tuple[bytes, ...]:
    return _names_of(source.name)


def fuzz_receive(data: bytes) -> None:
    """A genuine arrival of any preset, whatever its body: split, keyed, redacted, hashed; or turned away."""
    eaten = Bytes(data)
    source = sources()[eaten.number(len(sources()))]
    arrival = Arrival(source.name, eaten.headers(), eaten.piece(), eaten.piece(), peer="127.0.0.1")
    arrival.headers = [
        *arrival.headers,
        (b"content-type", (b"application/json", b"application/x-www-form-urlencoded")[eaten.number(2)]),
    ]
    arrival.body += eaten.rest()
    receiver = Receiver({}, cast("Any", None), lambda *_: (), cast("Any", None))
    with suppress(Rejected):
        parts, items = receiver._items(source, arrival)
        assert len(items) <= max(parts, 1)
        for item in items:
            assert item.key is None or len(item.key.encode()) <= 512
            assert (item.key is None) == (item.key_hash is None)
            assert item.subject is None or len(item.subject.encode()) <= 512
            assert item.type.encode() is not None
    if source.base.handshake is not None:
        source.base.handshake(arrival, source)


def fuzz_head(data: bytes) -> None:
    """What is kept of a request's head says what came, and masks what must not be kept."""
    eaten = Bytes(data)
    headers = [*eaten.headers(), (b"authorization", b"Bearer canary-5d1c0e")]
    arrival = Arrival("s", headers, b"", b"a=b&token=canary-5d1c0e", path="/in/s")
    kept = pack_head(arrival, frozenset({b"authorization"}), frozenset({b"token"}))
    assert b"canary" not in kept
    _, _, read = unpack_head(kept)
    assert [name for name, _ in read] == [name.decode("latin-1") for name, _ in headers]


def fuzz_peer(data: bytes) -> None:
    """Who sends, by what a proxy says; nobody becomes a program of our own by saying so."""
    from ipaddress import ip_network

    trusted: list[Network] = [ip_network("10.0.0.0/8")]
    scope = {"client": ("10.0.0.1", 1), "headers": [(b"x-forwarded-for", data)]}
    peer = peer_finder(trusted)(scope)
    assert peer == UNKNOWN or plain(peer) == peer
    assert not is_direct(Arrival("s", scope["headers"], b"", peer=peer))  # type: ignore[arg-type]


TARGETS: Final[dict[str, Target]] = {
    name.removeprefix("fuzz_"): target for name, target in list(globals().items()) if name.startswith("fuzz_")
}


# -- where to begin ----------------------------------------------------------------------------

SEP: Final = b"\x1f"


def seeds(name: str) -> Iterator[bytes]:
    """Bytes worth beginning with."""
    yield b""
    bodies = [
        b'{"id":"1","a":{"b":[1,2.5e3,null,true,"\\u00e4"]}}',
        b"[" * 70,
        b"{" * 10,
        b'{"a":1,"a":2}',
        b"1e999",
        b'"\\ud800"',
    ]
    if name == "body":
        yield from bodies
        yield from (b"[" + b"1," * 999 + b"1]", b"\xff\xfe", b"nul", b"-0", b"1" * 400, b'{"' + b"x" * 999 + b'":{}}')
    elif name == "form":
        yield from (b"a=b&c=d", b"a=%ff&a=%zz", b"&" * 2000, b"a" * 99 + b"=" * 99, b"a=b;c=d", b"+=+")
    elif name in ("path", "rule"):
        for path in (
            b".a.b[0]",
            b"..b",
            b"[?@.a==1]",
            b"['x y']",
            b".*[-1]",
            b"[1:5:2]",
            b".a" * 99,
            b"[",
            b"[?@" + b"(" * 50,
        ):
            yield from (path + SEP + body for body in bodies[:2])
        yield from (b"header:X-Id" + SEP + b"query:id" + SEP + b"\x01", b"literal:a", b"?form:b", b"header:" + SEP)
    elif name == "key":
        yield from (b"a\x1f\x01b\x1f" * 3, b"\x01".join([b"a", b"bc", b"ab", b"c"]), b"s\x1f\x02a\x1fb\x1fs\x1f\x01ab")
    elif name == "query":
        yield from (word.encode() + b':"a \\" b" x' for word in query.WORDS)
        yield from (b'body.a."b \\" c".0:>=-1.5e3 body.a:">x"', b"body.:x", b"body.a:=<5")
        yield from (
            b"since:2h until:9999999999d",
            b"attempts:>3 attempts:<9",
            b'"',
            b"a:b",
            b"code:5xx",
            b"id:dlv_" + b"0" * 32,
        )
    elif name == "config":
        yield from _settings()
    elif name == "units":
        yield from (
            b"1h30m",
            b"0.2s",
            b"1MiB",
            b"50/s",
            b"-1s",
            b"1e9d",
            b"nan",
            b"9" * 400,
            "٣s".encode(),
            b"inf/s",
            b"1/0s",
        )
    else:
        for number in range(len(sources()) if name in ("verifier", "receive") else 4):
            for value in (
                b"sha256=" + b"0" * 64,
                b"t=1,v1=00",
                b"v1,AAAA v1a,AAAA",
                b"Bearer x",
                b"Basic Og==",
                b"=",
                b"1.2.3.4, ::1",
            ):
                yield bytes([number, 2]) + b"\x00" + value + SEP + b"\x01" + value + SEP + b"\x00" + bodies[0] + SEP
            yield bytes([number, 0]) + SEP.join(bodies)


def _settings() -> Iterator[bytes]:
    yield b'store = "sqlite:./a.db"\n[source.a]\nverify = "none"\nkey = ["$.id", ["header:A", "?$.b"]]\n'
    yield b'[destination.d]\nurl = "https://a.example"\nretry = ["1s", "2s"]\nrate = "5/s"\n'
    yield b'[[route]]\nfrom = "a"\nto = "d"\n'
    yield b'[server]\nhost = "::1"\nport = 1\ntrusted_proxies = ["10.0.0.0/8"]\n[watermark]\ndead = 1\n'
    yield b"[source]\na = 1\n[[source.b]]\n"
    yield b"[[route]]\n[[route]]\nfrom = []\nwhen = { type = 1 }\n"
    yield b"store = 1979-05-27\nmigrate = nan\nretention = { a = inf }\n"


def main(name: str, options: list[str]) -> None:
    """Have atheris look for bytes that a target does not stand."""
    try:
        import atheris
    except ImportError:
        sys.exit("Fuzzing by coverage needs atheris: pip install atheris")
    corpus = Path(os.environ.get("FUZZ_CORPUS") or tempfile.mkdtemp(prefix="oncehook-fuzz-")) / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(name)):
        (corpus / f"seed-{number:04}").write_bytes(seed)
    for module in [module for module in sys.modules if module.partition(".")[0] == "oncehook"]:
        del sys.modules[module]  # once more, with counters in it
    with atheris.instrument_imports(include=["oncehook"]):
        target = importlib.import_module("tests.torture.fuzz_targets").TARGETS[name]
    atheris.Setup([sys.argv[0], str(corpus), *options], target)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"Name what to fuzz: {', '.join(TARGETS)}")
    main(sys.argv[1], sys.argv[2:])
