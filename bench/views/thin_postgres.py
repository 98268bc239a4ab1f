"""The thin reference on PostgreSQL: bare ASGI, one row per event, group commit over two connections, nothing else."""

from __future__ import annotations

import asyncio
from collections import deque

import asyncpg

from bench.views import STORE
from bench.views.thin import Waiting, serve

CONNECTIONS = 2
LARGEST_BATCH = 32
"""Half of the usual queue, so that the second connection has something to do."""

TABLE = "CREATE TABLE events (key text PRIMARY KEY, body bytea NOT NULL)"
KEEP = """
INSERT INTO events (key, body) SELECT * FROM unnest($1::text[], $2::bytea[])
ON CONFLICT (key) DO NOTHING RETURNING key
"""

_queue: deque[Waiting] = deque()
_free: list[asyncpg.Connection] = []
_writing: set[asyncio.Task[None]] = set()


def keep(waiting: Waiting) -> None:
    """Join the next batch."""
    _queue.append(waiting)
    if _free:
        task = asyncio.ensure_future(write(_free.pop()))
        _writing.add(task)
        task.add_done_callback(_writing.discard)


async def write(connection: asyncpg.Connection) -> None:
    """Commit batches until nothing waits."""
    # Requests that are read in the same turn of the loop join the first batch.
    await asyncio.sleep(0)
    while _queue:
        batch = [_queue.popleft() for _ in range(min(LARGEST_BATCH, len(_queue)))]
        # Sorted, so that two batches with the same keys lock them in the same order.
        batch.sort(key=lambda item: item.key)
        try:
            rows = await connection.fetch(KEEP, [item.key for item in batch], [item.body for item in batch])
        except (asyncpg.PostgresError, OSError) as error:
            refuse(batch, error)
        else:
            answer(batch, {row["key"] for row in rows})
    _free.append(connection)


def answer(batch: list[Waiting], kept: set[str]) -> None:
    """Wake the requests of a committed batch."""
    for item in batch:
        new = item.key in kept
        kept.discard(item.key)
        if not item.future.done():
            item.future.set_result(new)


def refuse(batch: list[Waiting], error: Exception) -> None:
    """Fail the requests of a batch that was not committed."""
    for item in batch:
        if not item.future.done():
            item.future.set_exception(error)


async def start() -> None:
    """Connect when the server starts."""
    _free.extend([await asyncpg.connect(STORE) for _ in range(CONNECTIONS)])


async def make_table() -> None:
    """Make the table."""
    connection = await asyncpg.connect(STORE)
    await connection.execute(TABLE)
    await connection.close()


app = serve(start, keep)


if __name__ == "__main__":
    asyncio.run(make_table())
