"""An automation product: people make triggers in the browser, and each starts the agent.

A trigger is a source that is made while this runs, with an address and a secret of its own. The agent is a function; it
is a destination like any other, and the person who makes a trigger chooses it there.
"""

import os
from pathlib import Path

from oncehook import Event, GiveUp, Inbox

inbox = Inbox(os.environ.get("STORE", "sqlite:./oncehook.db"))


@inbox.on("app", "agent.wanted", retry="quick")
def agent(event: Event) -> None:
    """Run for the product's own events, and for those of every trigger that is sent here."""
    if not Path("agent.txt").exists():
        raise GiveUp("no agent is set up")
    with Path("ran.txt").open("a") as ledger:
        ledger.write(f"{event.source} {event.key} run {event.run}\n")
