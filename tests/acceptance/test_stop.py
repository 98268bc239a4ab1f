"""R56: SIGTERM loses nothing, answers what is under way, and ends with 0."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from contextlib import closing, suppress
from typing import Any

import pytest

from oncehook.web.server import listen, serve_on
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import Receiver
from tests.waiting import until
from tests.wire import Answer, Client, hook, request, signed


async def under_way(receiver: Receiver) -> asyncio.Task[Answer]:
    """A hook that the server has read, and answers when it can."""
    client, probe, body = receiver.client(), receiver.client(), hook("order-1")
    answer = asyncio.create_task(client.post("/in/orders", body, signed(body)))
    await until(lambda: client._streams)  # and with that it is written
    for _ in range(2):  # what comes to it after the hook is answered: so it has read that, too
        assert (await probe.get("/livez")).body == b"ok\n"
    probe.close()
    return answer


async def test_arrivals_under_way_are_committed_and_answered(engine: Engine) -> None:
    # The commit is held for a second, so the signal comes in the middle of it.
    receiver = engine.receiver().start(fault="before_intake:1:pause=1")
    answer = await under_way(receiver)
    assert receiver.process is not None
    receiver.process.send_signal(signal.SIGTERM)
    assert (await answer).json["status"] == "accepted"
    assert receiver.wait() == 0
    assert list(engine.events()) == ["order-1"]


async def test_stopping_under_load_loses_nothing(engine: Engine) -> None:
    receiver = engine.receiver().start()
    acknowledged: set[str] = set()

    async def sender(name: str) -> None:
        client: Client = receiver.client()
        for n in range(10_000):
            body = hook(f"{name}-{n}")
            try:
                answer = await client.post("/in/orders", body, signed(body))
            except (OSError, asyncio.IncompleteReadError):
                return
            if answer.status == 200:
                acknowledged.add(f"{name}-{n}")

    senders = [asyncio.create_task(sender(f"sender{n}")) for n in range(8)]
    await until(lambda: len(acknowledged) > 100)
    assert await asyncio.to_thread(receiver.stop) == 0
    await asyncio.gather(*senders)
    assert acknowledged <= set(engine.events())


async def test_nothing_new_is_taken_while_the_last_answer_is_under_way(sqlite: Engine) -> None:
    receiver = sqlite.receiver().start()
    probe = receiver.client()
    assert (await probe.get("/readyz")).status == 200
    with closing(sqlite3.connect(sqlite.folder / "inbox.db", timeout=60, isolation_level=None)) as rival:
        rival.execute("BEGIN IMMEDIATE")  # nothing can be committed
        answer = await under_way(receiver)
        assert receiver.process is not None
        receiver.process.send_signal(signal.SIGTERM)
        await until_refused(receiver)
        assert not answer.done()
        rival.execute("ROLLBACK")
    assert (await answer).status == 200
    assert receiver.wait() == 0


async def until_refused(receiver: Receiver) -> None:
    """Until nobody listens any more. Who was connected before the signal was heard may be let go of without a word."""
    while True:
        client = receiver.client()
        try:
            await client.get("/readyz")
        except ConnectionRefusedError:
            return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        client.close()


async def test_what_outlasts_the_drain_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """An answer that never ends, and a browser that holds a connection behind it."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def never_answer(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with serve_on(listener, never_answer) as connections:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("GET", "/", b"", {}))
        await began.wait()
        connections.drain_until = asyncio.get_running_loop().time() + 0.1
    assert "server.drain_timeout" in caplog.text
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    await ended.wait()
    assert not connections.open
    writer.close()
