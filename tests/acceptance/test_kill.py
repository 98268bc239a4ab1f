"""kill -9 of the receiver: what was acknowledged is there (R1), a sender's retry gets the same id (R5, R12)."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from tests.acceptance.conftest import Engine
from tests.acceptance.processes import Receiver
from tests.effort import effort
from tests.wire import Client, hook, signed

KILLS = effort("KILLS", 5)
"""Per engine; `scripts/torture tests` kills a hundred times."""


async def send(client: Client, key: str) -> str | None:
    """The event id of an acknowledged hook; None when nobody answered."""
    body = hook(key)
    try:
        answer = await client.post("/in/orders", body, signed(body))
    except (OSError, asyncio.IncompleteReadError):
        client.close()
        return None
    return answer.json["event_id"] if answer.status == 200 else None


@pytest.mark.parametrize(("point", "stored"), [("before_intake", False), ("after_intake", True)])
async def test_kill_at_a_named_point(engine: Engine, point: str, stored: bool) -> None:
    receiver = engine.receiver().start(fault=f"{point}:1")
    assert await send(receiver.client(), "order-1") is None
    assert receiver.wait() == -9
    before = engine.events()
    assert ("order-1" in before) is stored
    receiver.start()
    try:
        client = receiver.client()
        body = hook("order-1")
        answer = await client.post("/in/orders", body, signed(body))
        # Killed before the commit it is new, with no waiting window (R12); after it, the same event (R5).
        assert answer.json["status"] == ("duplicate" if stored else "accepted")
        if stored:
            assert answer.json["event_id"] == f"evt_{before['order-1'].hex()}"
        client.close()
    finally:
        assert receiver.stop() == 0
    assert list(engine.events()) == ["order-1"]


@pytest.mark.timeout(900)
async def test_kill_at_random_under_load(engine: Engine) -> None:
    seed = 20261115
    chance = random.Random(seed)
    acknowledged: dict[str, str] = {}
    keys = (f"order-{n}" for n in itertools.count())
    owed: list[str] = []
    """Sent, but never seen acknowledged: a sender keeps trying these."""
    receiver = engine.receiver().start()
    for _ in range(KILLS):
        await load_until_killed(receiver, chance, keys, owed, acknowledged)
        receiver.start()
    client = receiver.client()
    for key in owed:
        while (event_id := await send(client, key)) is None:  # what was killed may still hold a row in PostgreSQL
            await asyncio.sleep(0.05)
        record(acknowledged, key, event_id)
    client.close()
    assert receiver.stop() == 0
    stored = {key: f"evt_{id_.hex()}" for key, id_ in engine.events().items()}
    assert stored == acknowledged, f"seed {seed}"
    assert len(acknowledged) > KILLS


async def load_until_killed(
    receiver: Receiver,
    chance: random.Random,
    keys: itertools.chain[str] | object,
    owed: list[str],
    acknowledged: dict[str, str],
) -> None:
    """Eight senders at once; some first repeat what was never acknowledged. The kill comes somewhere in between."""
    stop = asyncio.Event()

    async def sender(first: list[str]) -> None:
        client = receiver.client()
        pending = list(first)
        while not stop.is_set():
            key = pending.pop() if pending else next(keys)  # type: ignore[call-overload]
            if key not in owed:
                owed.append(key)
            event_id = await send(client, key)
            if event_id is None:
                break
            record(acknowledged, key, event_id)
            owed.remove(key)
        client.close()

    shares = [owed[n::8] for n in range(8)]
    senders = [asyncio.create_task(sender(share)) for share in shares]
    await asyncio.sleep(chance.uniform(0.01, 0.25))
    await asyncio.to_thread(receiver.kill)
    stop.set()
    await asyncio.gather(*senders)


def record(acknowledged: dict[str, str], key: str, event_id: str) -> None:
    assert acknowledged.setdefault(key, event_id) == event_id, f"{key} was acknowledged under two ids"
