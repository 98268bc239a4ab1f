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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, IntEnum, IntFlag, StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, Self, TypeVar, get_args
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec.structs import astuple, replace

from oncehook import clock
from oncehook.errors import ConfigError, Undecryptable

RoleName = Literal["viewer", "operator", "admin"]
ROLES: Final[tuple[RoleName, ...]] = get_args(RoleName)
"""From the least to the most powerful; `web.auth.Role` ranks them."""


@dataclass(frozen=True, slots=True)
class Person:
    """A person who uses the dashboard or the API through an application that authorises them."""

    name: str
    """For the audit log."""
    role: RoleName
    sources: Collection[str] | None = None
    """The sources that this person sees and acts on; None: all of them."""
    accounts: Collection[str | int] | None = None
    """The accounts that this person sees and acts on; None: all of them, and events without one."""
    payloads: bool = True
    """Whether this person sees bodies, header values, previews and answers."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Limits of one viewer, who sees the events of these sources and of these accounts."""

    sources: frozenset[str] | None = None
    """None: every source."""
    accounts: frozenset[str] | None = None
    """None: every account, and no account."""
    destinations: frozenset[str] | None = None
    """Of their deliveries those to these destinations; None: to every one. Only beside `accounts`."""

    @property
    def is_limited(self) -> bool:
        return self.sources is not None or self.accounts is not None

    def sees(self, source: object, account: object) -> bool:
        """Tell whether it includes an event of this source and account."""
        return (self.sources is None or source in self.sources) and (
            self.accounts is None or (account is not None and account in self.accounts)
        )

    def within(self, account: str) -> Scope:
        """Return the part of it that is one account's."""
        mine = {account} if self.accounts is None else self.accounts & {account}
        return Scope(self.sources, frozenset(mine), self.destinations)


EVERYTHING: Final = Scope()

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, in the order received, duplicates kept."""
AnyHeaders = Headers | Mapping[str, str] | Iterable[tuple[str, str]]
"""Headers as a program has them."""


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


class RouteId(Id):
    __slots__ = ()
    prefix = "rte_"


IdT = TypeVar("IdT", bound=Id)
EVENT_BYTES: Final = 13
"""Leading bytes of a delivery's id that are those of its event's id."""

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
    high = (tick & ~0xFFF) << 4 | 0x7000 | (tick & 0xFFF)
    return EventId((high << 64 | 0x2 << 62 | clock.random_bits(38) << 24).to_bytes(16))


def start_ids_anew() -> None:
    """Let ids follow the clock again after a test has moved it back from the future."""
    global _last_tick
    with _id_lock:
        _last_tick = 0


def last_delivery_of(event_id: bytes) -> DeliveryId:
    """Return the highest id that a delivery of this event can have."""
    return DeliveryId(event_id[:EVENT_BYTES] + b"\xff" * (16 - EVENT_BYTES))


def digest(*parts: bytes) -> bytes:
    """Hash a list of parts to 16 bytes. Each is preceded by its length, so ("a","bc") and ("ab","c") differ (R16)."""
    return blake2b(b"".join([len(part).to_bytes(4) + part for part in parts]), digest_size=16).digest()


def account_digest(account: str, *parts: bytes) -> bytes:
    """Hash a list of parts within an account. No list of parts without an account has the same hash."""
    name = account.encode()
    joined = b"".join([len(part).to_bytes(4) + part for part in (name, *parts)])
    return blake2b(joined, digest_size=16, person=b"account").digest()


def key_hash(source: str, parts: Sequence[str], account: str | None = None) -> bytes:
    """Hash what makes two arrivals the same event: the source's name, the account, and the parts of its key."""
    if account is not None:
        return account_digest(account, source.encode(), *[part.encode() for part in parts])
    if len(parts) == 1:  # as most keys have: `digest` without lists
        name, part = source.encode(), parts[0].encode()
        return blake2b(
            b"%b%b%b%b" % (len(name).to_bytes(4), name, len(part).to_bytes(4), part), digest_size=16
        ).digest()
    return digest(source.encode(), *[part.encode() for part in parts])


def subject_key(destination: str, source: str, subject: str, account: str | None = None) -> bytes:
    """Return the key of the queue in which a delivery waits: one destination, one source, one account, one subject."""
    if account is not None:
        return account_digest(account, destination.encode(), source.encode(), subject.encode())
    return digest(destination.encode(), source.encode(), subject.encode())


def fair_hash(value: str | None) -> int:
    """Hash a value over which a destination is leased in rounds, to a number that is stored; never negative."""
    return int.from_bytes(digest(b"fair", (value or "").encode())[:8]) >> 1


def subject_hash(subject: str) -> str:
    """Hash a subject for the audit log, which must not contain its text once it is erased."""
    return digest(b"subject", subject.encode()).hex()


ADDRESS: Final = "address"
"""The value of a source's `account` by which each account has an address of its own."""
_ACCOUNT_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+~-]{0,99}")


def is_account_id(text: str) -> bool:
    """Tell whether a text can be the id of an account: an address, a query and a log can show it as it is."""
    return _ACCOUNT_ID.fullmatch(text) is not None and text != ADDRESS


def check_account_id(account: str | int) -> str:
    """Return the id of an account as text. Raises ConfigError for what cannot be one."""
    text = str(account)
    if not is_account_id(text):
        raise ConfigError(
            f"{text[:60]!r} cannot be the id of an account.",
            hint="An id has up to 100 letters, digits and . _ @ + ~ -, begins with a letter, a digit or _, "
            f'and is not "{ADDRESS}".',
        )
    return text


