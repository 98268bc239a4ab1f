"""The judge: reads the ledger and the store after a run, and says what must not have happened.

Each function returns complaints, and an empty list when the promise was kept.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from oncehook.model import DEATHS
from tests.acceptance.sink import Sink
from tests.torture.fleet import Attempt, Fleet, Order
from tests.torture.ledger import Entry, Sleep
from tests.torture.senders import Senders

Delivery = tuple[str, str]
"""Destination and key."""

WAKING = 1.0
"""Seconds in which who was held up by the machine gets to know what has happened meanwhile, on that same machine."""

AT_ONCE = 0.02
"""Seconds in which nobody has polled."""


@dataclass(frozen=True)
class Terms:
    """What a run makes allowance for."""

    frozen: Collection[int] = ()
    """Processes that slept: nothing can stop them from going on beside their successors when they wake."""
    ambiguous: Collection[str] = ()
    """Orders whose sender gave up without an answer: they may be there or not."""
    may_fail: Collection[str] = ()
    """Destinations whose attempts the faults of this run make fail: they may need more of them."""


STRICT = Terms()


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


def unlike_expected(fleet: Fleet, orders: Mapping[str, Order], about: Terms = STRICT) -> list[str]:
    """Lost, phantom, ended otherwise than its order says, or with an attempt burnt by somebody's death (R37)."""
    found = fleet.deliveries()
    handlers = {destination for destination, _ in found}
    unlucky = condemned(fleet)
    wrong = [f"{d} {key}: phantom" for d, key in found if key not in orders]
    for destination in handlers:
        for key, order in orders.items():
            if (destination, key) in unlucky or (key in about.ambiguous and (destination, key) not in found):
                continue
            status, attempts, reason, _ = found.get((destination, key), ("lost", 0, None, 0))
            wanted, least = expected(order) if destination != "hook" else ("done", 1)
            exact = destination not in about.may_fail
            if status != wanted or attempts < least or (exact and attempts > least):
                wrong.append(f"{destination} {key}: {status} after {attempts} attempts ({reason}), not {wanted, least}")
    return wrong


def not_once(written: Iterable[str], orders: Mapping[str, Order], ambiguous: Collection[str] = ()) -> list[str]:
    """Effects of transactional handlers that are not there exactly once (R51)."""
    count = Counter(written)
    wanted = {key for key, order in orders.items() if expected(order)[0] == "done"}
    absent = [key for key in wanted if count[key] != 1 and not (key in ambiguous and count[key] == 0)]
    wrong = [f"{key}: {count[key]} effects" for key in absent]
    return wrong + [f"{key}: an effect that must not be" for key in count if key not in wanted]


