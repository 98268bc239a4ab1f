"""Senders as they are: each speaks for one subject, keeps its order, and tries again until it is told 2xx.

Now and then one sends twice at once, once more later, or another body under the same key; and some give up when they
get no answer. Those orders are *ambiguous*: they may be there or not, but if they are, they must be worked.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.torture.fleet import Order, Process
from tests.torture.history import History
from tests.wire import Answer, signed

PATIENCE = 3.0
"""Seconds until a sender gives an answer up, and asks somebody else."""

CROWD = 16
"""Orders of a hot subject that are sent at once."""

QUICK = (0.0, 0.0, 0.001, 0.003)
"""Seconds that the handlers of a hot subject take, by chance."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A 2xx: what was said, and under which id."""

    status: str
    event_id: str


class Senders:
    """All of them, and what they know: what was sent, and under which id it was acknowledged."""

    def __init__(self, receivers: Sequence[Process], chance: random.Random, history: History) -> None:
        self._receivers = receivers
        self._chance = chance
        self._history = history
        self.sent: dict[str, Order] = {}
        self.acknowledged: dict[str, str] = {}
        self.tries = 0
        self.answers: Counter[str] = Counter()
        """What came back of all tries: `accepted`, `duplicate`, `conflict`, `503`, `nothing`."""
        self.recovered: set[str] = set()
        """Orders whose first 2xx said `duplicate`: they had been committed, and nobody was told."""
        self.overlapped = 0
        """Orders sent twice at the same time, of which one was accepted and one a duplicate."""
        self.conflicts_tried = 0
        self.wrong: list[str] = []
        self.padding = 0
        self.behind = False
        """So much waits that nobody shall send for a while: a run must be able to end."""
        self.resting = asyncio.Event()
        """Set when no sender shall begin another order."""

    @property
    def ambiguous(self) -> set[str]:
        """Sent, and never acknowledged."""
        return self.sent.keys() - self.acknowledged.keys()

    async def send(self, key: str, subject: str | None, **how: object) -> None:
        """One order, until it is acknowledged."""
        order: Order = {"id": key, "subject": subject, **how}
        self.sent[key] = order
        await self._deliver(order)

    async def keep_sending(self, subject: str | None, name: str, pause: float) -> None:
        """Orders of one subject, each after the one before it was acknowledged."""
        n = 0
        while not self.resting.is_set():
            if self.behind:
                await asyncio.sleep(0.1)
                continue
            order: Order = {"id": f"{name}-{n}", "subject": subject, **self._fate()}
            self.sent[order["id"]] = order
            await self._as_chance_has_it(order)
            n += 1
            await asyncio.sleep(self._chance.uniform(0, 2 * pause))

    async def crowd(self, subject: str, pause: float) -> None:
        """Orders of one subject, many at once, so that they wait in line; each takes next to no time."""
        n = 0
        while not self.resting.is_set():
            if not self.behind:
                crowd: list[Order] = [
                    {
                        "id": f"{subject}-{n}-{place}",
                        "subject": subject,
                        **self._fate(),
                        "sleep": self._chance.choice(QUICK),
                    }
                    for place in range(CROWD)
                ]
                self.sent |= {order["id"]: order for order in crowd}
                await asyncio.gather(*map(self._as_chance_has_it, crowd))
                n += 1
            await asyncio.sleep(self._chance.uniform(0, 2 * CROWD * pause))

    async def send_what_is_rare(self) -> None:
        """What chance would send in most runs: one that fails, one with two bodies, one twice at once."""
        await self.send("rare-failing", None, fails=1)
        await self.send("rare-conflict", None)
        await self.contradict(self.sent["rare-conflict"])
        while not (self.overlapped or self.resting.is_set()):
            order: Order = {"id": f"rare-twice-{self.tries}", "subject": None}
            self.sent[order["id"]] = order
            await self._twice_at_once(order)

    async def _as_chance_has_it(self, order: Order) -> None:
        dice = self._chance.random()
        if dice < 0.03:  # one that never tries again
            self._settle(order, await self.attempt(order), first=True)
        elif dice < 0.10:
            await self._twice_at_once(order)
        else:
            await self._deliver(order)
            if dice < 0.15:
                await self._deliver(order)
            elif dice < 0.19:
                await self.contradict(order)

    def _fate(self) -> dict[str, object]:
        fate: dict[str, object] = {"sleep": round(self._chance.uniform(0.0, 0.03), 3)}
        dice = self._chance.random()
        if dice < 0.05:
            fate["fails"] = self._chance.choice([1, 2])
        elif dice < 0.07:
            fate["give_up"] = True
        elif dice < 0.09:
            fate["sleep"] = 0.6
        if self.padding:
            fate["padding"] = "x" * self.padding
        return fate

    # -- ways of sending -----------------------------------------------------------------------

    async def _deliver(self, order: Order, *, first: bool = True) -> None:
        while (answer := await self.attempt(order)) is None:
            first = False
            await asyncio.sleep(0.1)
        self._settle(order, answer, first=first)

    async def _twice_at_once(self, order: Order) -> None:
        answers = await asyncio.gather(self.attempt(order), self.attempt(order))
        for answer in answers:
            self._settle(order, answer, first=True)
        if {answer.status for answer in answers if answer} == {"accepted", "duplicate"}:
            self.overlapped += 1
        if not any(answers):
            await self._deliver(order, first=False)

    async def contradict(self, order: Order) -> None:
        """The same key with another body, until it is acknowledged: a conflict, and the first one stays."""
        other = {**order, "contradicts": True}
        answer = None
        while answer is None:
            self.conflicts_tried += 1
            answer = await self.attempt(other)
            await asyncio.sleep(0.0 if answer else 0.1)
        known = self.acknowledged[order["id"]]
        if (answer.status, answer.event_id) != ("conflict", known):
            self.wrong.append(f"{order['id']} with another body: {answer}, and {known} was there")

    def _settle(self, order: Order, answer: Acknowledged | None, *, first: bool) -> None:
        if answer is None:
            return
        key = order["id"]
        if key not in self.acknowledged and answer.status == "duplicate" and not first:
            self.recovered.add(key)
        known = self.acknowledged.setdefault(key, answer.event_id)
        if known != answer.event_id or answer.status == "conflict":
            self.wrong.append(f"{key} was acknowledged as {known} and then as {answer}")

    async def attempt(self, order: Order) -> Acknowledged | None:
        """Send it once; None when it was not acknowledged."""
        self.tries += 1
        self._history.add("sender", "sent", order["id"])
        answer = await self._exchange(json.dumps(order).encode())
        said = self.read(order, answer)
        self.answers[said] += 1
        self._history.add("sender", said, order["id"])
        return Acknowledged(said, str(answer.json.get("event_id"))) if answer and answer.status == 200 else None

    async def _exchange(self, body: bytes) -> Answer | None:
        client = self._chance.choice(self._receivers).client()
        try:
            async with asyncio.timeout(PATIENCE):
                return await client.post("/in/orders", body, signed(body))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return None
        finally:
            client.close()

    def read(self, order: Order, answer: Answer | None) -> str:
        """What an answer comes to; notes one that must not be."""
        if answer is None:
            return "nothing"
        if answer.status == 503:
            if int(answer.headers.get("retry-after", 0)) < 1:
                self.wrong.append(f"{order['id']}: 503 without Retry-After")
            return "503"
        if answer.status != 200:
            self.wrong.append(f"{order['id']}: answered {answer.status}")
            return str(answer.status)
        return str(answer.json["status"])
