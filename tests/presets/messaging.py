"""The ground that tests of the messaging presets stand on: one real source on a SQLite file of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncehook import clock, presets
from oncehook.inbox import Inbox
from oncehook.model import Arrival, Mark, StoredEvent
from oncehook.receive import Receipt
from oncehook.sources import Reply, Source, build

NAMES = (
    "whatsapp-cloud",
    "messenger",
    "360dialog",
    "evolution-api",
    "evolution-go",
    "waha",
    "twilio",
    "telegram",
    "slack",
)
SECRET = b"canary-5f1c9a77e2"
VERIFY_TOKEN = b"our verify token"
URL = "https://hooks.example.com/in/here"
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


@dataclass
class Ground:
    """One source that takes arrivals, and what became of them."""

    inbox: Inbox
    source: Source
    folder: Path

    async def send(
        self, data: Any, *, content_type: str = JSON, at: float | None = None, query: bytes = b""
    ) -> Receipt:
        """Send it as the genuine sender would."""
        draft = Arrival(self.source.name, [(b"content-type", content_type.encode())], wire(data), query)
        signed = self.source.scheme.sign(draft, SECRET, at=clock.now() if at is None else at, url=URL)
        return await self.inbox.receive(self.source.name, signed.headers, signed.body, query=signed.query)

    async def send_as(
        self, data: Any, headers: Mapping[str, str], *, content_type: str = JSON, query: bytes = b""
    ) -> Receipt:
        """Send it with these headers and no other proof."""
        return await self.inbox.receive(
            self.source.name, {"Content-Type": content_type, **headers}, wire(data), query=query
        )

    def ask(self, query: bytes, method: str = "GET") -> Reply:
        return self.inbox.receiver.greet(Arrival(self.source.name, [], b"", query, method))

    async def events(self) -> list[StoredEvent]:
        """Everything that was kept, in the order in which it came."""
        return (await self.inbox.store.find_events(limit=2000))[::-1]

    async def event(self) -> StoredEvent:
        """The only one that was kept."""
        [event] = await self.events()
        return event

    async def keys(self) -> list[str | None]:
        return [event.key for event in await self.events()]

    def bytes_on_disk(self) -> bytes:
        """All that the store has written, its log included."""
        return b"".join(path.read_bytes() for path in sorted(self.folder.iterdir()))


@contextlib.asynccontextmanager
async def ground(folder: Path, preset: str, **settings: Any) -> AsyncIterator[Ground]:
    folder = folder / preset
    folder.mkdir(exist_ok=True)
    inbox = Inbox(f"sqlite:{folder}/x.db")
    source = inbox.add(
        build(
            "here",
            preset=presets.load(preset),
            secrets=[SECRET],
            verify_token=VERIFY_TOKEN,
            public_url=URL,
            **settings,
        )
    )
    async with inbox.running():
        yield Ground(inbox, source, folder)


def wire(data: Any) -> bytes:
    """As Meta writes it: everything outside ASCII escaped, in lower case."""
    if isinstance(data, bytes):
        return data
    return data.encode() if isinstance(data, str) else json.dumps(data).encode()


def counts(receipt: Receipt) -> tuple[int, int, int]:
    """What a batch was answered: accepted, duplicates, conflicts."""
    answer = json.loads(receipt.reply.body)
    return answer["accepted"], answer["duplicates"], answer["conflicts"]


def is_unparsed(event: StoredEvent) -> bool:
    return bool(event.marks & Mark.unparsed)
