"""Handlers that emit, of every kind; `oncehook worker tests.acceptance.outbox_app:inbox` works for them.

Each order becomes two events of `steps` from each handler, and each of those goes to `audit`. The store's address comes
from the environment.
"""

from __future__ import annotations

import os
from typing import Any

from oncehook import Event, Inbox, RetryLater


def steps(event: Event) -> None:
    """Emit two events, and then fare as the order says."""
    for n in (1, 2):
        step = {"order": event.key, "by": event.destination, "n": n, "fence": event.fence}
        event.emit("steps", f"step.{n}", step, subject=f"{event.destination} {event.subject}")
    if event.attempt <= event.json().get("fails", 0):
        raise RetryLater("busy")


def make(store: str) -> Inbox:
    """`plain` and `stamp` leave the settling to the worker; `book` and `post` commit with us, where that can be."""
    inbox = Inbox(store)
    terms: dict[str, Any] = {"lease": "60s", "retry": ["0.02s"] * 3, "concurrency": 4}

    @inbox.on("orders", **terms)
    async def plain(event: Event) -> None:
        steps(event)

    @inbox.on("orders", **terms)
    def stamp(event: Event) -> None:
        steps(event)

    if store.startswith("postgresql"):

        @inbox.on("orders", **terms)
        async def book(event: Event, tx: Any) -> None:
            await tx.execute("SELECT 1")
            steps(event)

        @inbox.on("orders", **terms)
        def post(event: Event, tx: Any) -> None:
            tx.execute("SELECT 1")
            steps(event)

    @inbox.on("steps", **terms)
    async def audit(event: Event) -> None:
        """Where steps go."""

    return inbox


if "OUTBOX_STORE" in os.environ:
    inbox = make(os.environ["OUTBOX_STORE"])
