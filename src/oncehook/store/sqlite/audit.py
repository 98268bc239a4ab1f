"""Words that come from outside as they are kept, and the line that every act leaves behind.

Called by whatever acts, in the act's own transaction.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Final

from oncehook.store.audit import Ends, Line, changed_settings, line_hash
from oncehook.store.sqlite.intake import Micros

LONGEST: Final = 4096
"""Characters of an error or a reason that are kept."""


def kept(text: str) -> str:
    """Text that the store can hold and show: no NUL, no half surrogates, not without end."""
    return text[:LONGEST].replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def write_audit(
    connection: sqlite3.Connection, now: Micros, actor: str, act: str, target: str, detail: Mapping[str, object]
) -> None:
    """Who did what, to what, and what there is to say about it."""
    last, before = connection.execute("SELECT n, hash FROM audit_chain").fetchone()
    n, line = last + 1, (now, kept(actor), kept(act), kept(target), json.dumps(detail, default=str))
    hashed = line_hash(before, n, *line)
    connection.execute(
        "INSERT INTO audit (n, at, actor, act, target, detail, hash) VALUES (?,?,?,?,?,?,?)", (n, *line, hashed)
    )
    connection.execute("UPDATE audit_chain SET n = ?, hash = ?", (n, hashed))


def chain_ends(connection: sqlite3.Connection) -> Ends:
    """Return where the chain begins and ends."""
    return Ends(*connection.execute("SELECT n, hash, pruned, pruned_hash, since FROM audit_chain").fetchone())


def chained(connection: sqlite3.Connection, ends: Ends) -> Iterator[Line]:
    """Return the lines of the chain in order."""
    found = connection.execute(
        "SELECT n, at, actor, act, target, detail, coalesce(hash, x'') FROM audit WHERE n > ? ORDER BY n",
        (ends.before_first,),
    )
    return map(Line._make, found)


def prune_audit(connection: sqlite3.Connection, cut: Micros, limit: int) -> int:
    """Remove lines from the front of the log until one is younger than `cut`; the hash of the last one stays."""
    gone: tuple[int, bytes | None] | None = None
    count = 0
    for n, at, hashed in connection.execute("SELECT n, at, hash FROM audit ORDER BY n LIMIT ?", (limit,)).fetchall():
        if at >= cut:
            break
        gone, count = (n, hashed), count + 1
    if gone is not None:
        connection.execute("UPDATE audit_chain SET pruned = ?1, pruned_hash = coalesce(?2, pruned_hash)", gone)
        connection.execute("DELETE FROM audit WHERE n <= ?", gone[:1])
    return count


def note_settings(connection: sqlite3.Connection, now: Micros, place: str, digests: Mapping[str, str]) -> None:
    """Keep the digests of this start's settings, and write a line where some differ from those of the start before."""
    row = connection.execute("SELECT digests FROM settings_seen WHERE place = ?", (kept(place),)).fetchone()
    connection.execute(
        "INSERT INTO settings_seen (place, digests) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET digests = ?2",
        (kept(place), json.dumps(dict(digests))),
    )
    changes = {} if row is None else changed_settings(json.loads(row[0]), digests)
    if changes:
        write_audit(connection, now, "oncehook", "settings", place, changes)
