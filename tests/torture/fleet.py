"""Real processes of the shop: started as a user would, killed, frozen and stopped as the world does.

`Fleet` belongs to one store; tests ask it for workers and servers, put orders into it, and look at what became of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncehook.settings.build import open_store
from tests.acceptance.conftest import Engine
from tests.torture.app import make
from tests.torture.ledger import Entry, Ledger
from tests.wire import Client, signed

HANG = 150.0
"""Seconds after which something that must come is given up for lost: far from any figure that is promised, and a little
less than a test may take, so that one that waits in vain can say for what."""

READY = r"oncehook (?:worker ready|ready on http://[^ ]+:(\d+))"

ROOT = Path(__file__).parent.parent.parent

Order = dict[str, Any]


def until(holds: Callable[[], Any], what: str) -> Any:
    """Wait until it holds, and return what it found."""
    ends_at = time.monotonic() + HANG
    while not (found := holds()):
        assert time.monotonic() < ends_at, f"waited in vain: {what}"
        time.sleep(0.05)
    return found


@dataclass
class Process:
    """One `oncehook` process, which may be started many times. Its log goes on over all of them."""

    name: str
    folder: Path
    arguments: tuple[str, ...]
    settings: dict[str, str]
    port: int = 0
    program: list[str] = field(default_factory=list)
    """Where another version of the package is, if it is to be that."""
    pids: list[int] = field(default_factory=list)
    fault: str = ""
    """The named point that it was last started with."""
    paused: set[int] = field(default_factory=set)
    """Those of its lives that a named point may have held up."""
    _process: subprocess.Popen[bytes] | None = None
    _log_from: int = 0

    def launch(self, *, fault: str = "") -> Process:
        """Start it, and do not wait."""
        self.fault = fault
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith("ONCEHOOK_")}
        where = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
        own |= {"PYTHONPATH": os.pathsep.join(filter(None, [*self.program, *where])), "ONCEHOOK_FAULT": fault}
        own |= self.settings
        command, *options = self.arguments
        ports = ["--port", str(self.port)] if command == "serve" else []
        with self.log.open("ab") as log:
            self._log_from = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "oncehook", command, "tests.torture.app:inbox", *options, *ports],
                env=own, stderr=log, stdout=log, cwd=self.folder,
            )  # fmt: skip
        self.pids.append(self._process.pid)
        if "pause" in fault:
            self.paused.add(self._process.pid)
        return self

    def ready(self) -> Process:
        """Wait until it says that it is."""
        found = until(lambda: self._said(READY), f"{self.name} ready")
        self.port = int(found[1] or 0)
        return self

    def start(self, *, fault: str = "") -> Process:
        return self.launch(fault=fault).ready()

    def _said(self, pattern: str) -> re.Match[str] | None:
        text = self.text(self._log_from)
        found = re.search(pattern, text)
        assert found or self.is_running, f"{self.name} ended with {self.process.returncode}: {text}"
        return found

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def text(self, from_: int = 0) -> str:
        return self.log.read_bytes()[from_:].decode()

    def said(self, moment: str) -> list[dict[str, Any]]:
        """Its log lines of this name, over all its starts."""
        lines = [line for line in self.text().splitlines() if f'"{moment}"' in line]
        return [line for line in map(json.loads, lines) if line["event"] == moment]

    def kill(self) -> None:
        """No warning, no clean-up."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to stop, and do not wait."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Until it ends; returns its exit code."""
        return self.process.wait(HANG)

    def stop(self) -> int:
        """Ask it to stop; returns its exit code."""
        self.terminate()
        return self.wait()

    def client(self) -> Client:
        return Client("127.0.0.1", self.port)


class Fleet:
    """All processes around one store, and what can be seen of it from outside."""

    def __init__(self, engine: Engine, **settings: str) -> None:
        self.engine = engine
        self.ledger = Ledger(engine.url, engine.folder / "ledger.jsonl")
        self.settings = {"SHOP_STORE": engine.url, "SHOP_LEDGER": str(self.ledger.path)}
        self.settings |= {f"SHOP_{name.upper()}": text for name, text in settings.items()}
        self.processes: list[Process] = []
        self.program: list[str] = []
        """Where another version of the package is, if processes are to be that."""
        self.ledger.create()

    def _process(self, name: str, *arguments: str) -> Process:
        made = Process(name, self.engine.folder / name, arguments, dict(self.settings), program=list(self.program))
        self.processes.append(made)
        return made

    def worker(self, name: str = "worker", *options: str) -> Process:
        return self._process(name, "worker", *options)

    def server(self, name: str = "server", *options: str) -> Process:
        """Receives, and works unless told otherwise."""
        return self._process(name, "serve", *options)

    def end(self) -> None:
        """Nothing goes on running, whatever happened."""
        for process in self.processes:
            if process.is_running:
                process.kill()

    # -- orders --------------------------------------------------------------------------------

    async def fill(self, orders: Iterable[Order]) -> None:
        """Take in orders, one after the other, from a process that does not work."""
        shop = make(self.settings)
        async with shop.running(work=False):
            for order in orders:
                body = json.dumps(order).encode()
                receipt = await shop.receive("orders", signed(body), body)
                assert receipt.outcome == "accepted"

    def gate(self, name: str = "gate") -> Path:
        """Attempts of `note` whose order names it wait until it is touched."""
        return self.engine.folder / name

    def drain(self) -> None:
        """Have a worker do everything that is left."""
        last = self.worker("last", "--drain").launch()
        self._watch(lambda left: not last.is_running, last.text)
        assert last.wait() == 0, last.text()
        assert self.left() == 0, "the drain ended, and something was left"

    def _watch(self, is_over: Callable[[int], bool], said: Callable[[], str] = str) -> None:
        """Wait until it is over. However long that takes: as long as ever fewer are left, somebody works."""
        least, changed_at = self.left(), time.monotonic()
        while not is_over(left := self.left()):
            if left < least:
                least, changed_at = left, time.monotonic()
            assert time.monotonic() < changed_at + HANG, f"{left} are left, and none of them is worked: {said()}"
            time.sleep(0.05)

    def left(self) -> int:
        """Deliveries that are not settled yet."""
        ((count,),) = self.engine.rows("SELECT count(*) FROM deliveries WHERE status = 'pending'")
        return int(count)

    def finish(self) -> None:
        """Wait until the processes that run have settled everything."""
        self._watch(lambda left: left == 0)

    @property
    def shortest_wait(self) -> float:
        """Seconds that a retry waits at least."""
        waits = self.settings.get("SHOP_RETRY", "0.05s").split(",")
        return min(float(wait.removesuffix("s")) for wait in waits)

    # -- looking -------------------------------------------------------------------------------

    def begun(self, key: str, pid: int | None = None, *, moment: str = "begin") -> Entry | None:
        """The first time that an attempt of this order began, in that process."""
        found = (e for e in self.ledger.entries() if (e.key, e.moment) == (key, moment) and pid in (None, e.pid))
        return next(found, None)

    def deliveries(self) -> dict[tuple[str, str], tuple[str, int, str | None, int]]:
        """By destination and key: status, attempts, reason, place in the order of commit."""
        found = self.engine.rows(
            "SELECT t.name, e.key, d.status, d.attempts, d.reason, d.seq FROM deliveries d"
            " JOIN events e ON e.id = d.event_id JOIN destinations t ON t.id = d.destination_id"
        )
        made = {(name, key): (status, attempts, reason, seq) for name, key, status, attempts, reason, seq in found}
        assert len(made) == len(found), "an order was kept twice"
        return made

    def attempts(self) -> list[Attempt]:
        """Every attempt that the store knows of, in order of fences."""
        seconds = "a.{0} / 1000000.0" if self.ledger.is_sqlite else "extract(epoch FROM a.{0})::float8"
        found = self.engine.rows(
            f"SELECT t.name, e.key, e.subject, d.seq, a.fence, a.n, a.outcome, {seconds.format('started_at')},"
            f" {seconds.format('ended_at')} FROM attempts a JOIN deliveries d ON d.id = a.delivery_id"
            " JOIN events e ON e.id = d.event_id JOIN destinations t ON t.id = d.destination_id ORDER BY a.fence"
        )
        return [Attempt(*row) for row in found]

    def held_until(self) -> dict[int, float]:
        """When each lease ends that is held now, by fence, in the store's own time."""
        seconds = "due_at / 1000000.0" if self.ledger.is_sqlite else "extract(epoch FROM due_at)::float8"
        return dict(self.engine.rows(f"SELECT fence, {seconds} FROM heads WHERE leased"))

    async def troubles(self) -> list[str]:
        """The conservation laws that do not hold (R68). Nobody may write meanwhile."""
        store = open_store(self.engine.url)
        await store.open(write=False)
        try:
            return [check.detail for check in await store.check() if not check.ok]
        finally:
            await store.close()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt, as the store keeps it."""

    destination: str
    key: str
    subject: str | None
    seq: int
    fence: int
    n: int
    outcome: str
    started_at: float
    ended_at: float
