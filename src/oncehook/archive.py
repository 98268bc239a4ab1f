"""The archive: events are written out before they are pruned, and can be brought back to be replayed.

An object of the archive holds some events of one day, one line of JSON each, compressed with zstd and encrypted where
the store encrypts. Only when it is written are its events removed; a crash in between leaves them in both places, and
they are written once more. Bringing back what is there changes nothing. Needs the extra `oncehook[objects]`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC
from importlib import import_module
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from oncehook import clock
from oncehook.bodies import Bodies
from oncehook.errors import ArchiveInvalid, BodyMissing, ConfigError
from oncehook.model import ArchivedEvent, EventId, digest
from oncehook.objects import Objects
from oncehook.store.base import Store
from oncehook.store.cipher import Cipher, Reference

DAY: Final = 86_400.0

AT_ONCE: Final = 500
"""Events that are read and removed together."""
MOST_BYTES: Final = 32 << 20
"""Bytes of lines in one object, about: more events of the day go into the next one."""
MOST_READ: Final = 1 << 30
"""Bytes that one object may expand to when it is read."""
BROUGHT_BACK: Final = 4 << 20
"""Bytes of bodies that are brought back in one transaction, about."""
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}")

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(ArchivedEvent)


class Archive:
    """The archive of one store."""

    def __init__(self, store: Store, bodies: Bodies, objects: Objects) -> None:
        self.objects = objects
        self._store = store
        self._bodies = bodies

    # -- writing -------------------------------------------------------------------------------

    @staticmethod
    def check_library() -> None:
        """Raise ConfigError where the library that compresses is missing."""
        _zstd()

    async def prune(self, keep_events: Mapping[int, float], otherwise: float) -> int:
        """Archive and remove the events of days that have outlived their time; return how many were removed.

        An event stays until its whole day has: a day's events then come together, in few objects. Raises
        ObjectsUnavailable, and then removes nothing that is not archived.
        """
        removed = 0
        for source_id in (await self._store.register_names((), ())).sources.values():
            keep = keep_events.get(source_id, otherwise)
            whole_days = keep + (clock.now_utc().timestamp() - keep) % DAY
            async for ids in self._write(source_id, whole_days):
                for start in range(0, len(ids), AT_ONCE):
                    only = ids[start : start + AT_ONCE]
                    removed += (await self._store.prune(keep_events, otherwise, AT_ONCE, only)).events
                    await asyncio.sleep(0.05)  # other processes write the store, too
        return removed

    async def _write(self, source_id: int, keep: float) -> AsyncIterator[list[EventId]]:
        """Write the events of a source that may be removed; yield the ids of each object's events once it is there."""
        lines: list[tuple[EventId, bytes]] = []
        size, day = 0, ""
        async for event in self._find(source_id, keep):
            line = _ENCODER.encode(event)
            its_day = f"{event.received_at.astimezone(UTC):%Y-%m-%d}"
            if lines and (its_day != day or size > MOST_BYTES):
                yield await self._put(day, lines)
                lines, size = [], 0
            lines.append((EventId.parse(event.id), line))
            size += len(line)
            day = its_day
        if lines:
            yield await self._put(day, lines)

    async def _find(self, source_id: int, keep: float) -> AsyncIterator[ArchivedEvent]:
        after: bytes | None = b""
        while after is not None:
            found, after = await self._store.find_prunable(source_id, keep, after, AT_ONCE)
            for event in await self._store.read_archivable(found) if found else ():
                yield await self._read(event)

    async def _put(self, day: str, lines: Sequence[tuple[EventId, bytes]]) -> list[EventId]:
        name = f"archive/{day}/{lines[0][0].hex()}-{lines[-1][0].hex()}.jsonl.zst"
        content = b"\n".join(line for _, line in lines) + b"\n"
        await self.objects.put(name, await asyncio.to_thread(_pack, content, name, self._store.cipher))
        return [id_ for id_, _ in lines]

    async def _read(self, event: ArchivedEvent) -> ArchivedEvent:
        """Return an event with its plain head and body."""
        row, cipher = EventId.parse(event.id), self._store.cipher
        body = cipher.decrypt(event.body, "body", row)
        if isinstance(body, Reference):
            try:
                body = await self._bodies.read(body, "body", row)
            except BodyMissing:
                body = b""  # there is no body to keep, and that must not hold up the others
        return replace(event, head=cipher.decrypt(event.head, "head", row), body=body)

    # -- bringing back -------------------------------------------------------------------------

    async def names(self, day: str) -> list[str]:
        """Return the names of a day's objects. Raises ArchiveInvalid for what is no day."""
        if not _DAY.fullmatch(day):
            raise ArchiveInvalid(f"{day!r} is no day.", hint="Write it as 2026-11-18.")
        found: list[str] = []
        async for page in self.objects.list(f"archive/{day}/"):
            found += [one.name for one in page if one.name.endswith(".jsonl.zst")]
        return sorted(found)

    async def read(self, name: str) -> list[ArchivedEvent]:
        """Return the events of one object. Raises ArchiveInvalid, Undecryptable or ObjectsUnavailable."""
        kept = await self.objects.get(name)
        if kept is None:
            raise ArchiveInvalid(f"There is no {name} at {self.objects.address}.")
        return await asyncio.to_thread(unpack, kept, name, self._store.cipher)

    async def bring_back(
        self, events: Iterable[ArchivedEvent], keep: float, actor: str
    ) -> AsyncIterator[tuple[int, int]]:
        """Bring events back for so many seconds; yield how many were looked at and how many were not there."""
        group: list[ArchivedEvent] = []
        size = 0
        for event in events:
            group.append(event)
            size += len(event.body)
            if size > BROUGHT_BACK or len(group) == AT_ONCE:
                yield len(group), await self._restore(group, keep, actor)
                group, size = [], 0
        if group:
            yield len(group), await self._restore(group, keep, actor)

    async def _restore(self, events: Sequence[ArchivedEvent], keep: float, actor: str) -> int:
        names = {one.destination for event in events for one in event.deliveries}
        await self._store.register_names({event.source for event in events}, names)
        return await self._store.restore([await self._encrypt(event) for event in events], keep, actor)

    async def _encrypt(self, event: ArchivedEvent) -> ArchivedEvent:
        row = EventId.parse(event.id)
        head = self._store.cipher.encrypt(event.head, "head", row)
        return replace(event, head=head, body=await self._bodies.keep(event.body, "body", row))


