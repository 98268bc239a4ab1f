"""The words of oncehook as values: ids, arrivals, events, and what the store decided about them.

Nothing here does any work; everything else uses these types. Inside the program an id is 16 bytes;
outside it is text that carries its kind: `evt_`, `dlv_`, `att_`, `arr_`, `rpl_`.
"""

from __future__ import annotations

import json
import math
import operator
import re
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from enum import Enum, IntEnum, IntFlag, StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, Self, TypeVar, get_args
from urllib.parse import unquote_to_bytes

import msgspec

from oncehook import clock
from oncehook.errors import Undecryptable

RoleName = Literal["viewer", "operator", "admin"]
ROLES: Final[tuple[RoleName, ...]] = get_args(RoleName)
"""From the least to the most that somebody may do; `web.access.Role` ranks them."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who uses the dashboard or the API of an application of yours."""

    name: str
    """For the audit log."""
    role: RoleName
    sources: Collection[str] | None = None
    """The sources that this person sees and acts on; None: all of them."""
    payloads: bool = True
    """Whether this person sees bodies, header values, previews and answers."""


Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, in the order received, duplicates kept."""


# -- ids ---------------------------------------------------------------------------------------


class Id(bytes):
    """Sixteen bytes that print with the prefix of what they name: `evt_0199a4e8…`.

    A subclass of `bytes`, so that ids are stored, compared and hashed at the cost of bytes. To make one costs 0.1 µs.
    """

    __slots__ = ()
    prefix: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.prefix + self.hex()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` prints; dashes are ignored. Raises ValueError for anything else."""
        if not text.startswith(cls.prefix):
            raise ValueError(f"not an id of this kind ({cls.prefix}…): {text!r}")
        value = bytes.fromhex(text[len(cls.prefix) :].replace("-", ""))
        if len(value) != 16:
            raise ValueError(f"not an id: {text!r}")
        return cls(value)


class EventId(Id):
    __slots__ = ()
    prefix = "evt_"


class DeliveryId(Id):
    """The id of an event with the id of a destination in its last three bytes: room for 16 million destinations.

    So all deliveries of an event are one range of the primary key, and an id tells its event and its destination.
    """

    __slots__ = ()
    prefix = "dlv_"

    @classmethod
    def of(cls, event_id: bytes, destination_id: int) -> DeliveryId:
        return cls(event_id[:EVENT_BYTES] + destination_id.to_bytes(16 - EVENT_BYTES))

    @property
    def event_id(self) -> EventId:
        return EventId(self[:EVENT_BYTES] + bytes(16 - EVENT_BYTES))

    @property
    def destination_id(self) -> int:
        return int.from_bytes(self[EVENT_BYTES:])


class AttemptId(Id):
    """The first half of the delivery's id, and the fence."""

    __slots__ = ()
    prefix = "att_"


class ArrivalId(Id):
    __slots__ = ()
    prefix = "arr_"


class ReplayId(Id):
    __slots__ = ()
    prefix = "rpl_"


IdT = TypeVar("IdT", bound=Id)
EVENT_BYTES: Final = 13
"""How much of a delivery's id is its event's."""

_id_lock = threading.Lock()
_last_tick = 0


def new_id() -> EventId:
    """Make a UUIDv7 whose last three bytes are zero (see DeliveryId), greater than all made before by this process."""
    global _last_tick
    with _id_lock:
        # 48 bits of milliseconds and 12 bits that count within one
        tick = int(clock.now() * 1000) << 12
        if tick <= _last_tick:
            tick = _last_tick + 1
        _last_tick = tick
    high = (tick >> 12) << 16 | 0x7000 | (tick & 0xFFF)
    return EventId((high << 64 | 0x2 << 62 | clock.random_bits(38) << 24).to_bytes(16))


def start_ids_anew() -> None:
    """Let ids follow the clock again, after a test has taken it back from a future in which ids were made."""
    global _last_tick
    with _id_lock:
        _last_tick = 0


