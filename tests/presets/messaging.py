"""What tests of the messaging presets share: a source with a secret to look for, and short ways to ask about it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from oncehook.model import Arrival, Mark, StoredEvent
from oncehook.receive import Receipt
from oncehook.sources import Reply
from tests.presets.trial import URL, Trial, trial

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
FORM = "application/x-www-form-urlencoded"


@contextlib.asynccontextmanager
async def ground(folder: Path, preset: str, **settings: Any) -> AsyncIterator[Trial]:
    """The preset on trial, with secrets of ours."""
    given = {"secrets": [SECRET], "verify_token": VERIFY_TOKEN, "public_url": URL, **settings}
    async with trial(folder, preset, **given) as place:
        yield place


def ask(place: Trial, query: bytes, method: str = "GET") -> Reply:
    """What a question about the address itself is answered."""
    return place.inbox.receiver.greet(place.source, Arrival(place.source.name, [], b"", query, method))


async def send_as(place: Trial, body: object, headers: dict[str, str], **how: Any) -> Receipt:
    """Send it with these headers and no other proof."""
    return await place.take(place.draft(body, headers=headers, **how))


async def keys(place: Trial) -> list[str | None]:
    return [event.key for event in await place.events()]


def counts(receipt: Receipt) -> tuple[int, int, int]:
    """What a batch was answered: accepted, duplicates, conflicts."""
    answer = json.loads(receipt.reply.body)
    return answer["accepted"], answer["duplicates"], answer["conflicts"]


def is_unparsed(event: StoredEvent) -> bool:
    return bool(event.marks & Mark.unparsed)
