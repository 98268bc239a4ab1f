"""What tests of the messaging presets share: a source with a secret to look for, and short ways to ask about it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from oncehook import presets
from oncehook.ingest import Receipt
from oncehook.model import Arrival, EventDetails, Mark
from oncehook.sources import Odd, Reply, build
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
JUNK: list[Any] = [None, 42, "text", [], ["wamid.A"], True, {}]
"""What may stand where an object is expected."""


@contextlib.asynccontextmanager
async def ground(folder: Path, preset: str, **settings: Any) -> AsyncIterator[Trial]:
    """The preset on trial, with secrets of ours."""
    given = {"secret": [SECRET], "verify_token": VERIFY_TOKEN, "public_url": URL, **settings}
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


def is_unparsed(event: EventDetails) -> bool:
    return bool(event.marks & Mark.unparsed)


def meta_signature(body: bytes, secret: bytes = SECRET) -> dict[str, str]:
    """Made here, and not by our own scheme."""
    return {"X-Hub-Signature-256": "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()}


def json_values(names: Sequence[str]) -> st.SearchStrategy[Any]:
    """Any JSON in which these names may stand anywhere."""
    return st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "id", "wamid.A", "é"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=4),
        max_leaves=25,
    )


def take_apart(preset: str, data: Any) -> list[Any]:
    """The parts of a body, each read by the rules: whatever raises here is a 503 in the wild."""
    source = build("here", preset=presets.load(preset), secret=[SECRET], verify_token=b"x", public_url=URL)
    arrival = Arrival("here", [], b"")
    parts = [data] if source.split is None else list(source.split(data, arrival))
    for part in parts:
        source.rules.read_data(arrival, part.part if isinstance(part, Odd) else part, b"")
    return parts
