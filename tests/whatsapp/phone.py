"""A sender that says what a test tells it to say, and remembers what it was given."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from oncehook.whatsapp.messages import Message
from oncehook.whatsapp.outcomes import Reason, SendFailed, Sent

HANG = object()


@dataclass
class Phone:
    """Answers one after the other with what it was given, and well for ever after."""

    answers: list[Any] = field(default_factory=list)
    given: list[tuple[Message, str | None]] = field(default_factory=list)
    api: str = "meta"
    address: str = "https://graph.example/123"
    country: str | None = None
    timeout: float = 15.0
    files: Any = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    is_open: bool = False

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def attempt(self, message: Message, *, id: str | None = None) -> Sent:
        assert self.is_open
        self.given.append((message, id))
        self.began.set()
        answer = self.answers.pop(0) if self.answers else None
        if answer is HANG:
            await asyncio.sleep(60)
        if isinstance(answer, Exception):
            raise answer
        return answer or Sent(f"wamid.{len(self.given)}", 200, b'{"messages":[]}')

    @property
    def texts(self) -> list[str]:
        return [getattr(message, "text", "") for message, _ in self.given]


def busy(**how: Any) -> SendFailed:
    return SendFailed("Too many messages.", Reason.rate_limited, status=429, api_code="130429", **how)


def closed() -> SendFailed:
    return SendFailed(
        "More than 24 hours have passed.", Reason.window_closed, status=400, api_code="131047", answer=b'{"error":{}}'
    )


def silent() -> SendFailed:
    return SendFailed("No answer came.", Reason.unavailable, unsure=True)