def overtaken(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """What was written when a higher fence had begun on the subject before, and that beginning."""
    highest: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        first = highest.setdefault((entry.destination, entry.subject or entry.key), entry)
        if entry.fence < first.fence:
            yield entry, first
        elif entry.fence > first.fence:
            highest[entry.destination, entry.subject or entry.key] = entry


def zombies(entries: Iterable[Entry]) -> list[Entry]:
    """What was written by somebody who had been overtaken."""
    return [entry for entry, _ in overtaken(entries)]


def two_holders(
    entries: Collection[Entry], frozen: Collection[int], slept: Mapping[int, Collection[Sleep]] | None = None
) -> list[str]:
    """Who wrote on beside his successor, and had not slept: the store cannot stop a process that is frozen, by us or
    by its machine, but one that is awake must know when its lease is over (R32, R33)."""
    return [
        f"{entry}: overtaken, and awake"
        for entry, successor in overtaken(entries)
        if entry.pid not in frozen and not _just_slept(entry, successor, (slept or {}).get(entry.pid, ()))
    ]


def _just_slept(entry: Entry, successor: Entry, sleeps: Collection[Sleep]) -> bool:
    """Whether it wrote this as it woke up; also between looking at the clock and writing."""
    return entry.at < successor.at or any(start < entry.at < end + WAKING for start, end in sleeps)


def out_of_order(entries: Collection[Entry], places: Mapping[Delivery, int]) -> list[str]:
    """Attempts of one subject that did not begin in the order of commit (R42, R45)."""
    late = {entry.n for entry in zombies(entries)}
    last: defaultdict[tuple[str, str], int] = defaultdict(int)
    wrong = []
    for entry in entries:
        if entry.moment != "begin" or entry.n in late or entry.subject is None:
            continue
        place = places.get((entry.destination, entry.key))
        if place is None:
            wrong.append(f"{entry}: was worked, and is not kept")
            continue
        if place < last[entry.destination, entry.subject]:
            wrong.append(f"{entry}: began after its successor")
        last[entry.destination, entry.subject] = place
    return wrong


def not_as_acknowledged(
    acknowledged: Iterable[str], orders: Mapping[str, Order], places: Mapping[Delivery, int]
) -> list[str]:
    """Orders that stand in line before one that had been acknowledged before they were sent (R42).

    A sender that waits for its answers is called like its subject, and its name is in its keys.
    """
    last: dict[Delivery, str] = {}
    wrong = []
    for key in (key for key in acknowledged if key.rpartition("-")[0] == orders[key]["subject"]):
        for destination in {destination for destination, _ in places}:
            before = last.get((destination, orders[key]["subject"]), key)
            if places.get((destination, key), 0) < places.get((destination, before), 0):
                wrong.append(f"{destination} {key}: stands before {before}, which was acknowledged before it was sent")
            last[destination, orders[key]["subject"]] = key
    return wrong


def in_a_row(entries: Iterable[Entry]) -> int:
    """How often a process had ended an attempt of a subject and began the next of it at once."""
    ended: dict[tuple[int, str, str | None], float] = {}
    found = 0
    for entry in entries:
        line = (entry.pid, entry.destination, entry.subject)
        if entry.moment == "end":
            ended[line] = entry.at
        elif entry.subject is not None:
            found += entry.at - ended.get(line, 0.0) < AT_ONCE
    return found


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


def too_early(attempts: Iterable[Attempt], wait: float) -> list[str]:
    """Retries that began before they were due, by the store's own clock (R63)."""
    ended: dict[Delivery, float] = {}
    wrong = []
    for attempt in attempts:
        delivery = (attempt.destination, attempt.key)
        if attempt.started_at < ended.pop(delivery, 0.0) + wait - 0.001:
            wrong.append(f"{attempt}: began before it was due")
        if attempt.outcome == "retry":
            ended[delivery] = attempt.ended_at
    return wrong


def altered(fleet: Fleet, orders: Mapping[str, Order]) -> list[str]:
    """Events whose bytes are not those that were sent first (R6, R18)."""
    kept = fleet.engine.rows("SELECT key, body FROM events")
    return [f"{key}: another body" for key, body in kept if key in orders and json.loads(bytes(body)) != orders[key]]


def lost(fleet: Fleet, acknowledged: Mapping[str, str]) -> list[str]:
    """Acknowledged, and not kept under that id (R1, R5)."""
    kept = {key: f"evt_{id_.hex()}" for key, id_ in fleet.engine.events().items()}
    return [f"{key}: acknowledged as {id_}, kept as {kept.get(key)}" for key, id_ in acknowledged.items()
            if kept.get(key) != id_]  # fmt: skip


def counted(fleet: Fleet, what: str) -> int:
    """The store's own count."""
    ((total,),) = fleet.engine.rows(f"SELECT coalesce(sum(n), 0) FROM counters WHERE what = '{what}'")
    return int(total)


def miscounted_conflicts(fleet: Fleet, senders: Senders) -> list[str]:
    """Conflicts that did not surface (R18). One that was not acknowledged may have been counted or not."""
    told, tried, surfaced = senders.answers["conflict"], senders.conflicts_tried, counted(fleet, "conflict")
    return [] if told <= surfaced <= tried else [f"{surfaced} conflicts surfaced; {told} acknowledged, {tried} sent"]


def wrong_at_sink(fleet: Fleet, sink: Sink, orders: Mapping[str, Order]) -> list[str]:
    """What an HTTP destination can see: every order, first sights in order per subject, one id for each (R53)."""
    place = places(fleet)
    last: dict[str, tuple[int, str]] = {}
    ids: dict[str, str] = {}
    wrong = []
    for request in sink.requests:
        order = json.loads(request.body)
        key, subject, sent_id = order["id"], order["subject"], request.headers["webhook-id"]
        if key not in ids and subject is not None:
            before = last.get(subject, (0, ""))
            if place["hook", key] < before[0]:
                wrong.append(f"sink: {key} came after {before[1]}")
            last[subject] = (place["hook", key], key)
        if ids.setdefault(key, sent_id) != sent_id:
            wrong.append(f"sink: {key} came as {ids[key]} and as {sent_id}")
    done = {key for (name, key), (status, *_) in fleet.deliveries().items() if name == "hook" and status == "done"}
    wrong += [f"sink: {key} is done, and never came" for key in done - ids.keys()]
    return wrong + [f"sink: {key} is a phantom" for key in ids if key not in orders]


async def complaints(
    fleet: Fleet, orders: Mapping[str, Order], frozen: Collection[int] = (), about: Terms | None = None
) -> list[str]:
    """Everything that is wrong, after a run in which everything was settled."""
    about = about or Terms(frozen=frozen)
    entries, attempts = fleet.ledger.entries(), fleet.attempts()
    wrong = unlike_expected(fleet, orders, about)
    if any(entry.destination == "book" for entry in entries):
        unlucky = {key for destination, key in condemned(fleet) if destination == "book"}
        certain = {key: orders[key] for key in orders if key not in unlucky}
        wrong += not_once(fleet.ledger.written(), certain, about.ambiguous)
    wrong += [f"{entry}: phantom" for entry in entries if entry.key not in orders]
    wrong += two_holders(entries, about.frozen, fleet.ledger.slept()) + out_of_order(entries, places(fleet))
    wrong += overlapping(attempts)
    wrong += altered(fleet, orders) + too_early(attempts, fleet.shortest_wait)
    return wrong + repeated(entries, attempts)[1] + await fleet.troubles()
