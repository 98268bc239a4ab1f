"""PgQueuer with no-op jobs in batches of 200, set up as its tuning guide says: a connection of its own, `autovac`."""

from __future__ import annotations

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, Job, PgQueuer, Queries

from bench.work_peers import batches, body_of, run, setting

BATCH_SIZE = 200


async def fill() -> None:
    """Make its tables and enqueue by lists."""
    connection = await asyncpg.connect(setting("STORE"))
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    for batch in batches():
        size = len(batch)
        await queries.enqueue(["noop"] * size, [body_of(n).encode() for n in batch], [0] * size)
    await connection.close()


async def work() -> None:
    """Work until stopped."""
    worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(setting("STORE"))))

    @worker.entrypoint("noop")
    async def noop(job: Job) -> None:
        pass

    await worker.run(batch_size=BATCH_SIZE)


if __name__ == "__main__":
    run(lambda: uvloop.run(fill()), lambda: uvloop.run(work()))
