"""The front door: from (source, headers, body) to an answer that is only given after the commit.

No framework in here. Verify first, on the bytes as they came; only then read, split, key and hand over to the
store, which decides what is new. Every way out is a `Reply`: a genuine arrival gets its answer after the commit, a
forged one learns nothing, and whatever goes wrong on our side is 503, so that the sender tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final, Protocol

import msgspec

from oncehook import clock, payload
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
    Arrival,
    Emission,
    Intake,
    Item,
    Kind,
    Mark,
    Outcome,
    Verdict,
    digest,
    key_hash,
    new_id,
    pack_head,
    read_hops,
    show_id,
)
from oncehook.routes import Planner
from oncehook.rules import Reading, RuleContext, bounded, key_text
from oncehook.sources import PLAIN, Odd, Reply, Source
from oncehook.store.base import Pending, Store

STEP: Final = 0.02
"""Seconds between two looks. An answer is due one step before the budget ends, so that it is never late."""


class AckDeadlines:
    """Watches over the arrivals of one receiver, on one loop."""

    def __init__(self) -> None:
        self._lines: dict[float, deque[tuple[float, Pending]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, pending: Pending, budget: float) -> None:
        """Give up on this arrival when its budget is spent."""
        loop = pending.future.get_loop()  # asking which one is running would cost a system call
        line = self._lines.get(budget)
        if line is None:
            line = self._lines[budget] = deque()
        line.append((loop.time() + budget - STEP, pending))
        if self._timer is None:
            self._timer = loop.call_later(STEP, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        waiting = False
        for line in self._lines.values():
            while line and (line[0][1].future.done() or line[0][0] <= now):
                _give_up(line.popleft()[1])
            waiting = waiting or bool(line)
        self._timer = loop.call_later(STEP, self._look, loop) if waiting else None


def _give_up(pending: Pending) -> None:
    """What the writer has not taken yet is withdrawn; what it has, the key will tell at the sender's next try."""
    if not pending.future.done():
        pending.abandoned = True
        pending.future.set_exception(StoreUnavailable("The store did not answer within this source's budget."))


KEEP: Final = 30 * 86400.0
"""Seconds for which the key of an emitted event is remembered."""


@dataclass(slots=True, frozen=True)
class Draft:
    """What a program wants to emit; its body is fixed when it says so."""

    source: str
    type: str
    body: bytes
    key: str | None
    subject: str | None
    hops: int = 0
    """How many inboxes the event had come through whose handler emits this: a circle may lead through a handler."""
    at: float = field(default_factory=clock.perf)


def draft(source: str, type: str, payload: object, key: str | None, subject: str | None, hops: int = 0) -> Draft:
    """Bytes are the body as they are, anything else becomes JSON."""
    body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return Draft(source, type, body, key, subject, hops)


