"""The front door: from (source, headers, body) to an answer that is only given after the commit.

No framework in here. Verify first, on the bytes as they came; only then read, split, key and hand over to the
store, which decides what is new. Every way out is a `Reply`: a genuine arrival gets its answer after the commit, a
forged one learns nothing, and whatever goes wrong on our side is 503, so that the sender tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, Protocol

import msgspec

from oncehook import clock, payload
from oncehook.errors import (
    Encoded,
    KeyConflict,
    KeyRequired,
    Rejected,
    SignatureInvalid,
    StoreUnavailable,
    TooLarge,
)
from oncehook.keys import Reading, bounded, key_text
from oncehook.model import (
    Arrival,
    Intake,
    Item,
    Kind,
    Mark,
    Outcome,
    Planned,
    Verdict,
    digest,
    key_hash,
    new_id,
    pack_head,
    show_id,
)
from oncehook.sources import Reply, Source
from oncehook.store.base import Pending, Store

log = logging.getLogger("oncehook.receive")

Plan = Callable[[Source, Arrival, Item], Sequence[Planned]]

FORWARDING: Final = frozenset(
    {
        b"forwarded",
        b"via",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-real-ip",
        b"cf-connecting-ip",
    }
)
RETRY_AFTER: Final = (b"retry-after", b"5")
JSON: Final = (b"content-type", b"application/json")


class Witness(Protocol):
    """Who is told what happened, for logs and metrics. `observe` has the real one."""

    def arrival(
        self, source: str, outcome: str, seconds: float, size: int, items: Sequence[Item], ids: list[str]
    ) -> None:
        """An arrival was answered after its commit, or acknowledged without one (`ignored`, `handshake`)."""

    def rejected(self, arrival: Arrival, source: Source | None, error: Rejected) -> None:
        """An arrival was turned away."""

    def unavailable(self, source: str, error: StoreUnavailable) -> None:
        """An arrival could not be stored, and its sender was asked to try again."""


@dataclass(slots=True)
class Receipt:
    """The answer to one arrival, for a route of one's own: the reply, and what it says."""

    reply: Reply
    outcome: str
    event_ids: list[str]


