"""A small shop, as a user would write one; `oncehook worker tests.torture.app:inbox` works for it.

Each order says in its own body how its handlers fare: how long they take, how often they fail, whether they end
the process. Settings come from the environment (SHOP_…), so that a test can start it in any way it likes; with
SHOP_SINK every order is also sent there over HTTP, by the destination `hook`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncehook import Event, GiveUp, Inbox, RetryLater
from tests.torture.ledger import Ledger
from tests.wire import SECRET

HANDLERS = ("note", "stamp", "book")


class Shop(Inbox):
    """An inbox that waits no longer than it is told for attempts under way when it stops."""

    seconds = 25.0

    async def stop(self, patience: float | None = None) -> None:
        await super().stop(self.seconds if patience is None else patience)


def make(settings: Mapping[str, str]) -> Inbox:
    """The shop of these settings: `note` is a coroutine, `stamp` runs on a thread, `book` commits with us."""
    ledger = Ledger(settings["SHOP_STORE"], Path(settings["SHOP_LEDGER"]))
    shop = Shop(settings["SHOP_STORE"])
    shop.seconds = float(settings.get("SHOP_PATIENCE", "25"))
    shop.source(
        "orders",
        verify={"scheme": "hmac", "header": "X-Signature", "prefix": "sha256="},
        secret=SECRET,
        key="$.id",
        subject="$.subject",
        budget=settings.get("SHOP_BUDGET", "20s"),
    )

    async def note(event: Event) -> None:
        ledger.note("begin", event)
        order = event.json()
        await asyncio.sleep(order.get("sleep", 0.0))
        while not is_open(order.get("gate")):
            await asyncio.sleep(0.02)
        while not is_open(order.get("blocking_gate")):
            time.sleep(0.02)  # holds up the whole loop, as careless handlers do
        fare(event)
        ledger.note("end", event)

    def stamp(event: Event) -> None:
        ledger.note("begin", event)
        time.sleep(event.json().get("sleep", 0.0))
        fare(event)
        ledger.note("end", event)

    async def book(event: Event, tx: Any) -> None:
        ledger.note("begin", event)
        await tx.execute(f"INSERT INTO {ledger.effects} VALUES (%s, %s)", [event.key, event.fence])
        await asyncio.sleep(event.json().get("sleep", 0.0))
        fare(event)
        ledger.note("end", event)

    async def book_on_sqlite(event: Event) -> None:
        def write(db: Any) -> None:
            db.execute("CREATE TABLE IF NOT EXISTS effects (key TEXT, fence INTEGER)")
            db.execute("INSERT INTO effects VALUES (?, ?)", (event.key, event.fence))

        ledger.note("begin", event)
        event.commit(write)
        await asyncio.sleep(event.json().get("sleep", 0.0))
        fare(event)
        ledger.note("end", event)

    handlers: dict[str, Any] = {"note": note, "stamp": stamp, "book": book_on_sqlite if ledger.is_sqlite else book}
    terms: dict[str, Any] = {
        "lease": settings.get("SHOP_LEASE", "1s"),
        "retry": settings.get("SHOP_RETRY", "0.05s,0.05s,0.05s").split(","),
        "concurrency": 8,
    }
    for name in settings.get("SHOP_HANDLERS", ",".join(HANDLERS)).split(","):
        shop.on("orders", name=name, **terms)(handlers[name])
    if "SHOP_SINK" in settings:
        breaker = {"failures": 200, "open": "0.2s"}
        shop.destination("hook", url=settings["SHOP_SINK"], allow_private=True, timeout="1s", breaker=breaker, **terms)
        shop.route("orders", "hook")
    return shop


def is_open(gate: str | None) -> bool:
    """A gate is a file: tests make it when an attempt may go on."""
    return gate is None or Path(gate).exists()


def fare(event: Event) -> None:
    """End as the order says."""
    order = event.json()
    if order.get("kill") in (True, event.destination):
        os.kill(os.getpid(), signal.SIGKILL)
    if order.get("give_up"):
        raise GiveUp("not ours")
    if event.attempt <= order.get("fails", 0):
        raise RetryLater("busy")


if "SHOP_STORE" in os.environ:
    inbox = make(os.environ)
    Ledger(os.environ["SHOP_STORE"], Path(os.environ["SHOP_LEDGER"])).watch()