# -- what comes in -----------------------------------------------------------------------------


@dataclass(slots=True)
class Arrival:
    """One HTTP request as received, before it is verified."""

    source: str
    headers: Headers
    body: bytes
    query: bytes = b""
    method: str = "POST"
    path: str = ""
    peer: str = ""
    """Address of the other end, or empty when the arrival was handed over by a program."""
    account: str = ""
    """The account that its address names, as it was written; empty where it names none."""


class Mark(IntFlag):
    """Anything odd about a stored event."""

    none = 0
    unkeyed = 1
    """No key was found, and the source accepts such arrivals: it can never be a duplicate."""
    unparsed = 2
    """Verified, but its body could not be read; kept as raw bytes."""
    emitted = 4
    """An event of the application's own, not a sender's."""
    erased = 8
    """Its subject was erased: no body, head, key or subject is left, only the row."""
    same_body = 16
    """Its signed body came before under another key: the sender repeats itself, or somebody replays it."""
    unmapped = 32
    """The rule for its account found a value that is no account's id or alias, so it belongs to none."""


MARKS: Final = tuple(Mark(value) for value in range(64))
"""Every combination, because a flag is found by its value faster in a tuple than by a call."""


class Outcome(StrEnum):
    accepted = "accepted"
    duplicate = "duplicate"
    conflict = "conflict"
    rejected = "rejected"


# Structs of msgspec instead of dataclasses: to define one takes a fiftieth of the time, which every start pays, and to
# make one a third. Without reference cycles the garbage collector can skip those that every arrival makes.


class Planned(msgspec.Struct, gc=False):
    """A delivery to be made if its event turns out to be new."""

    id: DeliveryId
    destination_id: int
    subject_key: bytes | None
    options: int = 0
    """The options of its route, as the number that is stored."""
    fair: int | None = None
    """Hash of the value by which its destination is leased in rounds; None where it is not."""


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
    """One signature is one event, whatever its key: the first key counts."""
    same_as: EventId | None = None
    """The event that came first with the same proof, under another key; set by the store."""
    account: str | None = None
    """The account that it belongs to: part of its key and of its subject."""
    reference: bytes | None = None
    """Reference that the store keeps instead of a large body, which was written elsewhere before (`bodies`)."""


class Intake(msgspec.Struct, gc=False):
    """Everything that one verified arrival asks the store to keep in one commit."""

    arrival_id: Id
    """For an arrival with one item, the id of the event that it would make."""
    source_id: int
    headers: bytes
    """The head of the request as received: request line and headers, one per line (`pack_head`)."""
    items: Sequence[Item]
    raw: bytes | None = None
    """The whole request body, where the items are parts of it."""
    raw_reference: bytes | None = None
    """Reference that the store keeps instead of `raw`, where that is large."""


class Verdict(msgspec.Struct, gc=False):
    """The store's decision about one item."""

    outcome: Outcome
    event_id: EventId
    """This item's own event, or the first one with its key."""


UNKNOWN_SOURCE: Final = "unknown source"
"""Reason for which an arrival at no source is rejected."""


class Rejection(msgspec.Struct):
    """An arrival that was rejected; nothing of it is trusted."""

    source: str
    at: datetime
    code: str
    reason: str
    peer: str
    size: int
    id: ArrivalId = msgspec.field(default_factory=lambda: ArrivalId(new_id()))
    head: bytes | None = None
    """Of a known source, the head with credentials masked (`pack_head`); None where none is kept."""
    body: bytes | None = None
    """The first bytes of the body, redacted; None where none are kept."""
    n: int = 0
    """Its number in the store, for cursors."""


def pack_head(
    arrival: Arrival, masked: frozenset[bytes] = frozenset(), masked_query: frozenset[bytes] = frozenset()
) -> bytes:
    """Encode the head of a request for the store. Values of masked headers and parameters are left out."""
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
    """Return method, target and headers from the result of `pack_head`."""
    first, *rest = head.decode("latin-1").split("\r\n")
    method, _, target = first.partition(" ")
    pairs = [header.partition(": ") for header in rest]
    return method, target, [(name, value) for name, _, value in pairs]


HOPS: Final = b"oncehook-hops"
"""The header that counts the inboxes that an event has passed through; every HTTP delivery adds one."""
MOST_HOPS: Final = 5
"""No chain of inboxes is this long, so the event goes round in a circle."""
_HOPS_LINE: Final = re.compile(rb"\r\n" + HOPS + rb": ([0-9]{1,9})(?=\r|$)")


def read_hops(value: bytes) -> int:
    """Read the hop header of an arrival; 0 for a value that no inbox has written."""
    return int(value) if value.isdigit() and len(value) < 10 else 0


def hops_of(head: bytes) -> int:
    """Return how many inboxes an event has passed through, from the result of `pack_head`."""
    return max(map(int, _HOPS_LINE.findall(head)), default=0) if HOPS in head else 0


# -- what is kept ------------------------------------------------------------------------------


class StoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as it is stored, with all that an attempt needs."""

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
    account: str | None = None
    """The account that it belongs to; None: nobody's."""
    is_apart: bool = False
    """True where `body` is a reference to an object that holds it: see `bodies.Bodies.load`."""

    def without_payload(self) -> Self:
        return msgspec.structs.replace(self, request_head=b"", body=b"", is_apart=False)


class EventDetails(StoredEvent, frozen=True, gc=False, kw_only=True):
    """An event with what is known about its arrivals."""

    batch_id: ArrivalId | None
    copies: int
    """Number of its arrivals; 1 without duplicates."""
    same_as: EventId | None
    """The event in which the same signed body came before, under another key."""


