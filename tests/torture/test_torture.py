"""T4 to T13: orders come in while everything around them breaks; then everything must add up.

A run that did not reach its rare states proves nothing: another takes its place, and who never reaches them fails.
`TORTURE_SECONDS` makes each run longer, `TORTURE_SEED` repeats its dice; how processes interleave is
never the same twice. For hours of it there is `scripts/torture`. PostgreSQL has a file of its own, so that both engines
run at once.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.acceptance.conftest import make_engine
from tests.effort import effort, first_seed
from tests.torture import checker, driver
from tests.torture.claiming import RARE, torment_claims
from tests.torture.figures import Figures
from tests.torture.fleet import Fleet, Order, until
from tests.torture.ledger import SLEPT, Entry
from tests.torture.world import Outcome

SECONDS = effort("SECONDS", 2)
SEED = first_seed()


RUNS = 3
"""In one of a hundred runs as short as these nobody happens to send what a rare state needs."""


async def hold(component: str, engine: str, folder: Path) -> None:
    """Every promise must hold in every run, and in one of them every rare state be reached."""
    missed: list[Sequence[str]] = []
    for seed in range(SEED, SEED + RUNS):
        outcome = await driver.play(driver.COMPONENTS[component](), engine, folder / str(seed), SECONDS, seed)
        sys.stdout.write(driver.line(outcome, seed) + "\n")
        again = f"TORTURE_SEED={seed}, or {driver.command(outcome, seed, SECONDS)}"
        assert list(outcome.wrong) == [], again
        if not outcome.unreached:
            return
        missed.append(outcome.unreached)
    pytest.fail(f"these runs prove nothing, for what they did not reach: {missed}; {again}")


@pytest.mark.timeout(RUNS * SECONDS * 4 + 900)
@pytest.mark.parametrize("component", driver.components_of("sqlite"))
async def test_every_promise_holds_on_sqlite(component: str, tmp_path: Path) -> None:
    await hold(component, "sqlite", tmp_path)


def test_no_claim_has_two_owners_whatever_happens_to_valkey(tmp_path: Path) -> None:
    told, faults, wrong = torment_claims(tmp_path, SECONDS, SEED)
    assert wrong == [], f"seed {SEED}"
    assert all(told[word] for word in RARE), (told, faults)


# -- the judge itself --------------------------------------------------------------------------


async def test_the_judge_sees_what_is_wrong(tmp_path: Path) -> None:
    """A store that was tampered with behind its back: each kind of damage is a complaint of its own."""
    fleet = Fleet(make_engine("sqlite", tmp_path), handlers="note,book", lease="60s")
    orders: dict[str, Order] = {f"o{n}": {"id": f"o{n}", "subject": "s"} for n in range(6)}
    await fleet.fill(orders.values())
    fleet.drain()
    assert await checker.complaints(fleet, orders) == []
    store = sqlite3.connect(tmp_path / "inbox.db", isolation_level=None)
    store.execute("INSERT INTO effects VALUES ('o1', 1)")
    store.execute("UPDATE events SET body = CAST('{}' AS BLOB) WHERE key = 'o2'")
    store.execute("UPDATE deliveries SET status = 'pending' WHERE event_id = (SELECT id FROM events WHERE key = 'o3')")
    store.close()
    backward = {delivery: -place for delivery, place in checker.places(fleet).items()}
    acknowledged = {"s-1": {"id": "s-1", "subject": "s"}, "s-2": {"id": "s-2", "subject": "s"}}
    lined_up = {("note", "s-1"): 1, ("note", "s-2"): 2}
    assert checker.not_as_acknowledged(acknowledged, acknowledged, lined_up) == []
    assert len(checker.not_as_acknowledged(["s-2", "s-1"], acknowledged, lined_up)) == 1
    assert "began after its successor" in "".join(checker.out_of_order(fleet.ledger.entries(), backward))
    gone_from = {delivery: place for delivery, place in checker.places(fleet).items() if delivery[1] != "o5"}
    assert "was worked, and is not kept" in "".join(checker.out_of_order(fleet.ledger.entries(), gone_from))
    written = [json.loads(line) for line in fleet.ledger.path.read_text().splitlines() if line]
    fleet.ledger.create()  # anew, and nobody has slept
    with fleet.ledger.path.open("a") as ledger:
        for (at, *_), (_, *what) in zip(written, reversed(written), strict=True):
            ledger.write(json.dumps([at, *what]) + "\n")
    wrong = "\n".join(await checker.complaints(fleet, orders))
    for said in ("o1: 2 effects", "o2: another body", "o3: pending", "overtaken, and awake", "does not hold"):
        assert said in wrong
    gone = {"o1": "evt_" + "0" * 32, "o9": "evt_" + "9" * 32}
    assert len(checker.lost(fleet, gone)) == 2
    assert await checker.complaints(fleet, {key: orders[key] for key in list(orders)[1:]}), "o0 is a phantom"


@pytest.mark.parametrize(
    ("written_at", "slept", "is_wrong"),
    [
        (12.0, {}, True),
        (12.0, {7: [(10.5, 11.9)]}, False),
        (12.0, {7: [(8.0, 9.5), (12.1, 14.0)]}, True),
        (12.0, {8: [(10.5, 11.9)]}, True),
        (10.9, {}, False),
    ],
    ids=["awake", "just woken", "slept at other times", "somebody else slept", "written late"],
)
def test_who_goes_on_beside_its_successor_is_excused_only_by_sleep(
    written_at: float, slept: dict[int, list[tuple[float, float]]], is_wrong: bool
) -> None:
    ledger = [
        Entry(1, 10.0, 7, "note", "begin", "k", "s", 1, 1),
        Entry(2, 11.0, 8, "note", "begin", "k", "s", 2, 1),
        Entry(3, written_at, 7, "note", "end", "k", "s", 1, 1),
    ]
    assert bool(checker.two_holders(ledger, (), slept)) is is_wrong
    assert checker.two_holders(ledger, {7}, slept) == []


def test_a_process_tells_when_it_was_held_up(tmp_path: Path) -> None:
    fleet = Fleet(make_engine("sqlite", tmp_path), handlers="note")
    worker = fleet.worker().start()
    worker.freeze()
    frozen_at = time.time()
    time.sleep(2 * SLEPT)
    woken_at = time.time()
    worker.thaw()
    until(lambda: any(a < woken_at and b > frozen_at for a, b in fleet.ledger.slept()[worker.pid]), "it says so")
    worker.kill()


def test_a_run_that_proves_nothing_is_invalid() -> None:
    fine = Outcome("T4", "sqlite", Figures(Counter(sent=1)), [], [])
    blind = Outcome("T4", "sqlite", Figures(), [], ["reclaimed"])
    broken = Outcome("T4", "sqlite", Figures(), ["lost"], ["reclaimed"])
    assert [driver.exit_code([fine, other], []) for other in (fine, blind, broken)] == [0, 2, 1]
    assert driver.exit_code([fine], ["two owners"]) == 1
    assert driver.verdict(blind) == "INVALID"
    unfair = Outcome("T4", "sqlite", Figures(Counter(sent=1)), ["does not hold: events"], [])
    assert [driver.conserves(many) for many in ([fine], [fine, unfair], [fine, broken])] == [True, False, None]


def test_a_failure_says_how_to_repeat_it() -> None:
    said = driver.command(Outcome("T4", "sqlite", Figures(), ["lost"], []), 7, 60)
    assert driver.read_arguments(said.split()[1:]).seed == 7


def test_figures_add_up_and_can_be_read_by_machines() -> None:
    one = Figures()
    one.numbers.update(sent=3, lost=0)
    one.faults.update(kill=2)
    one.reclaim_delays.append(1.5)
    whole = (one + one).as_json()
    assert (whole["sent"], whole["lost"], whole["faults"], whole["reclaim_max_s"]) == (6, 0, 4, 1.5)
    assert json.loads(json.dumps(driver.report([Outcome("T4", "sqlite", one, [], [])], {}, 7)))["totals"]["sqlite"]
