"""The first story: Meta delivers one WhatsApp message twice at the same moment, and once a worker dies.

The original is Chatwoot's: first "GET, then SETEX" in Redis, later one atomic "SET NX EX" that lasts for 24 hours. Here
they run on a stand-in for Redis, and a barrier makes the race happen every time. oncehook runs as it is, on SQLite.
"""

import asyncio
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock

from oncehook import Event, Inbox
from oncehook.testing import signed

DAY = 24 * 3600


class Redis:
    """As much of Redis as the story needs: each command is atomic, two of them together are not."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._turn = Lock()

    def get(self, key: str) -> str | None:
        with self._turn:
            return self._values.get(key)

    def setex(self, key: str, seconds: int, value: str) -> None:
        with self._turn:
            self._values[key] = value

    def set_nx_ex(self, key: str, seconds: int, value: str) -> bool:
        with self._turn:
            return self._values.setdefault(key, value) is value


# -- the original ------------------------------------------------------------------------------


def look_then_lock() -> int:
    """Two workers, one message: how many rows come of it."""
    redis, rows, both_have_looked = Redis(), list[str](), Barrier(2)

    def work(wamid: str) -> None:
        seen = redis.get(wamid)
        both_have_looked.wait()
        if seen is None:
            redis.setex(wamid, DAY, "1")
            rows.append(wamid)

    with ThreadPoolExecutor(2) as workers:
        list(workers.map(work, ["wamid.1", "wamid.1"]))
    return len(rows)


def lock_that_outlives_its_worker() -> int:
    """The lock is atomic now; its holder dies, and the sender delivers again: how many rows come of it."""
    redis, rows = Redis(), list[str]()

    def work(wamid: str, owner: str, *, dies: bool = False) -> None:
        if redis.set_nx_ex(wamid, DAY, owner) and not dies:
            rows.append(wamid)

    work("wamid.1", "the first worker", dies=True)
    work("wamid.1", "the second worker")
    return len(rows)


# -- oncehook ----------------------------------------------------------------------------------


def open_inbox(folder: Path, killed_after: asyncio.Event | None = None) -> Inbox:
    """A WhatsApp source, and a handler that keeps each message in a table, or dies in the middle."""
    inbox = Inbox(f"sqlite:{folder}/oncehook.db")
    inbox.source("whatsapp", preset="whatsapp-cloud", secret="app secret", verify_token="hello", budget="30s")

    @inbox.on("whatsapp", "message.*")
    async def keep(event: Event) -> None:
        if killed_after is not None:
            await killed_after.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        # Written in the very transaction that marks the delivery done.
        event.commit(lambda connection: connection.execute("INSERT INTO messages VALUES (?)", (event.key,)))

    return inbox


async def receive(folder: Path, copies: int, *, dies: bool = False) -> None:
    """Take in that many copies of the message at once, work, and print what the sender was told."""
    answered = asyncio.Event()
    inbox = open_inbox(folder, answered if dies else None)
    message = (folder / "message.json").read_bytes()
    hook = signed(inbox.sources["whatsapp"], body=message)
    async with inbox.running():
        receipts = await asyncio.gather(
            *[inbox.receive("whatsapp", hook.headers, hook.body, peer="203.0.113.7") for _ in range(copies)]
        )
        print(json.dumps(Counter(receipt.outcome for receipt in receipts)), flush=True)
        answered.set()
        await inbox.drain()


def in_a_process(folder: Path, copies: int, *, dies: bool = False) -> str:
    """The same in a process of its own, which may be killed."""
    command = [sys.executable, __file__, str(folder), str(copies), *(["dies"] if dies else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if dies else 0)
    told = json.loads(done.stdout)
    return ", ".join(f"{told[outcome]} {outcome}" for outcome in sorted(told))


def kept(folder: Path) -> int:
    """How many rows there are."""
    with sqlite3.connect(folder / "oncehook.db") as connection:
        return int(connection.execute("SELECT count(*) FROM messages").fetchone()[0])


async def set_up(folder: Path) -> None:
    """The table, and one message of Meta's."""
    inbox = open_inbox(folder)
    (folder / "message.json").write_bytes(signed(inbox.sources["whatsapp"], "message.text").body)
    async with inbox.running(work=False):
        pass
    with sqlite3.connect(folder / "oncehook.db") as connection:
        connection.execute("CREATE TABLE messages (wamid text NOT NULL)")  # nothing but the inbox keeps copies out


def say(who: str, what: str) -> None:
    print(f"  {who:<25} {what}")


def tell() -> None:
    print("One WhatsApp message, delivered twice at the same moment")
    say("original, GET and SETEX", f"{look_then_lock()} rows. Both workers looked before either had written.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(set_up(folder))
        told = in_a_process(folder, 16)
        say("oncehook, 16 copies", f"{kept(folder)} row. {told}. Key, event and work are one commit.")

    print("A worker dies in the middle, and Meta delivers again")
    say(
        "original, SET NX EX",
        f"{lock_that_outlives_its_worker()} rows. The lock of the dead refuses every retry for 24 hours.",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(set_up(folder))
        first = in_a_process(folder, 1, dies=True)
        say("oncehook, killed", f"{kept(folder)} rows. {first}, then the process is gone.")
        again = in_a_process(folder, 1)
        say("oncehook, next start", f"{kept(folder)} row. {again}. The event was due, and no lock was in its way.")


if __name__ == "__main__":
    logging.getLogger("oncehook").setLevel(logging.CRITICAL)  # the story is told here
    if sys.argv[1:]:
        asyncio.run(receive(Path(sys.argv[1]), int(sys.argv[2]), dies="dies" in sys.argv))
    else:
        tell()