def last_delivery_of(event_id: bytes) -> DeliveryId:
    """Return the highest id that a delivery of this event can have."""
    return DeliveryId(event_id[:EVENT_BYTES] + b"\xff" * (16 - EVENT_BYTES))


def digest(*parts: bytes) -> bytes:
    """Hash a list of parts to 16 bytes. Each is preceded by its length, so ("a","bc") and ("ab","c") differ (R16)."""
    return blake2b(b"".join([len(part).to_bytes(4) + part for part in parts]), digest_size=16).digest()


def key_hash(source: str, parts: Sequence[str]) -> bytes:
    """Hash what makes two arrivals the same event: the source's name and the parts of its key."""
    return digest(source.encode(), *[part.encode() for part in parts])


def subject_key(destination: str, source: str, subject: str) -> bytes:
    """Name the queue in which deliveries wait: one destination, one source, one subject."""
    return digest(destination.encode(), source.encode(), subject.encode())


def subject_hash(subject: str) -> str:
    """Hash a subject for places where its text must not be: in the audit log, once it is erased."""
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


MARKS: Final = tuple(Mark(value) for value in range(32))
"""Every combination, because a flag is found by its value faster in a tuple than by a call."""


class Outcome(StrEnum):
    accepted = "accepted"
    duplicate = "duplicate"
    conflict = "conflict"
    rejected = "rejected"


# From here on structs of msgspec, not dataclasses, where every arrival makes some: it takes a third of the time, and
# without cycles they are no matter for garbage collection.


class Planned(msgspec.Struct, gc=False):
    """A delivery to be made if its event turns out to be new."""

    id: DeliveryId
    destination_id: int
    subject_key: bytes | None
    options: int = 0
    """What its route asks of it: `deliveries.Options`, as the number that is stored."""


class Item(msgspec.Struct, gc=False):
    """One event that an arrival would make: most arrivals hold one, a batch holds several."""

    event_id: EventId
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
    """A hash of what was signed, where a captured request could come back under another key."""
    is_bound: bool = False
    """What was signed is one event whatever its key: the key under which it came first counts."""
    same_as: EventId | None = None
    """The event that came with the same proof before, under another key; the store says so."""


class Intake(msgspec.Struct, gc=False):
    """What one verified arrival asks the store to keep, in one commit."""

    arrival_id: Id
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
    event_id: EventId
    """This item's own event, or the first one with its key."""


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
    """Encode the head of a request to keep it. Values of masked headers and parameters never reach the store."""
    target = arrival.path.encode("utf-8", "replace")
    if arrival.query:
        target += b"?" + (_mask_query(arrival.query, masked_query) if masked_query else arrival.query)
    parts = [arrival.method.encode() + b" " + target]
    for name, value in arrival.headers:
        parts.append(name + b": " + (b"[masked]" if name in masked else value))
    return b"\r\n".join(parts)


def _mask_query(query: bytes, masked: frozenset[bytes]) -> bytes:
    pairs = [piece.partition(b"=") for piece in query.split(b"&")]
    return b"&".join(
        name + b"=[masked]" if unquote_to_bytes(name) in masked else name + sign + value for name, sign, value in pairs
    )


def unpack_head(head: bytes) -> tuple[str, str, list[tuple[str, str]]]:
    """Return method, target and headers out of what `pack_head` made."""
    first, *rest = head.decode("latin-1").split("\r\n")
    method, _, target = first.partition(" ")
    pairs = [header.partition(": ") for header in rest]
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


class StoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as it is kept, with all that an attempt needs of it."""

    id: EventId
    source_id: int
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: Mark
    rank: int | None
    rank_scope: str | None
    request_head: bytes
    """Request line and headers: see `unpack_head`."""
    body: bytes

    def without_payload(self) -> Self:
        return msgspec.structs.replace(self, request_head=b"", body=b"")


class EventDetails(StoredEvent, frozen=True, gc=False, kw_only=True):
    """An event with what is known about its arrivals."""

    batch_id: ArrivalId | None
    copies: int
    """How often it arrived in all; 1 when nothing came again."""
    same_as: EventId | None
    """The event in which the same signed body came before, under another key."""


@dataclass(slots=True, frozen=True)
class StoredArrival:
    """A later arrival of an event that was already there."""

    id: ArrivalId
    """Of the event that it would have made."""
    event_id: EventId
    outcome: Outcome
    at: datetime
    request_head: bytes | None
    body: bytes | None
    """Kept only when it differs from the event's own."""
    batch_id: ArrivalId | None = None
    unreadable: Undecryptable | None = None
    """Why there is neither head nor body."""