class StoredArrival(msgspec.Struct, frozen=True):
    """A later arrival of an event that was already there."""

    id: ArrivalId
    """The id of the event that it would have made."""
    event_id: EventId
    outcome: Outcome
    at: datetime
    request_head: bytes | None
    body: bytes | None
    """Stored only where it differs from the event's own."""
    batch_id: ArrivalId | None = None
    unreadable: Undecryptable | None = None
    """Reason for the missing head and body."""


class Engine(Enum):
    sqlite = "sqlite"
    postgres = "postgresql"


class Check(msgspec.Struct, frozen=True):
    """One result of `doctor`, with a remedy where it failed."""

    name: str
    ok: bool
    detail: str
    hint: str = ""
    warning: bool = False


class StoredSession(msgspec.Struct, frozen=True):
    """A person's login at the dashboard. The browser's token is not kept, only its hash."""

    hash: bytes
    actor: str
    role: str
    proof: bytes
    """Binds the session to the password it was begun with; for one begun by a link, to all of them."""
    account: str | None = None
    """Of a customer at the portal: the one account that it sees."""


class SchemaState(msgspec.Struct, frozen=True):
    """The version of the store's schema, and the version that this program needs."""

    current: int
    target: int
    pending: Sequence[str] = ()


class Figures(msgspec.Struct, frozen=True):
    """Counts since a moment, per source: how many items were received and what became of them."""

    by_source: Mapping[str, Mapping[str, int]]
    by_destination: Mapping[str, Mapping[str, int]]
    elsewhere: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Rejected because there is no such source."""

    @classmethod
    def of(cls, rows: Iterable[tuple[str | None, str | None, str, int]]) -> Figures:
        """Build figures from rows (source, destination, name, sum), each with a source, a destination, or neither."""
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

    @classmethod
    def of_events(cls, rows: Iterable[tuple[str, int, int, int]]) -> Figures:
        """Build figures from rows (source, events, later arrivals, conflicts among these)."""
        return cls(
            {
                source: {
                    "received": events + later,
                    "accepted": events,
                    "duplicate": later - conflicts,
                    "conflict": conflicts,
                }
                for source, events, later, conflicts in rows
            },
            {},
        )


SIGNS: Final = (">=", "<=", ">", "<", "=")
"""Comparisons; longer ones first, because they are matched in this order."""

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,100})?(?:[eE][+-]?[0-9]{1,4})?")
_LARGEST: Final = 1 << 63


class Clause(msgspec.Struct, frozen=True):
    """A condition on one value in a JSON body. A body that is not JSON meets none that is not negated.

    `=` compares with the text of a string, with `true`, `false` and `null`, and with a number by value; the other signs
    compare numbers only. Two integers of 64 bits are compared exactly, all other numbers as floats.
    """

    path: tuple[str, ...]
    """From the root: names, and indexes of arrays as `0`, `1`, …"""
    sign: str
    value: str
    negated: bool = False
    """True where the condition must not hold: then a body without this place, or one that is not JSON, meets it."""

    @property
    def number(self) -> int | float | None:
        return read_number(self.value)


@lru_cache(maxsize=256)
def read_number(text: str) -> int | float | None:
    """Read a JSON number: integers exactly, if 64 bits hold them. None for what is no number, or too large."""
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
    """Tell whether a body, parsed as for handlers, meets all of these conditions."""
    try:
        data = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return all(clause.negated for clause in clauses)
    return all(_holds(clause, _at(data, clause.path)) is not clause.negated for clause in clauses)


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
"""Largest body in bytes that is read for a preview: a page shows several."""

LONGEST_TEXT: Final = 300
_JOINERS: Final = "\u200c\u200d"  # they join two emoji, or two words, into one


class DeliveryPreview(msgspec.Struct, frozen=True):
    """A delivery as it is shown before it is replayed."""

    to: str
    """The person a message is sent to, or the destination's address for an incoming one. Empty where only the API
    knows."""
    text: str
    is_incoming: bool = False
    """Whether somebody else wrote it; then `to` is no person."""


def flatten_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return text as one line, without invisible and direction-changing characters: a person decides by what is
    shown."""
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
    """Order in which deliveries are leased: live ones by their route's priority, then bulk replays; a quarantined one
    runs alone."""

    high = 0
    live = 1
    """Of a route with normal priority."""
    low = 2
    replay = 3
    quarantined = 4


class Options(IntFlag):
    """Options that a route or a replay gives a delivery; stored with it, because routes may change while it waits."""

    none = 0
    coalesce_type = 1
    """One attempt covers all that waits on the subject with the same type."""
    coalesce_any = 2
    """One attempt covers all that waits on the subject, of every type."""
    latest_wins = 4
    """Skip deliveries that a higher rank has overtaken."""
    hold = 8
    """When it goes dead, its successors wait until it is replayed or discarded."""
    fresh_id = 16
    """The run is sent under a new id, for receivers that deduplicate."""
    high = 32
    """It is leased before others of its destination."""
    low = 64
    """It is leased after others of its destination."""


OPTIONS: Final = tuple(Options(value) for value in range(128))


def _priority_of(options: Options) -> Priority:
    if options & Options.high:
        return Priority.high
    return Priority.low if options & Options.low else Priority.live


PRIORITIES: Final = tuple(_priority_of(options) for options in OPTIONS)
"""Priority of a live delivery, by its options."""


