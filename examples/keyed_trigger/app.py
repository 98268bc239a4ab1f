"""A trigger with a key that fails, is repaired and replayed: its own key does not stand in its way."""

import os
from pathlib import Path

from oncehook import Event, GiveUp, Inbox

inbox = Inbox(os.environ.get("STORE", "sqlite:./oncehook.db"))
# n8n nests its key one level deeper than Zapier: an ordered list of places, and no silence when none has it.
inbox.source("triggers", verify="none", key=["$.idempotency_key", "$.data.idempotency_key"], on_missing_key="reject")


@inbox.on("triggers", retry="quick")
def run(event: Event) -> None:
    if not Path("agent.txt").exists():
        raise GiveUp("no agent is set up")
    with Path("ran.txt").open("a") as ledger:
        ledger.write(f"{event.key} run {event.run}\n")