class Engine(Enum):
    sqlite = "sqlite"
    postgres = "postgresql"


@dataclass(slots=True, frozen=True)
class Check:
    """One result of `doctor`, with what to do where it is not well."""

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
        """Build figures of (source, destination, what, sum): each row names one of the two, or neither."""
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


SIGNS: Final = (">=", "<=", ">", "<", "=")
"""Comparisons; the longer ones first, because they are read off a text in this order."""

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,100})?(?:[eE][+-]?[0-9]{1,4})?")
_LARGEST: Final = 1 << 63


@dataclass(slots=True, frozen=True)
class Clause:
    """A condition on one place of a JSON body. A body that is no JSON has no places.

    `=` compares with the text of a string, with `true`, `false` and `null`, and with a number as a number; the other
    signs compare numbers only. Two whole numbers of 64 bits are compared exactly, all others as floats.
    """

    path: tuple[str, ...]
    """From the root: names, and indexes of arrays as `0`, `1`, …"""
    sign: str
    value: str

    @property
    def number(self) -> int | float | None:
        return read_number(self.value)


@lru_cache(maxsize=256)
def read_number(text: str) -> int | float | None:
    """Read a number as JSON writes it: whole ones exactly, where 64 bits hold them. None: it is none, or too large."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    if text.removeprefix("-").isdigit() and -_LARGEST <= int(text) < _LARGEST:
        return int(text)
    return number if math.isfinite(number) else None


_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


_decode: Final = msgspec.json.Decoder().decode
_MISSING: Final = object()


def says(body: bytes, clauses: Sequence[Clause]) -> bool:
    """Tell whether a body, read as handlers read it, says all of this."""
    try:
        data = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return all(_holds(clause, _at(data, clause.path)) for clause in clauses)


def _at(data: Any, path: Sequence[str]) -> Any:
    for step in path:
        if isinstance(data, dict):
            data = data.get(step, _MISSING)
        elif isinstance(data, list) and step.isdecimal() and str(int(step)) == step and int(step) < len(data):
            data = data[int(step)]
        else:
            return _MISSING
    return data


def _holds(clause: Clause, found: Any) -> bool:
    if isinstance(found, str):
        return clause.sign == "=" and found == clause.value
    if found is None or isinstance(found, bool):
        return clause.sign == "=" and json.dumps(found) == clause.value
    number = clause.number
    if not isinstance(found, int | float) or number is None:
        return False
    is_whole = isinstance(found, int) and isinstance(number, int)
    try:
        left, right = (found, number) if is_whole else (float(found), float(number))
    except OverflowError:
        return False
    return _COMPARE[clause.sign](left, right)


LONGEST_BODY: Final = 1 << 20
"""Bytes of a body that is looked into for a preview: a page shows several, and reads each of them whole."""

LONGEST_TEXT: Final = 300
_JOINERS: Final = "\u200c\u200d"  # they make one emoji, or one word, of two


@dataclass(frozen=True, slots=True)
class DeliveryPreview:
    """A delivery as it is shown before it is made again."""

    to: str
    """Who gets it: the person a message is sent to, or the address of the destination for what came in. Empty where
    only the API knows."""
    text: str
    is_incoming: bool = False
    """Whether somebody else wrote it: `to` is no person then."""


def flatten_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text in one line, without marks that turn it round or hide it: a person decides by what is seen."""
    shown = " ".join("".join(char for char in text if char.isspace() or not _is_hidden(char)).split())
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in _JOINERS


T = TypeVar("T")