class DeliveryStatus(StrEnum):
    """The status of a delivery. The store keeps `pending` for leased deliveries, too; `leased` is derived from the
    queue's head."""

    pending = "pending"
    leased = "leased"
    done = "done"
    dead = "dead"
    discarded = "discarded"


class Category(StrEnum):
    """Category of a failure: transient, permanent, or unknown."""

    transient = "transient"
    permanent = "permanent"
    unknown = "unknown"


class AttemptOutcome(StrEnum):
    done = "done"
    retry = "retry"
    dead = "dead"
    crashed = "crashed"


class Trigger(StrEnum):
    """The reason for an attempt, as `Oncehook-Trigger` names it."""

    initial = "initial"
    retry = "retry"
    replay = "replay"
    bulk_replay = "bulk-replay"
    test = "test"
    """A test of the destination, without an event."""


# -- leasing -----------------------------------------------------------------------------------


class LeaseRequest(msgspec.Struct, frozen=True):
    """A worker's request: at most so many deliveries of one destination, leased for so many seconds."""

    destination_id: int
    limit: int
    lease: float
    priority: Priority = Priority.live
    crash_tolerance: int = 0
    """Crashes after which it must run alone: none for a handler, whose code runs in our process; some for HTTP."""
    probe: float = 30.0
    """Seconds until the next probe, where this lease is the probe of a half-open breaker."""
    fair: bool = False
    """Lease in rounds over the values of `fair`, not by due time."""


class LimitRequest(msgspec.Struct, frozen=True):
    """A worker's request for allowances of one destination whose limits count over all processes."""

    destination_id: int
    lease: float
    """Seconds of the destination's leases: places count for two of them."""
    rate: float | None = None
    """Attempts begun per second."""
    slots: int = 0
    """Moments to begin an attempt at that it wants to reserve."""
    limit: int | None = None
    """Attempts under way, over all workers."""
    busy: int = 0
    """Those of this worker."""
    wanted: int = 0
    """Places that it would use; fewer than before hands some back."""


class Allowance(msgspec.Struct, frozen=True):
    """Allowances of one destination that a worker holds."""

    destination_id: int
    slots: int = 0
    """Moments reserved, one after the other at the rate."""
    first_in: float = 0.0
    """Seconds until the first of them; without any, until it makes sense to ask again."""
    places: int = 0
    """Attempts that it may have under way; where more are, none may begin before some have ended."""


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
    """Crashes while it ran alone. With DEATHS of them it is leased only to be settled as dead."""
    priority: Priority
    seconds: float
    """Duration of the lease, from the moment it was made."""
    highest_rank: int | None = None
    """The highest rank delivered in its scope so far, with `latest_wins`; otherwise None."""
    more: bool = False
    """True where something waited behind it when it was leased."""
    failing: bool = False
    """True where failures were counted against its destination, which a success clears."""
    unreadable: str | None = None
    """Reason why head and body cannot be read. It is leased to be settled as a failure."""
    is_settling: bool = False
    """The handler's own transaction settles it: the row is locked until the commit, and needs no heartbeat."""

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
        """Build the lease on a delivery that was leased in the commit that stored it."""
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
            item.account,
        )
        queue_key = planned.subject_key or planned.id
        priority = PRIORITIES[planned.options]
        return cls(delivery, event, queue_key, planned.id, fence, 0, priority, seconds, more=more)

    def without_payload(self) -> Self:
        return msgspec.structs.replace(self, event=self.event.without_payload())

    @property
    def is_stale(self) -> bool:
        """True where a higher rank was processed already. A replay is never stale."""
        rank, highest = self.event.rank, self.highest_rank
        return self.delivery.run == 1 and rank is not None and highest is not None and rank < highest

    @property
    def trigger(self) -> Trigger:
        if self.delivery.attempt > 1:
            return Trigger.retry
        if self.delivery.replay_id is None:
            return Trigger.initial
        return Trigger.bulk_replay if self.priority is Priority.replay else Trigger.replay


class Expired(msgspec.Struct, frozen=True):
    """A lease that expired before it was settled, and was taken over: its worker died, hung, or is cut off."""

    delivery_id: DeliveryId
    event_id: EventId
    destination_id: int
    fence: int
    run: int
    attempt: int
    """Number of the attempt that its holder was making; it does not count."""
    worker: str | None
    """The holder, where it is known."""


class Outlook(msgspec.Struct, frozen=True):
    """Destinations with due deliveries, by priority, and the time of the next due one. Paused destinations do not
    count."""

    due: Mapping[Priority, Collection[int]]
    due_in: float | None = None
    """Seconds until the next delivery of the requested destinations is due; None when there is none. Deliveries that
    are due now do not count."""
    looked_at: datetime | None = None
    """The moment to pass as `since` next time."""

    @property
    def is_due(self) -> bool:
        return any(self.due.values())

    def of(self, priority: Priority) -> Collection[int]:
        """Return the destinations with due deliveries of one priority."""
        return self.due.get(priority, ())


# -- settling ----------------------------------------------------------------------------------


class Breaker(msgspec.Struct, frozen=True):
    """Settings of a circuit breaker: after how many failures in a row it opens, and for how long."""

    failures: int = 10
    open: float = 30.0


class Evidence(msgspec.Struct, frozen=True, gc=False):
    """Details of how an attempt went."""

    status: int | None = None
    error: str | None = None
    answer: bytes | None = None
    """The first 4 KB of what the destination answered, a traceback, or what a handler returned, as JSON."""
    exchange: bytes | None = None
    """The HTTP call without its bodies, encoded once, where it was made (`Exchange.encode`)."""


