"""Sessions of the dashboard and uses of tokens on SQLite. Called by the engine: what writes inside the writer, `get`
beside it.

Hashes come in, never what a browser holds. The sweep removes those that are over.
"""

from __future__ import annotations

import sqlite3

from oncehook.model import StoredSession
from oncehook.store.base import TOKEN_USE_SECONDS
from oncehook.store.sqlite.audit import kept
from oncehook.store.sqlite.intake import Micros
from oncehook.store.sqlite.work import micros


def begin(connection: sqlite3.Connection, now: Micros, session: StoredSession, seconds: float, at_most: int) -> None:
    """Somebody has come in; the oldest make room when there are too many."""
    connection.execute(
        "DELETE FROM sessions WHERE hash IN (SELECT hash FROM sessions ORDER BY begun_at DESC LIMIT -1 OFFSET ?)",
        (at_most - 1,),
    )
    connection.execute(
        "INSERT INTO sessions (hash, actor, role, proof, begun_at, ends_at) VALUES (?,?,?,?,?,?)",
        (session.hash, kept(session.actor), session.role, session.proof, now, now + micros(seconds)),
    )


def get(connection: sqlite3.Connection, now: Micros, hash: bytes) -> StoredSession | None:
    """A session that lasts."""
    row = connection.execute(
        "SELECT hash, actor, role, proof FROM sessions WHERE hash = ? AND ends_at > ?", (hash, now)
    ).fetchone()
    return None if row is None else StoredSession(*row)


def end(connection: sqlite3.Connection, hash: bytes) -> None:
    """Somebody has gone."""
    connection.execute("DELETE FROM sessions WHERE hash = ?", (hash,))


def note_token_use(connection: sqlite3.Connection, now: Micros, name: str) -> None:
    """Note that a token was used, unless that was noted within the last minute."""
    connection.execute(
        "INSERT INTO token_uses (name, used_at) VALUES (?1, ?2)"
        " ON CONFLICT DO UPDATE SET used_at = ?2 WHERE used_at <= ?2 - ?3",
        (kept(name), now, micros(TOKEN_USE_SECONDS)),
    )


def prune(connection: sqlite3.Connection, now: Micros) -> int:
    """Those that are over; how many."""
    return connection.execute("DELETE FROM sessions WHERE ends_at <= ?", (now,)).rowcount
