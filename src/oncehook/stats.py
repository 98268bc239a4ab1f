"""The numbers since a moment, put together once for API, command line and dashboard.

The desk hands in what the store has counted; `gather` adds it up. Flows come from counters, which know minutes (and
days, once they are two days old); how deliveries stand is counted from the deliveries themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from oncehook.deliveries import DeliveryStatus, Level
from oncehook.model import Figures
from oncehook.watermarks import Watermark

Groups = dict[str, dict[str, int]]
PerDay = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Stats:
    """The numbers since a moment."""

    since: datetime
    total: int
    """Events accepted."""
    by_status: Mapping[DeliveryStatus, int]
    """How the deliveries of events received since stand now."""
    dead: int
    """All dead letters there are now."""
    duplicates: int
    conflicts: int
    rejected: int
    """Also what asked for a source that does not exist; per source, only those that do are told apart."""
    retries: int
    replays: int
    last_replay_at: datetime | None
    """When the latest replay was asked for."""
    per_day: Mapping[str, Mapping[str, int]]
    """Deliveries done, by destination and day (UTC)."""
    volume_today: int
    """Events accepted since midnight UTC; of sources that tell messages from receipts, the messages."""
    watermarks: Sequence[Watermark]
    by: Mapping[str, Mapping[str, int]] | None
    """The same per source or per destination."""


def gather(
    since: datetime,
    figures: Figures,
    *,
    today: Mapping[str, int],
    levels: Mapping[str, Level],
    statuses: Mapping[DeliveryStatus, int],
    marks: Sequence[Watermark],
    by: Literal["source", "destination"] | None,
    per_day: PerDay,
    last_replay_at: datetime | None,
) -> Stats:
    """Add it all up."""
    sources, destinations = figures.by_source.values(), figures.by_destination.values()
    groups = {"source": lambda: _by_source(figures, today), "destination": lambda: _by_destination(figures, levels)}
    return Stats(
        since=since,
        total=_sum(sources, "accepted"),
        by_status={status: statuses.get(status, 0) for status in DeliveryStatus},
        dead=sum(level.dead for level in levels.values()),
        duplicates=_sum(sources, "duplicate"),
        conflicts=_sum(sources, "conflict"),
        rejected=_sum([*sources, figures.elsewhere], "rejected"),
        retries=_sum(destinations, "retry"),
        replays=_sum(destinations, "replays"),
        last_replay_at=last_replay_at,
        per_day=per_day,
        volume_today=sum(today.values()),
        watermarks=marks,
        by=None if by is None else groups[by](),
    )


def _sum(counted: Iterable[Mapping[str, int]], what: str) -> int:
    return sum(counts.get(what, 0) for counts in counted)


def _by_source(figures: Figures, today: Mapping[str, int]) -> Groups:
    return {
        name: {
            "total": counts.get("accepted", 0),
            "duplicates": counts.get("duplicate", 0),
            "conflicts": counts.get("conflict", 0),
            "rejected": counts.get("rejected", 0),
            "volume_today": today.get(name, 0),
        }
        for name, counts in figures.by_source.items()
    }


def _by_destination(figures: Figures, levels: Mapping[str, Level]) -> Groups:
    return {
        name: {
            "pending": level.pending - level.leased,
            "leased": level.leased,
            "done": level.done,
            "dead": level.dead,
            "discarded": level.discarded,
            "delivered": figures.by_destination.get(name, {}).get("succeeded", 0),
            "retries": figures.by_destination.get(name, {}).get("retry", 0),
            "replays": figures.by_destination.get(name, {}).get("replays", 0),
        }
        for name, level in levels.items()
    }