class Exchange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An HTTP call of an attempt, as it is kept: bounded, and with secrets masked."""

    method: str
    address: str
    headers: Mapping[str, str]
    times: tuple[float | None, ...]
    """Seconds for the name, the connection, TLS, the first byte after the request, and in all; None: did not happen."""
    received: bytes = b""
    """The answer's headers, one per line."""

    def encode(self) -> bytes:
        return _encode_exchange(self)


_encode_exchange: Final = msgspec.msgpack.Encoder().encode
_decode_exchange: Final = msgspec.msgpack.Decoder(Exchange).decode
_EXCHANGE: Final = b"\xc1"
"""Begins a kept answer with its exchange: no text in UTF-8, and so no traceback and no JSON, has this byte."""


def read_exchange(encoded: bytes) -> Exchange:
    return _decode_exchange(encoded)


def join_answer(evidence: Evidence) -> bytes | None:
    """Return exchange and answer as one value, for the store."""
    exchange, answer = evidence.exchange, evidence.answer
    if exchange is None and (answer is None or not answer.startswith(_EXCHANGE)):
        return answer
    exchange = exchange or b""
    return b"".join((_EXCHANGE, len(exchange).to_bytes(4), exchange, answer or b""))


def split_answer(kept: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Return answer and exchange from the result of `join_answer`."""
    if kept is None or not kept.startswith(_EXCHANGE):
        return kept, None
    end = 5 + int.from_bytes(kept[1:5])
    return kept[end:] or None, kept[5:end] or None


NO_EVIDENCE = Evidence()


class Settle(StrEnum):
    """The fate of a leased delivery."""

    done = "done"
    retry = "retry"
    dead = "dead"
    release = "release"
    """Released untried: stop, rate limit, breaker, lost before the start. The attempt does not count (R37)."""


class Emission(msgspec.Struct):
    """An event that a handler emits: it exists if, and only if, its delivery is settled as done (R54)."""

    intake: Intake
    tell: Callable[[Verdict], None]
    """Called on the loop with the verdict."""
    verdict: Verdict | None = None
    """The store's verdict; valid once the settlement is committed."""

    def report(self) -> None:
        """Report the verdict, once its settlement is committed."""
        if self.verdict is not None:
            self.tell(self.verdict)


class Settlement(msgspec.Struct, frozen=True):
    """The end of a lease. Refused when the lease was lost."""

    lease: Lease
    what: Settle
    wait: float = 0.0
    """Seconds until the next attempt (retry, release)."""
    category: Category | None = None
    note: str | None = None
    """`stale`: done without an attempt, because a higher rank was delivered before. No attempt is stored."""
    evidence: Evidence = NO_EVIDENCE
    duration: float = 0.0
    """Seconds that the attempt took."""
    breaker: Breaker | None = None
    """The destination's breaker, where this outcome counts for it; otherwise None."""
    pause: str | None = None
    """Reason to pause the destination as well (410)."""
    commit: Callable[[Any], object] | None = None
    """SQLite: the handler's effect, run inside the transaction that settles, with a connection that cannot commit."""
    emits: Sequence[Emission] = ()
    """Events to store in the same commit; only for done deliveries."""
    take_next: float | None = None
    """Seconds for which to lease the next delivery of the subject in the same commit; only for done deliveries."""

    @property
    def emitted_to(self) -> set[int]:
        """Destinations of the events that it emits."""
        return {d.destination_id for emission in self.emits for item in emission.intake.items for d in item.deliveries}


class Settled(msgspec.Struct, frozen=True):
    """Result of a group of settlements."""

    ours: Collection[int] = frozenset()
    """The fences that were still ours."""
    next: Sequence[Lease] = ()
    """Leases on the next deliveries, where requested."""


def is_over(settlement: Settlement) -> bool:
    """Tell whether it removes the head of its queue, so that the next one is due; a held dead letter stays the head."""
    if settlement.what is Settle.dead:
        return not settlement.lease.delivery.options & Options.hold
    return settlement.what is Settle.done


def is_crash(settlement: Settlement) -> bool:
    """Tell whether the delivery is given up without an attempt, because it keeps killing its worker (R36)."""
    return settlement.what is Settle.dead and settlement.evidence.error == "crash" and settlement.lease.deaths >= DEATHS


def was_tried(settlement: Settlement) -> bool:
    """Tell whether an attempt was made, which is to be stored."""
    return settlement.what is not Settle.release and settlement.note != "stale" and not is_crash(settlement)


class Streak(msgspec.Struct):
    """Outcomes of a group of settlements for one destination: whether any succeeded, and how many have failed since."""

    breaker: Breaker
    reset: bool = False
    failures: int = 0
    last_failed: bytes | None = None
    """Only failures of different deliveries count in a row: one stubborn delivery does not open a breaker."""


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


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list, newest first."""

    items: Sequence[T]
    next: bytes | None = None
    """Cursor of the next page; None at the end. A page may have fewer items than its limit and still have a next
    one."""


class Total(msgspec.Struct, frozen=True):
    """The number of matches of a query, counted up to a limit."""

    n: int
    is_exact: bool = True
    """False: there are more, or the search has read as many rows as it may."""


class Filter(msgspec.Struct, frozen=True):
    """The conditions of a list or a replay. All that are given must hold.

    Conditions on deliveries must hold for the same one. An event without deliveries meets only negated ones.
    """

    ids: Sequence[DeliveryId] | None = None
    event_id: EventId | None = None
    source: str | None = None
    sources: Sequence[str] | None = None
    """Only events of these sources: the viewer's scope. No word of a query."""
    account: str | None = None
    accounts: Sequence[str] | None = None
    """Only events of these accounts: the viewer's scope. No word of a query."""
    destination: str | None = None
    destinations: Sequence[str] | None = None
    """Only deliveries to these destinations: the viewer's scope. No word of a query."""
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
    """True for deliveries that a replay has run again."""
    replay_id: ReplayId | None = None
    left_of: ReplayId | None = None
    """Deliveries that this replay has not begun: the rest of an aborted one."""
    since: datetime | None = None
    """Received at or after."""
    until: datetime | None = None
    """Received before."""
    text: str | None = None
    """Occurs in key, subject, type or last error."""
    body: Sequence[Clause] | None = None
    """Conditions on the body; all must hold."""
    arrivals_above: int | None = None
    arrivals_below: int | None = None
    outcome: Outcome | None = None
    """Had a later arrival with this outcome: `duplicate` or `conflict`."""
    without: Sequence[Filter] | None = None
    """Filters of one condition each, none of which may hold."""
    either: Sequence[Filter] | None = None
    """Filters of which at least one must hold as well. Engines never see it: they get `alternatives`."""

    def alternatives(self) -> list[Filter]:
        """Return filters without `either` that match together what this one matches; none where nothing can."""
        if self.either is None:
            return [self]
        common = msgspec.structs.replace(self, either=None)
        merged = [_merge_filters(common, one) for other in self.either for one in other.alternatives()]
        return [one for one in merged if one is not None]

    @property
    def came_again(self) -> bool:
        """True where only events with later arrivals match."""
        return self.outcome is not None or (self.arrivals_above or 0) >= 1

    @property
    def reads_bodies(self) -> bool:
        return self.body is not None or any(one.reads_bodies for one in self.either or ())


_CLOSEST: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    **dict.fromkeys(("since", "attempts_above", "arrivals_above"), max),
    **dict.fromkeys(("until", "attempts_below", "arrivals_below"), min),
    **dict.fromkeys(
        ("ids", "sources", "accounts", "destinations"), lambda one, other: tuple(each for each in one if each in other)
    ),
    **dict.fromkeys(("body", "without"), lambda one, other: (*one, *other)),
    "text": lambda one, other: f"{one} {other}",
}
"""How two values of the same field become one that means both."""