class Emitter:
    """Makes intakes of drafts. One per inbox; sources get their number when they are first named."""

    def __init__(self, store: Store, plan: Planner, observer: ArrivalObserver) -> None:
        self._store = store
        self._plan = plan
        self._observer = observer
        self._numbers: dict[str, int] = {}
        self._enrolling = asyncio.Lock()

    async def emit(self, said: Draft) -> str:
        """Keep it, in a commit of its own; returns the id of the event that stands."""
        await self._enroll([said.source])
        intake = self._intake(said)
        (verdict,) = await self._store.record(intake).future
        self._tell(said, intake, verdict)
        return show_id(Kind.event, verdict.event_id)

    async def emit_in(self, tx: Any, said: Draft) -> str:
        """Keep it if, and when, the caller's transaction commits."""
        if said.source not in self._numbers:  # on a connection of its own: also where this inbox was never started
            await asyncio.to_thread(self._enroll_blocking, [said.source])
        (verdict,) = await self._store.record_in(tx, self._intake(said))
        return show_id(Kind.event, verdict.event_id)

    def emit_in_blocking(self, tx: Any, said: Draft) -> str:
        """The same, on a thread."""
        self._enroll_blocking([said.source])
        (verdict,) = self._store.record_in_blocking(tx, self._intake(said))
        return show_id(Kind.event, verdict.event_id)

    async def emissions(self, drafts: Sequence[Draft]) -> list[Emission]:
        """What a handler has emitted, to be settled with its delivery."""
        await self._enroll(one.source for one in drafts)
        return [self._emission(one) for one in drafts]

    def emissions_blocking(self, drafts: Sequence[Draft]) -> list[Emission]:
        """The same, on a thread (PostgreSQL)."""
        self._enroll_blocking(one.source for one in drafts)
        return [self._emission(one) for one in drafts]

    async def _enroll(self, sources: Iterable[str]) -> None:
        if new := self._unknown(sources):
            async with self._enrolling:  # many first events at once ask for the number once
                if new := self._unknown(new):
                    self._numbers |= (await self._store.register_names(new, [])).sources

    def _enroll_blocking(self, sources: Iterable[str]) -> None:
        if new := self._unknown(sources):
            self._numbers |= self._store.enroll_blocking(new, []).sources

    def _unknown(self, sources: Iterable[str]) -> list[str]:
        return [source for source in sources if source not in self._numbers]

    def _intake(self, said: Draft) -> Intake:
        key, body = said.key, said.body
        item = Item(
            new_id(),
            bounded(said.type, 200),
            None if key is None else bounded(key),
            None if key is None else key_hash(said.source, (key,)),
            KEEP,
            None if said.subject is None else bounded(said.subject),
            body,
            digest(body),
            marks=Mark.emitted if key is not None else Mark.emitted | Mark.unkeyed,
        )
        item.deliveries = self._plan(Arrival(said.source, (), body), item)
        head = f"EMIT {said.source}\r\ncontent-type: application/json".encode()
        if said.hops:
            head += b"\r\n%s: %d" % (HOPS, said.hops)
        return Intake(item.event_id, self._numbers[said.source], head, [item])

    def _emission(self, said: Draft) -> Emission:
        intake = self._intake(said)
        return Emission(intake, lambda verdict: self._tell(said, intake, verdict))

    def _tell(self, said: Draft, intake: Intake, verdict: Verdict) -> None:
        ids = [show_id(Kind.event, verdict.event_id)]
        seconds = clock.perf() - said.at
        self._observer.arrival(said.source, [verdict.outcome], seconds, len(said.body), intake.items, ids)


log = logging.getLogger("oncehook.receive")

