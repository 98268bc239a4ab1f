"""The conservation laws (R68): sums that must match in any store at any moment, for all engines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from oncehook.human import count
from oncehook.model import Check
from oncehook.store.cipher import Cipher

LEVELS: Final = ("pending", "done", "dead", "discarded")
"""Counters that are levels: their sum is the number of deliveries with this status."""


@dataclass(slots=True)
class Tally:
    """Counts of one snapshot of a store. The engine counts; `conservation` compares."""

    counted: Sequence[tuple[int, int, str, int]]
    """Sums of the counters: source, destination, name, sum."""
    events: Mapping[int, int]
    """Rows in `events`, per source."""
    statuses: Mapping[tuple[int, str], int]
    """Rows in `deliveries`, per destination and status."""
    bad_keys: int
    lone_pending: int
    """Pending deliveries of a subject without a head: they would never be leased."""
    misplaced_heads: int
    """Heads that are not the first of their subject, or finished and not held."""


def conservation(tally: Tally) -> list[Check]:
    sources: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    destinations: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for source_id, destination_id, what, n in tally.counted:
        if source_id:
            sources[source_id][what] += n
        if destination_id:
            destinations[destination_id][what] += n
    received = sum(c["received"] for c in sources.values())
    lost = [s for s, c in sources.items() if c["received"] != c["accepted"] + c["duplicate"] + c["conflict"]]
    kept = sum(tally.events.values())
    astray = [
        s for s in {*sources, *tally.events} if sources[s]["accepted"] - sources[s]["purged"] != tally.events.get(s, 0)
    ]
    deliveries = sum(tally.statuses.values())
    drifted = {
        (destination, status)
        for destination in {*destinations, *(d for d, _ in tally.statuses)}
        for status in LEVELS
        if destinations[destination][status] != tally.statuses.get((destination, status), 0)
    }
    return [
        _law("arrivals", not lost, f"{received:,} received = accepted + duplicate + conflict, for every source"),
        _law("events", not astray, f"{count(kept, 'event')} kept = accepted - purged, for every source"),
        _law("keys", tally.bad_keys == 0, "every key stands for at least one arrival, or was imported"),
        _law(
            "deliveries",
            not drifted,
            f"{count(deliveries, 'delivery')} pending, done, dead or discarded, as counted for every destination",
        ),
        _law(
            "subjects", tally.lone_pending == 0, "every pending delivery is the head of its subject or waits behind one"
        ),
        _law("heads", tally.misplaced_heads == 0, "every head is the first of its subject, and open or held"),
    ]


_MISSING_KEY: Final = "Add the missing key to the end of `encrypt.key`; until then these values cannot be read."


def encryption(kept: Iterable[tuple[bytes | None, int]], cipher: Cipher) -> list[Check]:
    """Report the keys under which values are encrypted. `kept`: values by key id; None stands for plain ones.

    Empty where nothing is encrypted, nor shall be.
    """
    counts = dict(kept)
    plain = counts.pop(None, 0)
    values = {key.hex(): n for key, n in counts.items() if key is not None}
    if not values and not cipher.has_keys:
        return []
    given = cipher.key_ids
    shares = [f"{n:,} under the key {key}{'' if key in given else ' (not given)'}" for key, n in sorted(values.items())]
    counted = f"values encrypted: {', '.join(shares) or 'none'}; plain: {plain:,}"
    if any(key not in given for key in values):
        return [Check("encryption", False, counted, _MISSING_KEY)]
    unused = [key for key in given[1:] if key not in values]
    if unused:
        counted += f"; no longer needed: {', '.join(unused)}"
    return [Check("encryption", True, counted)]


def _law(name: str, holds: bool, statement: str) -> Check:
    if holds:
        return Check(name, True, statement)
    hint = "This must never happen. Keep a copy of the store and report the output of `oncehook doctor --json`."
    return Check(name, False, f"does not hold: {statement}", hint)
