"""Where does the time of one arrival go, from the socket to the fsync and back?

Each layer is run by itself in this process, in groups of 64 as 64 connections make them, and the best of many rounds
counts. Two figures come from outside: a bare server that reads and answers (what sockets and the loop cost), and the
whole product under load, to see how much of its CPU the layers explain. Run by `scripts/bench stack`; talk on stderr,
report on stdout. `docs/explanation/performance.md` explains the figures.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bench import disk, drive, machine, traffic
from bench.contestants import CONTESTANTS, run_contestant
from bench.drive import Order
from bench.engines import Postgres, Server, cpu_seconds, free_port
from bench.ingest import Trial, has_mixes, open_place
from bench.part import run_part
from bench.progress import Progress
from bench.report import Measured, Settings, table
from bench.work_contestants import Place, fresh_store
from oncehook import Inbox
from oncehook.ingest import NO_ACCOUNTS, Begun, Loaded, Receipt, Receiver
from oncehook.model import Arrival, Headers
from oncehook.sources import Reply, Source
from oncehook.web.connection import Connections, InboundConnection
from oncehook.web.hooks import Hooks
from oncehook.web.peers import direct_peer

GROUP = 64
ROUNDS = 150
WARM = 10
PATH = "/in/bench"
MAX_RATE = 30_000
VERIFY = {
    "scheme": "hmac",
    "header": traffic.SIGNATURE_HEADER,
    "prefix": traffic.SIGNATURE_PREFIX,
    "algorithm": "sha256",
    "encoding": "hex",
}
ENGINES = ("sqlite", "postgres")


@dataclass
class Layers:
    """Microseconds per event."""

    http: float = math.inf
    """Parse a request, watch over its connection, write the answer."""
    verify: float = math.inf
    read: float = math.inf
    """Read key, type and subject, hash the body, make the event's id, and plan."""
    plan: float = math.inf
    """Of it: which destinations get it."""
    hand_over: float = math.inf
    """Pack the headers and join the next group."""
    store_ours: float = math.inf
    """Our CPU from there until the group is committed: rows, statements, and what the driver does."""
    store_theirs: float = 0.0
    """The database's CPU, where it has processes of its own."""
    store_wall: float = math.inf
    """How long the group took, per event: the disk's share is in here."""
    answer: float = math.inf
    """Count it, and write the JSON."""

    def least(self, other: Layers) -> Layers:
        """The better of both in each layer."""
        return Layers(**{name: min(value, asdict(other)[name]) for name, value in asdict(self).items()})


class Requests:
    """Fresh signed requests, a group at a time: as arrivals, or as bytes on a wire."""

    def __init__(self, prepared: traffic.Traffic) -> None:
        self._tails = traffic.read_tails(prepared.folder)
        self._head = traffic.request_head(80, PATH, self._tails)
        self._file = prepared.records_file().open("rb")

    def wire(self) -> list[bytes]:
        """The next group as bytes."""
        return [traffic.compose(self._head, self._tails, record) for record in self._records()]

    def arrivals(self) -> list[Arrival]:
        """The next group as arrivals."""
        made = []
        for record in self._records():
            key, signature = record[: traffic.KEY_SIZE], record[traffic.KEY_SIZE :]
            body = traffic.OPENING + key + self._tails[int(key[:1], 16)]
            headers: Headers = [
                (b"host", b"127.0.0.1:80"),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (traffic.SIGNATURE_HEADER.lower().encode(), traffic.SIGNATURE_PREFIX.encode() + signature),
            ]
            made.append(Arrival("bench", headers, body, b"", "POST", PATH, "127.0.0.1"))
        return made

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _records(self) -> list[bytes]:
        return [self._file.read(traffic.RECORD_SIZE) for _ in range(GROUP)]


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds per event of a function that handles a group."""
    began = time.perf_counter()
    result = function()
    return (time.perf_counter() - began) * 1e6 / GROUP, result


# -- receive and store ---------------------------------------------------------------------------


async def one_group(inbox: Inbox, requests: Requests) -> Layers:
    """A group through the receiver's own steps, one after the other."""
    receiver, source = inbox.receiver, inbox.sources["bench"]
    arrivals = requests.arrivals()
    verify, _ = timed(lambda: [receiver._admit(source, arrival) for arrival in arrivals])
    read, items = timed(lambda: [receiver._items(source, arrival)[1] for arrival in arrivals])
    pairs = list(zip(arrivals, items, strict=True))
    plan, _ = timed(lambda: [receiver._plan(arrival, item[0]) for arrival, item in pairs])
    hand_over, waiting = timed(lambda: [receiver._record(source, a, item, split=False) for a, item in pairs])
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[pending.future for pending in waiting])
    wall = (time.perf_counter() - began) * 1e6 / GROUP
    ours = (time.process_time() - cpu) * 1e6 / GROUP
    begun = [Begun(source, a, 1, item, p, time.perf_counter()) for (a, item), p in zip(pairs, waiting, strict=True)]
    answer, _ = timed(lambda: [receiver.finish(one) for one in begun])
    return Layers(math.inf, verify, read, plan, hand_over, ours, 0.0, wall, answer)


