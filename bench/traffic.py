"""The requests that every contestant gets: signed JSON of one size, each with a random key of its own at `$.id`.

Signing costs more than sending, so all of it is done beforehand. A record on disk is only what differs from
request to request, a key and its signature; the generators (wrk by the Lua script made here, `bench.load`
without it) put the rest around it. Called by `bench.ingest` before anything is measured.
"""

from __future__ import annotations

import hmac
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SECRET = "the-secret-of-the-benchmark"
SIGNATURE_HEADER = "X-Signature"
SIGNATURE_PREFIX = "sha256="

KEY_SIZE = 32
SIGNATURE_SIZE = 64
RECORD_SIZE = KEY_SIZE + SIGNATURE_SIZE
BODY_SIZE = 2048
LARGE_SIZE = 64 << 10
OPENING = b'{"id":"'
VARIANTS = 16
"""Different bodies; the first digit of the key says which, so that a repeated key has its own body again."""

MIXES = (0.5, 0.9)
"""Shares of repeated keys, each with records of its own."""

_CHUNK = 20_000
_WORDS = ["order", "parcel", "street", "invoice", "green", "paid", "late", "window", "express", "blue", "note", "paper"]


@dataclass(frozen=True)
class Traffic:
    """Where the prepared requests lie: a folder with `records`, `tails`, and `duplicates-50` and its like."""

    folder: Path
    records: int
    duplicates: int
    """Records of each mix."""
    body_size: int = BODY_SIZE

    def records_file(self, repeated: float = 0.0) -> Path:
        """Keys and signatures: each once, or this share of them repeated."""
        return self.folder / (f"duplicates-{repeated:.0%}".rstrip("%") if repeated else "records")

    def distinct(self, count: int, repeated: float) -> int:
        """Count the different keys of the first `count` records of a mix."""
        with self.records_file(repeated).open("rb") as file:
            return len({file.read(RECORD_SIZE) for _ in range(count)})

    def keys(self, first: int, last: int) -> list[str]:
        """Return the keys of the records from `first` up to `last`."""
        with self.records_file().open("rb") as file:
            file.seek(first * RECORD_SIZE)
            data = file.read((last - first) * RECORD_SIZE)
        return [data[at : at + KEY_SIZE].decode() for at in range(0, len(data), RECORD_SIZE)]


def prepare(
    folder: Path, *, records: int, duplicates: int, tick: Callable[[float], None], body_size: int = BODY_SIZE
) -> Traffic:
    """Write all requests of a run into `folder`; `tick` hears how far it is, from 0 to 1."""
    folder.mkdir(exist_ok=True)
    tails = list(_tails(body_size - len(OPENING) - KEY_SIZE))
    prepared = Traffic(folder, records, duplicates, body_size)
    (folder / "tails").write_bytes(b"".join(tails))
    fresh = _sign(tails)
    with (folder / "records").open("wb") as file:
        for done in range(0, records, _CHUNK):
            file.write(b"".join(next(fresh) for _ in range(min(_CHUNK, records - done))))
            tick(done / (records + duplicates))
    for repeated in MIXES:
        _write_mix(prepared.records_file(repeated), duplicates, repeated, fresh)
    tick(1.0)
    return prepared


def _write_mix(path: Path, records: int, repeated: float, fresh: Iterator[bytes]) -> None:
    with path.open("wb") as file:
        seen: list[bytes] = []
        for _ in range(records):
            if not seen or random.random() >= repeated:
                seen.append(next(fresh))
                file.write(seen[-1])
            else:
                file.write(random.choice(seen))


def compose(head: bytes, tails: list[bytes], record: bytes) -> bytes:
    """Build a whole HTTP request for one record; `head` ends where the signature belongs."""
    key = record[:KEY_SIZE]
    return b"".join((head, record[KEY_SIZE:], b"\r\n\r\n", OPENING, key, tails[int(key[:1], 16)]))


def request_head(port: int, path: str, tails: list[bytes]) -> bytes:
    """Build everything of a request that comes before its signature."""
    return head_for(port, path, len(OPENING) + KEY_SIZE + len(tails[0]))


def head_for(port: int, path: str, length: int) -> bytes:
    """Build everything before the signature, for a body of this length."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{SIGNATURE_HEADER}: {SIGNATURE_PREFIX}"
    ).encode()


def read_tails(folder: Path) -> list[bytes]:
    """Read the bodies without their opening and key."""
    data = (folder / "tails").read_bytes()
    size = len(data) // VARIANTS
    return [data[i * size : (i + 1) * size] for i in range(VARIANTS)]


def one_record(folder: Path) -> bytes:
    """Make a fresh record that is in no file, for a probe."""
    return next(_sign(read_tails(folder)))


def write_lua(script: Path, traffic: Traffic, *, head: bytes, first: int, last: int, repeated: float) -> None:
    """Write a wrk script that sends the records from `first` up to `last`, each once, and prints its figures as JSON.

    When they run out it sends a request that must be refused, so that the run fails instead of repeating keys.
    """
    script.write_text(
        _LUA.format(
            records=json.dumps(str(traffic.records_file(repeated))),
            tails=json.dumps(str(traffic.folder / "tails")),
            head=json.dumps(head.decode()),
            opening=json.dumps(OPENING.decode()),
            first=first,
            last=last,
            key=KEY_SIZE,
            record=RECORD_SIZE,
            tail=traffic.body_size - len(OPENING) - KEY_SIZE,
        )
    )


def _tails(size: int) -> Iterator[bytes]:
    chance = random.Random(20)
    for variant in range(VARIANTS):
        text = {
            "type": "order.paid",
            "created": 1_760_000_000 + variant,
            "customer": {"name": " ".join(chance.choices(_WORDS, k=3)), "email": f"someone{variant}@example.com"},
            "items": [
                {
                    "sku": f"{chance.getrandbits(40):010x}",
                    "title": " ".join(chance.choices(_WORDS, k=4)),
                    "price": chance.randrange(9_999),
                }
                for _ in range(14)
            ],
            "note": "",
        }
        tail = b'",' + json.dumps(text, separators=(",", ":")).encode()[1:-2]
        filling = " ".join(chance.choices(_WORDS, k=size // 4)).encode()
        yield tail + filling[: size - len(tail) - 2] + b'"}'


def _sign(tails: list[bytes]) -> Iterator[bytes]:
    secret = SECRET.encode()
    while True:
        key = os.urandom(KEY_SIZE // 2).hex()
        body = OPENING + key.encode() + tails[int(key[0], 16)]
        yield key.encode() + hmac.digest(secret, body, "sha256").hex().encode()


_LUA = """
local file = io.open({records}, "rb")
file:seek("set", {first} * {record})
local all = io.open({tails}, "rb"):read("*a")
local head, opening = {head}, {opening}
local tails = {{}}
for i = 0, 15 do tails[string.format("%x", i)] = all:sub(i * {tail} + 1, (i + 1) * {tail}) end
local threads = {{}}
at = {first}

function setup(thread) table.insert(threads, thread) end

function request()
  local record = at < {last} and file:read({record})
  if not record then record = string.rep("0", {record}) else at = at + 1 end
  local key = record:sub(1, {key})
  return head .. record:sub({key} + 1) .. "\\r\\n\\r\\n" .. opening .. key .. tails[key:sub(1, 1)]
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '\\n{{"next": %d, "completed": %d, "refused": %d, "broken": %d, ' ..
    '"elapsed": %f, "p50_ms": %f, "p99_ms": %f, "max_ms": %f}}\\n',
    threads[1]:get("at"), summary.requests, e.status, e.connect + e.read + e.write + e.timeout,
    summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
end
"""
