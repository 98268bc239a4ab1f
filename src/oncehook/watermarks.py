"""Watermarks: levels that raise an alert when they are passed. What is measured, against which limits.

`Limits` come from the configuration; `measure` reads the store's numbers against them. The desk shows the answer, and
the sweep tells when one is crossed and when it is back; both ask here, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from oncehook.deliveries import Level


@dataclass(frozen=True, slots=True)
class Limits:
    """What is too much; None or empty: nobody asked."""

    dead: int | None = None
    """Dead letters."""
    oldest_due: float | None = None
    """Seconds for which the oldest delivery has been due."""
    daily_volume: Mapping[str, int] = field(default_factory=dict)
    """Events since midnight UTC, by source, of the types that count; 0: nobody wants to know, whatever the source's
    preset says."""
    disk: float | None = None
    """The free part of the disk, from 0 to 1: here less is worse."""

    def with_usual(self, usual: Mapping[str, int]) -> Limits:
        """With the usual daily volumes of some sources, where nothing else was said about them."""
        volumes = {source: limit for source, limit in {**usual, **self.daily_volume}.items() if limit}
        return replace(self, daily_volume=volumes)


@dataclass(frozen=True, slots=True)
class Watermark:
    """One level and its limit."""

    name: str
    """`dead`, `oldest_due`, `disk`, or `daily_volume.SOURCE`."""
    level: float | None
    """None: it cannot be told."""
    limit: float
    crossed: bool

    @property
    def source(self) -> str | None:
        """The source whose volume it measures: a notice, where the others are alarms. None for those."""
        kind, _, source = self.name.partition(".")
        return source if kind == "daily_volume" else None


def measure(
    limits: Limits, levels: Mapping[str, Level], volumes: Mapping[str, int], free: float | None
) -> list[Watermark]:
    """Every watermark that has a limit: how destinations stand, what came today, the free part of the disk."""
    found = []
    if limits.dead is not None:
        found.append(_above("dead", sum(level.dead for level in levels.values()), limits.dead))
    if limits.oldest_due is not None:
        waits = [level.oldest_due for level in levels.values() if level.oldest_due is not None]
        found.append(_above("oldest_due", max(waits, default=0.0), limits.oldest_due))
    for source, limit in limits.daily_volume.items():
        found.append(_above(f"daily_volume.{source}", volumes.get(source, 0), limit))
    if limits.disk is not None:
        found.append(Watermark("disk", free, limits.disk, free is not None and free < limits.disk))
    return found


def _above(name: str, level: float, limit: float) -> Watermark:
    return Watermark(name, level, limit, level > limit)