async def receive_groups(store: str, requests: Requests, store_pids: Sequence[int]) -> Layers:
    """Many groups into one store; the best of each layer."""
    inbox = Inbox(store)
    inbox.source("bench", verify=VERIFY, secret=traffic.SECRET, key=["$.id"])
    # Nobody listens there, and nobody works here: what is measured is that deliveries are written.
    inbox.destination("sink", url="http://127.0.0.1:9/", allow_private=True)
    inbox.route("bench", "sink")
    best = Layers()
    async with inbox.running(work=False):
        for _ in range(WARM):
            await one_group(inbox, requests)
        theirs = cpu_seconds(store_pids)
        for _ in range(ROUNDS):
            best = best.least(await one_group(inbox, requests))
        theirs = (cpu_seconds(store_pids) - theirs) * 1e6 / (GROUP * ROUNDS)
    # A mean: the kernel counts other processes in steps that are longer than a group.
    best.store_theirs = theirs
    return best


# -- HTTP ----------------------------------------------------------------------------------------


class _Answered(Receiver):
    """A receiver that knows the answer already, so that only the way there is measured."""

    _receipt = Receipt(Reply(200, b'{"status":"accepted","event_id":"evt_' + b"0" * 32 + b'"}'), "accepted", [])

    def __init__(self, receiver: Receiver) -> None:
        self.sources = receiver.sources

    def begin(self, source: Source | None, arrival: Arrival, loaded: Loaded = NO_ACCOUNTS) -> Receipt:
        """Answer at once."""
        return self._receipt