DEATHS = 3
"""Crashes while it ran alone after which a delivery is dead, with reason `crash` (R36)."""

COVERED = 5000
"""Deliveries that one coalesced attempt covers at most."""

REPLAY_PAUSE = 60.0
"""Seconds between two replays of one delivery."""

ANSWER_KEPT = 4096
"""Bytes of a destination's answer that are kept."""

RESULT_KEPT = 16384
"""Bytes of a handler's result, as JSON, up to which it is kept whole."""


class Priority(IntEnum):
    """Whose turn it is: live work first, bulk replay behind it, what may have killed a worker alone."""

    live = 0
    replay = 1
    quarantined = 2


class Options(IntFlag):
    """What its route or its replay asks of a delivery; kept with it, because routes may change while it waits."""

    none = 0
    coalesce_type = 1
    """Cover with one attempt all that waits on the subject and has the same type."""
    coalesce_any = 2
    """The same, of every type."""
    latest_wins = 4
    """Leave out what a higher rank has overtaken."""
    hold = 8
    """When it goes dead, its successors wait until it is replayed or discarded."""
    fresh_id = 16
    """This run is sent under a new id, for receivers that deduplicate."""


OPTIONS: Final = tuple(Options(value) for value in range(32))


class DeliveryStatus(StrEnum):
    """The status of a delivery. The store keeps `pending` for what is leased too; `leased` is read off its head."""

    pending = "pending"
    leased = "leased"
    done = "done"
    dead = "dead"
    discarded = "discarded"


class Category(StrEnum):
    """What kind of failure an attempt met: one that passes, one for good, or one that nobody can tell."""

    transient = "transient"
    permanent = "permanent"
    unknown = "unknown"


class AttemptOutcome(StrEnum):
    done = "done"
    retry = "retry"
    dead = "dead"
    crashed = "crashed"


class Trigger(StrEnum):
    """Why an attempt is made, as `Oncehook-Trigger` names it."""

    initial = "initial"
    retry = "retry"
    replay = "replay"
    bulk_replay = "bulk-replay"
    test = "test"
    """A person tries the destination out: there is no event."""


# -- leasing -----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class LeaseRequest:
    """What a worker asks for: at most so many deliveries of one destination, each for so many seconds."""

    destination_id: int
    limit: int
    lease: float
    priority: Priority = Priority.live
    crash_tolerance: int = 0
    """Crashes after which it must run alone: none for a handler, whose code runs in our process; some for HTTP."""
    probe: float = 30.0
    """Seconds until the next probe, when this lease is the one probe of a destination whose breaker is half open."""


class LeasedDelivery(msgspec.Struct, frozen=True, gc=False):
    """The delivery that an attempt is for: of a coalesced queue, the newest that the attempt covers."""

    id: DeliveryId
    destination_id: int
    run: int
    attempt: int
    """Its number within the run, from 1."""
    options: Options
    replay_id: ReplayId | None