INDIRECT: Final = frozenset(
    {
        *(b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip"),  # a proxy's
        *(b"origin", b"sec-fetch-site"),  # a browser's: any page may make it send
    }
)
"""Headers that tell that a request does not come from the program at the other end. So does X-Forwarded-anything."""

RETRY_AFTER: Final = (b"retry-after", b"5")
JSON: Final = (b"content-type", b"application/json")


Revive = Callable[[bytes], Awaitable[None]]
"""Brings back what ended as a dead letter of this event, where its source asks for it."""


class ArrivalObserver(Protocol):
    """Observer of arrivals, for logs and metrics; `observe` has the real one."""

    def arrival(
        self, source: str, outcomes: Sequence[str], seconds: float, size: int, items: Sequence[Item], ids: list[str]
    ) -> None:
        """An arrival was answered after its commit, or acknowledged without one (`ignored`, `handshake`).

        A batch has one outcome for each of its parts: those of the items, in their order, then those ignored.
        """

    def rejected(self, arrival: Arrival, source: Source | None, error: Rejected) -> None:
        """An arrival was turned away."""

    def unavailable(self, source: str, error: StoreUnavailable) -> None:
        """An arrival could not be stored, and its sender was asked to try again."""


class Receipt(msgspec.Struct):
    """The answer to one arrival, for a route of one's own: the reply, and what it says."""

    reply: Reply
    outcome: str
    event_ids: list[str]


class Begun(msgspec.Struct):
    """An arrival that the store has been asked to keep."""

    source: Source
    arrival: Arrival
    parts: int
    items: Sequence[Item]
    pending: Pending
    started: float


class Receiver:
    """Takes arrivals for a set of sources into a store."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        store: Store,
        plan: Planner,
        observer: ArrivalObserver,
        revive: Revive | None = None,
    ) -> None:
        self.sources = sources
        self._store = store
        self._plan = plan
        self._observer = observer
        self._revive = revive
        self._patience = AckDeadlines()

    @property
    def largest_body(self) -> int:
        """Bytes of the largest body that any source takes."""
        limits: list[int] = [source.settings.max_body for source in self.sources.values()]
        return max(limits, default=PLAIN.settings.max_body)

    async def receive(self, arrival: Arrival) -> Receipt:
        """Take in one arrival for the source of its name."""
        return await self.take(self.sources.get(arrival.source), arrival)

    async def take(self, source: Source | None, arrival: Arrival) -> Receipt:
        """Take in one arrival at a source's address; None: nobody lives there.

        The address decides, not the name: a source with a path of its own is not found under its name (S8).
        Never raises: whatever happens becomes the sender's answer.
        """
        begun = self.begin(source, arrival)
        return begun if isinstance(begun, Receipt) else await self.complete(begun)

    async def complete(self, begun: Begun) -> Receipt:
        """Wait for the store's decision, do what follows from it, and return the answer."""
        try:
            verdicts = await begun.pending.future
            if begun.source.settings.revive_dead and self._revive is not None:
                await self._bring_back(verdicts)
        except asyncio.CancelledError:
            begun.pending.abandoned = True  # nobody hears the answer: what is not taken yet is withdrawn
            raise
        except Exception as error:
            return self._failed(begun.source, begun.arrival, error)
        return self.finish(begun)

    def begin(self, source: Source | None, arrival: Arrival) -> Begun | Receipt:
        """Everything up to the store: what was handed over to it, or the answer where that is known already."""
        started = clock.perf()
        try:
            source = self._admit(source, arrival)
            if source.base.handshake is not None and (reply := source.base.handshake(arrival, source)) is not None:
                self._observer.arrival(source.name, ("handshake",), clock.perf() - started, len(arrival.body), (), [])
                return Receipt(reply, "handshake", [])
            parts, items = self._items(source, arrival)
            if not items:
                outcomes = ("ignored",) * (parts or 1)
                self._observer.arrival(source.name, outcomes, clock.perf() - started, len(arrival.body), (), [])
                return Receipt(_answer(source, arrival, {"status": "ignored"}), "ignored", [])
            pending = self._hand_over(source, arrival, items, split=parts > 1)
            return Begun(source, arrival, parts, items, pending, started)
        except Exception as error:
            return self._failed(source, arrival, error)

    def finish(self, begun: Begun) -> Receipt:
        """The answer, once the store has decided."""
        try:
            return self._acknowledge(begun, begun.pending.future.result())
        except Exception as error:
            return self._failed(begun.source, begun.arrival, error)

    def _failed(self, source: Source | None, arrival: Arrival, error: Exception) -> Receipt:
        if isinstance(error, Rejected):
            return Receipt(self.turn_away(source, arrival, error), "rejected", [])
        if isinstance(error, StoreUnavailable):
            return Receipt(self.put_off(source, error), "error", [])
        return Receipt(self._stumble(source, error), "error", [])

    def greet(self, source: Source | None, arrival: Arrival) -> Reply:
        """Answer anything but a POST: a provider's handshake, or the same refusal that a forged arrival gets."""
        started = clock.perf()
        try:
            if source is None or source.base.handshake is None:
                raise SignatureInvalid("unknown source" if source is None else "not a POST")
            self._check_peer(source, arrival)
            reply = source.base.handshake(arrival, source)
            if reply is None:
                raise SignatureInvalid("handshake")
        except Rejected as error:
            refusal = self.turn_away(source, arrival, error)
            return Reply(403, refusal.body) if _ASKED_BY_META in arrival.query else refusal
        except Exception as error:
            return self._stumble(source, error)
        self._observer.arrival(source.name, ("handshake",), clock.perf() - started, len(arrival.body), (), [])
        return reply

    def turn_away(self, source: Source | None, arrival: Arrival, error: Rejected) -> Reply:
        """Note that an arrival is not taken, and say so."""
        self._observer.rejected(arrival, source, error)
        return Reply(error.status, _sentence(str(error), error.code))

    def _stumble(self, source: Source | None, error: Exception) -> Reply:
        # A fault of ours is never the sender's: it tries again, and we read the log.
        name = _name(source)
        ration.log(log, logging.ERROR, "receive.failed", {"source": name}, kind=name, exc_info=True)
        return self.put_off(source, StoreUnavailable(str(error)))

    def put_off(self, source: Source | None, error: StoreUnavailable) -> Reply:
        """Note that an arrival cannot be taken now, and ask its sender to try again."""
        self._observer.unavailable(_name(source), error)
        return try_again(source, error.code)

    def _admit(self, source: Source | None, arrival: Arrival) -> Source:
        """Let only genuine arrivals pass. Nothing is parsed before this, and no key is touched (R8, S1)."""
        hops = 0
        for name, value in arrival.headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise Encoded
            if name == HOPS:
                hops = max(hops, read_hops(value))
        if source is None:
            # Cost a stranger the same time as a wrong signature would (S8).
            digest(arrival.body)
            raise SignatureInvalid("unknown source")
        self._check_peer(source, arrival)
        source.verifier(arrival)
        if hops > MOST_HOPS:  # only now: whoever cannot sign learns nothing about this source (S8)
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

    def _items(self, source: Source, arrival: Arrival) -> tuple[int, list[Item]]:
        """How many parts the arrival has, and the events to be made of them: less where types are ignored."""
        parts = None if source.split is None else _parts(source, arrival)
        if parts is not None and len(parts) != 1:
            made = [self._part(source, arrival, part, body) for part, body in parts]
            return len(parts), [item for item in made if item is not None]
        # A batch of one is its own envelope: it is read as the part it holds, and its bytes stay as they came.
        if parts is not None and not isinstance(parts[0][0], Odd):
            item = self._part(source, arrival, parts[0][0], arrival.body)
        else:
            reading = source.rules.read(arrival)
            item = self._item(source, arrival, arrival.body, reading if parts is None else _odd(reading))
        if item is not None and source.proof is not None:
            item.proof = digest(b"proof", source.name.encode(), source.proof(arrival))
            item.is_bound = source.own is not None and source.own.read(RuleContext(arrival, arrival.body)) is not None
        return 1, [] if item is None else [item]

    def _part(self, source: Source, arrival: Arrival, part: Any, body: bytes) -> Item | None:
        data = part.part if isinstance(part, Odd) else part
        reading = source.rules.read_data(arrival, data, body)
        return self._item(source, arrival, body, _odd(reading) if isinstance(part, Odd) else reading, data)

    def _item(
        self, source: Source, arrival: Arrival, body: bytes, reading: Reading, data: Any = payload.MISSING
    ) -> Item | None:
        """One event to be, or None when its type is ignored."""
        mask = source.body_masking
        kind = mask.text(reading.type or "event")
        if source.ignored is not None and source.ignored.match(kind):
            return None
        if source.redaction is not None:
            body, data = source.redaction(body, data), payload.MISSING
        if (masked := mask(body)) is not body:
            body, data = masked, payload.MISSING
        marks = Mark.unparsed if reading.unparsed else Mark.none
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
            None if parts is None else bounded(key_text(list(map(mask.text, parts)))),
            None if parts is None else key_hash(source.name, parts),
            keep,
            mask.text(reading.subject),
            body,
            body_hash,
            reading.event_at,
            reading.rank,
            mask.text(reading.rank_scope),
            marks,
        )
        item.deliveries = self._plan(arrival, item)
        return item

    # -- to the store and back -----------------------------------------------------------------

    def _hand_over(self, source: Source, arrival: Arrival, items: Sequence[Item], *, split: bool) -> Pending:
        raw = arrival.body if split else None
        if raw is not None:
            raw = source.body_masking(raw if source.redaction is None else source.redaction(raw, payload.MISSING))
        head = source.masking(pack_head(arrival, source.masked, source.scheme.masked_query))
        arrival_id = new_id() if split else items[0].event_id
        pending = self._store.record(Intake(arrival_id, source.number, head, items, raw))
        self._patience.watch(pending, source.settings.budget)
        return pending

    async def _bring_back(self, verdicts: Sequence[Verdict]) -> None:
        """Before the answer: a sender that is told "duplicate" may never come again."""
        assert self._revive is not None
        for verdict in verdicts:
            if verdict.outcome is Outcome.duplicate:
                await self._revive(verdict.event_id)

    def _acknowledge(self, begun: Begun, verdicts: Sequence[Verdict]) -> Receipt:
        source, parts, items = begun.source, begun.parts, begun.items
        ids = [show_id(Kind.event, verdict.event_id) for verdict in verdicts]
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


