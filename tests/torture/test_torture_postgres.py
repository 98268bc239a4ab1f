"""T4 to T13 on PostgreSQL: see test_torture.py."""

from __future__ import annotations

import json
import random
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from tests.acceptance.conftest import make_engine
from tests.torture import driver
from tests.torture.clocks import Clocks
from tests.torture.fleet import Fleet, until
from tests.torture.history import History
from tests.torture.test_torture import RUNS, SECONDS, hold
from tests.torture.world import World


@pytest.mark.timeout(RUNS * SECONDS * 4 + 900)
@pytest.mark.parametrize("component", driver.components_of("postgres"))
async def test_every_promise_holds_on_postgres(component: str, tmp_path: Path) -> None:
    await hold(component, "postgres", tmp_path)


def lapse(fleet: Fleet) -> None:
    """All leases were taken a while ago and are over, by the store's own clock."""
    url, _, schema = fleet.engine.url.partition("?schema=")
    with psycopg.connect(url, options=f"-csearch_path={schema}") as connection:
        connection.execute("UPDATE heads SET due_at = now(), leased_at = leased_at - interval '10 s' WHERE leased")


def slept(fleet: Fleet, pid: int, start: float, end: float) -> None:
    """This process was held up then, and nobody else ever."""
    fleet.ledger.sleeps.write_text("\n" * 8192 + json.dumps([pid, start, end]) + "\n")


async def test_a_lease_that_was_taken_is_excused_only_by_what_its_holder_says(tmp_path: Path) -> None:
    """What T9 lets pass: a holder that says so itself, or that it slept or was done, in its own lease, nobody else."""
    fleet = Fleet(make_engine("postgres", tmp_path), lease="60s", handlers="note")
    history = History(tmp_path / "history.jsonl")
    world = World(fleet.engine, fleet, history, random.Random(1), 1.0, AsyncExitStack())
    await fleet.fill([{"id": "1", "gate": str(fleet.gate())}])
    holder = fleet.worker("holder").start()
    until(lambda: fleet.begun("1", holder.pid), "at work")
    holder.kill()
    lapse(fleet)
    fleet.gate().touch()
    fleet.drain()
    history.close()
    (taken,) = [attempt for attempt in fleet.attempts() if attempt.outcome == "crashed"]
    (last,) = [process.pid for process in fleet.processes if process is not holder]
    during = (taken.started_at, taken.ended_at)
    for pid, sleep, excused in [
        (holder.pid, (taken.started_at - 9, taken.started_at), False),
        (holder.pid, (taken.ended_at, taken.ended_at + 9), False),
        (last, during, False),
        (holder.pid, during, True),
    ]:
        slept(fleet, pid, *sleep)
        assert (await Clocks().judge(world) == []) is excused
    slept(fleet, last, *during)
    written = fleet.ledger.path.read_text()
    for pid, fence, at, excused in [
        (holder.pid, taken.fence, taken.ended_at, False),
        (last, taken.fence + 1, taken.started_at, False),
        (holder.pid, taken.fence, taken.started_at, True),
    ]:
        end = json.dumps([at, pid, "note", "end", "1", None, fence, 1])
        fleet.ledger.path.write_text(f"{written}{end}\n")
        assert (await Clocks().judge(world) == []) is excused
    fleet.ledger.path.write_text(written)
    for name, at, excused in [
        ("holder", taken.started_at - 1, False),
        ("last", taken.started_at, False),
        ("holder", (taken.started_at + taken.ended_at) / 2, True),
    ]:
        process = next(one for one in fleet.processes if one.name == name)
        said = {"event": "heartbeat.unanswered", "timestamp": datetime.fromtimestamp(at, UTC).isoformat()}
        with process.log.open("a") as log:
            log.write(json.dumps(said) + "\n")
        assert (await Clocks().judge(world) == []) is excused
    assert world.extra["lapsed_unanswered"] == 1
