"""`oncehook bench`: measure intake and work of this machine in half a minute, on a store that is thrown away.

Signed 2 KB events go through the receiver and the store like any other, without HTTP between; then a handler that does
nothing works them off, one at a time per subject; then events come one by one. `scripts/bench` in the repository
compares with other programs, over HTTP.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from oncehook import __version__, clock
from oncehook.cli.options import json_option
from oncehook.cli.output import Progress, answer, fields
from oncehook.errors import StoreUnavailable

if TYPE_CHECKING:
    from oncehook.inbox import Inbox

SENDERS: Final = 64
"""Events under way at once."""
SUBJECTS: Final = 500
HANDLERS: Final = 200
ALONE: Final = 50
PAUSE: Final = 0.02
"""Seconds between two single events."""
SYNCS: Final = 200
SIZE: Final = 2048
SECRET: Final = b"the-secret-of-the-benchmark"
VERIFY: Final = {"scheme": "hmac", "header": "X-Signature", "prefix": "", "algorithm": "sha256", "encoding": "hex"}
BAR: Final = 1000
"""Steps of a bar that shows time."""


@click.command("bench")
@click.option(
    "--store",
    metavar="URL",
    help="A PostgreSQL to measure: a schema is made there and dropped again (default: SQLite in a temporary folder).",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where the SQLite file is put: the disk under it is what is measured.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, help="How long events are taken in."
)
@json_option
def bench(store: str | None, folder: Path | None, seconds: float, as_json: bool) -> int:
    """Measure this machine on a store that is thrown away: intake, work, and one event at a time."""
    import uvloop

    if store and not store.startswith(("postgresql:", "postgres:")):
        raise click.UsageError("--store is the URL of a PostgreSQL; SQLite is measured without it.")
    with _throw_away(store, folder) as (url, disk):
        found = uvloop.run(_measure(url, seconds))
        if disk is not None:
            found["fsync_ms"] = _fsync(disk)
    return answer(found, _lines(found), as_json=as_json)


@contextmanager
def _throw_away(store: str | None, folder: Path | None) -> Iterator[tuple[str, Path | None]]:
    """Yield a temporary store, and its folder if it is on this machine; remove it at the end."""
    if store is None:
        with tempfile.TemporaryDirectory(prefix="oncehook-bench-", dir=folder) as made:
            yield f"sqlite:{made}/bench.db", Path(made)
        return
    from oncehook.store.postgres.connection import throwaway_schema

    with throwaway_schema(store) as url:
        yield url, None


# -- measuring -----------------------------------------------------------------------------------


@dataclass
class _Handled:
    """The number of handled events, and the moments of the first and the last."""

    first: float = 0.0
    last: float = 0.0
    count: int = 0
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        self.last = clock.perf()
        self.first = self.first or self.last
        self.count += 1
        self.heard.set()


def _inbox(url: str, handled: _Handled) -> Inbox:
    from oncehook import Event, Inbox

    inbox = Inbox(url)
    # A slow disk is to be measured, so nothing times out.
    inbox.source("bench", verify=VERIFY, secret=SECRET, key=["$.id"], subject="$.subject", budget="1m")

    @inbox.on("bench", concurrency=HANDLERS)
    async def noop(event: Event) -> None:
        handled.note()

    return inbox


class _Traffic:
    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._run = clock.random_bytes(6).hex()

    def next(self) -> tuple[dict[str, str], bytes]:
        number = next(self._numbers)
        start = f'{{"id":"{self._run}-{number}","subject":"{number % SUBJECTS}","text":"'
        body = (start + "x" * (SIZE - len(start) - 2) + '"}').encode()
        return {"X-Signature": hmac.digest(SECRET, body, "sha256").hex()}, body


async def _measure(url: str, seconds: float) -> dict[str, Any]:
    traffic = _Traffic()
    intake = await _take_in(url, traffic, seconds)
    work = await _work_off(url, intake["events"])
    alone = await _one_by_one(url, traffic)
    return {
        "version": __version__,
        "store": "sqlite" if url.startswith("sqlite:") else "postgresql",
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "intake": intake,
        "work": work,
        "alone": alone,
    }


async def _take_in(url: str, traffic: _Traffic, seconds: float) -> dict[str, Any]:
    """Receive as many events as possible, 64 at once, without a worker."""
    inbox, times = _inbox(url, _Handled()), list[float]()
    async with inbox.running(work=False):
        await inbox.receive("bench", *traffic.next())
        began = clock.perf()
        with Progress("intake", BAR) as bar:

            async def sender() -> None:
                sent = began  # every sender sends at least one event, however late it begins
                while sent - began < seconds:
                    receipt = await inbox.receive("bench", *traffic.next())
                    if receipt.outcome != "accepted":
                        raise StoreUnavailable(f"An event was not taken in: {receipt.outcome}.")
                    bar.reach(round((sent - began) / seconds * BAR))
                    sent, before = clock.perf(), sent
                    times.append(sent - before)

            await asyncio.gather(*[sender() for _ in range(SENDERS)])
        took = clock.perf() - began
    return {"events": len(times) + 1, "per_second": len(times) / took, **_percentiles(times)}


async def _work_off(url: str, events: int) -> dict[str, Any]:
    """Deliver all that waits to a handler that does nothing, one at a time per subject."""
    handled = _Handled()
    inbox = _inbox(url, handled)
    async with inbox.running():
        with Progress("work", events, "deliveries") as bar:
            while handled.count < events:
                handled.heard.clear()
                await handled.heard.wait()
                bar.reach(handled.count)
        await inbox.drain()
    return {"deliveries": handled.count, "per_second": (handled.count - 1) / (handled.last - handled.first)}


async def _one_by_one(url: str, traffic: _Traffic) -> dict[str, Any]:
    """Send one event at a time; measure the time until its reply and until its handler is called."""
    handled = _Handled()
    inbox = _inbox(url, handled)
    answered, begun = [], []
    async with inbox.running():
        with Progress("one at a time", ALONE, "events") as bar:
            for _ in range(ALONE):
                await asyncio.sleep(PAUSE)
                handled.heard.clear()
                sent = clock.perf()
                await inbox.receive("bench", *traffic.next())
                answered.append(clock.perf() - sent)
                await handled.heard.wait()
                begun.append(handled.last - sent)
                bar.add(1)
        await inbox.drain()
    return {"events": ALONE, "answered": _percentiles(answered), "handled": _percentiles(begun)}


def _percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50_ms": ordered[len(ordered) // 2] * 1000, "p99_ms": ordered[int(len(ordered) * 0.99)] * 1000}


def _fsync(folder: Path) -> dict[str, float]:
    block, times = clock.random_bytes(4096), []
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            began = clock.perf()
            file.write(block)
            os.fsync(file.fileno())
            times.append(clock.perf() - began)
    return _percentiles(times)


# -- printing ------------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> list[str]:
    intake, work, alone = found["intake"], found["work"], found["alone"]
    machine = found["machine"]
    facts = {
        "machine": f"{machine['cores']} cores, Python {machine['python']}, {machine['system']}",
        "store": found["store"],
        "intake": f"{intake['per_second']:,.0f} events/s, {_times(intake)} (2 KB, signed, {SENDERS} at once, no HTTP)",
        "work": f"{work['per_second']:,.0f} deliveries/s, one at a time per subject ({SUBJECTS} subjects)",
        "alone": f"answered after {_times(alone['answered'])}; handler called after {_times(alone['handled'])}",
    }
    if "fsync_ms" in found:
        facts["fsync"] = _times(found["fsync_ms"])
    return fields(facts)


def _times(found: dict[str, float]) -> str:
    return f"p50 {found['p50_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms"
