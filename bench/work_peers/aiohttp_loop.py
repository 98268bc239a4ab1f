"""The bare client loop: aiohttp, 64 requests in flight, no store. What an HTTP delivery costs before anything is kept.

Writes down when each answer was there, and puts the moments into the file that `BENCH_STORE` names.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import uvloop

from bench.work_peers import body_of, run, setting

IN_FLIGHT = 64


async def send_all(session: aiohttp.ClientSession, bodies: Iterator[bytes], moments: array[float]) -> None:
    """Send what is left, one after the other."""
    url = setting("SINK")
    for body in bodies:
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
            await answer.read()
            if answer.status != 200:
                raise SystemExit(f"the sink answered {answer.status}")
        moments.append(time.time())


async def work() -> None:
    """Send every job once, then stop."""
    moments = array("d")
    bodies = iter([body_of(n).encode() for n in range(int(setting("JOBS")))])
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*[send_all(session, bodies, moments) for _ in range(IN_FLIGHT)])
    # Complete or not there at all: the benchmark looks at it while we write.
    partial = Path(setting("STORE") + ".part")
    partial.write_bytes(moments.tobytes())
    partial.rename(setting("STORE"))


if __name__ == "__main__":
    run(lambda: None, lambda: uvloop.run(work()))
