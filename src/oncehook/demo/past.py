"""An hour of history, lived through in a moment: real arrivals and real attempts on a clock that runs ahead.

The demo's clock is set back by an hour and moved on minute by minute, so charts, retries and dead letters are there at
the first look. When it is over the clock is right again, whatever happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from oncehook import clock
from oncehook.demo.shop import MENDS_AFTER, MINUTES, Shop
from oncehook.demo.traffic import Traffic, Way
from oncehook.inbox import Inbox
from oncehook.model import Arrival
from oncehook.sources import Source

STEP: Final = 20.0
"""Seconds that pass at once: about as long as a retry waits."""

ACTS: Final = (2, 7)
"""How many things happen in a step, at least one and less than the other."""

EXPIRES: Final = 48
"""The minute in which the key of the CRM expires."""

LOOK: Final = 0.001
PATIENCE: Final = 1000
"""Looks for which a step may take to come to rest."""


class _Past:
    """A clock that is behind, and catches up."""

    def __init__(self, seconds: float) -> None:
        self.behind = seconds
        clock.forward(-seconds)

    def forward(self, seconds: float) -> None:
        """Let time pass, and never go beyond the present."""
        seconds = min(max(seconds, 0.0), self.behind)
        self.behind -= seconds
        clock.forward(seconds)

    async def pace(self, seconds: float) -> None:
        """A handler works for so long; others at the same time, so that only a part of it is the clock's."""
        await asyncio.sleep(0)
        self.forward(seconds / 8)


async def live_through(shop: Shop, tell: Callable[[int], None] = lambda minute: None) -> None:
    """Give the shop its history. `tell` hears of every minute."""
    past = _Past(MINUTES * 60.0)
    try:
        inbox = shop.inbox(past.pace)
        async with inbox.running():
            traffic = Traffic(shop, inbox.sources, _straight_into(inbox))
            while past.behind:
                minute = MINUTES - int(past.behind // 60)
                shop.crm.is_expired = minute > EXPIRES
                await asyncio.gather(*[traffic.act() for _ in range(clock.chance.randrange(*ACTS))])
                await _come_to_rest(inbox)
                await inbox.store.record_rejections(*inbox.observer.take_counts())
                past.forward(past.behind % STEP or STEP)
                if past.behind <= (MINUTES - minute) * 60.0:
                    tell(minute)
    finally:
        past.forward(past.behind)
    shop.crm.mends_at = clock.now_utc() + MENDS_AFTER


def _straight_into(inbox: Inbox) -> Way:
    async def bring(source: Source, arrival: Arrival) -> int:
        receipt = await inbox.receive(source.name, arrival.headers, arrival.body, query=arrival.query)
        return receipt.reply.status

    return bring


async def _come_to_rest(inbox: Inbox) -> None:
    """Nothing is at work and nothing is due; or it is time to go on all the same."""
    for _ in range(PATIENCE):
        levels = (await inbox.admin.levels()).values()
        if not any(level.leased or level.oldest_due is not None for level in levels):
            return
        await asyncio.sleep(LOOK)
