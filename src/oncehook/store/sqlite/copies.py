"""Later arrivals of an event: all counted, the latest of each kind kept in a chain that `copies` holds by its end.

`intake` adds them, inside its transaction; a chain that has grown to twice its length is cut. `look` reads them, and
`sweep` forgets them with the event, or with the key that outlived it.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from oncehook.store.base import KEPT_ARRIVALS

CHAINS: Final = """
WITH RECURSIVE chain(n, nth) AS (
  SELECT duplicate, 1 FROM copies WHERE event_id = ?1
  UNION ALL
  SELECT conflict, 1 FROM copies WHERE event_id = ?1
  UNION ALL
  SELECT a.before, c.nth + 1 FROM chain c JOIN arrivals a ON a.n = c.n
)
"""
KEPT: Final = (
    CHAINS
    + """
SELECT a.id, a.event_id, a.outcome, a.at, coalesce(a.head, b.head), a.body, a.batch_id
FROM chain c JOIN arrivals a ON a.n = c.n LEFT JOIN batches b ON b.id = a.batch_id
WHERE c.nth <= ?2 ORDER BY a.n
"""
)
CUT: Final = CHAINS + "DELETE FROM arrivals WHERE n IN (SELECT n FROM chain WHERE nth > ?2)"


def outgrows(before: int, after: int) -> bool:
    """Whether a chain may be twice as long as it should be: asked at every addition, true at every twentieth."""
    return before // KEPT_ARRIVALS < after // KEPT_ARRIVALS


def cut(connection: sqlite3.Connection, event_id: bytes, keep: int = KEPT_ARRIVALS) -> None:
    """Keep only the latest of each kind."""
    connection.execute(CUT, (event_id, keep))


def forget_event(connection: sqlite3.Connection, event_id: bytes) -> None:
    """An event is about to go: its arrivals with it. The count stays as long as its key does (R20)."""
    if connection.execute("SELECT 1 FROM copies WHERE event_id = ?", (event_id,)).fetchone() is None:
        return
    cut(connection, event_id, 0)
    connection.execute("UPDATE copies SET duplicate = NULL, conflict = NULL WHERE event_id = ?", (event_id,))
    connection.execute(
        "DELETE FROM copies WHERE event_id = ?1 AND NOT EXISTS (SELECT 1 FROM keys k JOIN events e ON e.id = ?1"
        " WHERE k.hash = e.key_hash AND k.event_id = ?1)",
        (event_id,),
    )


def forget_key(connection: sqlite3.Connection, event_id: bytes) -> None:
    """A key that stood for this event is gone or stands for another: when the event went before it, nothing is left."""
    if connection.execute("SELECT 1 FROM events WHERE id = ?", (event_id,)).fetchone() is None:
        cut(connection, event_id, 0)
        connection.execute("DELETE FROM copies WHERE event_id = ?", (event_id,))
