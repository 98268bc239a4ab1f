"""Receiving: from (source, headers, body) to an answer that is given only after the commit.

An arrival is verified on the bytes as received; only then it is parsed, split, keyed and recorded by the store, which
decides what is new. The result is always a `Reply`: a genuine arrival gets its answer after the commit, a forged one
learns nothing, and any fault of ours is 503, so that the sender retries. Events of the program's own come in through
`Emitter`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from oncehook import clock, payload
from oncehook.accounts import Account, AccountDirectory, load_nobody
from oncehook.bodies import Bodies
from oncehook.errors import (
    Encoded,
    KeyConflict,
    KeyRequired,
    NotStarted,
    Rejected,
    SignatureInvalid,
    StoreUnavailable,
    TooLarge,
    TooManyHops,
)
from oncehook.logs import ration
from oncehook.model import (
    HOPS,
    MOST_HOPS,
    UNKNOWN_SOURCE,
    Arrival,
    Emission,
    EventId,
    Intake,
    Item,
    Mark,
    Outcome,
    Planned,
    StoredEvent,
    Verdict,
    account_digest,
    check_account_id,
    digest,
    is_account_id,
    key_hash,
    new_id,
    pack_head,
    read_hops,
)
from oncehook.routes import Planner, subscribers
from oncehook.rules import Reading, RuleContext, bound_text, key_text
from oncehook.sources import PLAIN, Odd, Reply, Source
from oncehook.store.base import Pending, Store

if TYPE_CHECKING:
    from oncehook.media import KeptMedia

log = logging.getLogger("oncehook.receive")

INDIRECT: Final = frozenset(
    {
        *(b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip"),  # a proxy's
        *(b"origin", b"sec-fetch-site"),  # a browser's: any page can make it send
    }
)
"""Headers of a request that does not come from the program at the other end. So is X-Forwarded-anything."""

RETRY_AFTER: Final = (b"retry-after", b"5")
JSON: Final = (b"content-type", b"application/json")
_META_HANDSHAKE: Final = b"hub.verify_token"
"""Found in the query of a handshake whose sender expects 403 where the token is wrong, and so, too, where there is no
such source (S8)."""

MOST_PARTS: Final = 10_000
MOST_PART_BYTES: Final = 32 << 20
"""A batch that would become more than this is kept whole: each part repeats its envelope, so a small body could grow
without bound."""

LOOKUPS: Final = 5
"""Times that the accounts of one arrival are looked up, because they change meanwhile."""

Revive = Callable[[EventId], Awaitable[None]]
"""A function that replays the dead letters of an event."""


class ArrivalObserver(Protocol):
    """Observer of arrivals, for logs and metrics."""

    def arrival(
        self, source: str, outcomes: Sequence[str], seconds: float, size: int, items: Sequence[Item], ids: list[str]
    ) -> None:
        """Note an arrival that was answered after its commit, or acknowledged without one (`ignored`, `handshake`).

        A batch has one outcome per part: those of the items in order, then those of ignored parts.
        """

    def note_rejection(self, arrival: Arrival, source: Source | None, error: Rejected) -> None: ...

    def unavailable(self, source: str, error: StoreUnavailable) -> None: ...


class Receipt(msgspec.Struct):
    """The answer to one arrival, for a route of one's own: the reply, and its content."""

    reply: Reply
    outcome: str
    event_ids: list[str]


class Begun(msgspec.Struct):
    """An arrival that was handed to the store."""

    source: Source
    arrival: Arrival
    parts: int
    items: Sequence[Item]
    pending: Pending
    started: float


class Deferred(msgspec.Struct):
    """An arrival that cannot go on before some names of accounts are looked up."""

    source: Source
    arrival: Arrival
    names: Collection[str]


Loaded = Mapping[str, Account | None]
"""Accounts by name that were looked up for one arrival; None: the name is nobody's."""
NO_ACCOUNTS: Final[Loaded] = MappingProxyType({})


