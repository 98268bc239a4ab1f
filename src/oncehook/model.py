"""The words of oncehook as values: ids, arrivals, events, and what the store said about them.

Nothing here does any work; everything else speaks in these types. Inside the program an id is 16 bytes;
outside it is text that carries its kind: `evt_`, `dlv_`, `att_`, `arr_`, `rpl_`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntFlag, StrEnum
from hashlib import blake2b
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from oncehook import clock
from oncehook.errors import Undecryptable

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, in the order received, duplicates kept."""


# -- ids ---------------------------------------------------------------------------------------


class Kind(StrEnum):
    """What an id stands for; the prefix it carries outside the program."""

    event = "evt"
    delivery = "dlv"
    attempt = "att"
    arrival = "arr"
    replay = "rpl"


_id_lock = threading.Lock()
_last_tick = 0


def new_id() -> bytes:
    """Make a UUIDv7 whose last three bytes are zero, greater than every one made before by this process.

    The three bytes are room for a destination's number: a delivery's id is its event's id with that number
    in them, so all deliveries of an event are one range of the primary key.
    """
    global _last_tick
    with _id_lock:
        # 48 bits of milliseconds and 12 bits that count within one
        tick = int(clock.now() * 1000) << 12
        if tick <= _last_tick:
            tick = _last_tick + 1
        _last_tick = tick
    high = (tick >> 12) << 16 | 0x7000 | (tick & 0xFFF)
    return (high << 64 | 0x2 << 62 | clock.random_bits(38) << 24).to_bytes(16)


def start_ids_anew() -> None:
    """Let ids follow the clock again, after a test has taken it back from a future in which ids were made."""
    global _last_tick
    with _id_lock:
        _last_tick = 0


OF_EVENT: Final = 13
"""Bytes that the ids of an event and of its deliveries share; the number of the destination is in the rest."""


def delivery_id(event_id: bytes, destination_id: int) -> bytes:
    """The id of this event's delivery to this destination."""
    return event_id[:OF_EVENT] + destination_id.to_bytes(16 - OF_EVENT)


def event_of(delivery_id: bytes) -> bytes:
    """The id of the event that a delivery is about."""
    return delivery_id[:OF_EVENT] + bytes(16 - OF_EVENT)


def last_delivery_of(event_id: bytes) -> bytes:
    """Return the highest id that a delivery of this event can have."""
    return event_id[:OF_EVENT] + b"\xff" * (16 - OF_EVENT)


def destination_of(delivery_id: bytes, known: Container[int]) -> int | None:
    """Return the number of the destination that a delivery goes to, if it is known. Older ids have two bytes for it."""
    numbers = (int.from_bytes(delivery_id[at:]) for at in (OF_EVENT, 14))
    return next((number for number in numbers if number in known), None)


def show_id(kind: Kind, value: bytes) -> str:
    """The text people see: `evt_` and 32 hexadecimal digits."""
    return kind + "_" + value.hex()  # not formatted: to format an enum's member takes longer than the rest


def read_id(kind: Kind, text: str) -> bytes:
    """The 16 bytes behind `evt_…`; raises ValueError for anything else. Dashes are forgiven."""
    prefix, _, digits = text.partition("_")
    if prefix != kind:
        raise ValueError(f"not an id of this kind ({kind}_…): {text!r}")
    value = bytes.fromhex(digits.replace("-", ""))
    if len(value) != 16:
        raise ValueError(f"not an id: {text!r}")
    return value


def digest(*parts: bytes) -> bytes:
    """16 bytes for a list of parts. Each is preceded by its length, so ("a","bc") and ("ab","c") differ (R16)."""
    return blake2b(b"".join([len(part).to_bytes(4) + part for part in parts]), digest_size=16).digest()


def key_hash(source: str, parts: Sequence[str]) -> bytes:
    """What makes two arrivals the same event: the source's name and the parts of its key."""
    return digest(source.encode(), *[part.encode() for part in parts])


