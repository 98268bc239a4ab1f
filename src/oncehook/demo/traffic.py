"""Senders as they are: they repeat themselves, change events, send much at once; now and then a signature is forged.

Hooks go over HTTP to the demo's server, or straight into the inbox that makes its history.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Final

from oncehook import clock, samples
from oncehook.demo.shop import NOBODY, SOURCES, Shop
from oncehook.model import Arrival
from oncehook.sources import Source

CUSTOMERS: Final = {
    "5511988880142": "Ana", "5521977770381": "Bruno", "5531966660027": "Carla", "5541955550993": "Davi",
    "5571944440318": "Elisa", "5581933331207": "Felipe",
}  # fmt: skip
TEXTS: Final = (
    "Do you still have the blue one?", "Where is my order?", "Can I come at three instead?", "Thank you!",
    "Is there parking?", "I would like to cancel", "How much is it with delivery?", "👍",
)  # fmt: skip
IMPATIENT: Final = ("Hello?", "Are you there?", "It is about my order", "No. 4711", "The blue one", "Please!")
APPOINTMENTS: Final = (142424, 142431, 142448)

Post = Callable[[Source, Arrival], Awaitable[int]]
"""Sends a signed arrival to its source; returns the status of the answer."""

chance = clock.chance


class Traffic:
    def __init__(self, shop: Shop, sources: dict[str, Source], post: Post, sent: Counter[str] | None = None) -> None:
        """Count hooks, and those that were rejected, in `sent`."""
        self._shop, self._sources = shop, sources
        self._post_to = post
        self.sent: Counter[str] = Counter() if sent is None else sent

    async def run(self, rate: float) -> None:
        """Send about `rate` hooks a second, until cancelled."""
        await self._send_many()
        was_broken = True
        while True:
            before = self.sent["sent"]
            await (self._send_many() if chance.random() < 0.04 else self.act())
            # a delivery that succeeds closes the breaker for all to see
            if was_broken and not self._shop.crm.is_broken:
                was_broken = False
                await self._post("bookings", self._draft("bookings", "scheduled"))
            await asyncio.sleep((self.sent["sent"] - before) * chance.uniform(0.5, 1.5) / rate)

    async def act(self) -> None:
        (happens,) = chance.choices(
            (self._message, self._status, self._payment, self._push, self._booking, self._reschedule),
            weights=(30, 14, 24, 14, 7, 5),
        )
        await happens()

    async def _message(self) -> None:
        customer = NOBODY if chance.random() < 0.01 else chance.choice(list(CUSTOMERS))
        hook = self._shop.meta.message(
            from_=customer, text=chance.choice(TEXTS), name=CUSTOMERS.get(customer, "Gil")
        )  # fmt: skip
        await self._send("whatsapp", *self._shop.meta.webhooks(hook))

    async def _status(self) -> None:
        """Report the status of a sent message. Statuses overtake each other, so the last one may be stale."""
        sent = self._shop.meta.sent
        if sent:
            of = sent.pop(0)
            hooks = [self._shop.meta.status(of, word) for word in chance.choice([("delivered", "read"), ("read",)])]
            await self._send("whatsapp", *self._shop.meta.webhooks(*hooks))
            if len(hooks) == 1:
                late = self._shop.meta.status(of, "delivered")
                await self._post("whatsapp", *self._shop.meta.webhooks(late))

    async def _send_many(self) -> None:
        """Send many messages of one customer in one request: they are worked one at a time, in order."""
        hooks = [self._shop.meta.message(from_="5511988880142", text=line, name="Ana") for line in IMPATIENT]
        await self._send("whatsapp", *self._shop.meta.webhooks(*hooks))

    async def _payment(self) -> None:
        kind = chance.choices(("invoice.paid", "charge.refunded"), weights=(5, 1))[0]
        hook = self._draft("stripe", kind)
        body = hook.body.replace(b"cus_42", b"cus_%d" % chance.randrange(40, 60))
        hook = replace(hook, body=body.replace(b"4200", b"%d" % (chance.randrange(5, 200) * 100)))
        await self._send("stripe", hook)
        if chance.random() < 0.06:
            await self._post("stripe", replace(hook, body=hook.body.replace(b'"eur"', b'"usd"')))

    async def _push(self) -> None:
        await self._send("github", self._draft("github", chance.choice(["push", "push", "issue_comment.created"])))

    async def _booking(self) -> None:
        await self._send("bookings", self._draft("bookings", chance.choice(["scheduled", "scheduled", "canceled"])))

    async def _reschedule(self) -> None:
        """Move an appointment several times: only the last time matters."""
        hook = self._draft("bookings", "rescheduled")
        hook = replace(hook, body=hook.body.replace(b"142424", str(chance.choice(APPOINTMENTS)).encode()))
        for minutes in chance.sample(range(24 * 60), chance.randrange(3, 6)):
            to = clock.now_utc() + timedelta(days=1, minutes=minutes)
            moved = replace(hook, body=hook.body + f"&datetime={to:%Y-%m-%dT%H:%M}".encode())
            await self._post("bookings", moved)

    def _draft(self, source: str, kind: str) -> Arrival:
        return samples.draft(self._sources[source], kind)

    async def _send(self, source: str, hook: Arrival) -> None:
        """Send a hook once, sometimes twice, and sometimes with a forged signature instead."""
        drawn = chance.random()
        if drawn < 0.06:
            await self._post(source, hook, forge=True)
            return
        await self._post(source, hook)
        if drawn > 0.82 and SOURCES[source] != "acuity":
            await self._post(source, hook)

    async def _post(self, source: str, hook: Arrival, *, forge: bool = False) -> None:
        to = self._sources[source]
        status = await self._post_to(to, samples.sign(to, replace(hook, source=source), forge=forge))
        self.sent["sent"] += 1
        if status == 401:
            self.sent["refused"] += 1
