"""R3, R58, R59, R60: while the store cannot write the answer is 503 with Retry-After; afterwards all is well again."""

from __future__ import annotations

import asyncio
import itertools
import resource
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.acceptance.conftest import Engine
from tests.servers import Postgres
from tests.wire import Answer, Client, hook, signed


async def send(client: Client, key: str, size: int = 100) -> Answer:
    body = hook(key, padding="x" * size)
    return await client.post("/in/orders", body, signed(body))


async def send_until(client: Client, wanted: int, prefix: str, *, pause: float = 0.05) -> list[str]:
    """Send new hooks until one is answered so; only 200 and 503 are allowed on the way. Returns what was accepted."""
    accepted = []
    for n in itertools.count():
        answer = await send(client, f"{prefix}-{n}", size=4000)
        assert answer.status in (200, 503)
        if answer.status == 503:
            assert int(answer.headers["retry-after"]) > 0
        else:
            accepted.append(f"{prefix}-{n}")
        if answer.status == wanted:
            break
        await asyncio.sleep(pause if wanted == 200 else 0)
    return accepted


async def test_full_disk(sqlite: Engine) -> None:
    """A limit on file sizes, set and lifted from outside, makes every write fail as a full disk does."""
    receiver = sqlite.receiver().start()
    client = receiver.client()
    accepted = await send_until(client, 200, "before")
    unlimited = resource.prlimit(receiver.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(receiver.pid, resource.RLIMIT_FSIZE, (4 << 10, unlimited[1]))
    accepted += await send_until(client, 503, "during")
    for n in range(20):
        assert (await send(client, f"refused-{n}", size=4000)).status == 503
    resource.prlimit(receiver.pid, resource.RLIMIT_FSIZE, unlimited)
    accepted += await send_until(client, 200, "after")
    while (await client.get("/readyz")).status != 200:
        await asyncio.sleep(0.05)
    assert receiver.stop() == 0
    assert set(accepted) <= set(sqlite.events()), "an acknowledged event is gone"
    with closing(sqlite3.connect(sqlite.folder / "inbox.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_rival_holds_the_write_lock(sqlite: Engine) -> None:
    """Another program writes to our file for longer than the budget: 503, then all is well again."""
    receiver = sqlite.receiver().start()
    client = receiver.client()
    body = b'{"id": "large", "padding": "' + b"x" * 900_000 + b'"}'
    with closing(sqlite3.connect(sqlite.folder / "inbox.db", timeout=60, isolation_level=None)) as rival:
        rival.execute("BEGIN IMMEDIATE")
        answer = await client.post("/in/orders", body, signed(body))
        assert answer.status == 503
        rival.execute("ROLLBACK")
    assert (await client.post("/in/orders", body, signed(body))).status == 200
    assert receiver.stop() == 0


async def test_database_restart(tmp_path: Path) -> None:
    """PostgreSQL goes away and comes back under load: 503 in between, no 2xx without commit, recovery by itself."""
    with Postgres() as server:
        engine = Engine("postgres", f"{server.url}?schema=restarted", tmp_path)
        receiver = engine.receiver().start()
        try:
            client = receiver.client()
            accepted = await send_until(client, 200, "before")
            for round_ in range(3):
                await asyncio.to_thread(server.stop, immediate=round_ % 2 == 0)
                for n in range(5):
                    assert (await send(client, f"down-{round_}-{n}")).status == 503
                assert (await client.get("/readyz")).status == 503
                await asyncio.to_thread(server.start)
                accepted += await send_until(client, 200, f"up-{round_}", pause=0.1)
            assert receiver.stop() == 0
        finally:
            engine.end()
        assert set(accepted) <= set(engine.events())


async def test_a_second_server_shares_the_file(sqlite: Engine) -> None:
    first = sqlite.receiver("one").start()
    second = sqlite.receiver("two").start()
    assert second.stop() == 0
    assert first.stop() == 0
