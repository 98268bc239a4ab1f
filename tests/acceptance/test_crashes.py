"""Workers die, freeze, are stopped and lose their database, as real processes; what was accepted is done all the same.

Time limits are no part of these tests, except where the store's own clock says when a lease was taken over (R29).
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oncehook import Event, Inbox
from oncehook.deliveries import DEATHS
from tests.acceptance.conftest import Engine
from tests.servers import Postgres, fresh_schema
from tests.torture import checker
from tests.torture.fleet import HANG, Fleet, Order, Process, until
from tests.wire import SECRET, Client, hook, signed

LEASE = 1.0


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


def start(*processes: Process) -> list[Process]:
    """All at once."""
    return [process.ready() for process in [process.launch() for process in processes]]


# -- kill -9 -----------------------------------------------------------------------------------


async def test_the_work_of_a_killed_worker_is_taken_over(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=f"{LEASE}s", handlers="note")
    gate = fleet.gate()
    orders = orders_of(6, 4, gate=str(gate))
    await fleet.fill(orders.values())
    workers = start(fleet.worker("first"), fleet.worker("second"))
    until(lambda: len(fleet.ledger.entries()) == 6, "all subjects at work")
    victim, heir = sorted(workers, key=lambda worker: -len(under_way(fleet, worker)))
    victim.kill()
    killed_at = time.time()
    held = fleet.held_until()
    lost = {fence: end for fence, end in held.items() if fence in under_way(fleet, victim)}
    assert lost, "it was killed in the middle"
    gate.touch()
    fleet.finish()
    assert heir.stop() == 0
    crashed = [attempt for attempt in fleet.attempts() if attempt.outcome == "crashed"]
    assert {attempt.fence for attempt in crashed} == lost.keys()
    assert {attempt.n for attempt in fleet.attempts()} == {1}, "a crash burns no attempt"
    for attempt in crashed:
        said = f"taken over {attempt.ended_at - killed_at:.2f} s after the kill, with a lease of {LEASE} s\n"
        sys.stdout.write(said)
        # The lease ended `LEASE` after its last renewal: this is lease + 1 s, by the store's clock (R29).
        assert 0 <= attempt.ended_at - lost[attempt.fence] <= 1.0
    assert await checker.complaints(fleet, orders) == []


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
    fleet = fleets(engine, lease="0.5s", handlers="note")
    neighbours: dict[str, Order] = {f"n{n}": {"id": f"n{n}", "sleep": 0.05} for n in range(20)}
    poison: Order = {"id": "poison", "kill": True}
    await fleet.fill([*list(neighbours.values())[:6], poison, *list(neighbours.values())[6:]])
    worker = fleet.worker("worker", "--drain")
    codes = []
    while fleet.left():  # a supervisor
        codes.append(worker.launch().wait())
        assert len(codes) < 20, codes
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
    fleet = fleets(engine, lease="0.5s", handlers="book")
    orders: dict[str, Order] = {}
    for point in POINTS[engine.name]:
        batch = {f"{point}-{n}": {"id": f"{point}-{n}", "subject": f"s{n % 8}", "sleep": 0.01} for n in range(24)}
        orders |= batch
        await fleet.fill(batch.values())
        # The first commits of a process on SQLite are the inbox's own.
        fault = f"{point}:{chance.randint(6, 16)}"
        struck = fleet.worker(point).start(fault=fault)
        assert struck.wait() == -9, f"{fault} was not reached"
    at_random = fleet.worker("random").start()
    await asyncio.sleep(chance.uniform(0.0, 0.2))
    at_random.kill()
    fleet.drain()
    assert await checker.complaints(fleet, orders) == [], f"seed {seed}"


async def test_kill_between_the_steps_of_a_plain_attempt(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease="0.5s", handlers="note")
    orders = orders_of(6, 5)
    await fleet.fill(orders.values())
    for point in ("after_lease", "before_settle", "after_settle"):
        assert fleet.worker(point).launch(fault=f"{point}:3").wait() == -9
    fleet.drain()
    assert await checker.complaints(fleet, orders) == []


async def test_a_drain_waits_for_what_somebody_runs_alone(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=f"{LEASE}s", handlers="note")
    orders: dict[str, Order] = {"1": {"id": "1", "gate": str(fleet.gate())}}
    await fleet.fill(orders.values())
    first, second = fleet.worker("first").start(), fleet.worker("second")
    until(lambda: fleet.begun("1", first.pid), "at work")
    first.kill()
    second.start()
    until(lambda: fleet.begun("1", second.pid), "a suspect at work, alone")
    drain = fleet.worker("drain", "--drain").start()
    await asyncio.sleep(0.5)
    second.kill()
    fleet.gate().touch()
    assert (drain.wait(), fleet.left()) == (0, 0), "it waits for what others hold, and takes over when they die"
    assert await checker.complaints(fleet, orders) == []


# -- frozen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [0, 1], ids=["late success", "late failure"])
async def test_what_a_zombie_has_to_say_is_refused(postgres: Engine, fleets: Callable[..., Fleet], fails: int) -> None:
    fleet = fleets(postgres, lease=f"{LEASE}s", handlers="note", retry="0.01s,0.01s")
    orders: dict[str, Order] = {
        "1": {"id": "1", "subject": "s", "blocking_gate": str(fleet.gate("1")), "fails": fails},
        "2": {"id": "2", "subject": "s", "gate": str(fleet.gate("2"))},
    }
    zombie = fleet.server("zombie").start()
    await fleet.fill(orders.values())
    until(lambda: fleet.begun("1", zombie.pid), "the first one at work")
    zombie.freeze()
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
        fleet.engine.rows("SELECT subject_key, leased, delivery_id, fence, attempts, crashes, waiting FROM heads"),
        fleet.attempts(),
    ]


async def metric(server: Process, name: str) -> float | None:
    client: Client = server.client()
    lines = (await client.get("/metrics")).body.decode().splitlines()
    client.close()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), None)


async def test_a_worker_that_slept_past_its_lease_begins_nothing(
    postgres: Engine, fleets: Callable[..., Fleet]
) -> None:
    fleet = fleets(postgres, lease="0.5s", handlers="note")
    orders = orders_of(1, 3)
    other = fleet.worker("other").start()
    other.freeze()
    await fleet.fill(orders.values())
    # It sleeps with its leases in hand, before it has begun.
    sleeper = fleet.worker("sleeper").launch(fault="after_lease:1:pause=4")
    until(fleet.held_until, "a lease in hand")
    other.thaw()
    fleet.finish()
    until(lambda: sleeper.said("lease.lost"), "the sleeper awake again")
    assert (sleeper.stop(), other.stop()) == (0, 0)
    assert {entry.pid for entry in fleet.ledger.entries()} == {other.pid}, (
        "what was lost before it began is not begun (R33)"
    )
    assert await checker.complaints(fleet, orders) == []


async def test_heartbeats_do_not_wait_for_a_transaction(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=f"{LEASE}s", handlers="stamp,book")
    other = fleet.worker("other").start()
    other.freeze()
    orders: dict[str, Order] = {"1": {"id": "1"}, "2": {"id": "2", "sleep": 3.0}}
    await fleet.fill(orders.values())
    # Its loop is held up while a transaction has settled and not committed; a thread works on beside it.
    holder = fleet.worker("holder").launch(fault="before_transaction_commit:1:pause=4")
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
    fleet = fleets(postgres, handlers="stamp", patience="0.2", lease=f"{LEASE}s")
    orders: dict[str, Order] = {"1": {"id": "1", "subject": "s", "sleep": 2.0}}
    workers = start(fleet.worker("first"), fleet.worker("second"))
    await fleet.fill(orders.values())
    entry = until(lambda: fleet.begun("1"), "at work")
    workers.sort(key=lambda worker: worker.pid != entry.pid)
    assert workers[0].stop() == 0
    fleet.finish()
    assert workers[1].stop() == 0
    # A thread cannot be ended (DESIGN.md 8.16): nobody may begin beside it.
    assert await checker.complaints(fleet, orders) == []


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
        worker = inbox._worker
        assert worker is not None
        (held,) = worker.heartbeat._held.values()
        # The store did not answer for most of a lease; it is still ours, and nobody else's.
        worker.heartbeat.let_go(held.lease)
        worker._lost_by_thread(held.lease)
        await asyncio.sleep(0.3)
        assert len(begun) == 1, "the thread is at work still"
        may_end.set()
        await inbox.drain()
    assert len(begun) == 1, "and what it did counts (R26 is for who was overtaken)"
    assert engine.rows("SELECT status, attempts FROM deliveries") == [("done", 1)]


@pytest.mark.parametrize("command", ["worker", "serve"])
async def test_a_second_signal_leaves_at_once_and_safely(
    postgres: Engine, fleets: Callable[..., Fleet], command: str
) -> None:
    fleet = fleets(postgres, handlers="note", lease="0.5s", patience="600")
    orders: dict[str, Order] = {"1": {"id": "1", "gate": str(fleet.gate())}}
    await fleet.fill(orders.values())
    process = (fleet.worker() if command == "worker" else fleet.server()).start()
    until(lambda: fleet.begun("1"), "at work")
    process.terminate()
    await asyncio.sleep(0.5)
    assert process.is_running, "it waits for what is under way"
    process.terminate()
    assert process.wait() != 0
    fleet.gate().touch()
    fleet.drain()
    assert await checker.complaints(fleet, orders) == []


async def test_a_rolling_restart_burns_nothing(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=f"{LEASE}s", patience="0.05")
    orders = orders_of(12, 25, sleep=0.02)
    workers = start(fleet.worker("first"), fleet.worker("second"))
    load = asyncio.create_task(fleet.fill(orders.values()))
    for worker in workers * 2:
        await asyncio.sleep(0.2)
        assert await asyncio.to_thread(worker.stop) == 0
        await asyncio.to_thread(worker.start)
    await load
    await asyncio.to_thread(fleet.finish)
    assert [worker.stop() for worker in workers] == [0, 0]
    assert [attempt for attempt in fleet.attempts() if (attempt.outcome, attempt.n) != ("done", 1)] == []
    # A commit may be under way when its handler is told to stop: then it is done, and need not be given back.
    done = {attempt.fence for attempt in fleet.attempts()}
    assert [line for worker in workers for line in worker.said("lease.lost") if line["fence"] not in done] == []
    assert await checker.complaints(fleet, orders) == []


# -- the database ------------------------------------------------------------------------------


async def test_workers_outlive_their_database(tmp_path: Path, fleets: Callable[..., Fleet]) -> None:
    with Postgres() as server:
        engine = Engine("postgres", f"{server.url}?schema={fresh_schema()}", tmp_path)
        fleet = fleets(engine, lease=f"{LEASE}s", handlers="book", retry=",".join(["0.2s"] * 20))
        orders = orders_of(8, 12, sleep=0.05)
        await fleet.fill(orders.values())
        workers = start(fleet.worker("first"), fleet.worker("second"))
        for immediate in (False, True):
            until(lambda: any(under_way(fleet, worker) for worker in workers), "at work")
            server.stop(immediate=immediate)
            await asyncio.sleep(0.5)
            server.start()
        fleet.finish()
        assert [worker.stop() for worker in workers] == [0, 0]
        assert {status for status, *_ in fleet.deliveries().values()} == {"done"}
        assert checker.not_once(fleet.ledger.written(), orders) == []
        entries = fleet.ledger.entries()
        assert checker.out_of_order(entries, checker.places(fleet)) == []
        assert checker.overlapping(fleet.attempts()) == []
        assert await fleet.troubles() == []


async def test_a_retry_is_due_when_it_was_also_after_a_crash(engine: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(engine, handlers="note", retry="2.5s")
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
    assert second.started_at - first.ended_at >= 2.5
    assert await checker.complaints(fleet, orders) == []
