"""Handlers that never end: everybody else's work goes on, and the process ends when it is told to (R34, R56)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from oncehook import Event, Inbox
from oncehook.model import Filter, LeaseRequest
from tests.acceptance.conftest import Engine
from tests.waiting import until

PROGRAM = """
import asyncio, sys
from oncehook import Event, Inbox
from oncehook.cli.run import Restart

inbox = Inbox(sys.argv[1])

@inbox.on("app")
async def stubborn(event: Event) -> None:
    print("begun", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def main() -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, told.set)
    await inbox.start()
    await inbox.emit("app", "t", {}, key="1")
    await told.wait()
    await inbox.stop(patience=0.1)

Restart(None, None, {}).run(main(), inbox)
"""


@pytest.mark.parametrize("blocking", [True, False], ids=["def", "async"])
async def test_others_are_worked_off_beside_a_handler_that_hangs(engine: Engine, blocking: bool) -> None:
    """Also suspects, which are run alone: what hangs beyond its time is not waited for."""
    inbox = Inbox(engine.url)
    begun, over, done = threading.Event(), threading.Event(), []

    def hang(event: Event) -> None:
        begun.set()
        over.wait()

    async def swallow(event: Event) -> None:
        begun.set()
        while not over.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    @inbox.on("app", "ship")
    async def ship(event: Event) -> None:
        done.append(event.key)

    inbox.on("app", "hang", timeout="0.2s", lease="1s", retry=["1h"])(hang if blocking else swallow)
    async with inbox.running(work=False):  # somebody dies with one of ours in hand
        await inbox.emit("app", "ship", {}, key="suspect")
        await inbox.store.lease([LeaseRequest(inbox.destinations["ship"].id, 1, 0.2)], "gone")
    again = Inbox(engine.url)
    again.on("app", "ship")(ship)
    again.on("app", "hang", timeout="0.2s", lease="1s", retry=["1h"])(hang if blocking else swallow)
    async with again.running():
        await again.emit("app", "hang", {}, key="h")
        await asyncio.to_thread(begun.wait)
        try:
            await until(lambda: "suspect" in done)
            await again.emit("app", "ship", {}, key="after")
            await until(lambda: "after" in done)
        finally:
            over.set()
    assert done.count("after") == 1


def test_a_coroutine_that_swallows_its_cancellation_does_not_hold_up_the_end(tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text(PROGRAM)
    url = f"sqlite:{tmp_path / 'inbox.db'}"
    process = subprocess.Popen([sys.executable, program, url], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


async def test_what_hung_is_tried_again_by_whoever_takes_it_over(engine: Engine) -> None:
    """Its lease runs out beside it; the second try is another attempt, and its own end counts."""
    inbox, calls = Inbox(engine.url), []
    over = asyncio.Event()

    @inbox.on("app", timeout="0.2s", lease="1s")
    async def swallow(event: Event) -> None:
        calls.append(event.attempt)
        meant = inbox.destinations["swallow"]
        meant.terms = replace(meant.terms, lease=60.0)  # of the second try: that one must not be taken over, too
        while len(calls) == 1 and not over.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async with inbox.running():
        await inbox.emit("app", "t", {}, key="1")
        try:
            await until(lambda: len(calls) == 2)
            while (await inbox.store.find_deliveries(Filter())).items[0].status != "done":
                await asyncio.sleep(0.02)
        finally:
            over.set()
    assert len(calls) == 2
