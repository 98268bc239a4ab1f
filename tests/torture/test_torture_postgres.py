"""T4 to T11 on PostgreSQL: see test_torture.py."""

from __future__ import annotations

import json
import random
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.acceptance.conftest import make_engine
from tests.torture import driver
from tests.torture.clocks import Clocks
from tests.torture.fleet import Fleet, until
from tests.torture.history import History
from tests.torture.test_torture import SECONDS, hold
from tests.torture.world import World


@pytest.mark.timeout(SECONDS * 4 + 400)
@pytest.mark.parametrize("component", driver.COMPONENTS)
async def test_every_promise_holds_on_postgres(component: str, tmp_path: Path) -> None:
    await hold(component, "postgres", tmp_path)


async def test_a_lease_that_was_taken_is_excused_only_by_unanswered_heartbeats(tmp_path: Path) -> None:
    """What T9 lets pass: a holder that says so itself, within its own lease, and nobody else."""
    fleet = Fleet(make_engine("postgres", tmp_path), lease="0.5s", handlers="note")
    history = History(tmp_path / "history.jsonl")
    world = World(fleet.engine, fleet, history, random.Random(1), 1.0, AsyncExitStack())
    await fleet.fill([{"id": "1", "gate": str(fleet.gate())}])
    holder = fleet.worker("holder").start()
    until(lambda: fleet.begun("1", holder.pid), "at work")
    holder.kill()
    fleet.gate().touch()
    fleet.drain()
    history.close()
    (taken,) = [attempt for attempt in fleet.attempts() if attempt.outcome == "crashed"]
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
