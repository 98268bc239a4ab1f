"""DBOS with a partitioned queue: each subject is a partition, and a partition runs one workflow at a time."""

from __future__ import annotations

import os
import signal

import sqlalchemy
from dbos import DBOS, DBOSClient, DBOSConfig

from bench.work_peers import batches, body_of, run, setting, subject_of

QUEUE = "bench"
POLLING_SECONDS = 0.1
"""A tenth of its default: each poll starts one workflow per partition, and so bounds how many are done."""


def config() -> DBOSConfig:
    """One version, so that every process may work off what `fill` enqueued; an id for each process."""
    return {
        "name": "bench",
        "system_database_url": address(),
        "application_version": "1",
        "executor_id": str(os.getpid()),
        "log_level": "WARNING",
    }


def address() -> str:
    """Return the address of its database in SQLAlchemy's form."""
    if setting("ENGINE") == "sqlite":
        return f"sqlite:///{setting('STORE')}"
    return setting("STORE").replace("postgresql://", "postgresql+psycopg://", 1)


@DBOS.workflow(name="noop")
def noop(body: str) -> None:
    """Do nothing."""


def launch() -> None:
    """Start it; the queue is declared after that."""
    DBOS(config=config())
    DBOS.listen_queues([QUEUE])
    DBOS.launch()


def fill() -> None:
    """Make its tables, declare the queue and enqueue, several in one transaction."""
    launch()
    DBOS.register_queue(QUEUE, partition_concurrency=1, polling_interval_sec=POLLING_SECONDS)
    DBOS.destroy()
    client = DBOSClient(system_database_url=address())
    engine = sqlalchemy.create_engine(address())
    for batch in batches():
        with engine.begin() as connection:
            for n in batch:
                partition = subject_of(n)
                assert partition is not None
                client.enqueue_in_transaction(
                    connection,
                    {
                        "workflow_name": "noop",
                        "queue_name": QUEUE,
                        "app_version": "1",
                        "queue_partition_key": partition,
                    },
                    body_of(n),
                )
    client.destroy()


def work() -> None:
    """Work until stopped."""
    launch()
    signal.sigwait([signal.SIGTERM])
    os._exit(0)


if __name__ == "__main__":
    run(fill, work)
