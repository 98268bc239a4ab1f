"""Workers die, freeze, are stopped and lose their database, as real processes; what was accepted is done all the same.

Time limits are no part of these tests, except where the store's own clock says when a lease was taken over (R29). So
leases are long: nobody loses one by being held up for a moment, and those of the dead are ended by the test.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import pytest

from oncehook import Event, Inbox
from oncehook.model import DEATHS
from tests.acceptance.conftest import Engine
from tests.servers import Postgres, fresh_schema
from tests.torture import checker
from tests.torture.app import make
from tests.torture.fleet import HANG, Fleet, Order, Process, until
from tests.wire import SECRET, Client, hook, signed

LONG = "60s"
TRIES = 3


@pytest.fixture
def fleets() -> Iterator[Callable[..., Fleet]]:
    """Makes fleets, and ends what they left running."""
    made: list[Fleet] = []

    def make(engine: Engine, **settings: str) -> Fleet:
        made.append(Fleet(engine, **settings))
        return made[-1]

    yield make
    for fleet in made:
        fleet.end()


def orders_of(subjects: int, each: int, **how: object) -> dict[str, Order]:
    """Orders of several subjects, in turn."""
    made: dict[str, Order] = {}
    for n in range(each):
        for subject in range(subjects):
            key = f"s{subject}-{n}"
            made[key] = {"id": key, "subject": f"s{subject}", **how}
    return made


def under_way(fleet: Fleet, process: Process) -> set[int]:
    """Fences of attempts that this process has begun and not ended."""
    own = [entry for entry in fleet.ledger.entries() if entry.pid == process.pid]
    return {e.fence for e in own if e.moment == "begin"} - {e.fence for e in own if e.moment == "end"}


def end_leases(engine: Engine, within: float = 0.0, fences: Collection[int] = ()) -> dict[int, float]:
    """Have these leases, or all that there are and the places of workers, end in so many seconds, as if the rest of
    each had passed; says when.

    On SQLite the next process to open the file does that by itself.
    """
    if engine.name == "sqlite":
        return {}
    these = f"AND fence IN ({', '.join(map(str, fences))})" if fences else ""
    if not fences:
        engine.rows(f"UPDATE places SET until = now() + interval '{within} seconds' RETURNING worker")
    return dict(
        engine.rows(
            f"UPDATE heads SET due_at = now() + interval '{within} seconds' WHERE leased {these}"
            " RETURNING fence, extract(epoch FROM due_at)::float8"
        )
    )


def start(*processes: Process) -> list[Process]:
    """All at once."""
    return [process.ready() for process in [process.launch() for process in processes]]


# -- kill -9 -----------------------------------------------------------------------------------


async def test_the_work_of_a_killed_worker_is_taken_over(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=LONG, handlers="note")
    orders: dict[str, Order] = {}
    waits = [1.0]
    while max(waits) >= 1.0:  # the machine may have been held up just then, but not each time
        assert len(orders) < TRIES * 24, f"taken over {waits} s after the end of a lease (R29)"
        gate = fleet.gate(f"gate {len(orders)}")
        batch = {f"{len(orders)} {key}": order for key, order in orders_of(6, 4, gate=str(gate)).items()}
        for key, order in batch.items():
            order["id"] = key
        orders |= batch
        waits = await kill_one_of_two(fleet, batch, gate)
    assert await checker.complaints(fleet, orders) == []


async def kill_one_of_two(fleet: Fleet, orders: dict[str, Order], gate: Path) -> list[float]:
    """Seconds between the end of each lease that the dead one held and the moment it was taken over, by the store's
    clock: a lease ends its own length after its last renewal, so that lease + 1 s are 1 s here (R29)."""
    await fleet.fill(orders.values())
    workers = start(fleet.worker("first"), fleet.worker("second"))
    until(lambda: sum(len(under_way(fleet, worker)) for worker in workers) == 6, "all subjects at work")
    victim, heir = sorted(workers, key=lambda worker: -len(under_way(fleet, worker)))
    victim.kill()
    assert under_way(fleet, victim), "it was killed in the middle"
    # Not at once: the heir looks once a second, and then it knows when the next lease ends.
    lost = end_leases(fleet.engine, 1.5, under_way(fleet, victim))
    gate.touch()
    fleet.finish()
    assert heir.stop() == 0
    made = [attempt for attempt in fleet.attempts() if attempt.key in orders]
    crashed = [attempt for attempt in made if attempt.outcome == "crashed"]
    assert {attempt.fence for attempt in crashed} == lost.keys() == under_way(fleet, victim)
    assert {attempt.n for attempt in made} == {1}, "a crash burns no attempt"
    waits = [attempt.ended_at - lost[attempt.fence] for attempt in crashed]
    sys.stdout.write(f"taken over {waits} s after the end of a lease\n")
    assert min(waits) >= 0
    return waits


async def test_a_killed_server_on_sqlite_goes_on_at_once(sqlite: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(sqlite, lease="60s")
    gate = fleet.gate()
    orders = orders_of(3, 3, gate=str(gate))
    await fleet.fill(orders.values())
    server = fleet.server().start()
    until(lambda: len(under_way(fleet, server)) >= 3, "at work")
    server.kill()
    held = fleet.held_until()
    assert held
    gate.touch()
    server.start()
    fleet.finish()
    assert server.stop() == 0
    crashed = {attempt.fence: attempt for attempt in fleet.attempts() if attempt.outcome == "crashed"}
    assert crashed.keys() == held.keys()
    assert all(crashed[fence].ended_at < end for fence, end in held.items()), "nobody waited for the lease to end"
    assert await checker.complaints(fleet, orders) == []


async def test_a_poisonous_order_condemns_nobody_but_itself(engine: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(engine, lease=LONG, handlers="note")
    neighbours: dict[str, Order] = {f"n{n}": {"id": f"n{n}", "sleep": 0.05} for n in range(20)}
    poison: Order = {"id": "poison", "kill": True}
    await fleet.fill([*list(neighbours.values())[:6], poison, *list(neighbours.values())[6:]])
    worker = fleet.worker("worker", "--drain")
    codes = []
    while fleet.left():  # a supervisor
        codes.append(worker.launch().wait())
        assert len(codes) < 20, codes
        end_leases(engine)
    found = fleet.deliveries()
    assert found.pop(("note", "poison"))[::2] == ("dead", "crash")
    assert {delivery[0] for delivery in found.values()} == {"done"}
    assert {delivery[1] for delivery in found.values()} == {1}, "nor did a neighbour lose an attempt"
    crashed = [attempt.key for attempt in fleet.attempts() if attempt.outcome == "crashed"]
    assert crashed.count("poison") == DEATHS + 1, "once in company, and then alone"
    assert max(crashed.count(key) for key in neighbours) == 1
    assert sum(code == -9 for code in codes) == DEATHS + 1
    assert await fleet.troubles() == []
    assert codes == [-9] * (DEATHS + 1) + [0], "a drain ends when nothing is left, and not before"


POINTS = {
    "postgres": ["before_tx_settle", "before_transaction_commit", "after_effect"],
    "sqlite": ["after_effect", "before_commit", "after_commit"],
}
"""Before anything is written, before it is committed, and after that before anybody knows; in another order on SQLite,
where the effect is written when the handler has returned."""


async def test_effects_that_commit_with_us_happen_once(engine: Engine, fleets: Callable[..., Fleet]) -> None:
    seed = 20261116
    chance = random.Random(seed)
    fleet = fleets(engine, lease=LONG, handlers="book")
    orders: dict[str, Order] = {}
    for point in POINTS[engine.name]:
        batch = {f"{point}-{n}": {"id": f"{point}-{n}", "subject": f"s{n % 8}", "sleep": 0.01} for n in range(24)}
        orders |= batch
        await fleet.fill(batch.values())
        # The first commits of a process on SQLite are the inbox's own.
        fault = f"{point}:{chance.randint(6, 16)}"
        struck = fleet.worker(point).launch(fault=fault)
        assert struck.wait() == -9, f"{fault} was not reached"
        end_leases(engine)
    at_random = fleet.worker("random").start()
    await asyncio.sleep(chance.uniform(0.0, 0.2))
    at_random.kill()
    end_leases(engine)
    fleet.drain()
    assert await checker.complaints(fleet, orders) == [], f"seed {seed}"


async def test_kill_between_the_steps_of_a_plain_attempt(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=LONG, handlers="note")
    orders = orders_of(6, 5)
    await fleet.fill(orders.values())
    for point in ("after_lease", "before_settle", "after_settle"):
        assert fleet.worker(point).launch(fault=f"{point}:3").wait() == -9
        end_leases(postgres)
    fleet.drain()
    assert await checker.complaints(fleet, orders) == []


async def test_a_drain_waits_for_what_somebody_runs_alone(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=LONG, handlers="note")
    orders: dict[str, Order] = {"1": {"id": "1", "gate": str(fleet.gate())}}
    await fleet.fill(orders.values())
    first, second = fleet.worker("first").start(), fleet.worker("second")
    until(lambda: fleet.begun("1", first.pid), "at work")
    first.kill()
    end_leases(postgres)
    second.start()
    until(lambda: fleet.begun("1", second.pid), "a suspect at work, alone")
    drain = fleet.worker("drain", "--drain").start()
    await asyncio.sleep(0.5)
    second.kill()
    end_leases(postgres)
    fleet.gate().touch()
    assert (drain.wait(), fleet.left()) == (0, 0), "it waits for what others hold, and takes over when they die"
    assert await checker.complaints(fleet, orders) == []


# -- frozen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [0, 1], ids=["late success", "late failure"])
async def test_what_a_zombie_has_to_say_is_refused(postgres: Engine, fleets: Callable[..., Fleet], fails: int) -> None:
    fleet = fleets(postgres, lease=LONG, handlers="note", retry="0.01s,0.01s")
    orders: dict[str, Order] = {
        "1": {"id": "1", "subject": "s", "blocking_gate": str(fleet.gate("1")), "fails": fails},
        "2": {"id": "2", "subject": "s", "gate": str(fleet.gate("2"))},
    }
    zombie = fleet.server("zombie").start()
    await fleet.fill(orders.values())
    until(lambda: fleet.begun("1", zombie.pid), "the first one at work")
    zombie.freeze()
    end_leases(postgres)
    fleet.gate("1").touch()
    heir = fleet.server("heir").start()
    until(lambda: fleet.begun("2", heir.pid), "the heir at work on the next one")
    before = standing(fleet)
    zombie.thaw()
    (line,) = until(lambda: zombie.said("lease.lost"), "the zombie told that it lost")
    first = fleet.begun("1", zombie.pid)
    assert first is not None
    assert (line["destination"], line["fence"]) == ("note", first.fence)
    assert standing(fleet) == before, "a zombie changes nothing: not state, attempts, time, nor the next one's lease"
    assert await metric(zombie, 'oncehook_leases_lost_total{destination="note"}') == 1.0
    fleet.gate("2").touch()
    fleet.finish()
    assert (zombie.stop(), heir.stop()) == (0, 0)
    assert await checker.complaints(fleet, orders, [zombie.pid]) == []


def standing(fleet: Fleet) -> list[object]:
    """All that a settlement could change."""
    return [
        fleet.engine.rows("SELECT id, status, attempts, fence, settled_at, last_error FROM deliveries ORDER BY id"),
        fleet.engine.rows("SELECT subject_key, leased, delivery_id, fence, attempts, crashes, seq FROM heads"),
        fleet.attempts(),
    ]


async def metric(server: Process, name: str) -> float | None:
    client: Client = server.client()
    lines = (await client.get("/metrics", {"Host": "localhost"})).body.decode().splitlines()
    client.close()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), None)


async def test_a_worker_that_slept_past_its_lease_begins_nothing(
    postgres: Engine, fleets: Callable[..., Fleet]
) -> None:
    fleet = fleets(postgres, lease="3s", handlers="note")
    orders = orders_of(1, 3)
    other = fleet.worker("other").start()
    other.freeze()
    await fleet.fill(orders.values())
    # It sleeps with its leases in hand, before it has begun.
    sleeper = fleet.worker("sleeper").launch(fault="after_lease:1:pause=4")
    until(fleet.held_until, "a lease in hand")
    sleeper.freeze()  # and does not wake before the other is through, however long that takes
    other.thaw()
    fleet.finish()
    sleeper.thaw()
    until(lambda: sleeper.said("lease.lost"), "the sleeper awake again")
    assert (sleeper.stop(), other.stop()) == (0, 0)
    assert {entry.pid for entry in fleet.ledger.entries()} == {other.pid}, (
        "what was lost before it began is not begun (R33)"
    )
    assert await checker.complaints(fleet, orders) == []


async def test_heartbeats_do_not_wait_for_a_transaction(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease="3s", handlers="stamp,book")
    other = fleet.worker("other").start()
    other.freeze()
    orders: dict[str, Order] = {"1": {"id": "1"}, "2": {"id": "2", "sleep": 3.0}}
    await fleet.fill(orders.values())
    # Its loop is held up while a transaction has settled and not committed; a thread works on beside it.
    holder = fleet.worker("holder").launch(fault="before_transaction_commit:1:pause=5")
    until(lambda: fleet.begun("2", holder.pid), "a thread at work")
    other.thaw()
    fleet.finish()
    assert (holder.stop(), other.stop()) == (0, 0)
    assert [attempt for attempt in fleet.attempts() if attempt.outcome == "crashed"] == [], "nobody died (R32)"
    assert await checker.complaints(fleet, orders) == []


# -- stopped -----------------------------------------------------------------------------------


async def test_what_does_not_end_in_time_is_given_back_uncounted(engine: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(engine, handlers="note,book", patience="0.2", lease="60s")
    orders = orders_of(2, 2, sleep=600)
    await fleet.fill(orders.values())
    worker = fleet.worker().start()
    until(lambda: len(under_way(fleet, worker)) == 4, "at work")
    assert worker.stop() == 0
    assert fleet.engine.rows("SELECT count(*) FROM heads WHERE leased OR attempts > 0") == [(0,)]
    assert fleet.attempts() == []
    assert fleet.left() == 8
    assert not worker.said("lease.lost")
    assert await fleet.troubles() == []


async def test_a_thread_keeps_its_lease_until_it_ends(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    """A thread cannot be ended (DESIGN.md 8.16): nobody may begin beside it, and so its process ends with it."""
    fleet = fleets(postgres, handlers="stamp", patience="0.2", lease=LONG)
    workers = start(fleet.worker("first"), fleet.worker("second"))
    await fleet.fill([{"id": "1", "subject": "s", "sleep": 600.0}])
    entry = until(lambda: fleet.begun("1"), "at work")
    workers.sort(key=lambda worker: worker.pid != entry.pid)
    assert workers[0].stop() == 0, "long before the thread would have ended"
    assert fleet.held_until().keys() == {entry.fence}, "it was not given back"
    end_leases(postgres)
    again = until(lambda: fleet.begun("1", workers[1].pid), "the other one at work")
    assert again.attempt == 1, "and that was no attempt"
    assert workers[1].stop() == 0
    assert [entry.moment for entry in fleet.ledger.entries()] == ["begin", "begin"]
    assert await fleet.troubles() == []


async def test_nobody_begins_beside_a_thread_whose_heartbeat_gave_up(engine: Engine) -> None:
    inbox = Inbox(engine.url)
    inbox.source(
        "orders", verify={"scheme": "hmac", "header": "X-Signature", "prefix": "sha256="}, secret=SECRET, key="$.id"
    )
    begun: list[int] = []
    may_end = threading.Event()

    @inbox.on("orders", lease="60s")
    def slowly(event: Event) -> None:
        begun.append(event.fence)
        may_end.wait(HANG)

    body = hook("1")
    async with inbox.running():
        assert (await inbox.receive("orders", signed(body), body)).outcome == "accepted"
        await asyncio.to_thread(until, lambda: begun, "at work")
        worker = inbox.worker
        assert worker is not None
        (held,) = worker.heartbeat._held.values()
        # The store did not answer for most of a lease; it is still ours, and nobody else's.
        worker.heartbeat.let_go(held.lease)
        worker._stop_lost(held.lease)
        await asyncio.sleep(0.3)
        assert len(begun) == 1, "the thread is at work still"
        may_end.set()
        await inbox.drain()
    assert len(begun) == 1, "and what it did counts (R26 is for who was overtaken)"
    assert engine.rows("SELECT status, attempts FROM deliveries") == [("done", 1)]


@pytest.mark.parametrize(("command", "later"), [("worker", 0.5), ("serve", 0.5), ("serve", 0.0)])
async def test_a_second_signal_leaves_at_once_and_safely(
    postgres: Engine, fleets: Callable[..., Fleet], command: str, later: float
) -> None:
    fleet = fleets(postgres, handlers="note", lease=LONG, patience="600")
    orders: dict[str, Order] = {"1": {"id": "1", "gate": str(fleet.gate())}}
    await fleet.fill(orders.values())
    process = fleet.worker() if command == "worker" else fleet.server()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind("")  # a name that nobody else has
        process.settings["NOTIFY_SOCKET"] = "@" + told.getsockname()[1:].decode()
        process.start()
        until(lambda: fleet.begun("1"), "at work")
        process.terminate()
        told.settimeout(HANG)
        while not told.recv(4096).startswith(b"STOPPING=1"):
            pass  # two signals that come before the first is heard are one
    await asyncio.sleep(later)
    assert process.is_running, "it waits for what is under way"
    process.terminate()
    assert process.wait() != 0
    end_leases(postgres)
    fleet.gate().touch()
    fleet.drain()
    assert await checker.complaints(fleet, orders) == []


async def test_a_rolling_restart_burns_nothing(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=LONG, patience="0.05")
    orders = orders_of(12, 25, sleep=0.02)
    coroutines = ("--destination", "note", "--destination", "book")
    first, second = fleet.worker("first", *coroutines), fleet.worker("second", *coroutines)
    # What is left behind on a thread is somebody's to find when its lease has run out: there they are waited for.
    threads = fleet.worker("threads", "--destination", "stamp")
    threads.settings["SHOP_PATIENCE"] = "60"
    workers = start(first, second, threads)
    load = asyncio.create_task(send(fleet, orders.values()))

    async def restart(worker: Process) -> None:
        assert await asyncio.to_thread(worker.stop) == 0
        await asyncio.to_thread(worker.start)

    for worker in (first, second) * 2:
        await asyncio.sleep(0.2)
        await asyncio.gather(restart(worker), restart(threads))
    await load
    await asyncio.to_thread(fleet.finish)
    assert [worker.stop() for worker in workers] == [0, 0, 0]
    assert [attempt for attempt in fleet.attempts() if (attempt.outcome, attempt.n) != ("done", 1)] == []
    # A commit may be under way when its handler is told to stop: then it is done, and need not be given back.
    done = {attempt.fence for attempt in fleet.attempts()}
    assert [line for worker in workers for line in worker.said("lease.lost") if line["fence"] not in done] == []
    assert await checker.complaints(fleet, orders) == []


async def send(fleet: Fleet, orders: Iterable[Order]) -> None:
    """Take in orders beside those that work. Who is held up in the middle of a transaction keeps others from adding to
    its subject; a sender is told so after a while, and sends again."""
    shop = make(fleet.settings)
    async with shop.running(work=False):
        for order in orders:
            body = json.dumps(order).encode()
            while (await shop.receive("orders", signed(body), body)).outcome != "accepted":
                pass


# -- the database ------------------------------------------------------------------------------


async def test_workers_outlive_their_database(tmp_path: Path, fleets: Callable[..., Fleet]) -> None:
    with Postgres() as server:
        engine = Engine("postgres", f"{server.url}?schema={fresh_schema()}", tmp_path)
        fleet = fleets(engine, lease="1s", handlers="book", retry=",".join(["0.2s"] * 20))
        orders = orders_of(8, 30, sleep=0.05)
        await fleet.fill(orders.values())
        workers = start(fleet.worker("first"), fleet.worker("second"))
        for immediate in (False, True):
            until(lambda: any(under_way(fleet, worker) for worker in workers), "at work")
            server.stop(immediate=immediate)
            await asyncio.sleep(0.5)
            server.start()
        fleet.finish()
        for worker in workers:
            assert worker.stop() == 0, worker.text()
        assert {status for status, *_ in fleet.deliveries().values()} == {"done"}
        assert checker.not_once(fleet.ledger.written(), orders) == []
        entries = fleet.ledger.entries()
        assert checker.out_of_order(entries, checker.places(fleet)) == []
        assert checker.overlapping(fleet.attempts()) == []
        assert await fleet.troubles() == []


async def test_a_retry_is_due_when_it_was_also_after_a_crash(engine: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(engine, handlers="note", retry="4s")
    orders: dict[str, Order] = {"1": {"id": "1", "fails": 1}}
    await fleet.fill(orders.values())
    worker = fleet.worker().start()
    until(lambda: fleet.attempts(), "the first attempt")
    due = fleet.engine.rows("SELECT due_at FROM heads")
    worker.kill()
    receiver = fleet.server("receiver", "--no-worker").start()
    assert fleet.engine.rows("SELECT due_at FROM heads") == due
    assert receiver.stop() == 0
    fleet.drain()
    first, second = fleet.attempts()
    assert (first.outcome, second.outcome, second.n) == ("retry", "done", 2)
    assert second.started_at - first.ended_at >= 4
    assert await checker.complaints(fleet, orders) == []
