"""Leases for tests of what receives one, without a store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from oncehook.model import DeliveryId, EventId, Lease, LeasedDelivery, Mark, Options, Priority, StoredEvent, new_id


def make_lease(event_id: bytes | None = None, **changes: Any) -> Lease:
    """Make a lease on a first attempt; `changes` are fields of its event, of its delivery or of the lease."""
    id_ = EventId(event_id or new_id())
    came_at = datetime(2026, 1, 1, tzinfo=UTC)
    event = StoredEvent(id_, 1, "orders", "order.paid", "k", None, came_at, None, Mark.none, None, None, b"", b"")
    delivery = LeasedDelivery(DeliveryId(id_), 1, 1, 1, Options.none, None)
    about_event, about_delivery = (
        {name: changes.pop(name) for name in part.__struct_fields__ if name in changes} for part in (event, delivery)
    )
    lease = Lease(
        structs.replace(delivery, **about_delivery),
        structs.replace(event, **about_event),
        queue_key=id_,
        front_id=delivery.id,
        fence=1,
        deaths=0,
        priority=Priority.live,
        seconds=10.0,
    )
    return structs.replace(lease, **changes)
