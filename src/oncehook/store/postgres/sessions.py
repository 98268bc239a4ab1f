"""Sessions of the dashboard and uses of tokens on PostgreSQL: begun, looked up and ended by any server of the inbox.

Hashes come in, never what a browser holds. `PostgresStore` hands its sessions to this; the sweep removes old ones.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from oncehook.model import StoredSession
from oncehook.store.base import TOKEN_USE_SECONDS
from oncehook.store.postgres.look import Reader
from oncehook.store.postgres.wire import storable

# `$6`: how many may be left beside the new one.
_BEGIN: Final = """
WITH old AS (
  DELETE FROM sessions WHERE hash IN (SELECT hash FROM sessions ORDER BY begun_at DESC OFFSET $6::bigint)
)
INSERT INTO sessions (hash, actor, role, proof, begun_at, ends_at)
VALUES ($1, $2, $3, $4, now(), now() + make_interval(secs => $5::float8))
"""
_GET: Final = "SELECT hash, actor, role, proof FROM sessions WHERE hash = $1 AND ends_at > now()"
_NOTE_USE: Final = """
INSERT INTO token_uses AS t (name, used_at) VALUES ($1, now())
ON CONFLICT (name) DO UPDATE SET used_at = now() WHERE t.used_at <= now() - make_interval(secs => $2::float8)
"""


class Sessions(Reader):
    """Who has come in."""

    async def begin_session(self, session: StoredSession, seconds: float, at_most: int = 1000) -> None:
        kept = [session.hash, storable(session.actor), session.role, session.proof]
        await self.execute(_BEGIN, [*kept, seconds, at_most - 1])

    async def get_session(self, hash: bytes) -> StoredSession | None:
        found = await self.rows(_GET, [hash])
        return StoredSession(*found[0]) if found else None

    async def end_session(self, hash: bytes) -> None:
        await self.execute("DELETE FROM sessions WHERE hash = $1", [hash])

    async def note_token_use(self, name: str) -> None:
        await self.execute(_NOTE_USE, [storable(name), TOKEN_USE_SECONDS])

    async def token_uses(self) -> dict[str, datetime]:
        return dict(await self.rows("SELECT name, used_at FROM token_uses"))

    async def inbox_number(self) -> int:
        return int((await self.rows("SELECT value FROM marks WHERE name = 'inbox'"))[0][0])
