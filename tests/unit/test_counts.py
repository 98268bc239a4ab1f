"""Limits that several processes share: together they allow what one would (S9, S14)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import pytest

from oncehook.web.connection import ConnectionLimits, Connections, InboundConnection
from oncehook.web.counts import BODIES, CONNECTIONS, NetworkCount, SharedCounts
from oncehook.web.hooks import BodyBudget


def rows(processes: int) -> list[SharedCounts]:
    """The memory of so many processes, as each of them sees it."""
    first = SharedCounts.create(processes)
    others = [SharedCounts(first.descriptor, processes, row, first.seed) for row in range(1, processes)]
    os.close(first.descriptor)  # the mappings stay
    return [first, *others]


def test_all_processes_see_the_sum() -> None:
    counts = [memory.count_of(CONNECTIONS) for memory in rows(3)]
    bodies = rows(1)[0].count_of(BODIES)
    for n, count in enumerate(counts, 1):
        count.add("203.0.113.1", n)
        count.add("203.0.113.2", 1)
    for n, count in enumerate(counts, 1):
        assert (count.total, count.of("203.0.113.1"), count.of("203.0.113.9")) == (9, 6, 0)
        assert (count.own, count.own_of("203.0.113.1")) == (n + 1, n)
    assert bodies.total == 0


def test_what_a_process_counted_goes_with_it() -> None:
    first, second = rows(2)
    for memory in (first, second):
        memory.count_of(CONNECTIONS).add("203.0.113.1", 5)
        memory.count_of(BODIES).add("203.0.113.1", 100)
    first.clear(1)
    assert first.count_of(CONNECTIONS).of("203.0.113.1") == 5
    assert first.count_of(BODIES).total == 100


class Line:
    """As much of a connection as is counted."""

    def __init__(self, network: str) -> None:
        self.network = self.address = network
        self.refused: list[int] = []

    def make_way(self) -> None:
        self.refused.append(503)


async def _nothing(scope: Any, receive: Any, send: Any) -> None: ...


def admitted(several: list[Connections], network: str, number: int) -> int:
    """How many connections of a network are let in, turn by turn at each process."""
    lines = [cast("InboundConnection", Line(network)) for _ in range(number)]
    taken = 0
    for n, line in enumerate(lines):
        guard = several[n % len(several)]
        if guard.admit(line):
            taken += 1
        else:
            guard.release(line)
    return taken


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_one_address_holds_the_same_share_of_any_number_of_processes(processes: int) -> None:
    limits = ConnectionLimits(per_address=10, connections=100)
    several = [Connections(_nothing, None, limits, (), memory.count_of(CONNECTIONS)) for memory in rows(processes)]
    assert admitted(several, "203.0.113.1", 30) == 10
    assert admitted(several, "203.0.113.2", 30) == 10


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_all_addresses_hold_the_same_number_of_any_number_of_processes(processes: int) -> None:
    several = [
        Connections(_nothing, None, ConnectionLimits(connections=7), (), memory.count_of(CONNECTIONS))
        for memory in rows(processes)
    ]
    for guard in several:  # nobody idles, who could make way
        guard.resting = cast("dict[InboundConnection, None]", Unwilling())
    assert sum(admitted(several, f"203.0.113.{n}", 1) for n in range(1)) == 1
    assert admitted(several, "203.0.113.77", 30) == 6


class Unwilling(dict[Any, None]):
    def __setitem__(self, key: object, value: None) -> None: ...


def budgets(most: int, processes: int) -> list[BodyBudget]:
    return [BodyBudget(most, (), memory.count_of(BODIES)) for memory in rows(processes)]


def grown(budget: BodyBudget, peer: str, size: int, refused: list[str]) -> Any:
    name = f"{peer} {size}"
    body = budget.begin(peer, cast("Callable[[], None]", lambda: refused.append(name)))
    body.grow(size)
    return body


def test_unfinished_bodies_are_bounded_over_all_processes() -> None:
    refused: list[str] = []
    first, second = budgets(1000, 2)
    for n in range(4):
        grown(first, f"203.0.113.{n}", 200, refused)
    grown(second, "198.51.100.1", 150, refused)
    assert (first.held, second.held, refused) == (950, 950, [])
    # The one that comes last is small, and not what is too much: who holds more than its part makes room.
    grown(second, "198.51.100.2", 120, refused)
    assert refused == []
    first.enforce()
    assert len(refused) == 1
    assert refused[0].endswith(" 200")
    assert first.held == second.held == 870
    second.enforce()
    assert len(refused) == 1


def test_one_network_has_its_share_over_all_processes() -> None:
    refused: list[str] = []
    first, second = budgets(1000, 2)  # a network may hold 250
    grown(first, "203.0.113.1", 200, refused)
    grown(second, "203.0.113.1", 40, refused)
    assert refused == []
    grown(second, "203.0.113.1", 60, refused)
    assert refused == []  # the largest is elsewhere
    first.enforce()
    assert refused == ["203.0.113.1 200"]
    grown(second, "203.0.113.1", 160, refused)
    assert refused == ["203.0.113.1 200", "203.0.113.1 160"]
    assert first.held == 100


def test_alone_a_process_holds_everything_itself() -> None:
    count = NetworkCount()
    count.add("203.0.113.1", 3)
    count.add("203.0.113.1", -1)
    assert (count.total, count.own, count.of("203.0.113.1"), count.of("203.0.113.2")) == (2, 2, 2, 0)
