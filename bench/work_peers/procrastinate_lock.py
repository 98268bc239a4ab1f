"""procrastinate, one job at a time per subject: every job has its subject as `lock`."""

from __future__ import annotations

import uvloop
from procrastinate import App, PsycopgConnector

from bench.work_peers import batches, body_of, run, setting, subject_of

CONCURRENCY = 100
"""Jobs at once in one process: fewer than there are subjects, so that a worker always finds one whose lock is free."""

app = App(connector=PsycopgConnector(conninfo=setting("STORE"), min_size=4, max_size=20))


@app.task(queue="bench", name="noop")
async def noop(body: str) -> None:
    """Do nothing."""


async def fill() -> None:
    """Make its tables and defer in batches."""
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for batch in batches():
            jobs = [noop.configure(lock=subject_of(n)).make_new_job(body=body_of(n)) for n in batch]
            await app.job_manager.batch_defer_jobs_async(jobs)


async def work() -> None:
    """Work until stopped."""
    async with app.open_async():
        await app.run_worker_async(queues=["bench"], concurrency=CONCURRENCY, fetch_job_polling_interval=0.2)


if __name__ == "__main__":
    run(lambda: uvloop.run(fill()), lambda: uvloop.run(work()))