def _merge_filters(one: Filter, other: Filter) -> Filter | None:
    """Return a filter for what matches both; None where they contradict each other."""
    fields: dict[str, Any] = {}
    for name in Filter.__struct_fields__:
        mine, others = getattr(one, name), getattr(other, name)
        if mine is None or others is None or mine == others:
            fields[name] = others if mine is None else mine
        elif name in _CLOSEST:
            fields[name] = _CLOSEST[name](mine, others)
        else:
            return None
    return Filter(**fields)


class StoredAttempt(msgspec.Struct, frozen=True):
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
        """JSON that a handler returned: stored as the answer of a successful attempt without a status."""
        is_handlers = self.outcome is AttemptOutcome.done and self.evidence.status is None
        return self.evidence.answer if is_handlers else None

    @property
    def exchange(self) -> Exchange | None:
        """Return the HTTP call that it made, if it made one."""
        return None if self.evidence.exchange is None else read_exchange(self.evidence.exchange)

    def without_answer(self) -> StoredAttempt:
        return replace(self, evidence=msgspec.structs.replace(self.evidence, answer=None, exchange=None))


class StoredDelivery(msgspec.Struct, frozen=True):
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
    """Attempts of this run so far, including a running one."""
    category: Category | None
    """Category of the last attempt."""
    last_status: int | None
    last_error: str | None
    due_at: datetime | None
    """Time of the next attempt; while leased, the end of the lease. None when settled, behind another, or held."""
    received_at: datetime
    settled_at: datetime | None
    last_replay_at: datetime | None
    replay_id: ReplayId | None
    reason: str | None
    """Reason of a discard, or of a dead letter without an attempt to blame (`crash`)."""
    blocked_by: DeliveryId | None = None
    """The delivery at the head of its subject, if that is another one."""
    account: str | None = None

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


class ListedEvent(msgspec.Struct, frozen=True):
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
    """Number of its arrivals; 1 without duplicates."""
    has_conflict: bool
    """True where a later arrival had another body."""
    deliveries: Sequence[ListedDelivery]
    account: str | None = None


class Cause(msgspec.Struct, frozen=True):
    """Dead letters with the same cause."""

    destination: str
    cause: str
    """The first line of the error, or `HTTP 404`, or `crash`."""
    count: int
    first_at: datetime
    """When the first of them died for the first time, before any replay."""
    last_at: datetime
    sample: DeliveryId
    per_hour: Sequence[int] = ()
    """Numbers of those that died for the first time, in each of the last 24 hours, oldest first."""


def count_hours(ages: Iterable[int]) -> list[int]:
    """Count ages in whole hours: one number for each of the last 24 hours, oldest first."""
    counted = Counter(ages)
    return [counted[hour] for hour in range(23, -1, -1)]


class Level(msgspec.Struct, frozen=True):
    """The state of a destination now."""

    pending: int = 0
    """Includes leased ones."""
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
    """Failures in a row, as the breaker counts them."""
    open_until: datetime | None = None
    """End of the time for which the breaker is open; None when it is closed."""


class StoredWorker(msgspec.Struct, frozen=True):
    id: str
    host: str
    pid: int
    started_at: datetime
    seen_at: datetime
    leases: int
    destinations: Sequence[str]


