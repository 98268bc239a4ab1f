"""Events of the application's own: from what a program says to what the store keeps, the same way for all of them.

`Inbox.emit` commits one by itself, `Inbox.emit_in` in a transaction that the caller owns, and what a handler emits is
committed with the end of its delivery: it exists if, and only if, that delivery is done (R54).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from oncehook import clock
from oncehook.deliveries import Emission
from oncehook.keys import bounded
from oncehook.model import HOPS, Arrival, Intake, Item, Kind, Mark, Verdict, digest, key_hash, new_id, show_id
from oncehook.routes import Planner
from oncehook.store.base import Store

KEEP: Final = 30 * 86400.0
"""Seconds for which the key of an emitted event is remembered."""


class Witness(Protocol):
    """Who is told what came in, for logs and metrics. `observe` has the real one, which `receive` tells more."""

    def arrival(
        self, source: str, outcomes: Sequence[str], seconds: float, size: int, items: Sequence[Item], ids: list[str]
    ) -> None:
        """An arrival was answered after its commit, or acknowledged without one (`ignored`, `handshake`).

        A batch has one outcome for each of its parts: those of the items, in their order, then those ignored.
        """


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

    def __init__(self, store: Store, plan: Planner, witness: Witness) -> None:
        self._store = store
        self._plan = plan
        self._witness = witness
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
                    self._numbers |= (await self._store.enroll(new, [])).sources

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
        self._witness.arrival(said.source, [verdict.outcome], seconds, len(said.body), intake.items, ids)
