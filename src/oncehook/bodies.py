"""Large bodies: kept as objects beside the store, which keeps a reference to each.

An object is what the column would have held, encrypted where the store encrypts, and is named by the day, the id of its
row and its own hash. It is written before the commit that refers to it, so a crash in between leaves an object without
a row: the sweep removes it when no commit can follow any more. No two rows share an object, so whoever removes a row
need not ask who else needs its body.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

from msgspec.structs import replace

from oncehook import clock
from oncehook.errors import BodyMissing, ObjectsUnavailable, Overloaded, StoreUnavailable
from oncehook.logs import ration
from oncehook.model import Check, Intake, Outcome, StoredEvent
from oncehook.objects import Objects
from oncehook.store.base import Pending, Store
from oncehook.store.cipher import Column, Reference

log = logging.getLogger("oncehook.bodies")

ABOVE: Final = 256 << 10
"""Bytes above which a body is large, unless the settings say otherwise."""
MOST_WAITING: Final = 64 << 20
"""Bytes of arrivals whose bodies are being written; more are asked to come again."""
GRACE: Final = 3600.0
"""Seconds after which no commit can follow any more for which an object was written."""
CLOSING: Final = 10.0
"""Seconds for which a stop waits for what is being written."""
_PAGE: Final = 1000

E = TypeVar("E", bound=StoredEvent)


class Bodies:
    """The large bodies of one store."""

    def __init__(self, store: Callable[[], Store], objects: Objects | None, above: int = ABOVE) -> None:
        """`objects`: None where large bodies stay in the store."""
        self.objects = objects
        self.above: float = math.inf if objects is None else above
        """Bytes above which a body is kept here."""
        self._store = store
        self._number: int | None = None
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # -- writing -------------------------------------------------------------------------------

    def record(self, store: Store, intake: Intake) -> Pending:
        """Write the large bodies of an arrival, then record it. Raises Overloaded when too many are being written."""
        loop = asyncio.get_running_loop()
        pending = Pending(intake, loop)
        if self._waiting + pending.size > MOST_WAITING and self._waiting:
            raise Overloaded
        self._waiting += pending.size
        task = loop.create_task(self._record(store, pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return pending

    async def _record(self, store: Store, pending: Pending) -> None:
        names: dict[int, str] = {}
        try:
            names = await self._write(pending.intake)
            if pending.abandoned:
                await self._remove(list(names.values()))
                return
            recorded = store.record(pending.intake)
        except BaseException as error:
            pending.refuse(error if isinstance(error, StoreUnavailable) else StoreUnavailable(str(error)))
            await self._remove(list(names.values()))
            if not isinstance(error, Exception):
                raise
            return
        finally:
            self._waiting -= pending.size
        try:
            verdicts = await recorded.future
        except Exception as error:
            pending.refuse(error)  # perhaps it was committed, so the objects stay; the sweep finds out
            return
        pending.answer(verdicts)
        outcomes = [verdict.outcome for verdict in verdicts]
        await self._remove([name for n, name in names.items() if n >= 0 and outcomes[n] is Outcome.duplicate])

    async def _write(self, intake: Intake) -> dict[int, str]:
        """Write what is large, and set the references; return names by the item's position, -1 for the whole body."""
        names: dict[int, str] = {}
        puts = []
        prefix = await self._prefix()
        for n, item in enumerate(intake.items):
            if len(item.body) > self.above:
                kept, reference = await asyncio.to_thread(self._prepare, item.body, "body", item.event_id)
                item.reference = reference
                names[n] = name_of(prefix, item.event_id, reference)
                puts.append((names[n], kept))
        if intake.raw is not None and len(intake.raw) > self.above:
            kept, reference = await asyncio.to_thread(self._prepare, intake.raw, "batch body", intake.arrival_id)
            intake.raw_reference = reference
            names[-1] = name_of(prefix, intake.arrival_id, reference)
            puts.append((names[-1], kept))
        assert self.objects is not None
        for name, kept in puts:
            await self.objects.put(name, kept)
        return names

    async def keep(self, body: bytes, column: Column, row: bytes) -> bytes:
        """Return a value as the row keeps it: a large one is written here first. Raises ObjectsUnavailable."""
        if len(body) <= self.above or self.objects is None:
            return self._store().cipher.encrypt(body, column, row)
        kept, reference = await asyncio.to_thread(self._prepare, body, column, row)
        await self.objects.put(name_of(await self._prefix(), row, reference), kept)
        return reference

    def _prepare(self, body: bytes, column: Column, row: bytes) -> tuple[bytes, Reference]:
        kept = self._store().cipher.encrypt(body, column, row)
        return kept, Reference.to(kept, len(body))

    async def _remove(self, names: Sequence[str]) -> None:
        """Remove objects that nobody refers to; what fails here, the sweep does."""
        if names and self.objects is not None:
            try:
                await self.objects.delete(names)
            except ObjectsUnavailable as error:
                ration.log(log, logging.WARNING, "bodies.not_removed", {"error": str(error)}, kind="bodies")

    async def open(self) -> None:
        """Prepare the place. Raises ConfigError where it cannot be used as it is set; one that does not answer now may
        answer later."""
        if self.objects is not None:
            try:
                await self.objects.open()
            except ObjectsUnavailable as error:
                log.warning("bodies.unavailable", extra={"fields": {"error": str(error)}})

    async def close(self) -> None:
        """Wait for what is being written, and close the place."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSING)
        if self.objects is not None:
            await self.objects.close()

    # -- reading -------------------------------------------------------------------------------

    async def load(self, event: E) -> E:
        """Return an event with its body. Raises BodyMissing, ObjectsUnavailable or Undecryptable."""
        if not event.is_apart:
            return event
        body = await self.read(Reference(event.body), "body", event.id)
        return replace(event, body=body, is_apart=False)

    async def read(self, reference: Reference, column: Column, row: bytes) -> bytes:
        """Return the value that a reference in this column and row stands for; raises like `load`."""
        if self.objects is None:
            raise BodyMissing(hint="It was kept elsewhere: set `bodies` to that place again.")
        kept = await self.objects.get(name_of(await self._prefix(), row, reference))
        if kept is None:
            raise BodyMissing(f"The body is not at {self.objects.address} any more.")

        def check() -> bytes:
            if hashlib.sha256(kept).digest() != reference.digest:
                raise BodyMissing(f"The body at {self.objects.address if self.objects else ''} is damaged.")
            return self._store().cipher.decrypt(kept, column, row)

        return await asyncio.to_thread(check)

    async def _prefix(self) -> str:
        """Return the prefix of this store's objects, so that two stores may share a place."""
        if self._number is None:
            self._number = await self._store().inbox_number()
        return f"bodies/{self._number}/"

    # -- upkeep --------------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Remove objects that no row refers to; return how many.

        At once where the row exists and refers to nothing (its event was erased); otherwise after GRACE, because its
        commit may still follow.
        """
        removed = 0
        if self.objects is None:
            return removed
        now = clock.now_utc()
        async for page in self.objects.list(await self._prefix()):
            for start in range(0, len(page), _PAGE):
                part = {one.name: one for one in page[start : start + _PAGE]}
                rows = {name: row for name in part if (row := row_of(name)) is not None}
                known = await self._store().find_references(list(rows.values()))
                gone = [
                    name
                    for name, row in rows.items()
                    if not known.get(row, (now - part[name].modified).total_seconds() < GRACE)
                ]
                await self.objects.delete(gone)
                removed += len(gone)
        return removed

    async def check(self) -> list[Check]:
        """Check that every large body is where its row says. For `doctor`: reads all rows and lists all objects."""
        prefix = await self._prefix()
        missing = found = 0
        names: set[str] = set()
        if self.objects is not None:
            try:
                async for page in self.objects.list(prefix):
                    names.update(one.name for one in page)
            except ObjectsUnavailable as error:
                return [Check("bodies", False, str(error), "Large bodies cannot be read or written until it answers.")]
        after = b""
        while rows := await self._store().list_references(after, _PAGE):
            found += len(rows)
            missing += sum(name_of(prefix, row, Reference(kept)) not in names for row, kept in rows)
            after = rows[-1][0]
        if not found:
            return []
        where = "the store" if self.objects is None else self.objects.address
        if missing:
            hint = "Check `bodies` in the settings, or bring the objects back from a backup."
            return [Check("bodies", False, f"{missing:,} of {found:,} large bodies are not at {where}", hint)]
        return [Check("bodies", True, f"{found:,} large bodies are at {where}")]


def name_of(prefix: str, row: bytes, reference: Reference) -> str:
    """Return the name of the object that a row refers to: `…/2026-11-18/<row>-<sha256>`."""
    day = datetime.fromtimestamp(int.from_bytes(row[:6]) / 1000, UTC)
    return f"{prefix}{day:%Y-%m-%d}/{row.hex()}-{reference.digest.hex()}"


def row_of(name: str) -> bytes | None:
    """Return the id of the row that an object belongs to; None for what is no body's name."""
    row = name.rpartition("/")[2].partition("-")[0]
    try:
        return bytes.fromhex(row) if len(row) == 32 else None
    except ValueError:
        return None