class Noun(StrEnum):
    """What can be defined."""

    source = "source"
    destination = "destination"
    route = "route"
    account = "account"


class StoredDefinition(msgspec.Struct, frozen=True):
    """A source, destination or route that was made while the inbox runs."""

    noun: Noun
    name: str
    """Of a route: its id."""
    id: int
    """In the store; of a route: its destination's."""
    account: str | None
    address: bytes | None
    """Of a source: a digest of the last part of its address (`address_hash`)."""
    source: str | None
    destination: str | None
    """The ends of a route."""
    settings: str
    """As given, JSON, without secrets."""
    secrets: bytes | None
    """The secret ones, JSON, encrypted."""
    is_enabled: bool
    version: int
    created_at: datetime
    changed_at: datetime
    is_led_nowhere: bool = False
    """Of a route: its destination is disabled."""
    led_to: str | None = None
    """Of a route: the settings of its destination, where that is stored."""
    media_id: int | None = None
    """Of a source: the id of the destination that keeps its media (`media_destination`), once there is one."""


_MEDIA: Final = ".media"


def media_destination(source: str) -> str:
    """Return the name of the destination that keeps the media of a stored source. No stored destination can be called
    so: whoever may define destinations must not get the deliveries of another's source."""
    return source + _MEDIA


def media_source(destination: str) -> str | None:
    """Return the stored source whose media a destination keeps; None for any other destination."""
    return destination.removesuffix(_MEDIA) if destination.endswith(_MEDIA) else None


class DefinitionWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one stored definition, with its audit entry."""

    act: Literal["create", "change", "rotate", "enable", "disable", "delete"]
    noun: Noun
    name: str
    actor: str
    detail: str
    """Of the audit entry: before and after, JSON, without secrets."""
    expected: int | None = None
    """Version of the definition that was changed; None for a new one."""
    account: str | None = None
    address: bytes | None = None
    source: str | None = None
    destination: str | None = None
    settings: str = "{}"
    secrets: bytes | None = None
    is_enabled: bool = True
    largest_body: int = 0
    """Bytes of the largest body that the source takes."""
    unless_waiting: bool = True
    """Refuse to delete a destination that deliveries wait for."""
    aliases: Sequence[str] = ()
    """Of an account: its other names."""
    moves: bool = False
    """Take aliases away from other accounts, which otherwise is refused."""


class DefinitionChange(msgspec.Struct, frozen=True, array_like=True):
    """A stored definition that was made, changed or deleted."""

    version: int
    noun: Noun
    name: str
    id: int
    address: bytes | None
    source: str | None
    destination: str | None
    is_enabled: bool
    """False where it was disabled or deleted."""


class DefinitionChanges(msgspec.Struct, frozen=True, array_like=True):
    """What has changed up to a version, in order of commit; of each definition the last change."""

    version: int
    largest_body: int
    """Bytes of the largest body that any stored source takes, or has taken."""
    since: int
    """The version from which on `changed` has every change; -1: from nowhere on, so all that is known may be old."""
    changed: Sequence[DefinitionChange] = ()


def address_hash(path: str) -> bytes:
    """Hash the last part of a source's address, because it may be a secret."""
    return digest(b"address", path.encode("utf-8", "surrogateescape"))


class Audited(msgspec.Struct, frozen=True):
    """Something a person or program did."""

    n: int
    at: datetime
    actor: str
    act: str
    target: str
    detail: Mapping[str, object]


# -- sweeping ----------------------------------------------------------------------------------


class StoredMedia(msgspec.Struct, frozen=True):
    """A file that an event refers to, as it is kept."""

    n: int
    """Its place in the event, from 0."""
    digest: bytes
    """SHA-256 of its content."""
    size: int
    type: str
    """Media type: `image/jpeg`."""
    filename: str | None = None


class ArchivedDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A finished delivery as it is archived."""

    destination: str
    subject_key: bytes | None
    seq: int
    status: str
    note: str | None
    run: int
    attempts: int
    options: int
    settled_at: datetime | None
    category: str | None
    last_status: int | None
    last_error: str | None
    reason: str | None
    fair: int | None


class ArchivedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event as it is archived: everything that is needed to deliver it again, one line of JSON."""

    id: str
    source: str
    type: str
    key: str | None
    subject: str | None
    received_at: datetime
    event_at: datetime | None
    marks: int
    rank: int | None
    rank_scope: str | None
    body_hash: bytes
    key_hash: bytes | None
    head: bytes
    body: bytes
    account: str | None
    deliveries: list[ArchivedDelivery]


class Pruned(msgspec.Struct, frozen=True):
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


class ReplayCommand(msgspec.Struct, frozen=True):
    """A replay that a person or program asks for."""

    filter: Filter
    actor: str
    reason: str = ""
    force: bool = False
    """Includes done ones."""
    fresh_id: bool = False
    rate: float | None = None
    """Deliveries a second at most."""
    bulk: bool = True
    """With a lower priority than live ones, fed in batches; otherwise one delivery, at once."""
    request_key: str | None = None
    """Key of the request: a second request with it returns the first one's replay (R47)."""
    expected: int | None = None
    """The number that the plan had shown; with another number now, nothing is done (PlanChanged)."""
    about: Mapping[str, object] = msgspec.field(default_factory=dict)
    """The order as it was given, for display."""
    noted: Mapping[str, object] = msgspec.field(default_factory=dict)
    """The order for the audit log, without the subject: entries are not changed when the subject is erased."""

    def audit_detail(self, count: int) -> dict[str, object]:
        """Return the detail of its audit entry, given the number of deliveries found."""
        return {"count": count, "reason": self.reason, "bulk": self.bulk, **self.noted}


