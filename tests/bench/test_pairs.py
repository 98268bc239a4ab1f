"""A, B and A again: who has which turn, what becomes of a turn that fails, and what the report shows."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from bench.engines import BenchError
from bench.pairs import Figures, Pair, Side, render, run_pairs, take_turns
from bench.progress import Progress
from bench.verdicts import CPU, Goal

from bench import pairs

DISK = {"p50_ms": 0.2}


def giving(**figures: float) -> Side:
    """A side that always comes to the same."""
    named = {CPU if name == "cpu" else f"{name}/s": value for name, value in figures.items()}
    return Side("-".join(figures), lambda progress, label: named)


def failing_once(side: Side, turn: int) -> Side:
    turns = count()

    def run(progress: Progress, label: str) -> Figures:
        if next(turns) == turn:
            raise BenchError("8 requests refused")
        return side.run(progress, label)

    return Side(side.name, run)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoNeighbours:
        def __init__(self, store_pids: object) -> None: ...

        def cores(self) -> float:
            return 0.1

    monkeypatch.setattr(pairs, "Neighbours", NoNeighbours)


def measure(pair: Pair, rounds: int = 5) -> dict[str, Any]:
    return {"seconds": 5.0, "disk": DISK, **run_pairs([pair], rounds, [])}


def test_another_is_first_each_time() -> None:
    side = giving(events=1.0)
    two = [Pair("x", side, side), Pair("y", side, side)]
    turns = [(number, pair.title, which) for number, pair, which in take_turns(2, two)]
    assert turns == [
        *[(0, "x", "a"), (0, "x", "b"), (0, "x", "again")],
        *[(0, "y", "b"), (0, "y", "again"), (0, "y", "a")],
        *[(1, "x", "b"), (1, "x", "again"), (1, "x", "a")],
        *[(1, "y", "again"), (1, "y", "a"), (1, "y", "b")],
    ]


def test_the_report_has_both_sides_cpu_first_and_a_verdict() -> None:
    pair = Pair("ingest", giving(cpu=200.0, events=1000.0), giving(cpu=100.0, events=1500.0), {CPU: Goal(0.6, True)})
    found = measure(pair)
    assert [" ".join(line.split()) for line in render(found).splitlines()[-2:]] == [
        "CPU µs 200 200–200 100 100–100 0.50× (0.50–0.50); noise 1.00–1.00; goal ≤ 0.6×: reached",
        "events/s 1,000 1,000–1,000 1,500 1,500–1,500 1.50× (1.50–1.50); noise 1.00–1.00: faster",
    ]
    [kept] = found["pairs"]
    assert [sorted(one) for one in kept["turns"]] == [["a", "again", "b"]] * 5
    assert kept["measures"][0]["ratio"] == {"median": 0.5, "least": 0.5, "most": 0.5}


def test_a_turn_that_fails_is_named_and_its_round_left_out() -> None:
    pair = Pair("ingest", giving(events=1000.0), failing_once(giving(events=1500.0), turn=2))
    found = measure(pair)
    assert found["failures"] == {"ingest  events": "8 requests refused"}
    assert "1.50× (1.50–1.50); noise 1.00–1.00: no verdict: 4 rounds, 5 are needed" in render(found)


def test_a_side_that_always_fails_leaves_nothing_to_compare() -> None:
    found = measure(Pair("ingest", giving(events=1.0), failing_once(giving(events=1.0), turn=0)), rounds=1)
    assert "no round in which every turn went well" in render(found)


def test_only_what_both_have_is_compared() -> None:
    found = measure(Pair("http", giving(cpu=1.0), giving(cpu=2.0, database=1.0)))
    assert [one["measure"] for one in found["pairs"][0]["measures"]] == [CPU]
