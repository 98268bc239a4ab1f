"""R11: any number of simultaneous copies of one key have exactly one winner, and all get its id."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.acceptance.conftest import Engine
from tests.acceptance.processes import Receiver
from tests.wire import Client, hook, signed

KEYS = 150
COPIES = 16


async def send_copies(receivers: list[Receiver]) -> tuple[Counter[str], dict[str, set[str]]]:
    """Every copy on a connection of its own, all copies of a key at the same moment, spread over the receivers."""
    clients = [receivers[n % len(receivers)].client() for n in range(COPIES)]
    outcomes: Counter[str] = Counter()
    ids: dict[str, set[str]] = {}

    async def send(client: Client, key: str) -> None:
        body = hook(key)
        answer = await client.post("/in/orders", body, signed(body))
        while answer.status == 503:  # who was first is held up in its commit: nothing was written for this one
            await asyncio.sleep(0.05)
            answer = await client.post("/in/orders", body, signed(body))
        assert answer.status == 200
        outcomes[answer.json["status"]] += 1
        ids.setdefault(key, set()).add(answer.json["event_id"])

    for number in range(KEYS):
        await asyncio.gather(*(send(client, f"key-{number}") for client in clients))
    for client in clients:
        client.close()
    return outcomes, ids


async def test_copies_on_one_receiver_have_one_winner(engine: Engine) -> None:
    receiver = engine.receiver().start()
    try:
        outcomes, ids = await send_copies([receiver])
    finally:
        assert receiver.stop() == 0
    check(engine, outcomes, ids)


async def test_copies_over_two_receivers_have_one_winner(postgres: Engine) -> None:
    receivers = [postgres.receiver("one").start(), postgres.receiver("two").start()]
    try:
        outcomes, ids = await send_copies(receivers)
    finally:
        assert [receiver.stop() for receiver in receivers] == [0, 0]
    check(postgres, outcomes, ids)


def check(engine: Engine, outcomes: Counter[str], ids: dict[str, set[str]]) -> None:
    assert outcomes == {"accepted": KEYS, "duplicate": KEYS * (COPIES - 1)}
    assert all(len(answers) == 1 for answers in ids.values()), "two answers named different events for one key"
    stored = engine.events()
    assert {key: f"evt_{id_.hex()}" for key, id_ in stored.items()} == {key: next(iter(ids[key])) for key in ids}
    assert engine.copies() == [COPIES] * KEYS
