"""The shop that the demo's inbox works for: four sources, and destinations that each have a trouble of their own.

`reply` is slow, so that the messages of a busy customer queue up; `ledger` hangs up once or twice and then answers;
`calendar` does all that waits for one appointment in one go; `crm` refuses everything until its key is renewed;
`answers` sends over a stand-in for WhatsApp, on which one customer cannot be found. The inbox is built twice, for the
history and for the live part; the servers are the same for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from oncehook import clock
from oncehook.event import Event
from oncehook.inbox import Inbox
from oncehook.settings.stored import make_key_file
from oncehook.testing.standins.meta import MetaStandIn
from oncehook.testing.standins.server import LoopbackServer, Reply, Request
from oncehook.upkeep import Limits
from oncehook.whatsapp import MetaCloud

SOURCES: Final = {"whatsapp": "whatsapp-cloud", "stripe": "stripe", "github": "github", "bookings": "acuity"}

NOBODY: Final = "5585900000000"
"""A number that is not on WhatsApp: messages to it become dead letters."""

PATIENCE: Final = 100
"""Failures in a row after which a breaker opens: more than the demo's outages have, so that dead letters are seen."""

MENDS_AFTER: Final = timedelta(minutes=5)

Handler = Callable[[Event], Awaitable[None]]
Pace = Callable[[float], Awaitable[None]]
"""Lets so many seconds pass."""


class Crm(LoopbackServer):
    """A server whose key has expired, until somebody renews it or a time has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_expired = False
        self.mends_at: datetime | None = None

    def reply(self, request: Request) -> Reply:
        self.requests.clear()
        if self.is_broken:
            return Reply(401, {"error": "api key expired"})
        return Reply(200, {"ok": True})

    @property
    def is_broken(self) -> bool:
        return self.is_expired and (self.mends_at is None or clock.now_utc() < self.mends_at)

    def mend(self) -> None:
        self.is_expired = False


class Shop:
    """The business that the inbox works for. `with` starts the servers of others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger_is_down = False
        self.crm = Crm()
        self.meta = MetaStandIn(secret=_secret())
        self.meta.not_on_whatsapp(NOBODY)
        self._secrets = {name: _secret() for name in SOURCES} | {"whatsapp": self.meta.secret}

    def __enter__(self) -> Shop:
        self.crm.start()
        self.meta.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.crm.stop()
        self.meta.stop()

    def inbox(self, pace: Pace = asyncio.sleep) -> Inbox:
        """Build an inbox on the shop's store, whose handlers wait through `pace`."""
        url = f"sqlite:{self.folder / 'demo.db'}"
        make_key_file(url)
        inbox = Inbox(url)
        for name, preset in SOURCES.items():
            # An appointment that is moved twice is two events: the new time tells them apart.
            key: dict[str, Any] = {"key": [["form:id", "form:action", "?form:datetime"]]} if name == "bookings" else {}
            inbox.source(name, preset=preset, secret=self._secrets[name], verify_token="demo", **key)  # noqa: S106
        inbox.limits = Limits(daily_volume={"whatsapp": 0})  # the demo sends a day's events in a minute
        inbox.destination("crm", url=f"{self.crm.url}/hooks", allow_private=True, breaker={"failures": PATIENCE})
        inbox.route("bookings", "crm", when={"type": ["scheduled", "canceled"]}, coalesce=False)
        to_whatsapp = MetaCloud(
            self.meta.token, self.meta.phone_number_id, base_url=self.meta.url, allow_private=True, timeout=5.0
        )
        inbox.sender("answers", to_whatsapp, retry="quick")
        _add_handlers(inbox, pace, lambda: self.ledger_is_down)
        return inbox


def _secret() -> str:
    return clock.random_bytes(16).hex()


def _as_top_level(handler: Handler) -> Handler:
    """Name a handler as if it stood in the module, like anybody's."""
    handler.__qualname__ = handler.__name__
    return handler


def _add_handlers(inbox: Inbox, pace: Pace, ledger_is_down: Callable[[], bool]) -> None:
    chance = clock.chance

    @inbox.on("whatsapp", "message.*", retry="quick")
    @_as_top_level
    async def reply(event: Event) -> None:
        await pace(chance.uniform(0.5, 0.9))
        message = event.json()["entry"][0]["changes"][0]["value"]["messages"][0]
        answer = {"to": f"+{message['from']}", "text": f"Got it: {message['text']['body']}"}
        event.emit("answers", "message.text", answer, subject=f"+{message['from']}")

    @inbox.on("whatsapp", "status.*", latest_wins=True)
    @_as_top_level
    async def receipts(event: Event) -> None:
        await pace(chance.uniform(0.01, 0.05))

    @inbox.on("stripe", retry=["9s", "20s"], breaker={"failures": PATIENCE})
    @_as_top_level
    async def ledger(event: Event) -> None:
        await pace(chance.uniform(0.02, 0.1))
        if ledger_is_down():
            raise ConnectionError("the ledger is down")
        if event.attempt <= hang_ups(event.id):
            raise ConnectionError("the ledger hung up")

    @inbox.on("github")
    @_as_top_level
    async def build(event: Event) -> None:
        await pace(chance.uniform(0.1, 0.4))

    @inbox.on("bookings")
    @_as_top_level
    async def calendar(event: Event) -> None:
        await pace(chance.uniform(0.4, 0.8))


def hang_ups(event_id: str) -> int:
    """Return how often the ledger hangs up on this event before it answers: never, once or twice."""
    return max(int(event_id[-8:-4], 16) % 5 - 2, 0)  # the last digits are the same in all event ids
