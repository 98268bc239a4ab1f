"""A preset on trial: an inbox of its own with that one source, and a sender who knows the secret.

`trial` opens it on a SQLite file; `Trial.send` signs a body with the preset's own scheme and hands it in, and what
was kept is read back from the store.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oncehook import clock, presets, samples
from oncehook.inbox import Inbox
from oncehook.ingest import Receipt
from oncehook.model import Arrival, EventDetails, EventId
from oncehook.sources import Source, build
from oncehook.verify import development_keys
from tests.kept import kept_events

URL = "https://hooks.example.com/in/trial"
DAY = 86_400.0


@dataclass
class Trial:
    inbox: Inbox
    source: Source
    folder: Path

    def draft(
        self,
        body: object,
        *,
        headers: Mapping[str, str] | None = None,
        query: str = "",
        content_type: str = "application/json",
    ) -> Arrival:
        """An unsigned arrival; a body that is not text is written as JSON with everything outside ASCII escaped."""
        text = body if isinstance(body, str | bytes) else json.dumps(body)
        pairs = {"content-type": content_type, **(headers or {})}
        return Arrival(
            self.source.name,
            [(name.lower().encode(), value.encode()) for name, value in pairs.items()],
            text.encode() if isinstance(text, str) else text,
            query.encode(),
        )

    def sign(self, draft: Arrival, *, at: float | None = None) -> Arrival:
        moment = clock.now() if at is None else at
        return self.source.scheme.sign(draft, self.source.signing, at=moment, url=self.source.settings.public_url)

    async def take(self, arrival: Arrival) -> Receipt:
        return await self.inbox.receive(arrival.source, arrival.headers, arrival.body, query=arrival.query)

    async def send(self, body: object, *, at: float | None = None, **how: Any) -> Receipt:
        return await self.take(self.sign(self.draft(body, **how), at=at))

    async def keep(self, body: object, **how: Any) -> EventDetails:
        """Send what must be accepted as one event, and read it back."""
        receipt = await self.send(body, **how)
        assert (receipt.outcome, receipt.reply.status) == ("accepted", 200), receipt
        [event] = await self.kept(receipt)
        return event

    async def outcome(self, body: object, **how: Any) -> str:
        return (await self.send(body, **how)).outcome

    async def kept(self, receipt: Receipt) -> list[EventDetails]:
        found = [await self.inbox.store.get_event(EventId.parse(text)) for text in receipt.event_ids]
        return [event for event in found if event is not None]

    async def events(self) -> list[EventDetails]:
        """All that is kept, oldest first."""
        return (await kept_events(self.inbox.store, self.source.name))[::-1]

    def bytes_on_disk(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.folder.iterdir() if path.is_file())


@asynccontextmanager
async def trial(folder: Path, preset: str, **settings: Any) -> AsyncIterator[Trial]:
    """An inbox that runs, with the preset as its one source; settings are those of `build`."""
    chosen = presets.load(preset)
    if "secret" not in settings:
        keys = development_keys(chosen.scheme)
        settings |= {"secret": keys.secrets, "signing": keys.signing}
    settings.setdefault("budget", 90.0)  # a busy machine is no reason to refuse
    if "public_url" in chosen.needs:
        settings.setdefault("public_url", URL)
    if "verify_token" in chosen.needs:
        settings.setdefault("verify_token", b"a token for tests")
    inbox = Inbox(f"sqlite:{folder}/x.db")
    source = inbox.add(build("trial", preset=chosen, **settings))
    async with inbox.running():
        yield Trial(inbox, source, folder)


async def try_sample(folder: Path, preset: str, kind: str) -> list[EventDetails]:
    """What holds for every sample of every preset; the events it made, with the batch's parts in their order.

    It is accepted and kept byte for byte, comes again as a duplicate, is refused after one byte changed, and the
    next one of the same type is a new event.
    """
    async with trial(folder, preset) as on:
        draft = samples.draft(on.source, kind)
        first = samples.sign(on.source, draft, url=on.source.settings.public_url)
        receipt = await on.take(first)
        assert (receipt.outcome, receipt.reply.status) == ("accepted", 200), receipt
        made = await on.kept(receipt)
        if kind == "batch":
            assert len(made) > 1
        else:
            assert [event.type for event in made] == [kind]
        for body in _spoilt(first.body):
            refused = await on.take(replace(first, body=body))
            assert (refused.outcome, refused.reply.status) == ("rejected", 401) or not _covers_body(on)
        unsigned = await on.take(draft)
        assert unsigned.reply.status == 401
        forged = await on.take(samples.sign(on.source, draft, url=on.source.settings.public_url, forge=True))
        assert forged.reply.status == 401
        if all(event.key for event in made):
            again = await on.take(first)
            assert (again.outcome, again.reply.status) == ("duplicate", 200)
            assert again.event_ids == receipt.event_ids
            fresh = await on.take(
                samples.sign(on.source, samples.draft(on.source, kind), url=on.source.settings.public_url)
            )
            assert fresh.outcome == "accepted"
        return made


def _covers_body(on: Trial) -> bool:
    return on.source.preset is not None and on.source.preset.body_authenticated


def _spoilt(body: bytes) -> list[bytes]:
    middle = len(body) // 2
    return [body + b" ", body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :], body[:-1]]
