"""Payloads of the WhatsApp family and of n8n, by value from their own documents and sources, and what they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

HASH = "hash of the body"
"""Instead of a key: the event has no id of its own."""


class Made(NamedTuple):
    """One event: its type, its key and its subject."""

    type: str
    key: str
    subject: str | None


class Said(NamedTuple):
    """What `event.whatsapp` tells of it."""

    chat: str
    sender: str
    text: str
    from_me: bool = False


@dataclass(frozen=True)
class Payload:
    body: dict[str, Any]
    made: list[Made]
    said: Said | None = None
    """None: it holds no message."""