class Lookup:
    """A source that is being looked up in the store, by its path."""

    __slots__ = ("_call_backs", "_error", "_source", "is_done", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_done = False
        self._source: Source | None = None
        self._error: StoreUnavailable | None = None
        self._call_backs: list[Callable[[], None]] = []

    def call_back(self, function: Callable[[], None]) -> None:
        """Call this function when it is decided, or at once where it is already."""
        if self.is_done:
            function()
        else:
            self._call_backs.append(function)

    async def wait(self) -> None:
        found = asyncio.get_running_loop().create_future()
        self.call_back(lambda: None if found.done() else found.set_result(None))
        await found

    def result(self) -> Source | None:
        """Return the source; None where there is none. Raises StoreUnavailable."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._source

    def decide(self, source: Source | None, error: StoreUnavailable | None = None) -> None:
        self.is_done, self._source, self._error = True, source, error
        for call_back in self._call_backs:
            try:
                call_back()
            except Exception:  # the others that wait for it get their answers
                name = _name(source)
                ration.log(log, logging.ERROR, "receive.failed", {"source": name}, kind=name, exc_info=True)


class StoredSources(Protocol):
    """Sources that are defined while the inbox runs."""

    @property
    def largest_body(self) -> int:
        """Bytes of the largest body that any of them takes."""

    def at(self, path: str) -> Source | Lookup | None:
        """Return the source at this path; None where there is none; a look-up where that is not known here."""

    async def find_source(self, name: str) -> Source | None: ...


class Receiver:
    """Receiver of arrivals for a set of sources: admit, read, record, reply."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        store: Store,
        plan: Planner,
        observer: ArrivalObserver,
        revive: Revive | None = None,
        stored: StoredSources | None = None,
        accounts: AccountDirectory | None = None,
        bodies: Bodies | None = None,
    ) -> None:
        """`stored`: finds the sources that are not among `sources`."""
        self.sources = sources
        self.stored = stored
        self._store = store
        self._bodies = bodies
        self._large = math.inf if bodies is None else bodies.above
        self._plan = plan
        self._observer = observer
        self._accounts = accounts or AccountDirectory(load_nobody)
        self._revive = revive
        self._deadlines = AckDeadlines()
        self._missing: set[str] = set()
        """Names of accounts that the arrival being read needs and nobody has looked up."""

    @property
    def largest_body(self) -> int:
        """Bytes of the largest body that any source takes."""
        limits: list[int] = [source.settings.max_body for source in self.sources.values()]
        own = max(limits, default=PLAIN.settings.max_body)
        return own if self.stored is None else max(own, self.stored.largest_body)

    async def receive(self, arrival: Arrival) -> Receipt:
        source = self.sources.get(arrival.source)
        if source is None and self.stored is not None:
            try:
                source = await self.stored.find_source(arrival.source)
            except StoreUnavailable as error:
                return Receipt(self.put_off(None, error), "error", [])
        return await self.take(source, arrival)

    async def take(self, source: Source | None, arrival: Arrival) -> Receipt:
        """Receive one arrival at a source's path; None where no source has it.

        The path decides, not the name: a source with a path of its own is not found under its name (S8). Never raises:
        every error becomes a reply.
        """
        begun = self.begin(source, arrival)
        return begun if isinstance(begun, Receipt) else await self.complete(begun)

    async def answer_handshake(self, source: Source | None, arrival: Arrival) -> Reply:
        """Answer anything but a POST, after looking up the account that its address names."""
        reply = self.greet(source, arrival)
        return (await self.complete(reply)).reply if isinstance(reply, Deferred) else reply

    async def _resume(self, deferred: Deferred) -> Begun | Receipt | Deferred:
        """Look up the accounts that an arrival needs, and begin it again."""
        try:
            async with asyncio.timeout(deferred.source.settings.budget):
                loaded = await self._accounts.load(deferred.names)
        except TimeoutError:
            error = StoreUnavailable("The store did not look the account up within this source's budget.")
            return self._answer_failure(deferred.source, deferred.arrival, error)
        except Exception as error:
            return self._answer_failure(deferred.source, deferred.arrival, error)
        if deferred.arrival.method != "POST":
            reply = self.greet(deferred.source, deferred.arrival, loaded)
            return reply if isinstance(reply, Deferred) else Receipt(reply, "handshake", [])
        return self.begin(deferred.source, deferred.arrival, loaded)

    async def complete(self, begun: Begun | Deferred) -> Receipt:
        """Wait for the store's decision, act on it, and return the reply."""
        for _ in range(LOOKUPS):
            if not isinstance(begun, Deferred):
                break
            resumed = await self._resume(begun)
            if isinstance(resumed, Receipt):
                return resumed
            begun = resumed
        if isinstance(begun, Deferred):
            error = StoreUnavailable("Its account changes faster than it can be looked up.")
            return self._answer_failure(begun.source, begun.arrival, error)
        try:
            verdicts = await begun.pending.future
            if begun.source.settings.revive_dead and self._revive is not None:
                # Before the reply: after "duplicate" a sender may never come again.
                for verdict in verdicts:
                    if verdict.outcome is Outcome.duplicate:
                        await self._revive(verdict.event_id)
        except asyncio.CancelledError:
            begun.pending.abandoned = True  # nobody reads the reply: withdraw what is not being written yet
            raise
        except Exception as error:
            return self._answer_failure(begun.source, begun.arrival, error)
        return self.finish(begun)

    def begin(
        self, source: Source | None, arrival: Arrival, loaded: Loaded = NO_ACCOUNTS
    ) -> Begun | Receipt | Deferred:
        """Verify, parse and record an arrival; return the pending intake, or the reply where it is known already.

        Returns `Deferred` where accounts must be looked up first; with `loaded`, they have been.
        """
        started = clock.perf()
        template = source
        try:
            if source is not None and source.has_accounts_by_address:
                source = self._at_address(source, arrival, loaded)
            source = self._admit(source, arrival)
            if source.base.handshake is not None and (reply := source.base.handshake(arrival, source)) is not None:
                self._note_unstored(source, arrival, ("handshake",), started)
                return Receipt(reply, "handshake", [])
            parts, items = self._items(source, arrival, loaded)
            if self._missing:
                raise KeyError
            if not items:
                self._note_unstored(source, arrival, ("ignored",) * (parts or 1), started)
                return Receipt(_answer(source, arrival, {"status": "ignored"}), "ignored", [])
            pending = self._record(source, arrival, items, split=parts > 1)
            return Begun(source, arrival, parts, items, pending, started)
        except Exception as error:
            if self._missing and template is not None:
                return self._defer(template, arrival)
            return self._answer_failure(source, arrival, error)

    def _defer(self, source: Source, arrival: Arrival) -> Deferred:
        names, self._missing = self._missing, set()
        return Deferred(source, arrival, names)

    def _at_address(self, source: Source, arrival: Arrival, loaded: Loaded) -> Source | None:
        """Return a source as it is for the account in the address; None where that is nobody's. Raises KeyError."""
        if not is_account_id(arrival.account):
            return None
        account = self._account(arrival.account, loaded)
        # An alias is what others call an account; only its id is an address.
        return None if account is None or account.id != arrival.account else self._accounts.at(source, account)

    def _account(self, name: str, loaded: Loaded) -> Account | None:
        """Return the account of an id or alias; None for nobody's. Raises KeyError, and notes the name."""
        try:
            if name not in loaded:
                return self._accounts.find(name)
            found = loaded[name]
            if found is not None and not self._accounts.is_current(found):
                raise KeyError(name)
        except KeyError:
            self._missing.add(name)
            raise
        return found

    def finish(self, begun: Begun) -> Receipt:
        """Return the reply, once the store has decided."""
        try:
            return self._acknowledge(begun, begun.pending.result())
        except Exception as error:
            return self._answer_failure(begun.source, begun.arrival, error)

    def _answer_failure(self, source: Source | None, arrival: Arrival, error: Exception) -> Receipt:
        if isinstance(error, Rejected):
            return Receipt(self.turn_away(source, arrival, error), "rejected", [])
        if isinstance(error, StoreUnavailable):
            return Receipt(self.put_off(source, error), "error", [])
        return Receipt(self._fail_ours(source, error), "error", [])

    def greet(self, source: Source | None, arrival: Arrival, loaded: Loaded = NO_ACCOUNTS) -> Reply | Deferred:
        """Answer anything but a POST: a provider's handshake, or the same refusal as for a forged arrival."""
        started = clock.perf()
        template = source
        try:
            if source is not None and source.has_accounts_by_address:
                source = self._at_address(source, arrival, loaded)
            if source is None or source.base.handshake is None:
                raise SignatureInvalid(UNKNOWN_SOURCE if source is None else "not a POST")
            if source.guard is not None:
                source.guard()
            self._check_peer(source, arrival)
            reply = source.base.handshake(arrival, source)
            if reply is None:
                raise SignatureInvalid("handshake")
        except Rejected as error:
            refusal = self.turn_away(source, arrival, error)
            return Reply(403, refusal.body) if _META_HANDSHAKE in arrival.query else refusal
        except StoreUnavailable as error:
            return self.put_off(source, error)
        except Exception as error:
            if self._missing and template is not None:
                return self._defer(template, arrival)
            return self._fail_ours(source, error)
        self._note_unstored(source, arrival, ("handshake",), started)
        return reply

    def _note_unstored(self, source: Source, arrival: Arrival, outcomes: Sequence[str], started: float) -> None:
        self._observer.arrival(source.name, outcomes, clock.perf() - started, len(arrival.body), (), [])

    def turn_away(self, source: Source | None, arrival: Arrival, error: Rejected) -> Reply:
        self._observer.note_rejection(arrival, source, error)
        return Reply(error.status, _sentence(str(error), error.code))

    def _fail_ours(self, source: Source | None, error: Exception) -> Reply:
        # An error of ours is not the sender's fault: it retries, and we read the log.
        name = _name(source)
        ration.log(log, logging.ERROR, "receive.failed", {"source": name}, kind=name, exc_info=True)
        return self.put_off(source, StoreUnavailable(str(error)))

    def put_off(self, source: Source | None, error: StoreUnavailable) -> Reply:
        """Note that an arrival cannot be stored now, and ask its sender to retry."""
        self._observer.unavailable(_name(source), error)
        return try_again(source, error)

    def _admit(self, source: Source | None, arrival: Arrival) -> Source:
        """Let only genuine arrivals pass. Nothing is parsed before this, and no key is used (R8, S1)."""
        hops = 0
        for name, value in arrival.headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise Encoded
            if name == HOPS:
                hops = max(hops, read_hops(value))
        if source is None:
            # Because an unknown source must cost the same time as a wrong signature (S8).
            digest(arrival.body)
            raise SignatureInvalid(UNKNOWN_SOURCE)
        if source.guard is not None:
            source.guard()
        self._check_peer(source, arrival)
        source.verifier(arrival)
        if hops > MOST_HOPS:  # checked last, so that whoever cannot sign learns nothing about this source (S8)
            raise TooManyHops
        if len(arrival.body) > source.settings.max_body:
            raise TooLarge
        return source

    def _check_peer(self, source: Source, arrival: Arrival) -> None:
        if source.loopback_only and not is_direct(arrival):
            raise SignatureInvalid("not a direct request from this machine")
        if arrival.peer and not source.allows(arrival.peer):
            raise SignatureInvalid("address not allowed")

    # -- from bytes to items -------------------------------------------------------------------

    def _items(self, source: Source, arrival: Arrival, loaded: Loaded = NO_ACCOUNTS) -> tuple[int, list[Item]]:
        """Return the number of parts, and the items built from them, without ignored types."""
        parts = None if source.split is None else _parts(source, arrival)
        if parts is not None and len(parts) != 1:
            made = [self._part(source, arrival, part, body, loaded) for part, body in parts]
            return len(parts), [item for item in made if item is not None]
        # A batch of one is read as its one part, and its bytes are stored unchanged.
        if parts is not None and not isinstance(parts[0][0], Odd):
            item = self._part(source, arrival, parts[0][0], arrival.body, loaded)
        else:
            reading = source.rules.read(arrival)
            item = self._item(source, arrival, arrival.body, reading if parts is None else _odd(reading), loaded)
        if item is not None and source.proof is not None:
            proof = (b"proof", source.name.encode(), source.proof(arrival))
            item.proof = digest(*proof) if item.account is None else account_digest(item.account, *proof)
            item.is_bound = source.own is not None and source.own.read(RuleContext(arrival, arrival.body)) is not None
        return 1, [] if item is None else [item]

    def _part(self, source: Source, arrival: Arrival, part: Any, body: bytes, loaded: Loaded) -> Item | None:
        data = part.part if isinstance(part, Odd) else part
        reading = source.rules.read_data(arrival, data, body)
        return self._item(source, arrival, body, _odd(reading) if isinstance(part, Odd) else reading, loaded, data)

    def _item(
        self,
        source: Source,
        arrival: Arrival,
        body: bytes,
        reading: Reading,
        loaded: Loaded,
        data: Any = payload.MISSING,
    ) -> Item | None:
        """Build the item of one event; return None when its type is ignored."""
        mask = source.body_masking
        kind = mask.text(reading.type or "event")
        if source.ignored is not None and source.ignored.match(kind):
            return None
        if source.redaction is not None:
            body, data = source.redaction(body, data), payload.MISSING
        if (masked := mask(body)) is not body:
            body, data = masked, payload.MISSING
        marks = Mark.unparsed if reading.unparsed else Mark.none
        account = within = source.account
        if reading.account is not None:
            account = within = self._map_account(reading.account, loaded)
            if account is None:
                marks |= Mark.unmapped
                # Two customers whom nobody has mapped yet must not suppress each other's events. No id begins so.
                within = f"?{reading.account}"
        body_hash = source.body_hash(body, data)
        parts, keep = reading.key, source.settings.keep_keys
        if parts is None:
            if source.on_missing_key == "reject":
                raise KeyRequired
            if source.on_missing_key == "body_hash":
                parts, keep = ("body_hash", body_hash.hex()), source.missing_keep
            else:
                marks |= Mark.unkeyed
        item = Item(
            new_id(),
            kind,
            None if parts is None else bound_text(key_text(list(map(mask.text, parts)))),
            None if parts is None else key_hash(source.name, parts, within),
            keep,
            mask.text(reading.subject),
            body,
            body_hash,
            reading.event_at,
            reading.rank,
            mask.text(reading.rank_scope),
            marks,
            account=account,
        )
        if within is not None and item.rank is not None:
            # Ranks are compared by scope alone: what overtakes an event must be of the same account.
            item.rank_scope = bound_text(f"{within}/{item.rank_scope or item.subject or ''}")
        item.deliveries = self._plan(arrival, item)
        return item

    def _map_account(self, name: str, loaded: Loaded) -> str | None:
        try:
            account = self._account(name, loaded)
        except KeyError:
            return None  # this reading is given up: the names of the whole arrival are looked up first
        return None if account is None else account.id

    # -- to the store and back -----------------------------------------------------------------

    def _record(self, source: Source, arrival: Arrival, items: Sequence[Item], *, split: bool) -> Pending:
        raw = arrival.body if split else None
        if raw is not None:
            raw = source.body_masking(raw if source.redaction is None else source.redaction(raw, payload.MISSING))
        head = source.masking(pack_head(arrival, source.masked, source.scheme.masked_query))
        arrival_id = new_id() if split else items[0].event_id
        intake = Intake(arrival_id, source.id, head, items, raw)
        if len(arrival.body) > self._large and self._bodies is not None:
            pending = self._bodies.record(self._store, intake)
        else:
            pending = self._store.record(intake)
        self._deadlines.watch(pending, source.settings.budget)
        return pending

    def _acknowledge(self, begun: Begun, verdicts: Sequence[Verdict]) -> Receipt:
        source, parts, items = begun.source, begun.parts, begun.items
        if source.guard is not None:
            # A source that was deleted while this was stored acknowledges nothing any more.
            source.guard()
        ids = [str(verdict.event_id) for verdict in verdicts]
        outcomes: list[str] = [verdict.outcome for verdict in verdicts]
        if parts == 1:
            outcome = verdicts[0].outcome
            if outcome is Outcome.accepted:
                answer: dict[str, object] = {"status": outcome, "event_id": ids[0]}
            else:
                answer = {"status": outcome, "skipped": True, "event_id": ids[0]}
        else:
            outcome, answer = _sum_up(outcomes, ids)
            outcomes += ["ignored"] * (parts - len(verdicts))
        took = clock.perf() - begun.started
        self._observer.arrival(source.name, outcomes, took, len(begun.arrival.body), items, ids)
        if source.settings.on_conflict == "reject" and all(verdict.outcome is Outcome.conflict for verdict in verdicts):
            error = KeyConflict()
            return Receipt(Reply(error.status, _sentence(str(error), error.code)), outcome, ids)
        return Receipt(_answer(source, begun.arrival, answer), outcome, ids)


