"""The store under load on a tapped disk: `python -m tests.torture.power_load FOLDER SYNCHRONOUS SEED`.

Arrivals in groups, copies of them, work that is done, a stop and a start now and then; all by the store's own
code. Its tape, with what was acknowledged in between, is left in FOLDER/tape. SYNCHRONOUS is "FULL", as the store asks
for itself, or what it is to be instead, to show what that would lose.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from oncehook.model import Outcome
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite import SqliteStore, connection
from tests.store.making import CRM, done, enrolled, intake, item, take
from tests.torture.power_tap import Tap
from tests.torture.seeded_bugs import everywhere

ROUNDS: Final = 120
CHECKPOINT: Final = 24
"""Pages of the log after which it is copied into the database: few, so that a short run sees many checkpoints."""


async def load(path: Path, tap: Tap, chance: random.Random) -> None:
    """Keep the store busy, and note what it has said yes to."""
    store = await _open(path)
    sent = 0
    for n in range(ROUNDS):
        fresh = [f"order-{sent + k}" for k in range(chance.randrange(1, 7))]
        sent += len(fresh)
        copies = [f"order-{chance.randrange(sent)}"] if chance.random() < 0.3 else []
        await _receive(store, tap, fresh + copies, chance)
        if chance.random() < 0.5:
            await _work(store, tap, chance.randrange(1, 12))
        if n % 40 == 30:
            await store.close()
            store = await _open(path)
    await store.close()


async def _open(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    await store.open()
    await enrolled(store)
    return store


async def _receive(store: SqliteStore, tap: Tap, keys: list[str], chance: random.Random) -> None:
    """These arrive together. Some are large, so that one commit is many writes."""
    items = [
        item(key, subject=f"s{len(key)}{n % 3}", to=[CRM], body=b"%d" % n * chance.choice((20, 200, 9000)))
        for n, key in enumerate(keys)
    ]
    verdicts = [await pending.future for pending in [store.record(intake(one)) for one in items]]
    kept = [verdict.event_id for (verdict,) in verdicts if verdict.outcome is Outcome.accepted]
    tap.ack(kept, [])


async def _work(store: SqliteStore, tap: Tap, most: int) -> None:
    leases = await take(store, most)
    ours = (await store.settle([done(lease) for lease in leases])).ours
    tap.ack([], [lease.delivery.id for lease in leases if lease.fence in ours])


def settings(synchronous: str) -> Callable[[Path, Cipher], sqlite3.Connection]:
    """How the writer opens its file here: as ever, with more checkpoints, and perhaps a weaker promise."""
    connect = connection.connect

    def changed(path: Path, cipher: Cipher) -> sqlite3.Connection:
        connection = connect(path, cipher)
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT}")
        if synchronous != "FULL":
            connection.execute(f"PRAGMA synchronous = {synchronous}")
        return connection

    return changed


def main(folder: Path, synchronous: str, seed: str) -> None:
    tap = Tap()
    everywhere(connection.connect, settings(synchronous))
    asyncio.run(load(folder / "oncehook.db", tap, random.Random(seed)))
    (folder / "tape").write_bytes(pickle.dumps(tap.tape))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
