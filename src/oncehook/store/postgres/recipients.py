"""Whom destinations have reached, on PostgreSQL: noted when a worker starts, asked when a replay is planned.

Addresses come in as hashes. `CHANGED` is a column of the plan: whether a delivery was first made to another address
than today's. `PostgresStore` hands its notes to this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oncehook.store.postgres.look import Reader
from oncehook.store.postgres.wire import Ids, Integers

# Of a delivery `d`. A destination that has never moved is not looked at any further.
CHANGED: Final = """
(SELECT count(*) FROM recipients r WHERE r.destination_id = d.destination_id) > 1 AND coalesce((
    SELECT r.address FROM recipients r WHERE r.destination_id = d.destination_id
      AND r.since <= (SELECT a.started_at FROM attempts a WHERE a.delivery_id = d.id ORDER BY a.fence LIMIT 1)
    ORDER BY r.since DESC LIMIT 1
  ) <> (
    SELECT r.address FROM recipients r WHERE r.destination_id = d.destination_id ORDER BY r.since DESC LIMIT 1
  ), false)
"""
_NOTE: Final = """
INSERT INTO recipients (destination_id, since, address)
SELECT i.id, now(), i.address FROM unnest($1::integer[], $2::uuid[]) AS i(id, address)
WHERE i.address IS DISTINCT FROM (
  SELECT r.address FROM recipients r WHERE r.destination_id = i.id ORDER BY r.since DESC LIMIT 1)
ON CONFLICT DO NOTHING
"""


class Recipients(Reader):
    """Remembers whom destinations reach."""

    async def note_recipients(self, addresses: Mapping[int, bytes]) -> None:
        if addresses:
            await self.execute(_NOTE, [Integers(list(addresses)), Ids(list(addresses.values()))])