def subject_key(destination: str, source: str, subject: str) -> bytes:
    """Name the line in which deliveries wait: one destination, one source, one subject."""
    return digest(destination.encode(), source.encode(), subject.encode())


def subject_hash(subject: str) -> str:
    """What stands for a subject where its text must not: in the audit log, once it is erased."""
    return digest(b"subject", subject.encode()).hex()


# -- what comes in -----------------------------------------------------------------------------


@dataclass(slots=True)
class Arrival:
    """One HTTP request as it came, before anything is believed about it."""

    source: str
    headers: Headers
    body: bytes
    query: bytes = b""
    method: str = "POST"
    path: str = ""
    peer: str = ""
    """Address of the other end, or empty when the arrival was handed over by a program."""


class Mark(IntFlag):
    """What is odd about a stored event, if anything."""

    none = 0
    unkeyed = 1
    """No key was found, and the source accepts such arrivals: it can never be a duplicate."""
    unparsed = 2
    """Verified, but its body could not be read; kept as raw bytes."""
    emitted = 4
    """An event of the application's own, not a sender's."""
    erased = 8
    """Its subject was erased: no body, head, key or subject is left, only that it was there."""
    same_body = 16
    """What its sender signed had come before, under another key: the sender repeats itself, or somebody else does."""


class Outcome(StrEnum):
    """What became of an arrival."""

    accepted = "accepted"
    duplicate = "duplicate"
    conflict = "conflict"
    rejected = "rejected"


# From here on structs of msgspec, not dataclasses, where every arrival makes some: it takes a third of the time, and
# without cycles they are no matter for garbage collection.


class Planned(msgspec.Struct, gc=False):
    """A delivery to be made if its event turns out to be new."""

    id: bytes
    destination_id: int
    subject_key: bytes | None
    options: int = 0
    """What its route asks of it: `deliveries.Options`, as the number that is stored."""


class Item(msgspec.Struct, gc=False):
    """One event that an arrival would make: most arrivals hold one, a batch holds several."""

    event_id: bytes
    type: str
    key: str | None
    key_hash: bytes | None
    keep: float
    """Seconds for which the key is remembered."""
    subject: str | None
    body: bytes
    body_hash: bytes
    event_at: datetime | None = None
    rank: int | None = None
    rank_scope: str | None = None
    marks: Mark = Mark.none
    deliveries: Sequence[Planned] = ()
    proof: bytes | None = None
    """Stands for what was signed, where a captured request could come back under another key."""
    is_bound: bool = False
    """What was signed is one event whatever its key: the key under which it came first counts."""
    same_as: bytes | None = None
    """The event that came with the same proof before, under another key; the store says so."""


class Intake(msgspec.Struct, gc=False):
    """What one verified arrival asks the store to keep, in one commit."""

    arrival_id: bytes
    """Of an arrival with one item, the id of the event it would make: one is as fresh as the other."""
    source_id: int
    headers: bytes
    """The head of the request as it came: request line and headers, one per line (`pack_head`)."""
    items: Sequence[Item]
    raw: bytes | None = None
    """The whole request body, where the items are parts of it."""


class Verdict(msgspec.Struct, gc=False):
    """What the store decided about one item."""

    outcome: Outcome
    event_id: bytes
    """The event that stands: this item's own, or the first one with its key."""


@dataclass(slots=True)
class Rejection:
    """An arrival that was turned away: no body, no key, nothing believed."""

    source: str
    at: datetime
    code: str
    reason: str
    peer: str
    size: int


def pack_head(
    arrival: Arrival, masked: frozenset[bytes] = frozenset(), masked_query: frozenset[bytes] = frozenset()
) -> bytes:
    """The head of a request as bytes to keep. Values of masked headers and parameters never reach the store."""
    target = arrival.path.encode("utf-8", "replace")
    if arrival.query:
        target += b"?" + (_mask_query(arrival.query, masked_query) if masked_query else arrival.query)
    lines = [arrival.method.encode() + b" " + target]
    for name, value in arrival.headers:
        lines.append(name + b": " + (b"[masked]" if name in masked else value))
    return b"\r\n".join(lines)


