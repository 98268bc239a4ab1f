"""Leasing on PostgreSQL: what a worker may take now, what it may expect, and how long it keeps what it has.

Wants go in as columns, leases come out, by one call each of a function of migration 0007 in autocommit. Workers lease
rows of `heads`, never rows of `deliveries`, so a deep subject costs a lease nothing. The engine calls these on its hot
connections, `heartbeat` calls RENEW on a thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from oncehook.model import (
    MARKS,
    OPTIONS,
    DeliveryId,
    EventId,
    Expired,
    Lease,
    LeasedDelivery,
    LeaseRequest,
    Outlook,
    Priority,
    ReplayId,
    StoredEvent,
)
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.wire import Bigs, Column, Floats, Ids, Integers, Smalls

LEASE: Final = "SELECT * FROM lease($1, $2, $3, $4, $5, $6, $7, $8)"
OUTLOOK: Final = "SELECT * FROM outlook($1, $2)"
RENEW: Final = "SELECT * FROM renew($1, $2, $3, $4)"

SOURCE_ID: Final = 13
"""Its place among the columns of `leased`."""

_TURNS: Final = tuple(Priority)


def lease_parameters(
    wants: Sequence[LeaseRequest], slot: int, worker: str | None = None
) -> list[Column | int | str | None]:
    """Return what LEASE takes, `$1` to `$8`."""
    return [
        Integers([want.destination_id for want in wants]),
        Smalls([want.priority for want in wants]),
        Integers([want.limit for want in wants]),
        Floats([want.lease for want in wants]),
        Integers([want.crash_tolerance for want in wants]),
        Floats([want.probe for want in wants]),
        slot,
        worker,
    ]


def read_lease(row: Sequence[Any], sources: Mapping[int, str], cipher: Cipher) -> Lease:
    """Make a lease of the columns of `leased`; `sources` are their names by number."""
    priority, options, source, marks = _TURNS[row[8]], OPTIONS[row[9]], sources[row[SOURCE_ID]], MARKS[row[19]]
    delivery = LeasedDelivery(DeliveryId(row[1]), row[3], row[5], row[6], options, row[10] and ReplayId(row[10]))
    columns = (EventId(row[12]), row[13], source, *row[14:19], marks, *row[20:22], *row[23:25])
    event = StoredEvent(*columns)
    more, failing = row[25:27]
    return cipher.read_lease(
        Lease(delivery, event, row[0], DeliveryId(row[2]), row[4], row[7], priority, row[11], row[22], more, failing)
    )


def read_expired(former: str) -> Expired:
    """Make what is told of a lease that had run out when LEASE came upon it."""
    held, event_id, *rest = json.loads(former)
    return Expired(DeliveryId(UUID(held).bytes), EventId(UUID(event_id).bytes), *rest)


def read_outlook(rows: Sequence[tuple[Any, ...]]) -> Outlook:
    """Read what OUTLOOK said."""
    due: dict[Priority, set[int]] = {priority: set() for priority in Priority}
    due_in: float | None = None
    looked_at: datetime | None = None
    for destination_id, priority, seconds, moment in rows:
        if destination_id is not None:
            due[_TURNS[priority]].add(destination_id)
        elif moment is not None:
            looked_at = moment
        else:
            due_in = seconds
    return Outlook(due[Priority.live], due[Priority.replay], due[Priority.quarantined], due_in, looked_at)


def renew_parameters(leases: Sequence[Lease]) -> list[Column]:
    """Return what RENEW takes, `$1` to `$4`; sorted, so that rows are locked in the order everybody locks them in."""
    ordered = sorted(leases, key=lambda lease: lease.queue_key)
    return [
        Ids([lease.queue_key for lease in ordered]),
        Ids([lease.front_id for lease in ordered]),
        Bigs([lease.fence for lease in ordered]),
        Floats([lease.seconds for lease in ordered]),
    ]
