"""The third story: two hooks for one object, a microsecond apart.

The original is a question on Stack Overflow (64948270, Django and PostgreSQL). A hook says which object changed, the
handler fetches it and makes or changes its row. Side by side two of them make two rows. So each looked for a rival of
the last 10 seconds, and quit when there was one: both quit. A barrier makes the race happen every time. oncehook runs
as it is, on SQLite.
"""

import asyncio
import json
import logging
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from oncehook import Event, Inbox

FETCHING = 0.05
"""Seconds; in the question it is up to 1.2."""


# -- the original ------------------------------------------------------------------------------


def side_by_side() -> int:
    """Look whether there is a row, fetch the object, insert: how many rows two hooks make."""
    rows, both_have_looked = list[str](), Barrier(2)

    def handle(number: str) -> None:
        is_new = number not in rows
        both_have_looked.wait()
        time.sleep(FETCHING)
        if is_new:
            rows.append(number)

    with ThreadPoolExecutor(2) as processes:
        list(processes.map(handle, ["42", "42"]))
    return len(rows)


def looking_for_rivals() -> int:
    """Note oneself, look for a rival of the last 10 seconds, quit if there is one: how many rows two hooks make."""
    rows, changes, both_are_noted = list[str](), list[tuple[str, str, float]](), Barrier(2)

    def handle(number: str, process: str) -> None:
        changes.append((number, process, time.monotonic()))
        both_are_noted.wait()
        if any(
            other != process and about == number and time.monotonic() - at < 10 for about, other, at in list(changes)
        ):
            return
        time.sleep(FETCHING)
        rows.append(number)

    with ThreadPoolExecutor(2) as processes:
        list(processes.map(handle, ["42", "42"], ["one", "two"]))
    return len(rows)


# -- oncehook ----------------------------------------------------------------------------------


async def tell_ours(folder: str) -> None:
    inbox = Inbox(f"sqlite:{folder}/oncehook.db")
    # There is no event id in these hooks: the object and its version together are the key.
    inbox.source(
        "shop", verify="none", key=[["$.number", "$.version"]], subject="$.number", rank="$.version", budget="30s"
    )
    rows: list[dict[str, str]] = []
    at_work: list[str] = []
    most_at_work = 0

    @inbox.on("shop", latest_wins=True)
    async def keep(event: Event) -> None:
        """Look, then write: safe, because nobody else is at this object meanwhile."""
        nonlocal most_at_work
        at_work.append(event.id)
        most_at_work = max(most_at_work, len(at_work))
        said = event.json()
        row = next((row for row in rows if row["number"] == said["number"]), None)
        await asyncio.sleep(FETCHING)
        if row is None:
            rows.append(row := {"number": said["number"]})
        row["status"] = said["status"]
        at_work.remove(event.id)

    async def hook(version: int, status: str) -> str:
        body = json.dumps({"number": "42", "version": version, "status": status}).encode()
        return (await inbox.receive("shop", {}, body)).outcome

    async with inbox.running():
        await asyncio.gather(hook(1, "created"), hook(2, "paid"))
        await inbox.drain()
        say("oncehook, in order", f"{len(rows)} row, {rows[0]['status']}. {most_at_work} hook of the object at a time.")

        print("Version 4 of the object comes before version 3")
        for version, status in ((4, "shipped"), (3, "packed")):
            await hook(version, status)
            await inbox.drain()
        page = await inbox.admin.deliveries(inbox.admin.read("subject:42"))
        notes = [one.note or "handled" for one in reversed(page.items)]
        say("oncehook, latest wins", f"the row says {rows[0]['status']}. Version 4 {notes[2]}, version 3 {notes[3]}.")


def say(who: str, what: str) -> None:
    print(f"  {who:<25} {what}")


def tell() -> None:
    print("Two hooks for one object, a microsecond apart")
    say("original, side by side", f"{side_by_side()} rows. Each looked before the other had written.")
    say("original, with a check", f"{looking_for_rivals()} rows. Each found the other, and quit.")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(tell_ours(folder))


if __name__ == "__main__":
    logging.getLogger("oncehook").setLevel(logging.CRITICAL)  # the story is told here
    tell()
