"""The figures of a run: one line for people, the same as JSON for machines; several runs add up to one."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.torture import checker

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.torture.fleet import Attempt
    from tests.torture.world import World


@dataclass
class Figures:
    """What happened, in numbers."""

    numbers: Counter[str] = field(default_factory=Counter)
    """Those that add up: sent, acked, stored, lost and so on, in the order in which they are shown."""
    reclaim_delays: list[float] = field(default_factory=list)
    """Seconds from a kill to the moment its lease was taken over, by the store's clock."""
    dead: Counter[str] = field(default_factory=Counter)
    """By reason."""
    faults: Counter[str] = field(default_factory=Counter)
    """By kind."""
    reach: Counter[str] = field(default_factory=Counter)
    """How often each rare state was seen."""
    extra: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: Figures) -> Figures:
        numbers = Counter(self.numbers)
        numbers.update(other.numbers)  # `+` would drop what is zero
        return Figures(
            numbers, self.reclaim_delays + other.reclaim_delays, self.dead + other.dead, self.faults + other.faults,
            self.reach + other.reach, self.extra | other.extra,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        delays = self.reclaim_delays or [0.0]
        return {
            **self.numbers,
            "reclaim_p50_s": round(statistics.median(delays), 3),
            "reclaim_max_s": round(max(delays), 3),
            "dead_by_reason": dict(self.dead),
            "faults": self.faults.total(),
            "faults_by_kind": dict(self.faults.most_common()),
            "reached": {name: n for name, n in self.reach.items() if n},
            **self.extra,
        }

    def line(self) -> str:
        """All of it in one line."""
        return " ".join(f"{name}={_shown(value)}" for name, value in self.as_json().items() if name != "reached")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{n}" for name, n in value.items()) or "none"
    return str(value)


def count(world: World, wrong: Sequence[str]) -> Figures:
    """Read off history, ledger and store what happened. `wrong` is what the checker found."""
    fleet, senders, history = world.fleet, world.senders, world.history
    entries, attempts, deliveries = fleet.ledger.entries(), fleet.attempts(), fleet.deliveries()
    statuses = Counter(status for status, *_ in deliveries.values())
    crashed = [attempt for attempt in attempts if attempt.outcome == "crashed"]
    seen_at_sink = Counter(request.headers["webhook-id"] for request in (world.sink.requests if world.sink else ()))
    written = Counter(fleet.ledger.written()) if any(entry.destination == "book" for entry in entries) else Counter()
    ends = sum(entry.moment == "end" and entry.destination != "book" for entry in entries)
    stopped, known = history.pids("stop"), {attempt.fence for attempt in attempts}
    given_back = {entry.fence for entry in entries if entry.pid in stopped} - known
    kept = fleet.engine.events()
    numbers = {
        "sent": len(senders.sent),
        "tries": senders.tries,
        "acked": len(senders.acknowledged),
        "ambiguous": len(senders.ambiguous),
        "recovered": len(senders.recovered),
        "stored": len(kept),
        "executed": len({(e.destination, e.key) for e in entries}) + len(seen_at_sink),
        "attempts": len(attempts),
        "effects": ends + written.total() + seen_at_sink.total(),
        "done": statuses["done"],
        "lost": len(senders.acknowledged.keys() - kept.keys()) + _unfinished(world),
        "phantom": len(kept.keys() - senders.sent.keys()),
        "duplicate_rows": _duplicate_rows(world),
        "duplicate_effects_tx": sum(n - 1 for n in written.values() if n > 1),
        "duplicate_effects_plain": checker.repeated(entries, attempts)[0] + seen_at_sink.total() - len(seen_at_sink),
        "order_violations": len(checker.out_of_order(entries, checker.places(fleet))) + len(
            checker.overlapping(attempts)),
        "conflicts_sent": senders.answers["conflict"],
        "conflicts": checker.counted(fleet, "conflict"),
        "burnt_by_shutdown": _burnt(world),
        "stale_refused": _refused(world, attempts),
        "reclaimed": len(crashed),
        "refused_503": senders.answers["503"],
        "wrong": len(wrong),
    }  # fmt: skip
    reach = {
        "stale_refused": numbers["stale_refused"],
        "reclaimed": len(crashed),
        "crash_between_commit_and_ack": len(senders.recovered),
        "duplicate_in_flight": senders.overlapped,
        "conflict": numbers["conflicts"],
        "poison_dead": sum(reason == "crash" for _, _, reason, _ in deliveries.values()),
        "drain_with_work_left": len(given_back),
        "refused_503": numbers["refused_503"],
        "retried": sum(attempt.outcome == "retry" for attempt in attempts),
        "in_a_row": checker.in_a_row(entries),
    }
    return Figures(
        Counter(numbers), list(_delays(world, crashed)), _dead(deliveries.values()), history.faults(),
        Counter(reach), world.extra,
    )  # fmt: skip


def _unfinished(world: World) -> int:
    """Kept, and some destination has not had it."""
    return sum(status not in ("done", "dead", "discarded") for status, *_ in world.fleet.deliveries().values())


def _duplicate_rows(world: World) -> int:
    ((rows, keys),) = world.engine.rows("SELECT count(*), count(DISTINCT key) FROM events")
    return int(rows) - int(keys)


def _dead(deliveries: Iterable[tuple[str, int, str | None, int]]) -> Counter[str]:
    return Counter(reason or "gave up" for status, _, reason, _ in deliveries if status == "dead")


def _burnt(world: World) -> int:
    """Attempts beyond what the orders say of `note`, which no fault makes fail: each was taken by somebody's end."""
    found = world.fleet.deliveries().items()
    orders = world.senders.sent
    notes = [(orders[key], n, reason) for (name, key), (_, n, reason, _) in found if name == "note" and key in orders]
    return sum(max(n - checker.expected(order)[1], 0) for order, n, reason in notes if reason != "crash")


def _refused(world: World, attempts: Sequence[Attempt]) -> int:
    """Leases that were lost, and about which nothing was written by who had lost them."""
    done = {attempt.fence for attempt in attempts if attempt.outcome != "crashed"}
    lost = [line["fence"] for process in world.fleet.processes for line in process.said("lease.lost")]
    return sum(fence not in done for fence in lost)


def _delays(world: World, crashed: Iterable[Attempt]) -> Iterable[float]:
    holders = {entry.fence: entry.pid for entry in world.fleet.ledger.entries()}
    killed = world.history.when("kill")
    for attempt in crashed:
        pid = holders.get(attempt.fence, 0)
        if pid in killed and attempt.ended_at > killed[pid]:  # else it had been frozen before
            yield attempt.ended_at - killed[pid]
