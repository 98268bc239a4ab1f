"""The product: an inbox with a handler that does nothing, or an HTTP destination, as `BENCH_SCENARIO` says.

Filled by `emit`, in group commits, while nobody works; then worked off by `oncehook worker` with this module's `inbox`.
"""

from __future__ import annotations

import asyncio

import uvloop

from bench.work_peers import batches, body_of, run, setting, subject_of
from oncehook import Event, Inbox

HANDLERS, IN_FLIGHT = 200, 64


def make_inbox() -> Inbox:
    """Make the inbox that is measured."""
    store = setting("STORE")
    made = Inbox(f"sqlite:{store}" if setting("ENGINE") == "sqlite" else store)
    made.source("bench", verify="none", key=["$.id"], subject="$.subject", keep_events=setting("KEEP", "30d"))
    if setting("SCENARIO") in ("http", "steady"):
        made.destination("sink", url=setting("SINK"), allow_private=True, concurrency=IN_FLIGHT)
        made.route("bench", "sink")
    else:

        @made.on("bench", concurrency=HANDLERS)
        async def noop(event: Event) -> None:
            pass

    return made


async def keep(n: int) -> None:
    """Keep one event, as an application that emits its own would."""
    await inbox.emit("bench", "job", body_of(n).encode(), key=str(n), subject=subject_of(n))


async def fill() -> None:
    """Keep them all, many at once; the first one alone, because it makes the source known to the store."""
    async with inbox.running(work=False):
        await keep(0)
        for batch in batches():
            await asyncio.gather(*[keep(n) for n in batch if n])


inbox = make_inbox()

if __name__ == "__main__":
    run(lambda: uvloop.run(fill()), lambda: None)
