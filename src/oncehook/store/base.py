"""The store, told in the verbs of the domain.

An engine implements `Store`; nothing above this file knows which one it talks to. Each verb is one
transaction. The verbs follow the way of the data: intake (an arrival is kept), look (somebody reads),
house (the store looks after itself).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from oncehook.model import (
    Check,
    Engine,
    Figures,
    Intake,
    Rejection,
    SchemaState,
    StoredArrival,
    StoredEvent,
    Verdict,
)

KEPT_ARRIVALS = 20
"""Later arrivals kept per event, the latest ones; `copies` counts them all (DESIGN.md 8.1)."""

CONFLICT_SLOTS = KEPT_ARRIVALS
"""Conflicts have slots of their own, so that a storm of duplicates cannot push them out."""

KEPT_REJECTIONS = 1000
"""Size of the ring of rejected arrivals."""


@dataclass(slots=True, frozen=True)
class Numbers:
    """The small numbers that stand for names in the store. A number is never given twice."""

    sources: Mapping[str, int]
    destinations: Mapping[str, int]


Watch = Callable[[str, float], None]
"""Is told the name of an operation and its seconds."""


def unwatched(operation: str, seconds: float) -> None:
    """Nobody looks."""


class Pending:
    """An intake that waits for the next group commit, and the future its sender waits on."""

    __slots__ = ("abandoned", "future", "intake", "size")

    def __init__(self, intake: Intake, future: asyncio.Future[list[Verdict]]) -> None:
        self.intake = intake
        self.future = future
        self.size = len(intake.raw or b"") + sum(len(item.body) for item in intake.items)
        self.abandoned = False
        """Its sender was told 503 meanwhile: do not start writing it."""


def answer(batch: Sequence[Pending], verdicts: Sequence[list[Verdict]]) -> None:
    """Resolve the futures of a committed group. A sender that has gone is no reason to fail the others."""
    for pending, verdict in zip(batch, verdicts, strict=True):
        if not pending.future.done():
            pending.future.set_result(verdict)


def refuse(batch: Sequence[Pending], error: BaseException) -> None:
    """Fail the futures of a group that was not committed."""
    for pending in batch:
        if not pending.future.done():
            pending.future.set_exception(error)
            pending.future.exception()  # seen: its sender may have gone, and that is nothing to log


class Store(Protocol):
    """What oncehook asks of a database."""

    engine: Engine
    watch: Watch
    """Told on the loop how long each commit took; may be replaced before `open`."""

    # -- house: opening --------------------------------------------------------------------

    async def open(self, *, migrate: bool = True, write: bool = True) -> None:
        """Connect, check that the engine keeps its promises (R2, R61, R66), bring the schema up to date.

        `write=False` opens for reading only, beside a process that writes.
        Raises MigrationNeeded, SchemaTooNew, StoreHeld or StoreUnavailable.
        """

    async def close(self) -> None:
        """Commit what was taken in, refuse what was not, and let go of the database."""

    async def enroll(self, sources: Iterable[str], destinations: Iterable[str]) -> Numbers:
        """Give every name its number, once and for ever."""

    # -- intake ----------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        """Join the next group commit: keys, events and deliveries of this arrival, all or nothing.

        `pending.future` resolves after the commit, with one verdict per item in their order; it fails with
        StoreUnavailable when the store cannot tell, in which case the sender's retry finds out (R4).
        Raises Overloaded at once when too much waits already. Must be called on the loop that opened the store.
        """

    async def record_rejections(self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, str], int]) -> None:
        """Add to the bounded ring of rejections, and to the counters: (source number, what) -> how many."""

    # -- look ------------------------------------------------------------------------------

    async def get_event(self, event_id: bytes) -> StoredEvent | None:
        """One event, whole."""

    async def find_events(
        self,
        *,
        source: str | None = None,
        subject: str | None = None,
        before: bytes | None = None,
        limit: int = 50,
    ) -> list[StoredEvent]:
        """Events, newest first, older than the cursor `before`."""

    async def find_key(self, key_hash: bytes) -> bytes | None:
        """The event that stands for a key inside its window."""

    async def arrivals_of(self, event_id: bytes) -> list[StoredArrival]:
        """Later arrivals of an event, oldest first; at most KEPT_ARRIVALS duplicates and as many conflicts."""

    async def batch_body(self, batch_id: bytes) -> tuple[bytes, bytes] | None:
        """Head and raw body of the request that a split event came in."""

    async def recent_rejections(self, limit: int = 50) -> list[Rejection]:
        """The latest rejections, newest first."""

    async def figures(self, since: datetime | None = None) -> Figures:
        """Sums of the counters since a moment: received, accepted, duplicate, conflict, rejected per source."""

    # -- house -----------------------------------------------------------------------------

    async def ping(self) -> None:
        """Prove that the store can commit a write right now; raises StoreUnavailable."""

    async def schema_state(self) -> SchemaState:
        """How far the schema is."""

    async def check(self) -> list[Check]:
        """Look for what must never be: the conservation laws (R68), by scanning. For `doctor`; may take a while."""

    async def size(self) -> int:
        """Bytes on disk."""