class Lease(msgspec.Struct, gc=False):
    """A worker's right, for a limited time, to make the next attempt of one delivery."""

    delivery: LeasedDelivery
    event: StoredEvent
    queue_key: bytes
    """The subject's row in `heads`; where there is no subject, the delivery's own id."""
    front_id: DeliveryId
    """The delivery at the front of the queue; `delivery.id`, unless coalesced."""
    fence: int
    deaths: int
    """Crashes while it ran alone. At DEATHS it is leased only to be settled as dead."""
    priority: Priority
    seconds: float
    """For how long, from the moment it was leased."""
    highest_rank: int | None = None
    """The highest rank delivered in its scope so far, where the latest wins; else None."""
    more: bool = False
    """Something was queued behind it when it was leased."""
    failing: bool = False
    """Failures were counted against its destination then: a success takes them off."""
    unreadable: str | None = None
    """Why request head and body are missing: they cannot be decrypted. It is leased to be settled as a failure."""
    is_settling: bool = False
    """Its handler's own transaction settles it: the row is locked until the commit, and needs no heartbeat."""

    @classmethod
    def on_arrival(
        cls,
        intake: Intake,
        item: Item,
        planned: Planned,
        *,
        fence: int,
        seconds: float,
        source: str,
        received_at: datetime,
        more: bool,
    ) -> Lease:
        """Make the lease on a delivery that was leased in the commit which kept it."""
        delivery = LeasedDelivery(planned.id, planned.destination_id, 1, 1, OPTIONS[planned.options], None)
        event = StoredEvent(
            item.event_id,
            intake.source_id,
            source,
            item.type,
            item.key,
            item.subject,
            received_at,
            item.event_at,
            item.marks,
            item.rank,
            item.rank_scope,
            intake.headers,
            item.body,
        )
        queue_key = planned.subject_key or planned.id
        return cls(delivery, event, queue_key, planned.id, fence, 0, Priority.live, seconds, more=more)

    @property
    def is_stale(self) -> bool:
        """True where a higher rank has overtaken it. What a person asks for again is never stale."""
        rank, highest = self.event.rank, self.highest_rank
        return self.delivery.run == 1 and rank is not None and highest is not None and rank < highest

    @property
    def trigger(self) -> Trigger:
        if self.delivery.attempt > 1:
            return Trigger.retry
        if self.delivery.replay_id is None:
            return Trigger.initial
        return Trigger.bulk_replay if self.priority is Priority.replay else Trigger.replay


@dataclass(slots=True, frozen=True)
class Expired:
    """A lease that ran out before its holder settled it, and was taken over: the holder died, hung, or is cut off."""

    delivery_id: DeliveryId
    event_id: EventId
    destination_id: int
    fence: int
    run: int
    attempt: int
    """The one that its holder was making; it is given back."""
    worker: str | None
    """Who held it, where that is known."""


@dataclass(slots=True, frozen=True)
class Outlook:
    """Destinations that have something to be leased now, by priority, and when the next will have. Paused ones do not
    count."""

    live: Collection[int] = ()
    replay: Collection[int] = ()
    quarantined: Collection[int] = ()
    due_in: float | None = None
    """Seconds until the next delivery of the destinations that were asked about may be leased; None when there is none.
    Those that may be leased now do not count."""
    looked_at: datetime | None = None
    """The moment to ask from next time, where that was asked."""

    @property
    def is_due(self) -> bool:
        return bool(self.live or self.replay or self.quarantined)


# -- settling ----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Breaker:
    """When a destination is held back: after so many failures in a row, for so long."""

    failures: int = 10
    open: float = 30.0


@dataclass(slots=True, frozen=True)
class Evidence:
    """What is known about how an attempt went."""

    status: int | None = None
    error: str | None = None
    answer: bytes | None = None
    """The first 4 KB of what the destination answered, a traceback, or what a handler returned, as JSON."""


NO_EVIDENCE = Evidence()


class Settle(StrEnum):
    """What becomes of a leased delivery."""

    done = "done"
    retry = "retry"
    dead = "dead"
    release = "release"
    """Given back untried: stop, rate limit, breaker, lost before start. The attempt does not count (R37)."""


@dataclass(slots=True)
class Emission:
    """An event that a handler emits: it exists if, and only if, its delivery is settled as done (R54)."""

    intake: Intake
    tell: Callable[[Verdict], None]
    """Called on the loop with what became of it."""
    verdict: Verdict | None = None
    """What the store decided; it holds once the settlement is committed."""

    def report(self) -> None:
        """Hand out the verdict, once its settlement is committed."""
        if self.verdict is not None:
            self.tell(self.verdict)


