"""The thin reference on SQLite: bare ASGI, one row per event, group commit in a writer thread, and nothing else.

It shows what the same idea costs without a product around it. WAL with `synchronous = FULL`: the answer comes
after the commit is on disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from queue import Empty, SimpleQueue

from bench.views import STORE
from bench.views.thin import Waiting, serve

TABLE = "CREATE TABLE events (key TEXT PRIMARY KEY, body BLOB NOT NULL)"
KEEP = "INSERT INTO events (key, body) VALUES (?, ?) ON CONFLICT (key) DO NOTHING"

_queue: SimpleQueue[Waiting] = SimpleQueue()


def connect() -> sqlite3.Connection:
    """Open a connection whose commits survive a power cut."""
    connection = sqlite3.connect(STORE, isolation_level=None, check_same_thread=False)
    connection.executescript("PRAGMA page_size = 8192; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
    return connection


def gather() -> list[Waiting]:
    """Everything that waits now; sleeps until there is something."""
    batch = [_queue.get()]
    try:
        while True:
            batch.append(_queue.get_nowait())
    except Empty:
        return batch


def write(connection: sqlite3.Connection, batch: list[Waiting]) -> list[bool]:
    """Keep a batch in one transaction; says for each whether it was new."""
    connection.execute("BEGIN IMMEDIATE")
    fresh = [connection.execute(KEEP, (item.key, item.body)).rowcount == 1 for item in batch]
    connection.execute("COMMIT")
    return fresh


def answer(batch: list[Waiting], fresh: list[bool]) -> None:
    """Wake the requests of a committed batch."""
    for item, new in zip(batch, fresh, strict=True):
        if not item.future.done():
            item.future.set_result(new)


def refuse(batch: list[Waiting], error: Exception) -> None:
    """Fail the requests of a batch that was not committed."""
    for item in batch:
        if not item.future.done():
            item.future.set_exception(error)


def run_writer(loop: asyncio.AbstractEventLoop) -> None:
    """Body of the writer thread."""
    connection = connect()
    while True:
        batch = gather()
        try:
            fresh = write(connection, batch)
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            loop.call_soon_threadsafe(refuse, batch, error)
        else:
            loop.call_soon_threadsafe(answer, batch, fresh)


async def start() -> None:
    """Start the writer when the server starts."""
    threading.Thread(target=run_writer, args=(asyncio.get_running_loop(),), daemon=True).start()


app = serve(start, _queue.put)


if __name__ == "__main__":
    connect().execute(TABLE)
