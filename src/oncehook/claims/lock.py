"""`DedupLock`: the plain atomic lock, for those who want just `SET NX EX`.

Two answers instead of three, so it cannot tell "is being done" from "was done", and a crash after `acquire` locks the
key for all of `keep`. `Claims` and `once` can and do not.
"""

from __future__ import annotations

from typing import Final

from oncehook.claims.faces import KEEP, shared, shared_async
from oncehook.errors import ClaimLost

NAMESPACE: Final = "oncehook-locks"
"""Apart from claims: the same id may be locked here and claimed there."""


class DedupLock:
    """A lock on one id, for `keep`. Without `store`, as for `once`.

    >>> if DedupLock("wamid.HBgL…", store="redis://localhost/0").acquire():
    ...     handle(message)
    """

    def __init__(self, source_id: str, *, store: str | None = None, keep: str | float = KEEP) -> None:
        self.source_id = source_id
        self._claims = shared(store, namespace=NAMESPACE, ttl=keep)
        self._token: str | None = None

    def acquire(self) -> bool:
        """Take it; True for exactly one of any number that try. Raises StoreUnavailable rather than guess."""
        claim = self._claims.claim(self.source_id)
        self._token = claim.token or self._token
        return claim.status == "new"

    def release(self) -> bool:
        """Give it back, if this very object has it; says whether it did. Never touches somebody else's."""
        token, self._token = self._token, None
        try:
            self._claims.abort(self.source_id, token)
        except ClaimLost:
            return False
        return True


class AsyncDedupLock:
    """The same on an event loop."""

    def __init__(self, source_id: str, *, store: str | None = None, keep: str | float = KEEP) -> None:
        self.source_id = source_id
        self._claims = shared_async(store, namespace=NAMESPACE, ttl=keep)
        self._token: str | None = None

    async def acquire(self) -> bool:
        """Take it; as `DedupLock.acquire`."""
        claim = await self._claims.claim(self.source_id)
        self._token = claim.token or self._token
        return claim.status == "new"

    async def release(self) -> bool:
        """Give it back, if this very object has it; as `DedupLock.release`."""
        token, self._token = self._token, None
        try:
            await self._claims.abort(self.source_id, token)
        except ClaimLost:
            return False
        return True