@dataclass(slots=True, frozen=True)
class Settlement:
    """The end of a lease. Refused when the lease is no longer ours."""

    lease: Lease
    what: Settle
    wait: float = 0.0
    """Seconds until the next attempt (retry, release)."""
    category: Category | None = None
    note: str | None = None
    """`stale`: finished without attempt, because a higher rank came before. No attempt row is written for it."""
    evidence: Evidence = NO_EVIDENCE
    duration: float = 0.0
    """Seconds that the attempt took."""
    breaker: Breaker | None = None
    """The destination's, where this outcome says something about it; None where it does not."""
    pause: str | None = None
    """Why the destination is to be paused along with it (410)."""
    commit: Callable[[Any], object] | None = None
    """SQLite: the handler's effect, run inside the transaction that settles, with a connection that cannot commit."""
    emits: Sequence[Emission] = ()
    """Events that are kept in the same commit; for what is done only."""
    take_next: float | None = None
    """Lease the next delivery of the subject in the same commit, for so many seconds; for what is done only."""

    @property
    def emitted_to(self) -> set[int]:
        """Destinations of what it emits."""
        return {d.destination_id for emission in self.emits for item in emission.intake.items for d in item.deliveries}


@dataclass(slots=True, frozen=True)
class Settled:
    """Result of a group of settlements."""

    ours: Collection[int] = frozenset()
    """The fences that were still ours."""
    next: Sequence[Lease] = ()
    """Leases on what comes next, where that was asked for."""


def is_over(settlement: Settlement) -> bool:
    """Tell whether it finishes the head of its queue, so that the queue goes on; a held dead letter stays the head."""
    if settlement.what is Settle.dead:
        return not settlement.lease.delivery.options & Options.hold
    return settlement.what is Settle.done


def is_crash(settlement: Settlement) -> bool:
    """Tell whether it is given up because it keeps killing its worker, and was not even tried (R36)."""
    return settlement.what is Settle.dead and settlement.evidence.error == "crash" and settlement.lease.deaths >= DEATHS


def was_tried(settlement: Settlement) -> bool:
    """Tell whether there was an attempt to write down."""
    return settlement.what is not Settle.release and settlement.note != "stale" and not is_crash(settlement)


@dataclass(slots=True)
class Streak:
    """Outcomes of a group of settlements for one destination: whether any was well, and how many failed since."""

    breaker: Breaker
    reset: bool = False
    failures: int = 0
    last_failed: bytes | None = None
    """Failures in a row count over different deliveries: one stubborn delivery does not open a breaker."""


def count_streaks(settlements: Sequence[Settlement]) -> dict[int, Streak]:
    """Return the streaks of a group of settlements, in their order, by destination."""
    found: dict[int, Streak] = {}
    for settlement in settlements:
        if settlement.breaker is None or settlement.what is Settle.release:
            continue
        streak = found.setdefault(settlement.lease.delivery.destination_id, Streak(settlement.breaker))
        if settlement.what is Settle.done:
            streak.reset, streak.failures, streak.last_failed = True, 0, None
        elif streak.last_failed != settlement.lease.delivery.id:
            streak.failures += 1
            streak.last_failed = settlement.lease.delivery.id
    return found


# -- looking -----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Page(Generic[T]):
    """Part of a list, newest first."""

    items: Sequence[T]
    next: bytes | None = None
    """Where to go on; None at the end. A page may hold less than was asked for and still have a next one."""


@dataclass(slots=True, frozen=True)
class Filter:
    """What a list or a replay is about. Everything that is given must hold."""

    ids: Sequence[DeliveryId] | None = None
    event_id: EventId | None = None
    source: str | None = None
    sources: Sequence[str] | None = None
    """Only events of these: what somebody may see of what they ask for. No word of a query."""
    destination: str | None = None
    status: DeliveryStatus | None = None
    type: str | None = None
    """A pattern with `*` and `?`."""
    subject: str | None = None
    key: str | None = None
    category: Category | None = None
    note: str | None = None
    code: str | None = None
    """Status code of the last attempt: `503`, or a class of them, `5xx`."""
    attempts_above: int | None = None
    attempts_below: int | None = None
    is_replayed: bool | None = None
    """True: only those that a replay has run again."""
    replay_id: ReplayId | None = None
    since: datetime | None = None
    """Received at or after."""
    until: datetime | None = None
    """Received before."""
    text: str | None = None
    """Occurs in key, subject, type or last error."""
    body: Sequence[Clause] | None = None
    """What the body must say; all of it."""


