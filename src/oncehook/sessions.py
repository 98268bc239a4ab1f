"""Sessions of the dashboard: who has come in, kept in the store, so that every server of an inbox knows them.

A browser holds a random name of 256 bits; the store gets only its hash, for a limited time. A session carries a proof
of what it was begun with, made with that name: nobody can guess passwords from what is stored, and when the password
changes, nobody can vouch for the session any more (S31). The dashboard's `Door` calls this.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from oncehook import clock
from oncehook.model import StoredSession
from oncehook.store.base import Store

SESSION_SECONDS: Final = 12 * 3600.0


class Sessions:
    """Begins, finds and ends sessions. Finding one writes nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cookie = ""

    async def cookie(self) -> str:
        """What the cookie is called. Cookies do not know ports: each inbox on a machine has a name of its own."""
        if not self._cookie:
            self._cookie = f"oncehook_{await self._store.inbox_number():x}"
        return self._cookie

    async def begin(self, actor: str, role: str, voucher: bytes, seconds: float = SESSION_SECONDS) -> str:
        """Begin a session and return the name that only the browser is to know. It is bound to `voucher`: a hash of
        the password it is begun with, or of what else let the person in."""
        name = clock.random_bytes(32).hex()
        proof = prove(name, voucher)
        await self._store.begin_session(StoredSession(hash_of(name), actor, role, proof), seconds)
        return name

    async def of(self, name: str) -> StoredSession | None:
        """Whose session this is, while it lasts."""
        return await self._store.get_session(hash_of(name))

    async def end(self, name: str) -> None:
        """It is over, at every server."""
        await self._store.end_session(hash_of(name))


def hash_of(text: str) -> bytes:
    """Return what is kept of a name."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def prove(name: str, voucher: bytes) -> bytes:
    """Return a proof that a session was begun with this voucher: can be checked with the session's name only."""
    return hmac.digest(name.encode("utf-8", "surrogateescape"), voucher, "sha256")
