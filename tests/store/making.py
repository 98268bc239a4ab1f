"""Intakes to record, made of as little as a test wants to say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from oncehook.model import (
    Intake,
    Item,
    Mark,
    Outcome,
    Planned,
    StoredEvent,
    Verdict,
    delivery_id,
    digest,
    key_hash,
    new_id,
    subject_key,
)
from oncehook.store.base import Numbers, Store

DAY = 86400.0
HEAD = b"POST /in/orders\r\ncontent-type: application/json"


def item(
    key: str | Sequence[str] | None = None,
    *,
    source: str = "orders",
    body: bytes = b'{"id": 1}',
    subject: str | None = None,
    to: Sequence[tuple[str, int]] = (),
    keep: float = 30 * DAY,
    type_: str = "order.created",
    event_id: bytes | None = None,
    event_at: datetime | None = None,
    rank: int | None = None,
    rank_scope: str | None = None,
    marks: Mark = Mark.none,
) -> Item:
    """One event; `to` are the destinations it goes to, by name and number."""
    event_id = event_id or new_id()
    parts = [key] if isinstance(key, str) else key
    return Item(
        event_id=event_id,
        type=type_,
        key=None if parts is None else "|".join(parts),
        key_hash=None if parts is None else key_hash(source, parts),
        keep=keep,
        subject=subject,
        body=body,
        body_hash=digest(body),
        event_at=event_at,
        rank=rank,
        rank_scope=rank_scope,
        marks=marks,
        deliveries=[
            Planned(
                delivery_id(event_id, number), number, None if subject is None else subject_key(name, source, subject)
            )
            for name, number in to
        ],
    )


def intake(*items: Item, source_id: int = 1, head: bytes = HEAD, raw: bytes | None = None) -> Intake:
    """One arrival; `raw` makes it a split one."""
    return Intake(new_id(), source_id, head, items, raw)


async def record(store: Store, *intakes: Intake) -> list[Verdict]:
    """Record these at once, in one go of the loop, and wait for the verdict on each item."""
    pending = [store.record(one) for one in intakes]
    return [verdict for one in pending for verdict in await asyncio.wait_for(one.future, 20)]


async def record_all(store: Store, intakes: Sequence[Intake]) -> list[list[Verdict] | BaseException]:
    """The same, with the failures among the answers."""
    pending = [store.record(one).future for one in intakes]
    return await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 20)


async def keep(store: Store, *items: Item, source_id: int = 1, head: bytes = HEAD) -> list[Verdict]:
    """Record each item as an arrival of its own, one after the other."""
    return [(await record(store, intake(one, source_id=source_id, head=head)))[0] for one in items]


def outcomes(verdicts: Sequence[Verdict]) -> list[Outcome]:
    return [verdict.outcome for verdict in verdicts]


async def event_of(store: Store, verdict: Verdict) -> StoredEvent:
    event = await store.get_event(verdict.event_id)
    assert event is not None
    return event


async def enrolled(store: Store) -> Numbers:
    """Two sources and two destinations, with the numbers 1 and 2 each."""
    numbers = await store.enroll(["orders", "payments"], ["crm", "mail"])
    assert numbers == Numbers({"orders": 1, "payments": 2}, {"crm": 1, "mail": 2})
    return numbers