class _Wire(asyncio.Transport):
    """A connection that leads nowhere."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return itself as its socket."""
        return self

    def getpeername(self) -> tuple[str, int]:
        """Where it seems to come from."""
        return "127.0.0.1", 50_000

    getsockname = getpeername

    def is_closing(self) -> bool:
        """Never."""
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Into the void."""


async def parse_groups(inbox: Inbox, requests: Requests) -> float:
    """Feed requests to as many connections; the best microseconds per request."""
    server = Connections(_nothing, Hooks(_Answered(inbox.receiver), "/in/", direct_peer))
    lines = [InboundConnection(server) for _ in range(GROUP)]
    for line in lines:
        line.connection_made(_Wire())
    best = math.inf
    for _ in range(ROUNDS):
        pieces = list(zip(lines, requests.wire(), strict=True))
        began = time.perf_counter()
        for line, piece in pieces:
            line.data_received(piece)
        await asyncio.sleep(0)  # the answers are written in the next turn of the loop
        best = min(best, (time.perf_counter() - began) * 1e6 / GROUP)
    return best


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """No application: every request is an arrival."""


async def http_layer(store: str, requests: Requests) -> float:
    """What HTTP costs, without sockets."""
    inbox = Inbox(store)
    inbox.source("bench", verify=VERIFY, secret=traffic.SECRET, key=["$.id"])
    async with inbox.running(work=False):
        return await parse_groups(inbox, requests)


# -- from outside --------------------------------------------------------------------------------


def socket_layer(prepared: traffic.Traffic, folder: Path, seconds: float, tick: Callable[[float], None]) -> float:
    """CPU microseconds per request of a server that only reads and answers."""
    port = free_port()
    server = Server([sys.executable, "-m", "bench.work_peers.sink", str(port)], {}, folder / "sink-log", port)
    try:
        server.wait_until_ready()
        before = cpu_seconds([server.pid])
        order = Order(prepared, [port], PATH, 0, prepared.records)
        figures = drive.load_own(order, seconds=seconds, tick=tick)
        return (cpu_seconds([server.pid]) - before) * 1e6 / figures.acknowledged
    finally:
        server.stop()


def whole_product(seconds: float, folder: Path | None) -> dict[str, Measured]:
    """The product under load, by engine."""
    chosen = [one for one in CONTESTANTS if has_mixes(one)]
    settings = Settings(seconds, 1, None, 0.0, False, True, ["--no-worker"], folder, MAX_RATE)
    progress = Progress(1 + 2 * len(chosen))
    found = {}
    with open_place(chosen, settings, progress) as place:
        for one in chosen:
            with run_contestant(one, place) as running:
                trial = Trial(running, place, settings, progress, "whole")
                trial.warm_up()
                found[one.engine] = trial.measure()
    return found


def run(seconds: float, folder: Path | None) -> dict[str, Any]:
    """The whole of it, as plain values."""
    logging.getLogger("oncehook").addHandler(logging.NullHandler())
    progress = Progress(3 + len(ENGINES))
    home = Path(tempfile.mkdtemp(prefix="oncehook-stack-", dir=folder))
    layers = {}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        postgres = Postgres(home)
        stack.callback(postgres.stop)
        records = max(math.ceil(seconds) * 4 * MAX_RATE, (ROUNDS + WARM) * GROUP)
        prepared = traffic.prepare(home, records=records, duplicates=0, tick=progress.step("sign the requests"))
        sockets = socket_layer(prepared, home, seconds, progress.step("sockets and loop"))
        fsync = disk.summarize(disk.measure(home, seconds=1.0))
        place = Place(home, postgres, "", traffic.BODY_SIZE)
        progress.step("HTTP")
        http = _run_quietly(lambda requests: http_layer(f"sqlite:{home / 'http.db'}", requests), prepared)
        for engine in ENGINES:
            progress.step(f"{engine}  receive and store")
            room = home / f"store-{engine}"
            room.mkdir()
            store = fresh_store(engine, place, room, stack)
            url = f"sqlite:{store}" if engine == "sqlite" else store
            pids = place.store_pids(engine)
            best = _run_quietly(partial(receive_groups, url, store_pids=pids), prepared)
            layers[engine] = replace(best, http=http)
    whole = whole_product(seconds, folder)
    return {
        "machine": machine.describe(),
        "disk": asdict(fsync),
        "group": GROUP,
        "sockets": sockets,
        "layers": {engine: asdict(one) for engine, one in layers.items()},
        "whole": {engine: asdict(one) for engine, one in whole.items()},
    }


def _run_quietly(work: Callable[[Requests], Awaitable[Any]], prepared: traffic.Traffic) -> Any:
    """Run it on a loop like the server's, without collections of garbage in between."""
    requests = Requests(prepared)
    gc.collect()
    gc.disable()
    try:
        return uvloop.run(_awaited(work(requests)))
    finally:
        gc.enable()
        requests.close()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def rows(found: dict[str, Any], engine: str) -> list[tuple[str, float]]:
    """The layers of one engine from the socket down and up again, in microseconds of our CPU per event."""
    one = found["layers"][engine]
    return [
        ("sockets and loop", found["sockets"]),
        ("HTTP: parse, watch, write", one["http"]),
        ("verify the signature", one["verify"]),
        ("key, hashes, id", one["read"] - one["plan"]),
        ("plan the deliveries", one["plan"]),
        ("hand over", one["hand_over"]),
        ("insert and commit", one["store_ours"]),
        ("answer", one["answer"]),
    ]


def render(found: dict[str, Any]) -> str:
    """The report as text."""
    parts = [f"µs of CPU per event, {traffic.BODY_SIZE} bytes, groups of {found['group']}, best round"]
    for engine in found["layers"]:
        layers = rows(found, engine)
        total, whole = sum(value for _, value in layers), found["whole"][engine]
        lines = [[f"{engine}, in our process", ""], *[[name, f"{value:.1f}"] for name, value in layers]]
        lines += [
            ["together", f"{total:.1f}"],
            ["the whole product under load", f"{whole['server_cpu_us']:.1f}"],
            ["in the database's processes, alone", f"{found['layers'][engine]['store_theirs']:.1f}"],
            ["in the database's processes, under load", f"{whole['store_cpu_us']:.1f}"],
            ["a group's commit on the clock, per event", f"{found['layers'][engine]['store_wall']:.1f}"],
        ]
        parts.append(table(lines))
    return "\n\n".join(parts)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report."""
    return run_part(
        words,
        name="stack",
        about=str(__doc__),
        seconds=4.0,
        length="length of the loads from outside",
        run=run,
        render=render,
    )


if __name__ == "__main__":
    sys.exit(main())