class ClosedReceiver(Receiver):
    """The front door of an inbox that is not started: every sender is asked to try again, and the log says why."""

    def begin(self, source: Source | None, arrival: Arrival) -> Receipt:
        """Put every arrival off, genuine or not: nothing can be stored."""
        return Receipt(self.put_off(source, NotStarted()), "error", [])

    def greet(self, source: Source | None, arrival: Arrival) -> Reply:
        """Put handshakes off, too: whoever registers an address should learn that nothing is taken there yet."""
        return self.put_off(source, NotStarted())

    def turn_away(self, source: Source | None, arrival: Arrival, error: Rejected) -> Reply:
        """Put off what would be rejected: there is no store to note it in."""
        return self.put_off(source, NotStarted())


_ASKED_BY_META: Final = b"hub.verify_token"
"""In the query of a handshake whose sender expects 403 where the token is wrong. Whether there is such a source, the
answer must not tell (S8)."""

MOST_PARTS: Final = 10_000
MOST_PART_BYTES: Final = 32 << 20
"""A batch that would become more than this is kept whole: each part repeats its envelope, so a small body could grow
without bound."""


def _parts(source: Source, arrival: Arrival) -> list[tuple[Any, bytes]] | None:
    """The parts of a batch and the bytes of each, or None when it cannot be told apart: then it is kept whole.

    A shape that the splitter did not expect must not lose a verified event (S11).
    """
    assert source.split is not None
    parts: list[tuple[Any, bytes]] = []
    # Not under the key of its first item: where that one is known already, all the others would be its conflict.
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
    """What is read from a part of the wrong shape: whatever stands where the key should be is not believed."""
    return msgspec.structs.replace(reading, key=None, unparsed=True)


