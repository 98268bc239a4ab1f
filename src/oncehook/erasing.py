"""Erasing a subject, as faces ask for it: checked, counted before, carried out in short batches, and audited (S37).

A subject and a reason come in, an `Erasure` goes out. The desk holds one `Erasing`; who may ask, faces decide before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from oncehook import query
from oncehook.erasure import EraseOrder, Erasure
from oncehook.errors import BadRequest, NotFound
from oncehook.keys import bounded
from oncehook.model import subject_hash
from oncehook.sources import Source
from oncehook.store.base import Store

AT_ONCE: Final = 2000
"""Events that one request erases at most; whoever wants more asks again."""
BATCH: Final = 100
LONGEST_REASON: Final = 1000
LONGEST_SUBJECT: Final = 10_000


class Erasing:
    """Erases subjects of one store."""

    def __init__(self, store: Store, sources: Mapping[str, Source], *, is_limited: bool = False) -> None:
        """`is_limited`: there are other sources, which are not to be touched."""
        self._store = store
        self._sources = sources
        self._is_limited = is_limited

    async def count(self, subject: str, source: str | None = None) -> Erasure:
        """What is there to be erased. Nothing happens."""
        return await self._store.erasable(self._order(subject, source))

    async def erase(
        self, subject: str, source: str | None = None, *, actor: str, reason: str, at_most: int = AT_ONCE
    ) -> tuple[Erasure, int]:
        """Erase, and say how many events are left: none, unless there were more than `at_most`.

        What arrives for the subject while it runs is erased too. Asked again, it goes on where it ended.
        """
        order = self._order(subject, source, actor, reason)
        total = Erasure()
        while total.events < at_most:
            batch = await self._store.erase(order, min(BATCH, at_most - total.events))
            total += batch
            if not batch.events:
                break
        await self._store.empty_log()
        if not total.events:  # that somebody looked, and there was nothing, is worth a line too
            said = {"reason": reason, **asdict(total)}
            await self._store.audit(actor, "erase", f"subject {subject_hash(order.subject)}", said)
        return total, (await self._store.erasable(order)).events

    def _order(self, subject: str, source: str | None, actor: str = "", reason: str | None = None) -> EraseOrder:
        query.check_text(subject, "The subject", LONGEST_SUBJECT)
        kept = bounded(subject)
        if not kept:
            raise BadRequest("Whose events? An empty subject means nobody's.")
        if reason is not None:
            _check_reason(reason, subject)
        return EraseOrder(kept, self._number(source), actor, reason or "", query.quoted(kept))

    def _number(self, name: str | None) -> int | None:
        if name is None and self._is_limited:
            raise BadRequest(
                "Say of which source: you may not see all of them.", hint=f"One of: {', '.join(self._sources)}."
            )
        if name is None:
            return None
        if (source := self._sources.get(name)) is None:
            raise NotFound(f'There is no source "{name[:60]}".')
        return source.number


def _check_reason(reason: str, subject: str) -> None:
    query.check_text(reason, "The reason", LONGEST_REASON)
    if not reason.strip():
        raise BadRequest("Say why: a subject is erased only with a reason.")
    if re.search(rf"(?<!\w){re.escape(subject)}(?!\w)", reason):
        raise BadRequest(
            "The reason names the subject, and stays in the audit log.", hint="Name the request by its number instead."
        )