def _parts(source: Source, arrival: Arrival) -> list[tuple[Any, bytes]] | None:
    """Return the parts of a batch with their bytes; None for what is no batch, which is stored whole.

    A shape that the splitter did not expect must not lose a verified event (S11).
    """
    assert source.split is not None
    parts: list[tuple[Any, bytes]] = []
    # Without a key: under the key of its first item, the other items would be conflicts where that one is known.
    whole = [(Odd(None), arrival.body)]
    size = 0
    try:
        for part in source.split(payload.parse(arrival.body), arrival):
            parts.append((part, msgspec.json.encode(part.part if isinstance(part, Odd) else part)))
            size += len(parts[-1][1])
            if size > MOST_PART_BYTES or len(parts) > MOST_PARTS:
                fields = {"source": source.name, "size": len(arrival.body)}
                ration.log(log, logging.WARNING, "split.too_large", fields, kind=source.name)
                return whole
    except payload.Unreadable:
        return None
    except Exception:
        fields = {"source": source.name}
        ration.log(log, logging.ERROR, "split.failed", fields, kind=source.name, exc_info=True)
        return whole
    return parts


def _odd(reading: Reading) -> Reading:
    """Return a reading without its key, because the part has the wrong shape."""
    return msgspec.structs.replace(reading, key=None, unparsed=True)


