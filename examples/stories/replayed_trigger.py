"""The second story: a trigger from n8n comes twice through a tunnel, its destination stumbles, and a person replays it.

The original is evo-nexus': it looks for the key at the top of the payload only, hands an event on once, and a replay
inserts the failed event again under its own unique key. oncehook runs as it is, on SQLite, with a server that answers
502 once.
"""

import asyncio
import json
import logging
import sqlite3
import tempfile
from collections.abc import Callable
from typing import Any

from oncehook import Event, GiveUp, Inbox
from oncehook.testing.standins import N8nStandIn

TRIGGER = {"event": "lead.created", "data": {"idempotency_key": "lead-42"}}  # n8n nests it one level deeper


# -- the original ------------------------------------------------------------------------------


class Original:
    """Executions with a unique key, as a table has them."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE TABLE executions (key text UNIQUE, status text)")

    def trigger(self, payload: dict[str, Any]) -> str:
        return self._execute(payload.get("idempotency_key"))

    def replay(self, key: str) -> str:
        return self._execute(key)

    def _execute(self, key: str | None) -> str:
        try:
            row = self._database.execute("INSERT INTO executions VALUES (?, 'running')", (key,)).lastrowid
        except sqlite3.IntegrityError:
            return "skipped"
        try:
            self._run()
        except ConnectionError:
            status = "failed"
        else:
            status = "done"
        self._database.execute("UPDATE executions SET status = ? WHERE rowid = ?", (status, row))
        return status


def runs_of_two_copies() -> int:
    """The same trigger twice: how often it runs."""
    runs: list[str] = []
    original = Original(lambda: runs.append("ran"))
    for _ in range(2):
        original.trigger(TRIGGER)
    return len(runs)


def failed_and_replayed() -> tuple[str, str]:
    """The destination answers 502 once; then a person replays: what each says."""
    answers = [502, 200]

    def hand_on() -> None:
        if answers.pop(0) != 200:
            raise ConnectionError("502 Bad Gateway")

    original = Original(hand_on)
    return original.trigger({"idempotency_key": "lead-42"}), original.replay("lead-42")


# -- oncehook ----------------------------------------------------------------------------------


async def tell_ours(folder: str, n8n: N8nStandIn) -> None:
    """The same trigger through an inbox, to a server and to an agent that is not set up yet."""
    inbox = Inbox(f"sqlite:{folder}/oncehook.db")
    inbox.source("triggers", verify="none", type="$.event", budget="30s")  # finds the key at the top and in `data`
    inbox.destination("n8n", url=n8n.webhook(), retry=["0.2s", "0.2s"], allow_private=True)
    inbox.route("triggers", "n8n")
    is_set_up = False

    @inbox.on("triggers")
    async def agent(event: Event) -> None:
        if not is_set_up:
            raise GiveUp("no agent is set up")

    async with inbox.running():

        async def trigger() -> str:
            return (await inbox.receive("triggers", {}, json.dumps(TRIGGER).encode())).outcome

        async def states() -> dict[str, Any]:
            page = await inbox.admin.deliveries(inbox.admin.read(""))
            return {one.destination: one for one in page.items}

        n8n.fail(502, times=1)
        copies = [await trigger(), await trigger()]
        await inbox.drain()
        now = await states()
        say("oncehook, two copies", f"{', '.join(copies)}; n8n ran {len(n8n.executions)} time.")
        say("oncehook, 502 once", f"{now['n8n'].status} on attempt {now['n8n'].attempts}.")
        say("oncehook, no agent", f"{now['agent'].status}, and kept until a person replays or discards it.")
        is_set_up = True
        await inbox.admin.replay_one(now["agent"].id, actor="anna", reason="the agent is set up")
        await inbox.drain()
        now = await states()
        say("oncehook, replayed", f"{now['agent'].status} in run {now['agent'].run}, under the same key.")
        say("oncehook, a late copy", f"{await trigger()}. Keys count for hooks that come in, not for replays.")


def say(who: str, what: str) -> None:
    print(f"  {who:<25} {what}")


def tell() -> None:
    print("A trigger from n8n comes twice; its destination answers 502 once; a person replays what failed")
    say("original, two copies", f"it ran {runs_of_two_copies()} times. The key is one level deeper than it looks.")
    failed, replayed = failed_and_replayed()
    say("original, 502 once", f"{failed}, and never tried again.")
    say("original, replayed", f"{replayed}. The replay meets its own unique key.")
    with tempfile.TemporaryDirectory() as folder, N8nStandIn("lead") as n8n:
        asyncio.run(tell_ours(folder, n8n))


if __name__ == "__main__":
    logging.getLogger("oncehook").setLevel(logging.CRITICAL)  # the story is told here
    tell()