@dataclass(slots=True, frozen=True)
class StoredAttempt:
    delivery_id: DeliveryId
    fence: int
    run: int
    n: int
    started_at: datetime
    ended_at: datetime
    outcome: AttemptOutcome
    category: Category | None
    evidence: Evidence

    @property
    def id(self) -> AttemptId:
        return AttemptId(self.delivery_id[:8] + self.fence.to_bytes(8))

    @property
    def result(self) -> bytes | None:
        """JSON that a handler returned: kept as the answer of an attempt that went well without any status."""
        is_handlers = self.outcome is AttemptOutcome.done and self.evidence.status is None
        return self.evidence.answer if is_handlers else None

    def without_answer(self) -> StoredAttempt:
        return replace(self, evidence=replace(self.evidence, answer=None))


@dataclass(slots=True, frozen=True)
class StoredDelivery:
    id: DeliveryId
    event_id: EventId
    source: str
    destination: str
    type: str
    key: str | None
    subject: str | None
    status: DeliveryStatus
    note: str | None
    run: int
    attempts: int
    """Of this run so far, one under way included."""
    category: Category | None
    """Of the last attempt."""
    last_status: int | None
    last_error: str | None
    due_at: datetime | None
    """When it may be tried next; while leased, when the lease ends. None when settled, behind another, or held."""
    received_at: datetime
    settled_at: datetime | None
    last_replay_at: datetime | None
    replay_id: ReplayId | None
    reason: str | None
    """Why it was discarded, or why it is dead without an attempt to blame (`crash`)."""
    blocked_by: DeliveryId | None = None
    """The delivery at the head of its subject, when that is another one."""

    @property
    def is_replayed(self) -> bool:
        return self.replay_id is not None


class ListedDelivery(NamedTuple):
    """A delivery beside its event in a list."""

    id: DeliveryId
    destination: str
    status: DeliveryStatus
    note: str | None
    run: int
    replay_id: ReplayId | None
    """The latest replay that has run it again."""

    @property
    def is_replayed(self) -> bool:
        return self.replay_id is not None


@dataclass(slots=True, frozen=True)
class ListedEvent:
    """An event in a list: without its body, with what became of it."""

    id: EventId
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: Mark
    size: int
    copies: int
    deliveries: Sequence[ListedDelivery]


@dataclass(slots=True, frozen=True)
class Cause:
    """Dead letters that died of the same thing."""

    destination: str
    cause: str
    """The first line of the error, or `HTTP 404`, or `crash`."""
    count: int
    first_at: datetime
    last_at: datetime
    sample: DeliveryId


@dataclass(slots=True, frozen=True)
class Level:
    """The state of a destination now."""

    pending: int = 0
    """Those that are leased included."""
    leased: int = 0
    done: int = 0
    dead: int = 0
    discarded: int = 0
    oldest_due: float | None = None
    """Seconds for which the oldest has been due; None when nothing is."""
    paused_at: datetime | None = None
    paused_by: str | None = None
    paused_why: str | None = None
    failures: int = 0
    """In a row, as the breaker counts them."""
    open_until: datetime | None = None
    """The breaker is open: nothing is tried before."""


@dataclass(slots=True, frozen=True)
class StoredWorker:
    id: str
    host: str
    pid: int
    started_at: datetime
    seen_at: datetime
    leases: int
    destinations: Sequence[str]


@dataclass(slots=True, frozen=True)
class Audited:
    """Something a person or program did."""

    n: int
    at: datetime
    actor: str
    act: str
    target: str
    detail: Mapping[str, object]


# -- sweeping ----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Pruned:
    events: int = 0
    keys: int = 0
    batches: int = 0
    others: int = 0
    """Ranks, finished replays, old audit entries, sessions that are over."""

    def __bool__(self) -> bool:
        return bool(self.events or self.keys or self.batches or self.others)


NOTHING_TO_REPLAY = "There is nothing to replay."
NOTHING_TO_REPLAY_HINT = "Ask for a plan: it says what matches, and what of it is left out."


class ReplayState(StrEnum):
    running = "running"
    paused = "paused"
    done = "done"
    aborted = "aborted"


