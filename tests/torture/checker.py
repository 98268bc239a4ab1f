"""The judge: reads the ledger and the store after a run, and says what must not have happened.

Each function returns complaints, and an empty list when the promise was kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from oncehook.deliveries import DEATHS
from tests.torture.fleet import Attempt, Fleet, Order
from tests.torture.ledger import Entry

Delivery = tuple[str, str]
"""Destination and key."""


def expected(order: Order) -> tuple[str, int]:
    """How a delivery of this order must end, and after how many attempts: whatever happens to processes."""
    if order.get("give_up"):
        return "dead", 1
    return "done", order.get("fails", 0) + 1


def condemned(fleet: Fleet) -> set[Delivery]:
    """Those that chance killed often enough while they ran alone: dead by the rule, with the crashes to show for it."""
    crashes = Counter((a.destination, a.key) for a in fleet.attempts() if a.outcome == "crashed")
    return {
        delivery
        for delivery, (status, _, reason, _) in fleet.deliveries().items()
        if status == "dead" and reason == "crash" and crashes[delivery] >= DEATHS
    }


def unlike_expected(fleet: Fleet, orders: Mapping[str, Order]) -> list[str]:
    """Lost, phantom, ended otherwise than its order says, or with an attempt burnt by somebody's death (R37)."""
    found = fleet.deliveries()
    handlers = {destination for destination, _ in found}
    unlucky = condemned(fleet)
    wrong = [f"{d} {key}: phantom" for d, key in found if key not in orders]
    for destination in handlers:
        for key, order in orders.items():
            status, attempts, reason, _ = found.get((destination, key), ("lost", 0, None, 0))
            if (status, attempts) != expected(order) and (destination, key) not in unlucky:
                wrong.append(
                    f"{destination} {key}: {status} after {attempts} attempts ({reason}), not {expected(order)}"
                )
    return wrong


def not_once(written: Iterable[str], orders: Mapping[str, Order]) -> list[str]:
    """Effects of transactional handlers that are not there exactly once (R51)."""
    count = Counter(written)
    wanted = {key for key, order in orders.items() if expected(order)[0] == "done"}
    wrong = [f"{key}: {count[key]} effects" for key in wanted if count[key] != 1]
    return wrong + [f"{key}: an effect that must not be" for key in count if key not in wanted]


def zombies(entries: Iterable[Entry]) -> list[Entry]:
    """What was written by somebody who had been overtaken: a higher fence had begun on the subject before."""
    highest: defaultdict[tuple[str, str], int] = defaultdict(int)
    late = []
    for entry in entries:
        line = (entry.destination, entry.subject or entry.key)
        if entry.fence < highest[line]:
            late.append(entry)
        highest[line] = max(highest[line], entry.fence)
    return late


def two_holders(entries: Collection[Entry], frozen: Collection[int]) -> list[str]:
    """Who wrote on beside his successor, and was never frozen: the store cannot stop a process that slept, but one
    that is awake must know when its lease is over (R32, R33)."""
    return [f"{entry}: overtaken, and awake" for entry in zombies(entries) if entry.pid not in frozen]


def out_of_order(entries: Collection[Entry], places: Mapping[Delivery, int]) -> list[str]:
    """Attempts of one subject that did not begin in the order of commit (R42, R45)."""
    late = {entry.n for entry in zombies(entries)}
    last: defaultdict[tuple[str, str], int] = defaultdict(int)
    wrong = []
    for entry in entries:
        if entry.moment != "begin" or entry.n in late or entry.subject is None:
            continue
        place = places[entry.destination, entry.key]
        if place < last[entry.destination, entry.subject]:
            wrong.append(f"{entry}: began after its successor")
        last[entry.destination, entry.subject] = place
    return wrong


def overlapping(attempts: Iterable[Attempt]) -> list[str]:
    """Leases of one subject that overlapped, or were not given in the order of commit, by the store's word."""
    lines: defaultdict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        lines[attempt.destination, attempt.subject or attempt.key].append(attempt)
    wrong = []
    for line in lines.values():
        for before, after in pairwise(line):
            if after.seq < before.seq:
                wrong.append(f"{after}: given after {before}")
            if after.started_at < before.ended_at - 0.001:
                wrong.append(f"{after}: began before the end of {before}")
    return wrong


def repeated(entries: Iterable[Entry], attempts: Iterable[Attempt]) -> tuple[int, list[str]]:
    """Plain effects beyond the first, and those that no crash accounts for: a stop must not repeat anything."""
    crashes = Counter((a.destination, a.key) for a in attempts if a.outcome == "crashed")
    ends = Counter((e.destination, e.key) for e in entries if e.moment == "end" and e.destination != "book")
    again = {delivery: n - 1 for delivery, n in ends.items() if n > 1}
    unaccounted = [delivery for delivery, n in again.items() if n > crashes[delivery]]
    return sum(again.values()), [f"{one}: {again[one]} more effects, {crashes[one]} crashes" for one in unaccounted]


def places(fleet: Fleet) -> dict[Delivery, int]:
    """Where each delivery stands in the order of commit."""
    return {delivery: seq for delivery, (_, _, _, seq) in fleet.deliveries().items()}


async def complaints(fleet: Fleet, orders: Mapping[str, Order], frozen: Collection[int] = ()) -> list[str]:
    """Everything that is wrong, after a run in which everything was settled."""
    entries, attempts = fleet.ledger.entries(), fleet.attempts()
    wrong = unlike_expected(fleet, orders)
    if any(entry.destination == "book" for entry in entries):
        unlucky = {key for destination, key in condemned(fleet) if destination == "book"}
        wrong += not_once(fleet.ledger.written(), {key: orders[key] for key in orders if key not in unlucky})
    wrong += [f"{entry}: phantom" for entry in entries if entry.key not in orders]
    wrong += two_holders(entries, frozen) + out_of_order(entries, places(fleet)) + overlapping(attempts)
    return wrong + repeated(entries, attempts)[1] + await fleet.troubles()