def is_direct(arrival: Arrival) -> bool:
    """Whether an arrival comes straight from this machine, and not through a tunnel that ends on it."""
    if not arrival.peer:
        return True  # handed over by a program of ours
    try:
        if not ip_address(arrival.peer).is_loopback:
            return False
    except ValueError:
        return False
    return not any(name in INDIRECT or name.startswith(b"x-forwarded-") for name, _ in arrival.headers)


def try_again(source: Source | None, code: str = StoreUnavailable.code) -> Reply:
    """The answer to what cannot be stored now: only the code, for a sentence may name files and hosts of ours."""
    status = 503 if source is None else source.base.unavailable
    return Reply(status, _sentence("Cannot store this now; try again.", code), (JSON, RETRY_AFTER))


def _sum_up(outcomes: Sequence[str], ids: list[str]) -> tuple[Outcome, dict[str, object]]:
    """The answer to a batch: it counts as accepted when anything in it was new."""
    outcome = Outcome.accepted if Outcome.accepted in outcomes else Outcome.duplicate
    return outcome, {
        "status": outcome,
        "accepted": outcomes.count(Outcome.accepted),
        "duplicates": outcomes.count(Outcome.duplicate),
        "conflicts": outcomes.count(Outcome.conflict),
        "event_ids": ids,
    }


def _name(source: Source | None) -> str:
    # An unknown source's name is a stranger's text, and this one becomes a label.
    return "unknown" if source is None else source.name


def _sentence(text: str, code: str) -> bytes:
    return msgspec.json.encode({"error": text, "code": code})


def _answer(source: Source, arrival: Arrival, body: Mapping[str, object]) -> Reply:
    if source.base.answer is None:
        return Reply(source.base.accepted, msgspec.json.encode(body))
    return source.base.answer if isinstance(source.base.answer, Reply) else source.base.answer(arrival)