def is_direct(arrival: Arrival) -> bool:
    """Tell whether an arrival comes directly from this machine, not through a tunnel that ends here."""
    if not arrival.peer:
        return True  # passed in by a program of ours
    try:
        if not ip_address(arrival.peer).is_loopback:
            return False
    except ValueError:
        return False
    return not any(name in INDIRECT or name.startswith(b"x-forwarded-") for name, _ in arrival.headers)


def try_again(source: Source | None, error: StoreUnavailable | None = None) -> Reply:
    """Return the reply to what cannot be stored now: with the code, not the message, which may contain files and
    hosts."""
    status = 503 if source is None else source.base.unavailable
    sentence = "This inbox is not started" if isinstance(error, NotStarted) else "Cannot store this now"
    code = StoreUnavailable.code if error is None else error.code
    return Reply(status, _sentence(f"{sentence}; try again.", code), (JSON, RETRY_AFTER))


def _sum_up(outcomes: Sequence[str], ids: list[str]) -> tuple[Outcome, dict[str, object]]:
    """Return the reply to a batch: `accepted` when anything in it was new."""
    outcome = Outcome.accepted if Outcome.accepted in outcomes else Outcome.duplicate
    return outcome, {
        "status": outcome,
        "accepted": outcomes.count(Outcome.accepted),
        "duplicates": outcomes.count(Outcome.duplicate),
        "conflicts": outcomes.count(Outcome.conflict),
        "event_ids": ids,
    }


