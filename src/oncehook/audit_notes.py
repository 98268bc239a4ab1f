"""Audit lines that somebody may cause as often as they like: payloads that they look at, acts that are refused (S34).

The desk notes them here; the log stays bounded however fast they come.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import Final

from oncehook import clock
from oncehook.errors import StoreError
from oncehook.logs import ration
from oncehook.store.base import Store

log = logging.getLogger("oncehook.audit")

FIRST: Final = 20
"""Lines of one actor and act that a minute gets one by one; then one each time their number has doubled."""
SAME_VIEW: Final = 3600.0
"""Seconds for which looking at the same payload again is no new line: a page that is open is asked for again."""
VIEWS: Final = 10_000
LONGEST_TARGET: Final = 300


class AuditNotes:
    """Writes such lines, for all faces of one process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._minute = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._views: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def view(self, actor: str, target: str) -> None:
        """Note that somebody was shown a payload."""
        now, seen = clock.steady(), self._views.get((actor, target))
        if seen is not None and now - seen < SAME_VIEW:
            return
        self._views[actor, target] = now
        self._views.move_to_end((actor, target))
        while len(self._views) > VIEWS:
            self._views.popitem(last=False)
        await self._note(actor, "view", target, {})

    async def refused(self, actor: str, target: str, code: str) -> None:
        """Note that somebody asked for what was refused."""
        await self._note(actor, "refused", target[:LONGEST_TARGET], {"code": code})

    async def _note(self, actor: str, act: str, target: str, detail: dict[str, object]) -> None:
        minute = int(clock.steady() // 60)
        if minute != self._minute:
            self._minute, self._counts = minute, Counter()
        self._counts[actor, act] += 1
        count = self._counts[actor, act]
        if count > FIRST:
            times, rest = divmod(count, FIRST)
            if rest or times & (times - 1):
                return
            detail |= {"so_far_this_minute": count}
        try:
            await self._store.audit(actor, act, target, detail)
        except StoreError as error:
            # A full disk must not hide what is on it, and who only reads the file cannot write to it.
            fields = {"actor": actor, "act": act, "target": target, "error": str(error)}
            ration.log(log, logging.WARNING, "audit.not_written", fields, kind=act)
