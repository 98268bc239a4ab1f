"""Server-sent events for open pages: hints that something has happened, or on the live page, rows.

Moments come from the broadcast in the API's form. Those in quick succession are sent together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec

from oncehook import clock
from oncehook.web.dashboard.render import render
from oncehook.web.live import Broadcast, Watcher

PAUSE: Final = 0.25
"""Seconds between two pieces of live rows."""
TICK: Final = 1.0
"""Seconds between two hints that a page should reload."""

Moment = tuple[str, Mapping[str, Any]]
Welcome = Callable[[], Awaitable[bool]]
"""Tells whether the listener may still receive moments."""


def read_moments(piece: bytes) -> Iterator[Moment]:
    """Yield the moments in a piece of the stream: kind and fields of each."""
    for block in piece.split(b"\n\n"):
        head, _, data = block.partition(b"\ndata: ")
        if head.startswith(b"event: ") and data:
            yield head.removeprefix(b"event: ").decode(), msgspec.json.decode(data)


def _read_moment(fields: Mapping[str, Any], now: datetime) -> datetime:
    """Return when a moment happened, which is before it is drawn; now, where it does not say."""
    return datetime.fromisoformat(fields["at"]) if "at" in fields else now


def encode_text_event(name: str, text: str) -> bytes:
    """Encode a server-sent event; every line of untrusted text becomes a line of data."""
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    return f"event: {name}\n{lines}\n".encode()


async def stream_ticks(
    stream: Broadcast, watcher: Watcher, is_welcome: Welcome, about: Callable[[Moment], bool]
) -> AsyncIterator[bytes]:
    """Yield a hint whenever something has happened that concerns the page."""
    async for piece in stream.watch(watcher):
        if not await is_welcome():
            return
        if piece.startswith(b"retry"):
            # Something may have happened between rendering the page and listening.
            yield piece + encode_text_event("tick", "")
        elif piece.startswith(b":"):
            yield piece
        elif any(about(moment) for moment in read_moments(piece)):
            yield encode_text_event("tick", "")
            await asyncio.sleep(TICK)


async def stream_rows(
    stream: Broadcast, watcher: Watcher, is_welcome: Welcome, about: Callable[[Moment], bool], root: str, language: str
) -> AsyncIterator[bytes]:
    """Yield moments as rows of the live page, newest first; those in quick succession together."""
    async for piece in stream.watch(watcher):
        if not await is_welcome():
            return
        if piece.startswith((b":", b"retry")):
            yield piece
            continue
        if moments := [moment for moment in read_moments(piece) if about(moment)]:
            now = clock.now_utc()
            shown = [
                render(
                    "_moment.html", language, kind=kind, moment=fields, at=_read_moment(fields, now), now=now, root=root
                )
                for kind, fields in moments
            ]
            yield encode_text_event("moments", "".join(reversed(shown)))
        await asyncio.sleep(PAUSE)
