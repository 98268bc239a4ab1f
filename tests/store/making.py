"""Intakes to record, leases to take and settlements to make, of as little as a test wants to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Protocol

from oncehook import portal
from oncehook.admin import Admin
from oncehook.bodies import Bodies
from oncehook.define import Define
from oncehook.definitions import Definitions
from oncehook.destinations.base import Destination
from oncehook.ingest import ClosedReceiver, Receiver
from oncehook.model import (
    Breaker,
    Category,
    DeliveryId,
    DeliveryStatus,
    EventDetails,
    Evidence,
    Filter,
    Intake,
    Item,
    Lease,
    LeaseRequest,
    Mark,
    Options,
    Outcome,
    Planned,
    Priority,
    ReplayCommand,
    Settle,
    Settlement,
    StoredDelivery,
    StoredEvent,
    StoredReplay,
    Verdict,
    digest,
    fair_hash,
    key_hash,
    new_id,
    subject_key,
)
from oncehook.observe import Observer
from oncehook.reports import RunningReceiver
from oncehook.routes import Route
from oncehook.settings.stored import Vault
from oncehook.sources import Source
from oncehook.store.base import NameIds, Store
from oncehook.store.cipher import Cipher
from oncehook.upkeep import Limits

DAY = 86400.0
HEAD = b"POST /in/orders\r\ncontent-type: application/json"
CRM = ("crm", 1)
MAIL = ("mail", 2)
DEAD = Filter(status=DeliveryStatus.dead)


class AdminOnly:
    """An inbox of which only the questions and acts of people are tested."""

    def __init__(
        self,
        store: Store,
        *,
        sources: dict[str, Source] | None = None,
        destinations: Mapping[str, Destination] | None = None,
        routes: Sequence[Route] = (),
        limits: Limits | None = None,
        free: float | None = None,
    ) -> None:
        self.store, self.limits = store, limits or Limits()
        self.sources, self.destinations, self.routes = sources or {}, dict(destinations or {}), list(routes)
        self.bodies = Bodies(lambda: store, None)
        self.places: dict[tuple[str, str], str] = {}
        self.signing_secrets: dict[str, list[str]] = {}
        self.nudges: list[int] = []
        self.receivers: Sequence[RunningReceiver] = ()
        self.settings, self.vault, self.is_started = None, Vault(Cipher()), False
        self.definitions = Definitions(self)
        store.free_disk = lambda: free  # type: ignore[method-assign]
        self.admin = Admin(self)

    @property
    def receiver(self) -> Receiver:
        return ClosedReceiver(self.sources, self.store, lambda *_: (), Observer("sqlite"))

    @property
    def define(self) -> Define:
        return Define(self)

    def note_changed(self, destination_ids: Collection[int] | None) -> None:
        """Nobody works here."""

    def note_source(self, source: Source) -> None:
        """Nobody receives here."""

    async def keep_stored_media(self, event: StoredEvent) -> None:
        """Nothing is kept here."""

    def portal_link(self, account: str | int, *, name: str, expires: str | float) -> str:
        return portal.make_link(self.vault, account, name, expires)

    def nudge(self) -> None:
        self.nudges.append(1)

    async def write_counts(self) -> None:
        """Nothing is counted here."""

    def kept_for(self) -> Mapping[str, float]:
        return {"": 30 * DAY}


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
    options: Options = Options.none,
    fair: str | None = None,
    account: str | None = None,
) -> Item:
    """One event; `to` are the destinations it goes to, by name and number."""
    event_id = event_id or new_id()
    parts = [key] if isinstance(key, str) else key
    return Item(
        event_id=event_id,
        type=type_,
        key=None if parts is None else "|".join(parts),
        key_hash=None if parts is None else key_hash(source, parts, account),
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
                DeliveryId.of(event_id, number),
                number,
                None if subject is None else subject_key(name, source, subject, account),
                int(options),
                None if fair is None else fair_hash(fair),
            )
            for name, number in to
        ],
        account=account,
    )


def intake(*items: Item, source_id: int = 1, head: bytes = HEAD, raw: bytes | None = None) -> Intake:
    """One arrival; `raw` makes it a split one."""
    arrival_id = items[0].event_id if len(items) == 1 and raw is None else new_id()
    return Intake(arrival_id, source_id, head, items, raw)


async def record(store: Store, *intakes: Intake) -> list[Verdict]:
    """Record these at once, in one go of the loop, and wait for the verdict on each item."""
    pending = [store.record(one) for one in intakes]
    return [verdict for one in pending for verdict in await one.future]


async def record_all(store: Store, intakes: Sequence[Intake]) -> list[list[Verdict] | BaseException]:
    """The same, with the failures among the answers."""
    pending = [store.record(one).future for one in intakes]
    return await asyncio.gather(*pending, return_exceptions=True)


async def keep(store: Store, *items: Item, source_id: int = 1, head: bytes = HEAD) -> list[Verdict]:
    """Record each item as an arrival of its own, one after the other."""
    return [(await record(store, intake(one, source_id=source_id, head=head)))[0] for one in items]


def outcomes(verdicts: Sequence[Verdict]) -> list[Outcome]:
    return [verdict.outcome for verdict in verdicts]


async def event_of(store: Store, verdict: Verdict) -> EventDetails:
    event = await store.get_event(verdict.event_id)
    assert event is not None
    return event


async def enrolled(store: Store) -> NameIds:
    """Two sources and two destinations, with the numbers 1 and 2 each."""
    numbers = await store.register_names(["orders", "payments"], ["crm", "mail"])
    assert numbers == NameIds({"orders": 1, "payments": 2}, {"crm": 1, "mail": 2})
    return numbers


# -- the way out -------------------------------------------------------------------------------


class Makes(Protocol):
    """A ground on which stores can be made."""

    def make(self, **options: Any) -> Store: ...


@asynccontextmanager
async def opened(ground: Makes, **options: Any) -> AsyncIterator[Store]:
    """A store on this ground, open and enrolled; when it is left, the books must balance."""
    store = ground.make(**options)
    await store.open()
    try:
        await enrolled(store)
        yield store
        assert [check.name for check in await store.check() if not check.ok] == []
    finally:
        await store.close()


async def deliver(
    store: Store,
    *subjects: str | None,
    to: tuple[str, int] = CRM,
    source: str = "orders",
    **about: Any,
) -> list[bytes]:
    """One event per subject, in this order, each an arrival of its own; the ids of their deliveries."""
    source_id = {"orders": 1, "payments": 2}[source]
    items = [item(source=source, subject=subject, to=[to], **about) for subject in subjects]
    await record(store, *[intake(one, source_id=source_id) for one in items])
    return [one.deliveries[0].id for one in items]


async def deliver_one(store: Store, subject: str | None = None, **about: Any) -> bytes:
    """The id of the delivery of one new event."""
    [made] = await deliver(store, subject, **about)
    return made


async def take(
    store: Store,
    limit: int = 100,
    *,
    to: int = 1,
    lease: float = 30.0,
    priority: Priority = Priority.live,
    crash_tolerance: int = 0,
    probe: float = 30.0,
    fair: bool = False,
) -> list[Lease]:
    """Lease what may be leased of one destination."""
    return await store.lease([LeaseRequest(to, limit, lease, priority, crash_tolerance, probe, fair)])


async def take_one(store: Store, **about: Any) -> Lease:
    """Lease the only delivery that may be leased."""
    leases = await take(store, **about)
    assert len(leases) == 1, leases
    return leases[0]


def ids(leases: Sequence[Lease]) -> list[bytes]:
    return [lease.delivery.id for lease in leases]


def done(lease: Lease, **about: Any) -> Settlement:
    return Settlement(lease, Settle.done, **about)


def retry(lease: Lease, wait: float = 0.0, *, error: str = "no answer", status: int | None = None) -> Settlement:
    evidence = Evidence(status, error)
    return Settlement(lease, Settle.retry, wait, category=Category.transient, evidence=evidence, duration=0.5)


def dead(lease: Lease, *, error: str | None = "no such order", status: int | None = None) -> Settlement:
    return Settlement(lease, Settle.dead, category=Category.permanent, evidence=Evidence(status, error))


def release(lease: Lease, wait: float = 0.0) -> Settlement:
    return Settlement(lease, Settle.release, wait)


def failed(lease: Lease, breaker: Breaker) -> Settlement:
    """A retry that says something about the destination."""
    return Settlement(
        lease, Settle.retry, category=Category.transient, evidence=Evidence(503, "HTTP 503"), breaker=breaker
    )


async def settle(store: Store, *settlements: Settlement) -> None:
    """Settle in one commit; every lease must still be ours."""
    assert (await store.settle(settlements)).ours == {one.lease.fence for one in settlements}


async def is_lost(store: Store, settlement: Settlement) -> bool:
    """Whether a settlement comes too late."""
    return not (await store.settle([settlement])).ours


async def finish(store: Store, **about: Any) -> list[bytes]:
    """Lease all that can be leased, until nothing is left, and settle it done; the deliveries in their order."""
    order: list[bytes] = []
    while leases := await take(store, **about):
        await settle(store, *[done(lease) for lease in leases])
        order += ids(leases)
    return order


async def dead_letters(store: Store, *subjects: str | None, **about: Any) -> list[bytes]:
    """Deliveries that have given up, in order of commit."""
    made = await deliver(store, *subjects, **about)
    while leases := [lease for lease in await take(store, to=made[0][-1]) if lease.delivery.id in made]:
        await settle(store, *[dead(lease) for lease in leases])
    return made


async def look(store: Store, delivery: bytes) -> StoredDelivery:
    found = await store.get_delivery(delivery)
    assert found is not None
    return found


async def statuses(store: Store, deliveries: Sequence[bytes]) -> list[str]:
    return [str((await look(store, one)).status) for one in deliveries]


async def replay(store: Store, delivery: bytes, **about: Any) -> StoredReplay:
    """Replay one delivery, at once."""
    return await store.make_replay(new_id(), ReplayCommand(Filter(ids=[delivery]), "ann", bulk=False, **about))


async def progress(store: Store, made: StoredReplay) -> StoredReplay:
    """How far a replay is by now."""
    found = await store.get_replay(made.id)
    assert found is not None
    return found


async def replay_all(store: Store, filter: Filter | None = None, **about: Any) -> StoredReplay:
    """Order a bulk replay."""
    return await store.make_replay(new_id(), ReplayCommand(filter or Filter(), "ann", **about))


async def mixture(store: Store) -> dict[str, list[bytes]]:
    """Deliveries of every status; of crm, except two dead ones of mail."""
    found = {"dead": await dead_letters(store, *[None] * 4, "a", "b")}
    found["dead of mail"] = await dead_letters(store, None, None, to=MAIL)
    found["discarded"] = await dead_letters(store, None)
    await store.discard(Filter(ids=found["discarded"]), "ann", "")
    found["done"] = await deliver(store, None, None, None)
    await finish(store)
    found["leased"] = await deliver(store, None)
    await take_one(store)
    found["pending"] = await deliver(store, None, None)
    return found
