"""Senders as they are: each speaks for one subject, keeps its order, and tries again until it is told 2xx."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

from tests.torture.fleet import Order, Process
from tests.torture.history import History
from tests.wire import signed

PATIENCE = 3.0
"""Seconds until a sender gives an answer up, and asks somebody else."""


class Senders:
    """All of them, and what they know: what was sent, and under which id it was acknowledged."""

    def __init__(self, receivers: Sequence[Process], chance: random.Random, history: History) -> None:
        self._receivers = receivers
        self._chance = chance
        self._history = history
        self.sent: dict[str, Order] = {}
        self.acknowledged: dict[str, str] = {}
        self.tries = 0
        self.wrong: list[str] = []
        self.resting = asyncio.Event()
        """Set when no sender shall begin another order."""

    async def send(self, key: str, subject: str | None, **how: object) -> None:
        """One order, until it is acknowledged; now and then once more, which must change nothing."""
        order: Order = {"id": key, "subject": subject, **how}
        self.sent[key] = order
        await self._deliver(order)
        if self._chance.random() < 0.05:
            await self._deliver(order)

    async def keep_sending(self, subject: str | None, name: str, pause: float) -> None:
        """Orders of one subject, each after the one before it was acknowledged."""
        n = 0
        while not self.resting.is_set():
            await self.send(f"{name}-{n}", subject, **self._fate())
            n += 1
            await asyncio.sleep(self._chance.uniform(0, 2 * pause))

    def _fate(self) -> dict[str, object]:
        fate: dict[str, object] = {"sleep": round(self._chance.uniform(0.0, 0.03), 3)}
        dice = self._chance.random()
        if dice < 0.05:
            fate["fails"] = self._chance.choice([1, 2])
        elif dice < 0.07:
            fate["give_up"] = True
        elif dice < 0.09:
            fate["sleep"] = 0.6
        return fate

    async def _deliver(self, order: Order) -> None:
        body = json.dumps(order).encode()
        while (event_id := await self._try(body)) is None:
            await asyncio.sleep(0.1)
        known = self.acknowledged.setdefault(order["id"], event_id)
        self._history.add("sender", "acknowledged", order["id"])
        if known != event_id:
            self.wrong.append(f"{order['id']} was acknowledged as {known} and as {event_id}")

    async def _try(self, body: bytes) -> str | None:
        self.tries += 1
        client = self._chance.choice(self._receivers).client()
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await client.post("/in/orders", body, signed(body))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return None
        finally:
            client.close()
        if answer.status == 503:
            return None
        if answer.status != 200:
            self.wrong.append(f"{answer.status}: {body!r}")
        return str(answer.json.get("event_id"))
