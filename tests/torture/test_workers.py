"""T4: orders come in while every process is killed, frozen and stopped at random; then everything must add up.

One line says what happened. A run in which nothing happened proves nothing, and fails. `ONCEHOOK_TORTURE_SECONDS` makes
it longer, `ONCEHOOK_TORTURE_SEED` repeats its dice; how processes interleave is never the same twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import statistics
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.acceptance.conftest import make_engine
from tests.torture import checker
from tests.torture.fleet import Fleet, Process
from tests.torture.history import History
from tests.torture.nemesis import LEASE, Nemesis
from tests.torture.senders import Senders

SECONDS = float(os.environ.get("ONCEHOOK_TORTURE_SECONDS", "12"))
SEED = int(os.environ.get("ONCEHOOK_TORTURE_SEED", "0")) or secrets.randbelow(10**9)
SUBJECTS = 8


@pytest.mark.timeout(SECONDS * 3 + 240)
@pytest.mark.parametrize("name", ["sqlite", "postgres"])
async def test_nothing_is_lost_or_out_of_order_whoever_dies(name: str, tmp_path: Path) -> None:
    fleet = Fleet(make_engine(name, tmp_path), lease=f"{LEASE}s", patience="0.3")
    history = History(tmp_path / "history.jsonl")
    try:
        await torment(fleet, history)
    except BaseException as error:
        error.add_note(f"ONCEHOOK_TORTURE_SEED={SEED}")
        raise
    finally:
        fleet.end()
        history.close()


def muster(fleet: Fleet) -> tuple[list[Process], list[Process]]:
    """Receivers and workers: one process on SQLite, two and three of them on PostgreSQL."""
    if fleet.ledger.is_sqlite:
        receivers = workers = [fleet.server()]
    else:
        receivers = [fleet.server(f"receiver{n}", "--no-worker") for n in (1, 2)]
        workers = [fleet.worker(f"worker{n}") for n in (1, 2, 3)]
    for process in fleet.processes:
        process.launch()
    for process in fleet.processes:
        process.ready()
    return receivers, workers


async def torment(fleet: Fleet, history: History) -> None:
    chance = random.Random(SEED)
    receivers, workers = await asyncio.to_thread(muster, fleet)
    senders = Senders(receivers, chance, history)
    nemesis = Nemesis(fleet, workers, chance, history)
    async with asyncio.TaskGroup() as group:
        for n in range(SUBJECTS):
            group.create_task(senders.keep_sending(f"s{n}", f"s{n}", 0.15))
        group.create_task(senders.keep_sending(None, "loose", 0.15))
        await nemesis.strike_surely(senders)
        await nemesis.rage(SECONDS)
        senders.resting.set()
    codes = [await asyncio.to_thread(process.stop) for process in fleet.processes]
    await asyncio.to_thread(fleet.drain)
    wrong = [*senders.wrong, *nemesis.bad_exits, *(f"exit code {code} at the end" for code in codes if code)]
    wrong += await checker.complaints(fleet, senders.sent, history.pids("freeze"))
    wrong += [f"{key}: sent, and never acknowledged" for key in senders.sent if key not in senders.acknowledged]
    figures = count(fleet, senders, history)
    line = " ".join(f"{name}={value}" for name, value in figures.items())
    sys.stdout.write(f"torture engine={fleet.engine.name} {line} wrong={len(wrong)} seed={SEED}\n")
    assert wrong == [], line
    # On SQLite there is nobody who could take over from a process that sleeps: its leases are its own when it wakes.
    needed = ["reclaimed", "left_in_drain"] + ([] if fleet.ledger.is_sqlite else ["refused"])
    assert all(figures[name] for name in needed), f"this run proves nothing: {line}"


def count(fleet: Fleet, senders: Senders, history: History) -> dict[str, object]:
    """The figures of a run."""
    entries, attempts = fleet.ledger.entries(), fleet.attempts()
    crashed = [attempt for attempt in attempts if attempt.outcome == "crashed"]
    holders = {entry.fence: entry.pid for entry in entries}
    killed = history.when("kill")
    delays = [a.ended_at - killed[pid] for a in crashed if (pid := holders.get(a.fence, 0)) in killed]
    delays = [delay for delay in delays if delay > 0] or [0.0]  # before the kill: it had been frozen
    statuses = Counter(status for status, *_ in fleet.deliveries().values())
    faults = history.counts()
    # Begun by a process that was told to stop, and no attempt in the end.
    stopped, known = history.pids("stop"), {attempt.fence for attempt in attempts}
    given_back = {entry.fence for entry in entries if entry.pid in stopped} - known
    done = {attempt.fence for attempt in attempts if attempt.outcome != "crashed"}
    lost = [line["fence"] for process in fleet.processes for line in process.said("lease.lost")]
    return {
        "sent": len(senders.sent),
        "tries": senders.tries,
        "acknowledged": len(senders.acknowledged),
        "stored": len(fleet.engine.events()),
        "executed": len({(entry.destination, entry.key) for entry in entries}),
        "attempts": len(attempts),
        "done": statuses["done"],
        "dead": statuses["dead"],
        "effects": len(fleet.ledger.written()),
        "repeated": checker.repeated(entries, attempts)[0],
        "overtaken_writes": len(checker.zombies(entries)),
        "refused": sum(fence not in done for fence in lost),
        "reclaimed": len(crashed),
        "reclaim_p50": f"{statistics.median(delays):.2f}s",
        "reclaim_max": f"{max(delays):.2f}s",
        "left_in_drain": len(given_back),
        "kills": faults["kill"],
        "freezes": faults["freeze"],
        "stops": faults["stop"],
    }