class Receiver:
    """Takes arrivals for a set of sources into a store."""

    def __init__(self, sources: Mapping[str, Source], store: Store, plan: Plan, witness: Witness) -> None:
        self.sources = sources
        self._store = store
        self._plan = plan
        self._witness = witness

    async def receive(self, arrival: Arrival) -> Receipt:
        """Take one arrival in. Never raises: whatever happens becomes the sender's answer."""
        started = clock.perf()
        source = self.sources.get(arrival.source)
        try:
            source = self._admit(arrival, source)
            if source.handshake is not None and (reply := source.handshake(arrival, source)) is not None:
                self._witness.arrival(source.name, "handshake", clock.perf() - started, len(arrival.body), (), [])
                return Receipt(reply, "handshake", [])
            items = self._items(source, arrival)
            if not items:
                self._witness.arrival(source.name, "ignored", clock.perf() - started, len(arrival.body), (), [])
                return Receipt(_answer(source, {"status": "ignored"}), "ignored", [])
            verdicts = await self._keep(source, arrival, items)
            return self._acknowledge(source, arrival, items, verdicts, started)
        except Rejected as error:
            self._witness.rejected(arrival, source, error)
            return Receipt(_refusal(error, source), "rejected", [])
        except StoreUnavailable as error:
            self._witness.unavailable(arrival.source, error)
            return Receipt(_try_again(error, source), "error", [])
        except Exception as error:
            # A fault of ours is never the sender's: it tries again, and we read the log.
            log.exception("receive.failed", extra={"source": arrival.source})
            unavailable = StoreUnavailable(str(error))
            self._witness.unavailable(arrival.source, unavailable)
            return Receipt(_try_again(unavailable, source), "error", [])

    def greet(self, arrival: Arrival) -> Reply:
        """Answer anything but a POST: a provider's handshake, or the same refusal that a forged arrival gets."""
        source = self.sources.get(arrival.source)
        if source is None or source.handshake is None or (source.loopback_only and not is_direct(arrival)):
            return _refusal(SignatureInvalid(), None)
        return source.handshake(arrival, source) or _refusal(SignatureInvalid(), None)

    def _admit(self, arrival: Arrival, source: Source | None) -> Source:
        """Let only genuine arrivals pass. Nothing is parsed before this, and no key is touched (R8, S1)."""
        for name, value in arrival.headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise Encoded
        if source is None:
            # Cost a stranger the same time as a wrong signature would (S8).
            digest(arrival.body)
            raise SignatureInvalid("unknown source")
        if len(arrival.body) > source.max_body:
            raise TooLarge
        if source.loopback_only and not is_direct(arrival):
            raise SignatureInvalid("not a direct request from this machine")
        if arrival.peer and not source.allows(arrival.peer):
            raise SignatureInvalid("address not allowed")
        source.verifier(arrival)
        return source

    # -- from bytes to items -------------------------------------------------------------------

    def _items(self, source: Source, arrival: Arrival) -> list[Item]:
        if source.split is not None:
            parts = self._parts(source, arrival)
            if parts is not None and len(parts) != 1:
                made = [self._part(source, arrival, part) for part in parts]
                return [item for item in made if item is not None]
            if parts is not None:  # a batch of one is its own envelope: the bytes stay as they came
                return self._whole(source, arrival, source.rules.read_data(arrival, parts[0], arrival.body))
        return self._whole(source, arrival, source.rules.read(arrival))

    def _whole(self, source: Source, arrival: Arrival, reading: Reading) -> list[Item]:
        item = self._item(source, arrival, arrival.body, reading)
        return [] if item is None else [item]

    def _parts(self, source: Source, arrival: Arrival) -> list[Any] | None:
        """The parts of a batch, or None when the body cannot be told apart: then it is kept whole."""
        assert source.split is not None
        try:
            return list(source.split(payload.parse(arrival.body), arrival))
        except payload.Unreadable:
            return None
        except Exception:  # a shape the splitter did not expect must not lose a verified event (S11)
            log.exception("split.failed", extra={"source": source.name})
            return None

    def _part(self, source: Source, arrival: Arrival, part: Any) -> Item | None:
        body = msgspec.json.encode(part)
        return self._item(source, arrival, body, source.rules.read_data(arrival, part, body), part)

    def _item(
        self, source: Source, arrival: Arrival, body: bytes, reading: Reading, data: Any = payload.MISSING
    ) -> Item | None:
        """One event to be, or None when its type is ignored."""
        kind = reading.type or "event"
        if source.ignored is not None and source.ignored.match(kind):
            return None
        if source.redaction is not None:
            body, data = source.redaction(body, data), payload.MISSING
        marks = Mark.unparsed if reading.unparsed else Mark.none
        body_hash = source.body_hash(body, data)
        parts, keep = reading.key, source.keep
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
            None if parts is None else bounded(key_text(parts)),
            None if parts is None else key_hash(source.name, parts),
            keep,
            reading.subject,
            body,
            body_hash,
            reading.event_at,
            reading.rank,
            reading.rank_scope,
            marks,
        )
        item.deliveries = self._plan(source, arrival, item)
        return item

    # -- to the store and back -----------------------------------------------------------------

    async def _keep(self, source: Source, arrival: Arrival, items: Sequence[Item]) -> list[Verdict]:
        raw = arrival.body if len(items) > 1 else None
        if raw is not None and source.redaction is not None:
            raw = source.redaction(raw, payload.MISSING)
        head = pack_head(arrival, source.masked, source.scheme.masked_query)
        intake = Intake(new_id(), source.number, head, items, raw)
        pending = self._store.record(intake)
        # Not asyncio.wait_for: a timer on the loop costs a tenth of it, and this is every arrival's path.
        timer = asyncio.get_running_loop().call_later(source.budget, _give_up, pending)
        try:
            return await pending.future
        finally:
            timer.cancel()

    def _acknowledge(
        self, source: Source, arrival: Arrival, items: Sequence[Item], verdicts: Sequence[Verdict], started: float
    ) -> Receipt:
        ids = [show_id(Kind.event, verdict.event_id) for verdict in verdicts]
        if len(verdicts) == 1:
            outcome = verdicts[0].outcome
            if outcome is Outcome.accepted:
                answer: dict[str, object] = {"status": outcome, "event_id": ids[0]}
            else:
                answer = {"status": outcome, "skipped": True, "event_id": ids[0]}
        else:
            outcome, answer = _sum_up(verdicts, ids)
        self._witness.arrival(source.name, outcome, clock.perf() - started, len(arrival.body), items, ids)
        if source.reject_conflicts and outcome is Outcome.conflict:
            return Receipt(_refusal(KeyConflict(), source), outcome, ids)
        return Receipt(_answer(source, answer), outcome, ids)


def is_direct(arrival: Arrival) -> bool:
    """Whether an arrival comes straight from this machine, and not through a tunnel that ends on it."""
    if not arrival.peer:
        return True  # handed over by a program of ours
    try:
        if not ip_address(arrival.peer).is_loopback:
            return False
    except ValueError:
        return False
    return not any(name in FORWARDING for name, _ in arrival.headers)


def _give_up(pending: Pending) -> None:
    """The budget is spent (R9). What the writer has not taken yet is withdrawn; what it has, the key will tell."""
    if not pending.future.done():
        pending.abandoned = True
        pending.future.set_exception(StoreUnavailable("The store did not answer within this source's budget."))


def _sum_up(verdicts: Sequence[Verdict], ids: list[str]) -> tuple[Outcome, dict[str, object]]:
    """The answer to a batch: it counts as accepted when anything in it was new."""
    outcomes = [verdict.outcome for verdict in verdicts]
    counts = {outcome: outcomes.count(outcome) for outcome in (Outcome.accepted, Outcome.duplicate, Outcome.conflict)}
    outcome = Outcome.accepted if counts[Outcome.accepted] else Outcome.duplicate
    return outcome, {
        "status": outcome,
        "accepted": counts[Outcome.accepted],
        "duplicates": counts[Outcome.duplicate],
        "conflicts": counts[Outcome.conflict],
        "event_ids": ids,
    }


def _answer(source: Source, body: Mapping[str, object]) -> Reply:
    return source.answer or Reply(200, msgspec.json.encode(body))


def _refusal(error: Rejected, source: Source | None) -> Reply:
    status = error.status
    if isinstance(error, SignatureInvalid) and source is not None:
        status = source.rejected
    return Reply(status, msgspec.json.encode({"error": str(error), "code": error.code}))


def _try_again(error: StoreUnavailable, source: Source | None) -> Reply:
    status = 503 if source is None else source.unavailable
    # The sentence may name files and hosts of ours: the sender gets the code only.
    body = {"error": "Cannot store this now; try again.", "code": error.code}
    return Reply(status, msgspec.json.encode(body), (JSON, RETRY_AFTER))