def _name(source: Source | None) -> str:
    # An unknown source's name is untrusted, and this becomes a label.
    return "unknown" if source is None else source.name


def _sentence(text: str, code: str) -> bytes:
    return msgspec.json.encode({"error": text, "code": code})


def _answer(source: Source, arrival: Arrival, body: Mapping[str, object]) -> Reply:
    if source.base.answer is None:
        return Reply(source.base.accepted, msgspec.json.encode(body))
    return source.base.answer if isinstance(source.base.answer, Reply) else source.base.answer(arrival)


class ClosedReceiver(Receiver):
    """The receiver of an inbox that is not started: it asks every sender to retry, and logs why."""

    def begin(self, source: Source | None, arrival: Arrival, loaded: Loaded = NO_ACCOUNTS) -> Receipt:
        """Put off every arrival, genuine or not, because nothing can be stored."""
        return Receipt(self.put_off(source, NotStarted()), "error", [])

    def greet(self, source: Source | None, arrival: Arrival, loaded: Loaded = NO_ACCOUNTS) -> Reply:
        """Put off handshakes, too, so that nobody registers an address that cannot receive yet."""
        return self.put_off(source, NotStarted())

    def turn_away(self, source: Source | None, arrival: Arrival, error: Rejected) -> Reply:
        """Put off what would be rejected, because there is no store to note it in."""
        return self.put_off(source, NotStarted())


