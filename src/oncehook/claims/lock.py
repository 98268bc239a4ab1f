"""`DedupLock`: a plain atomic lock, like `SET NX EX`.

It has two answers instead of three, so it cannot tell "in progress" from "done", and a crash after `acquire` locks the
key for all of `keep`. `Claims` and `once` do not have these limits.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Final

from oncehook.claims.client import KEEP, get_shared, get_shared_async
from oncehook.errors import ClaimLost, ConfigError, StoreUnavailable

NAMESPACE: Final = "oncehook-locks"
"""Separate from that of claims, so that the same id may be locked and claimed."""


class DedupLock:
    """A lock on one id, for `keep`. Without `store`, as for `once`.

    `prefix` precedes the id in the key: the same id is locked once for each. `seen` takes the id and returns whether
    your own database has it already, for what the lock has forgotten; such an id is not acquired.

    >>> if DedupLock("wamid.HBgL…", store="redis://localhost/0", prefix="inbox-7:").acquire():
    ...     handle(message)
    """

    def __init__(
        self,
        source_id: str,
        *,
        store: str | None = None,
        keep: str | float = KEEP,
        prefix: str = "",
        seen: Callable[[str], object] | None = None,
    ) -> None:
        if inspect.iscoroutinefunction(seen):
            raise ConfigError("`seen` must be a plain function here.", hint="Use AsyncDedupLock to have it awaited.")
        self.source_id = source_id
        self._key = _key(prefix, source_id)
        self._claims = get_shared(store, namespace=NAMESPACE, ttl=keep)
        self._seen = seen
        self._token: str | None = None

    def acquire(self) -> bool:
        """Take it; True for exactly one of any number that try. Raises StoreUnavailable rather than guess."""
        try:
            claim = self._claims.claim(self._key)
        except StoreUnavailable:
            if self._was_seen():
                return False
            raise
        if claim.status != "new":
            return False
        self._token = claim.token
        if self._look():
            self._token = None  # stays locked, so that the next caller need not call `seen`
            return False
        return True

    def release(self) -> bool:
        """Release it if this object acquired it; return whether it did. Never releases another's lock."""
        token, self._token = self._token, None
        try:
            self._claims.abort(self._key, token)
        except ClaimLost:
            return False
        return True

    def _was_seen(self) -> bool:
        return self._seen is not None and bool(self._seen(self.source_id))

    def _look(self) -> bool:
        try:
            return self._was_seen()
        except BaseException:
            with contextlib.suppress(StoreUnavailable):  # the block's own error matters more; the lock lapses by itself
                self.release()
            raise


class AsyncDedupLock:
    """A lock like `DedupLock` for event loops; `seen` may be `def` or `async def`."""

    def __init__(
        self,
        source_id: str,
        *,
        store: str | None = None,
        keep: str | float = KEEP,
        prefix: str = "",
        seen: Callable[[str], Awaitable[object] | object] | None = None,
    ) -> None:
        self.source_id = source_id
        self._key = _key(prefix, source_id)
        self._claims = get_shared_async(store, namespace=NAMESPACE, ttl=keep)
        self._seen = seen
        self._token: str | None = None

    async def acquire(self) -> bool:
        """Take it; as `DedupLock.acquire`."""
        try:
            claim = await self._claims.claim(self._key)
        except StoreUnavailable:
            if await self._was_seen():
                return False
            raise
        if claim.status != "new":
            return False
        self._token = claim.token
        if await self._look():
            self._token = None
            return False
        return True

    async def release(self) -> bool:
        """Release it if this very object has it; as `DedupLock.release`."""
        token, self._token = self._token, None
        try:
            await self._claims.abort(self._key, token)
        except ClaimLost:
            return False
        return True

    async def _was_seen(self) -> bool:
        found = self._seen(self.source_id) if self._seen is not None else False
        return bool(await found if inspect.isawaitable(found) else found)

    async def _look(self) -> bool:
        try:
            return await self._was_seen()
        except BaseException:
            with contextlib.suppress(StoreUnavailable):
                await self.release()
            raise


def _key(prefix: str, source_id: str) -> str:
    """Return the key to lock; an empty id gives an empty key, which is refused."""
    return prefix + source_id if source_id and isinstance(source_id, str) else source_id