@dataclass(slots=True, frozen=True)
class ReplayCommand:
    """What a person or program asks for."""

    filter: Filter
    actor: str
    reason: str = ""
    force: bool = False
    """The done ones too."""
    fresh_id: bool = False
    rate: float | None = None
    """Deliveries a second at most."""
    bulk: bool = True
    """Behind live traffic, fed little by little; else one delivery, at once."""
    request_key: str | None = None
    """The same request key gets the same replay, and makes no second one (R47)."""
    expected: int | None = None
    """How many the plan had shown: when it is another number now, nothing is done (PlanChanged)."""
    about: Mapping[str, object] = field(default_factory=dict)
    """The order in the words in which it was given, to be shown."""
    noted: Mapping[str, object] = field(default_factory=dict)
    """The same for the audit log, without the subject: an entry stays as it is, also when the subject is erased."""

    def audit_detail(self, count: int) -> dict[str, object]:
        """Return the detail of its audit entry, when it has found so many."""
        return {"count": count, "reason": self.reason, "bulk": self.bulk, **self.noted}


@dataclass(slots=True, frozen=True)
class StoredReplay:
    """A replay as it is kept: what was asked, and how far it is."""

    id: ReplayId
    state: ReplayState
    about: Mapping[str, object]
    actor: str
    reason: str
    bulk: bool
    rate: float | None
    planned: int
    fed: int
    """Handed to workers so far."""
    done: int
    dead: int
    skipped: int
    """Left out when their turn came: worked on by then, replayed a moment ago, or pruned."""
    created_at: datetime
    finished_at: datetime | None


@dataclass(slots=True, frozen=True)
class PlanSnapshot:
    """What somebody has been shown, and says yes to."""

    count: int
    at: datetime
    """When, by the store's clock."""


@dataclass(slots=True, frozen=True)
class ReplayPlan:
    """What a replay would do, before anybody confirms it."""

    total: int
    at: datetime
    """When it was made, by the store's clock."""
    by_destination: Mapping[str, int] = field(default_factory=dict)
    by_status: Mapping[DeliveryStatus, int] = field(default_factory=dict)
    left_out: Mapping[DeliveryStatus, int] = field(default_factory=dict)
    """Matching, but not replayed: being worked on, or done and not asked for."""
    oldest: datetime | None = None
    newest: datetime | None = None
    changed: Mapping[str, int] = field(default_factory=dict)
    """Those whose first attempt went to another address than their destination has now, by destination."""
    sample: Sequence[StoredDelivery] = ()


ERASED: Final = "erased"
"""The note of deliveries whose event was erased; they can never be replayed."""

_MENTION: Final = "subject:[erased]"


@dataclass(slots=True, frozen=True)
class EraseOrder:
    """Whose events are to be erased, who wants it, and why."""

    subject: str
    source_id: int | None = None
    """Only this source's; two sources may use the same text for different things."""
    actor: str = ""
    reason: str = ""
    spelled: str = ""
    """The subject as queries write it, which replays have kept, and entries of an old audit log."""


@dataclass(slots=True, frozen=True)
class Erasure:
    """How much was erased, or would be."""

    events: int = 0
    deliveries: int = 0
    """Open ones and dead letters, which are discarded first."""
    attempts: int = 0
    arrivals: int = 0
    """Later arrivals of these events that are still kept."""
    batches: int = 0
    """Split requests whose raw bytes go."""
    shared_batches: int = 0
    """Those of them that also held events of others: the raw bytes go all the same, the others' events stay."""

    def __add__(self, other: Erasure) -> Erasure:
        return Erasure(*[mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)])


def mention_of(order: EraseOrder) -> str:
    """Return the text by which kept JSON mentions the subject."""
    return json.dumps(f"subject:{order.spelled}")[1:-1]


def without_mention(kept: str, order: EraseOrder) -> str:
    """Return kept JSON in which queries no longer name the subject."""
    return re.sub(re.escape(mention_of(order)) + r"(?=[\s\"'\\]|$)", _MENTION, kept)