STEP: Final = 0.02
"""Seconds between two looks. An answer is due one step before the budget ends, so that it is never late."""


class AckDeadlines:
    """Deadlines of the pending replies of one receiver, on one loop.

    Because an arrival should pay for none of it, it is only added to a list; its time counts from the last look.
    """

    def __init__(self) -> None:
        self._new: dict[float, list[Pending]] = {}
        """Arrivals since the last look, by their budget."""
        self._waiting: list[tuple[float, list[Pending]]] = []
        """Earlier arrivals, with the moment at which they are given up."""
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, pending: Pending, budget: float) -> None:
        """Reply 503 to an arrival when its budget is spent."""
        new = self._new.get(budget)
        if new is None:
            new = self._new[budget] = []
        new.append(pending)
        if self._timer is None:
            self._looked_at = pending.loop.time()
            self._timer = pending.loop.call_later(STEP, self._look, pending.loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        watched = [*self._waiting, *((self._looked_at + budget - STEP, new) for budget, new in self._new.items())]
        self._new, self._waiting, self._looked_at = {}, [], now
        for due, group in watched:
            undecided = [pending for pending in group if not pending.is_decided]
            if due <= now:
                _give_up(undecided)
            elif undecided:
                self._waiting.append((due, undecided))
        self._timer = loop.call_later(STEP, self._look, loop) if self._waiting or self._new else None


def _give_up(undecided: Iterable[Pending]) -> None:
    """Withdraw an arrival that is not being written yet; if it is, the sender's retry finds it by its key."""
    for pending in undecided:
        pending.abandoned = True
        pending.refuse(StoreUnavailable("The store did not answer within this source's budget."))


KEEP_EMITTED: Final = 30 * 86400.0
"""Seconds for which the key of an emitted event is remembered."""


@dataclass(slots=True, frozen=True)
class Draft:
    """An event to be emitted, with its body encoded at that moment."""

    source: str
    type: str
    body: bytes
    key: str | None
    subject: str | None
    hops: int = 0
    """Inboxes that the event had come through whose handler emits this: a circle may lead through a handler."""
    account: str | None = None
    at: float = field(default_factory=clock.perf)

    @property
    def routed(self) -> set[str]:
        """Return the names whose stored routes and subscriptions it may match."""
        named = {self.source, subscribers(None)}
        return named if self.account is None else {*named, subscribers(self.account)}


def draft(
    source: str,
    type: str,
    payload: object,
    key: str | None,
    subject: str | None,
    hops: int = 0,
    account: str | int | None = None,
) -> Draft:
    """Draft an event: bytes are the body, anything else becomes JSON. Raises ConfigError for what is no account, and
    TypeError for a key or subject that is not text."""
    for name, value in (("key", key), ("subject", subject)):
        if not isinstance(value, str | None):
            raise TypeError(f"{name} must be text, not {value.__class__.__name__}.")
    body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return Draft(source, type, body, key, subject, hops, None if account is None else check_account_id(account))


class EmitterHost(Protocol):
    """The inbox as its emitter needs it. Its fields are read at each emission, because `start()` builds some of
    them."""

    @property
    def observer(self) -> ArrivalObserver: ...

    @property
    def store(self) -> Store: ...

    @property
    def bodies(self) -> Bodies: ...

    def plan_deliveries(self, arrival: Arrival, item: Item) -> Sequence[Planned]: ...

    async def load_routes(self, sources: Collection[str]) -> None:
        """Load the stored routes of these sources, before deliveries are planned."""

    def load_routes_blocking(self, sources: Collection[str]) -> None: ...
    async def keep_media(self, event: StoredEvent) -> list[KeptMedia]: ...


class Emitter:
    """Receiver for events of the program's own. A source gets its id when it is first named."""

    def __init__(self, inbox: EmitterHost) -> None:
        self._inbox = inbox
        self._source_ids: dict[str, int] = {}
        self._registering = asyncio.Lock()

    @property
    def store(self) -> Store:
        return self._inbox.store

    async def keep_media(self, event: StoredEvent) -> list[KeptMedia]:
        """Return the files that an event refers to; those that are not kept yet are fetched."""
        return await self._inbox.keep_media(event)

    async def emit(self, draft: Draft) -> str:
        """Store an event in a commit of its own; return its id, or that of the first one with its key."""
        await self._register([draft.source])
        await self._inbox.load_routes(draft.routed)
        intake = self._intake(draft)
        bodies = self._inbox.bodies
        is_large = len(draft.body) > bodies.above
        (verdict,) = await (bodies.record(self.store, intake) if is_large else self.store.record(intake)).future
        self._notify(draft, intake, verdict)
        return str(verdict.event_id)

    async def emit_in(self, tx: Any, draft: Draft) -> str:
        """Store an event if, and when, the caller's transaction commits."""
        if draft.source not in self._source_ids:  # on a connection of its own, also where this inbox was never started
            await asyncio.to_thread(self._register_blocking, [draft.source])
        await self._inbox.load_routes(draft.routed)
        (verdict,) = await self.store.record_in(tx, self._intake(draft))
        return str(verdict.event_id)

    def emit_in_blocking(self, tx: Any, draft: Draft) -> str:
        self._register_blocking([draft.source])
        self._inbox.load_routes_blocking(draft.routed)
        (verdict,) = self.store.record_in_blocking(tx, self._intake(draft))
        return str(verdict.event_id)

    async def emissions(self, drafts: Sequence[Draft]) -> list[Emission]:
        """Return what a handler has emitted, to be settled with its delivery."""
        await self._register(one.source for one in drafts)
        await self._inbox.load_routes({name for one in drafts for name in one.routed})
        return [self._emission(one) for one in drafts]

    def emissions_blocking(self, drafts: Sequence[Draft]) -> list[Emission]:
        self._register_blocking(one.source for one in drafts)
        self._inbox.load_routes_blocking({name for one in drafts for name in one.routed})
        return [self._emission(one) for one in drafts]

    async def _register(self, sources: Iterable[str]) -> None:
        if new := self._unknown(sources):
            async with self._registering:  # many first events at once look up the id once
                if new := self._unknown(new):
                    self._source_ids |= (await self.store.register_names(new, [])).sources

    def _register_blocking(self, sources: Iterable[str]) -> None:
        if new := self._unknown(sources):
            self._source_ids |= self.store.register_names_blocking(new, []).sources

    def _unknown(self, sources: Iterable[str]) -> list[str]:
        return [source for source in sources if source not in self._source_ids]

    def _intake(self, draft: Draft) -> Intake:
        key, body = draft.key, draft.body
        item = Item(
            new_id(),
            bound_text(draft.type, 200),
            None if key is None else bound_text(key),
            None if key is None else key_hash(draft.source, (key,), draft.account),
            KEEP_EMITTED,
            None if draft.subject is None else bound_text(draft.subject),
            body,
            digest(body),
            marks=Mark.emitted if key is not None else Mark.emitted | Mark.unkeyed,
            account=draft.account,
        )
        item.deliveries = self._inbox.plan_deliveries(Arrival(draft.source, (), body), item)
        head = f"EMIT {draft.source}\r\ncontent-type: application/json".encode()
        if draft.hops:
            head += b"\r\n%s: %d" % (HOPS, draft.hops)
        return Intake(item.event_id, self._source_ids[draft.source], head, [item])

    def _emission(self, draft: Draft) -> Emission:
        intake = self._intake(draft)
        return Emission(intake, lambda verdict: self._notify(draft, intake, verdict))

    def _notify(self, draft: Draft, intake: Intake, verdict: Verdict) -> None:
        ids = [str(verdict.event_id)]
        seconds = clock.perf() - draft.at
        self._inbox.observer.arrival(draft.source, [verdict.outcome], seconds, len(draft.body), intake.items, ids)
