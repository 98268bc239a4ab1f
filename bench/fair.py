"""Rounds: how long 50 customers with ten deliveries each take, alone and beside one with 100,000.

Everything is stored first; then one worker with the default of 16 attempts at once works it off, with a handler that
takes a millisecond. Run by `python -m bench.fair`; a table on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.engines import Postgres
from oncehook import Inbox
from oncehook.event import Event

CUSTOMERS, EACH = 50, 10
TAKES = 0.001


async def measure(store: str, crowd: int, fair: str | None) -> list[float]:
    """Return the seconds after which each customer's last delivery was done, since the worker was ready."""
    left = {f"small-{n}": EACH for n in range(CUSTOMERS)}
    ended: dict[str, float] = {}
    all_ended = asyncio.Event()

    async def handle(event: Event) -> None:
        await asyncio.sleep(TAKES)
        account = event.json()["account"]
        if account in left:
            left[account] -= 1
            if not left[account]:
                ended[account] = time.perf_counter()
                if len(ended) == CUSTOMERS:
                    all_ended.set()

    def build() -> Inbox:
        inbox = Inbox(store)
        terms = {} if fair is None else {"fair": fair}
        inbox.on("app", name="crm", **terms)(handle)  # type: ignore[arg-type]
        return inbox

    async with build().running(work=False) as inbox:
        accounts = ["big"] * crowd + [name for name in left for _ in range(EACH)]
        for first in range(0, len(accounts), 500):
            group = accounts[first : first + 500]
            await asyncio.gather(*[inbox.emit("app", "order.created", {"account": name}) for name in group])
    async with build().running():
        began = time.perf_counter()
        await asyncio.wait_for(all_ended.wait(), 600)
    return sorted(at - began for at in ended.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--crowd", type=int, default=100_000, help="what the large customer has waiting")
    crowd = parser.parse_args().crowd
    print(
        f"| engine | {CUSTOMERS} customers with {EACH} each | first done, s | last done, s |\n| --- | --- | --- | --- |"
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = Postgres(folder)
        stack.callback(server.stop)
        for engine in ("sqlite", "postgres"):
            for what, waiting, fair in (
                ("alone", 0, "$.account"),
                (f"beside one with {crowd:,}, in rounds", crowd, "$.account"),
                (f"beside one with {crowd:,}, by due time", crowd, None),
            ):
                name = f"fair_{waiting}_{fair is not None}"
                store = (
                    f"sqlite:{folder / name}.db" if engine == "sqlite" else f"{server.uri('postgres')}?schema={name}"
                )
                found = asyncio.run(measure(store, waiting, fair))
                print(f"| {engine} | {what} | {found[0]:.2f} | {found[-1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
