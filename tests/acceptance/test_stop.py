"""R56: SIGTERM loses nothing, answers what is under way, and ends with 0."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.acceptance.conftest import Engine
from tests.wire import Client, hook, signed


async def test_arrivals_under_way_are_committed_and_answered(engine: Engine) -> None:
    # The commit is held for a second, so the signal surely comes in the middle of it.
    receiver = engine.receiver().start(fault="before_intake:1:pause=1")
    client = receiver.client()
    body = hook("order-1")
    answer = asyncio.create_task(client.post("/in/orders", body, signed(body)))
    await asyncio.sleep(0.4)
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
    await asyncio.sleep(0.5)
    assert await asyncio.to_thread(receiver.stop) == 0
    await asyncio.gather(*senders)
    assert acknowledged
    assert acknowledged <= set(engine.events())


async def test_nothing_new_is_taken_while_the_last_answer_is_under_way(sqlite: Engine) -> None:
    receiver = sqlite.receiver().start(fault="before_intake:1:pause=2")
    probe, client = receiver.client(), receiver.client()
    assert (await probe.get("/readyz")).status == 200
    assert (await probe.get("/livez")).body == b"ok\n"
    probe.close()
    body = hook("order-1")
    answer = asyncio.create_task(client.post("/in/orders", body, signed(body)))
    await asyncio.sleep(0.3)
    assert receiver.process is not None
    receiver.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.5)
    with pytest.raises(ConnectionError):
        await probe.get("/readyz")
    assert (await answer).status == 200
    assert receiver.wait() == 0