def _pack(content: bytes, name: str, cipher: Cipher) -> bytes:
    packed: bytes = _zstd().ZstdCompressor(level=6, write_checksum=True).compress(content)
    return cipher.encrypt(packed, "archive", _row(name))


def unpack(kept: bytes, name: str, cipher: Cipher) -> list[ArchivedEvent]:
    """Return the events of an archived object. Raises ArchiveInvalid or Undecryptable."""
    library = _zstd()
    try:
        packed = cipher.decrypt(kept, "archive", _row(name))
        if not 0 < library.frame_content_size(packed) <= MOST_READ:
            raise ValueError("its size is wrong")
        content = library.ZstdDecompressor().decompress(packed)
        return [_check(_DECODER.decode(line)) for line in content.split(b"\n") if line]
    except (library.ZstdError, msgspec.MsgspecError, ValueError) as error:
        raise ArchiveInvalid(f"{name} is no archive of oncehook, or is damaged: {error}.") from None


def _check(event: ArchivedEvent) -> ArchivedEvent:
    """Refuse a line that no store could have written. Raises ValueError."""
    EventId.parse(event.id)
    hashes = [event.body_hash, event.key_hash, *(one.subject_key for one in event.deliveries)]
    if any(one is not None and len(one) != 16 for one in hashes):
        raise ValueError(f"{event.id} has a hash of the wrong length")
    if any(one.status not in ("done", "discarded") for one in event.deliveries):
        raise ValueError(f"{event.id} has a delivery that is not over")
    if event.received_at > clock.now_utc():
        raise ValueError(f"{event.id} comes from the future")
    return event


def _row(name: str) -> bytes:
    """Return what an object's encryption is bound to: its own name, without the folders that people may change."""
    return digest(name.rpartition("/")[2].encode())


def _zstd() -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        raise ConfigError(
            "An archive needs a library that is not installed.", hint="Run: pip install 'oncehook[objects]'"
        ) from None
