"""An hour of history, made in a moment: real arrivals and real attempts on a clock that runs ahead.

The clock is set back by an hour and moved on step by step, so charts, retries and dead letters are there at the first
look. When it is over the clock is right again, whatever happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from oncehook import clock
from oncehook.demo.shop import MENDS_AFTER, MINUTES, Shop
from oncehook.demo.traffic import Post, Traffic
from oncehook.inbox import Inbox
from oncehook.model import Arrival
from oncehook.sources import Source

STEP: Final = 20.0
"""Seconds that pass at once: about as long as a retry waits."""

ACTS: Final = range(2, 7)
"""How many things may happen in a step."""

EXPIRES: Final = 48
"""The minute in which the CRM's key expires."""

MOST_POLLS: Final = 1000
"""Polls, a millisecond apart, after which a step ends although work is left."""


class _PastClock:
    """A clock that is behind, and catches up."""

    def __init__(self, seconds: float) -> None:
        self.behind = seconds
        clock.forward(-seconds)

    def forward(self, seconds: float) -> None:
        """Let time pass, up to the present at most."""
        seconds = min(max(seconds, 0.0), self.behind)
        self.behind -= seconds
        clock.forward(seconds)

    async def pace(self, seconds: float) -> None:
        """Work for so long as a handler. Others work at the same time, so that the clock moves by a part of it."""
        await asyncio.sleep(0)
        self.forward(seconds / 8)


async def make_history(shop: Shop, on_minute: Callable[[int], None] = lambda minute: None) -> None:
    """Give the shop its history; call `on_minute` after every minute of it."""
    past = _PastClock(MINUTES * 60.0)
    try:
        inbox = shop.inbox(past.pace)
        async with inbox.running():
            traffic = Traffic(shop, inbox.sources, _receive_by(inbox))
            while past.behind:
                minute = MINUTES - int(past.behind // 60)
                shop.crm.is_expired = minute > EXPIRES
                await asyncio.gather(*[traffic.act() for _ in range(clock.chance.choice(ACTS))])
                await _wait_until_idle(inbox)
                await inbox.store.record_rejections(*inbox.observer.take_counts())
                past.forward(past.behind % STEP or STEP)
                if past.behind <= (MINUTES - minute) * 60.0:
                    on_minute(minute)
    finally:
        past.forward(past.behind)
    shop.crm.mends_at = clock.now_utc() + MENDS_AFTER


def _receive_by(inbox: Inbox) -> Post:
    async def post(source: Source, arrival: Arrival) -> int:
        receipt = await inbox.receive(source.name, arrival.headers, arrival.body, query=arrival.query)
        return receipt.reply.status

    return post


async def _wait_until_idle(inbox: Inbox) -> None:
    for _ in range(MOST_POLLS):
        levels = (await inbox.admin.levels()).values()
        if not any(level.leased or level.oldest_due is not None for level in levels):
            return
        await asyncio.sleep(0.001)