class StoredReplay(msgspec.Struct, frozen=True):
    """A replay as it is stored: the request and its progress."""

    id: ReplayId
    state: ReplayState
    about: Mapping[str, object]
    actor: str
    reason: str
    bulk: bool
    rate: float | None
    planned: int
    fed: int
    """Items fed to workers so far."""
    done: int
    dead: int
    skipped: int
    """Items left out when they were fed: running by then, replayed a moment ago, or pruned."""
    created_at: datetime
    finished_at: datetime | None


class ReplayItem(msgspec.Struct, frozen=True):
    """One delivery of a replay, and what became of it."""

    n: int
    """Its place in the replay."""
    delivery_id: DeliveryId
    destination: str
    outcome: str
    """`done`, `dead`, `skipped`, `running` (handed to workers) or `left` (not begun)."""
    type: str | None
    """None where the event is no longer there, as with the next three."""
    subject: str | None
    received_at: datetime | None
    error: str | None
    """Its last error, where it is dead."""

    @property
    def event_id(self) -> EventId:
        return self.delivery_id.event_id


class ChartMark(msgspec.Struct, frozen=True):
    """A moment that every chart shows, such as a deploy."""

    at: datetime
    text: str
    actor: str


class BreakerChange(msgspec.Struct, frozen=True):
    """A breaker that has opened, or closed again."""

    destination_id: int
    open_until: datetime | None
    """None: it has closed."""
    failures: int


class PlanSnapshot(msgspec.Struct, frozen=True):
    """The plan that a person was shown and confirms."""

    count: int
    at: datetime
    """Time of the plan, by the store's clock."""


class PlannedFor(msgspec.Struct, frozen=True):
    """The part of a replay's plan that concerns one destination."""

    by_status: Mapping[DeliveryStatus, int] = msgspec.field(default_factory=dict)
    left_out: Mapping[DeliveryStatus, int] = msgspec.field(default_factory=dict)
    """Matching but not replayed."""
    refused: int = 0
    """Those of them whose last attempt was refused for good (`permanent`)."""

    @classmethod
    def of(cls, rows: Iterable[tuple[str, DeliveryStatus, bool, bool, int]]) -> dict[str, PlannedFor]:
        """Build the parts from rows (destination, status, whether replayed, whether refused for good, count)."""
        parts: dict[str, tuple[Counter[DeliveryStatus], Counter[DeliveryStatus]]] = {}
        refused: Counter[str] = Counter()
        for name, status, is_replayed, is_refused, n in rows:
            parts.setdefault(name, (Counter(), Counter()))[0 if is_replayed else 1][status] += n
            refused[name] += n if is_replayed and is_refused else 0
        return {name: cls(dict(taken), dict(left_out), refused[name]) for name, (taken, left_out) in parts.items()}


class ReplayPlan(msgspec.Struct, frozen=True):
    """The effect of a replay, computed before anybody confirms it."""

    total: int
    at: datetime
    """Time of the plan, by the store's clock."""
    by_destination: Mapping[str, int] = msgspec.field(default_factory=dict)
    by_status: Mapping[DeliveryStatus, int] = msgspec.field(default_factory=dict)
    left_out: Mapping[DeliveryStatus, int] = msgspec.field(default_factory=dict)
    """Matching but not replayed: running, or done and not forced."""
    oldest: datetime | None = None
    newest: datetime | None = None
    changed: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Deliveries whose first attempt went to another address than now, by destination."""
    sample: Sequence[StoredDelivery] = ()
    parts: Mapping[str, PlannedFor] = msgspec.field(default_factory=dict)
    """The same by destination, including those of which all are left out."""


ERASED: Final = "erased"
"""The note of deliveries whose event was erased; they cannot be replayed."""

_MENTION: Final = "subject:[erased]"


class EraseOrder(msgspec.Struct, frozen=True):
    """An erasure that was asked for: whose events, by whom, and why."""

    subject: str | None
    """None: every event of the account."""
    source_id: int | None = None
    """Only events of this source; two sources may use the same text for different subjects."""
    actor: str = ""
    reason: str = ""
    spelled: str = ""
    """The subject as stored queries of replays and old audit entries write it."""
    account: str | None = None
    """Only events of this account."""

    @property
    def target(self) -> str:
        """Return whose events, for the audit log, which must not contain the text of a subject."""
        if self.subject is None:
            return f"account {self.account}"
        return f"subject {subject_hash(self.subject)}"


class Erasure(msgspec.Struct, frozen=True):
    """The number of rows that were erased, or would be."""

    events: int = 0
    deliveries: int = 0
    """Open ones and dead letters, which are discarded first."""
    attempts: int = 0
    arrivals: int = 0
    """Later arrivals of these events that are still kept."""
    batches: int = 0
    """Split requests whose raw bytes are erased."""
    shared_batches: int = 0
    """Those of them that also held events of other subjects: the raw bytes are erased, the other events stay."""

    def __add__(self, other: Erasure) -> Erasure:
        return Erasure(*[mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)])


def mention_of(order: EraseOrder) -> str:
    """Return the text by which stored JSON (queries of replays) mentions the subject."""
    return json.dumps(f"subject:{order.spelled}")[1:-1]


def without_mention(kept: str, order: EraseOrder) -> str:
    """Return stored JSON without the subject in its queries."""
    return re.sub(re.escape(mention_of(order)) + r"(?=[\s\"'\\]|$)", _MENTION, kept)