def _mask_query(query: bytes, masked: frozenset[bytes]) -> bytes:
    pairs = [piece.partition(b"=") for piece in query.split(b"&")]
    return b"&".join(
        name + b"=[masked]" if unquote_to_bytes(name) in masked else name + sign + value for name, sign, value in pairs
    )


def unpack_head(head: bytes) -> tuple[str, str, list[tuple[str, str]]]:
    """Method, target and headers out of what `pack_head` made."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, target = first.partition(" ")
    pairs = [line.partition(": ") for line in lines]
    return method, target, [(name, value) for name, _, value in pairs]


HOPS: Final = b"oncehook-hops"
"""The header that counts how many inboxes an event has come through: every delivery over HTTP adds one."""
MOST_HOPS: Final = 5
"""A chain of inboxes is shorter; what comes from further away goes round in a circle."""
_HOPS_LINE: Final = re.compile(rb"\r\n" + HOPS + rb": ([0-9]{1,9})(?=\r|$)")


def read_hops(value: bytes) -> int:
    """Read the header of an arrival; what no inbox has written counts as nothing."""
    return int(value) if value.isdigit() and len(value) < 10 else 0


def hops_of(head: bytes) -> int:
    """Return how many inboxes an event had come through, out of what `pack_head` made."""
    return max(map(int, _HOPS_LINE.findall(head)), default=0) if HOPS in head else 0


# -- what is kept ------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class StoredEvent:
    """An event as it is kept."""

    id: bytes
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: Mark
    head: bytes
    body: bytes
    batch_id: bytes | None
    copies: int
    """How often it arrived in all; 1 when nothing came again."""
    rank: int | None = None
    rank_scope: str | None = None
    same_as: bytes | None = None
    """The event in which the same signed body came before, under another key."""


@dataclass(slots=True, frozen=True)
class StoredArrival:
    """A later arrival of an event that was already there."""

    id: bytes
    """Of the event that it would have made."""
    event_id: bytes
    outcome: Outcome
    at: datetime
    head: bytes | None
    body: bytes | None
    """Kept only when it differs from the event's own."""
    batch_id: bytes | None = None
    unreadable: Undecryptable | None = None
    """Why there is neither head nor body."""


class Engine(Enum):
    """Which database keeps it all."""

    sqlite = "sqlite"
    postgres = "postgresql"


@dataclass(slots=True, frozen=True)
class Check:
    """One line of `doctor`: what was looked at, whether it is well, and what to do when not."""

    name: str
    ok: bool
    detail: str
    hint: str = ""
    warning: bool = False


@dataclass(slots=True, frozen=True)
class StoredSession:
    """Somebody who has come in at the dashboard. What their browser holds is kept nowhere, only its hash."""

    hash: bytes
    actor: str
    role: str
    proof: bytes
    """Binds it to the password it was begun with; begun by a link, to all of them."""


@dataclass(slots=True, frozen=True)
class SchemaState:
    """How far the store's schema is, and how far this program would take it."""

    current: int
    target: int
    pending: Sequence[str] = ()


@dataclass(slots=True, frozen=True)
class Figures:
    """Counts since a moment, per source: how many items were received and what became of them."""

    by_source: Mapping[str, Mapping[str, int]]
    by_destination: Mapping[str, Mapping[str, int]]
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """What was rejected because there is no such source."""

    @classmethod
    def of(cls, rows: Iterable[tuple[str | None, str | None, str, int]]) -> Figures:
        """Out of (source, destination, what, sum): each row names one of the two, or neither."""
        sources: dict[str, dict[str, int]] = {}
        destinations: dict[str, dict[str, int]] = {}
        elsewhere: dict[str, int] = {}
        for source, destination, what, n in rows:
            if source is not None:
                sources.setdefault(source, {})[what] = int(n)
            if destination is not None:
                destinations.setdefault(destination, {})[what] = int(n)
            if source is None and destination is None:
                elsewhere[what] = int(n)
        return cls(sources, destinations, elsewhere)
