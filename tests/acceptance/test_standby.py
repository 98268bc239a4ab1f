"""A primary dies under traffic and its standby is promoted: nothing acknowledged is lost, and work goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path

from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, Receiver
from tests.acceptance.sink import Sink
from tests.servers import Postgres
from tests.wire import hook, signed

ROUTED = """
[destination.crm]
url = "{sink}"
allow_private = true
retry = ["0.2s", "0.2s", "0.2s", "0.2s", "0.2s"]

[[route]]
from = "orders"
to = "crm"
"""


class Senders:
    """Senders at two receivers, each of which repeats a hook until it is acknowledged."""

    def __init__(self, receivers: list[Receiver]) -> None:
        self._receivers = receivers
        self._keys = (f"order-{n}" for n in itertools.count())
        self.statuses: Counter[int] = Counter()
        self.acknowledged: dict[str, str] = {}
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        await asyncio.gather(*(self._send(receiver) for receiver in self._receivers for _ in range(4)))

    async def _send(self, receiver: Receiver) -> None:
        client = receiver.client()
        while not self._is_over.is_set():
            key = next(self._keys)
            body = hook(key)
            while (answer := await client.post("/in/orders", body, signed(body))).status != 200:
                self.statuses[answer.status] += 1
                assert int(answer.headers["retry-after"]) > 0
                await asyncio.sleep(0.05)
            self.statuses[200] += 1
            self.acknowledged[key] = answer.json["event_id"]

    def stop(self) -> None:
        """Send nothing new; what was sent is repeated until it is acknowledged."""
        self._is_over.set()

    async def reach(self, acknowledged: int) -> None:
        while len(self.acknowledged) < acknowledged:
            await asyncio.sleep(0.01)


async def test_a_promoted_standby_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    with Postgres() as primary, Postgres(primary) as standby:
        url = f"postgresql://oncehook@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres?schema=followed"
        engine = Engine("postgres", url, tmp_path)
        async with Sink().open() as sink:
            receivers = [engine.receiver(name) for name in ("one", "two")]
            for one in receivers:
                one.config = CONFIG + ROUTED.format(sink=sink.url)
                await asyncio.to_thread(one.start)
            try:
                senders = Senders(receivers)
                sending = asyncio.create_task(senders.run())
                await senders.reach(200)
                with standby.follower_stopped():  # so that what was committed without it would be lost
                    await asyncio.sleep(0.3)
                    await asyncio.to_thread(primary.stop, immediate=True)
                at_death = len(senders.acknowledged)
                while senders.statuses[503] < 20:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(standby.promote)
                await senders.reach(at_death + 200)
                senders.stop()
                await sending
                while engine.rows("SELECT count(*) FROM deliveries WHERE status <> 'done'") != [(0,)]:
                    await asyncio.sleep(0.05)
                assert [one.stop() for one in receivers] == [0, 0]
            finally:
                engine.end()
        assert set(senders.statuses) == {200, 503}
        stored = {key: f"evt_{id_.hex()}" for key, id_ in engine.events().items()}
        assert stored == senders.acknowledged, "each was repeated until it was acknowledged"
        assert {json.loads(one.body)["id"] for one in sink.requests} == set(stored), "all were worked on"
