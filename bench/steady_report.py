"""What a run of the steady benchmark found: delays, CPU and backlog of every scene, and the targets they are held to.

`bench.steady` fills it in; everything here reads the plain values that are also written as JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import Target, short, table
from bench.traffic import BODY_SIZE
from bench.verdicts import NOISY_CORES

ENGINES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
SUBJECTS = (0, 500, 20, 3, 1)
"""0: every event is the only one of its subject."""
PIECE = 1_000
"""Events of one subject that are sent, delivered and paid for together."""
ENDS = 5
"""Pieces at each end whose median counts."""
JUDGED_RATE, JUDGED_SUBJECTS = 1_000, (0, 20, 3)
BEHIND_LIMIT_S, MEAN_LIMIT, STORE_CPU_LIMIT, HOT_LIMIT = 1.0, 3.0, 1.5, 1.3
ALONE_RATE = 1_000
"""Events a second that are offered to one subject."""

Found = dict[str, Any]


@dataclass(frozen=True)
class Scene:
    """A load: so many events per second on so many subjects."""

    engine: str
    rate: int
    subjects: int
    """0: every event is the only one of its subject."""
    statistics: str
    """`fresh`: none when it begins. `analysed`: made when the store was nearly empty."""

    def __str__(self) -> str:
        return f"{self.engine}  {self.rate:,}/s  {name_subjects(self.subjects)}  {self.statistics}"


@dataclass(frozen=True)
class Steady:
    """One scene: milliseconds from the moment an event was due until its delivery was settled."""

    scene: Scene
    events: int
    undelivered: int
    """Not delivered when the waiting ended, and counted as if they had been delivered then."""
    mean_ms: float
    p50_ms: float
    p99_ms: float
    behind_s: float
    """The longest delay."""
    store_cpu_us: float
    """CPU per event of the database's processes."""
    our_cpu_us: float
    """CPU per event of our own process; on SQLite the store is part of it."""
    backlog: list[int]
    """The most events that were due and not delivered, in each step of `backlog_seconds`."""
    others_cores: float
    """Cores that somebody else used meanwhile."""


@dataclass(frozen=True)
class Alone:
    """One subject and a handler that does nothing: deliveries a second, drained and while more arrives."""

    engine: str
    drained: float
    under_load: float
    store_cpu_us: float
    our_cpu_us: float
    others_cores: float


@dataclass(frozen=True)
class Hot:
    """One subject that receives and delivers piece after piece while nobody vacuums: CPU per event of each piece."""

    engine: str
    store_cpu_us: list[float]
    our_cpu_us: list[float]
    others_cores: float


def name_subjects(count: int) -> str:
    """`unique`, `1 subject`, `20 subjects`."""
    return f"{count:,} subject{'s' * (count > 1)}" if count else "unique"


def median_of(ones: Iterable[dict[str, Any]], name: str) -> float:
    """One figure over all rounds."""
    return float(statistics.median(one[name] for one in ones))


def first_and_last(pieces: Sequence[float]) -> tuple[float, float]:
    """Cost of an event at both ends of a hot subject."""
    ends = max(1, min(ENDS, len(pieces) // 2))
    return statistics.median(pieces[:ends]), statistics.median(pieces[-ends:])


def select(ones: Sequence[dict[str, Any]], **about: Any) -> list[dict[str, Any]]:
    """Return the results that have these values, in their scene or themselves."""
    return [one for one in ones if all({**one, **one.get("scene", {})}[name] == value for name, value in about.items())]


def distinct(ones: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Return the values of a field, each once, in the order in which they came."""
    return list(dict.fromkeys({**one, **one.get("scene", {})}[name] for one in ones))


# -- targets -----------------------------------------------------------------------------------


def targets(found: Found) -> list[Target]:
    """List the targets that this run can judge."""
    return [*_judge_steady(found), *_judge_hot(found)]


def _judge_steady(found: Found) -> list[Target]:
    """Judge whether hot subjects or old statistics make PostgreSQL late or expensive."""
    ones = select(found["steady"], engine="postgres", rate=JUDGED_RATE)
    ones = [one for one in ones if one["scene"]["subjects"] in JUDGED_SUBJECTS]
    if not ones:
        return []
    at = f"postgres, {JUDGED_RATE:,}/s"
    judged = [_limit(f"{at}: furthest behind", max(one["behind_s"] for one in ones), BEHIND_LIMIT_S, " s")]
    scenes = [
        select(ones, subjects=subjects, statistics=known)
        for subjects in distinct(ones, "subjects")
        for known in distinct(ones, "statistics")
    ]
    scenes = [rounds for rounds in scenes if rounds]
    if reference := select(ones, subjects=0, statistics="fresh"):
        worst = max(median_of(rounds, "mean_ms") for rounds in scenes)
        ratio = worst / median_of(reference, "mean_ms")
        judged.append(_limit(f"{at}: worst mean delay / unique, fresh", ratio, MEAN_LIMIT))
    costs = [median_of(rounds, "store_cpu_us") for rounds in scenes]
    if len(costs) > 1:
        what = f"{at}: database's CPU per event, most / least"
        judged.append(_limit(what, max(costs) / min(costs), STORE_CPU_LIMIT))
    return judged


def _judge_hot(found: Found) -> list[Target]:
    """Judge whether the store becomes more expensive with every event of a subject."""
    judged = []
    for engine in distinct(found["hot"], "engine"):
        pieces = "store_cpu_us" if engine == "postgres" else "our_cpu_us"
        ratios = []
        for one in select(found["hot"], engine=engine):
            first, last = first_and_last(one[pieces])
            ratios.append(last / first)
        what = f"{engine}, hot subject: CPU per event, last / first thousand"
        judged.append(_limit(what, statistics.median(ratios), HOT_LIMIT))
    return judged


def _limit(what: str, value: float, limit: float, unit: str = "x") -> Target:
    return Target(what, value, unit, limit, None, lower_is_better=True)


# -- text --------------------------------------------------------------------------------------


def render(found: Found) -> str:
    """Render the report as text, at most 100 columns wide: medians of the rounds."""
    parts = [_heading(found)]
    if found["steady"]:
        parts.append(
            "CPU µs: per event, of all processes, of it the database and our process; ms from due to\n"
            "delivered; behind: the longest of these; left: not delivered when the waiting ended"
        )
    for engine in distinct(found["steady"], "engine"):
        for rate in distinct(select(found["steady"], engine=engine), "rate"):
            ones = select(found["steady"], engine=engine, rate=rate)
            parts += [f"{ENGINES[engine]}, {rate:,} events/s", table(_steady_rows(ones))]
    if found["alone"]:
        heading = "one subject, a handler that does nothing: deliveries a second, CPU µs of the drained ones"
        parts += [heading, table(_alone_rows(found))]
    if found["hot"]:
        events = PIECE * max(len(one["our_cpu_us"]) for one in found["hot"])
        heading = f"one subject, {events:,} events one after the other, no vacuum: CPU µs per event"
        parts += [heading, table(_hot_rows(found))]
    if judged := targets(found):
        # As in the other parts: somebody else's work would be judged, too.
        busy = " (no verdict: this machine was busy with other work)" if is_noisy(found) else ""
        parts += [f"targets{busy}", "\n".join(f"  {target.line()}" for target in judged)]
    return "\n\n".join(parts)


def others_cores(found: Found) -> float:
    """Return the most that somebody else disturbed a turn."""
    return max((one["others_cores"] for part in ("steady", "alone", "hot") for one in found[part]), default=0.0)


def is_noisy(found: Found) -> bool:
    """Tell whether the figures of this run say more about the neighbours than about us."""
    return others_cores(found) > NOISY_CORES


def _heading(found: Found) -> str:
    length = f" of {found['seconds']:g} s" if found["steady"] else ""
    rounds = f"{found['rounds']} round{'s' * (found['rounds'] > 1)}{length}"
    lines = [
        f"received and delivered by one process, {BODY_SIZE} bytes, {rounds}",
        f"disk: fsync p50 {found['disk']['p50_ms']:.3f} ms, p99 {found['disk']['p99_ms']:.3f} ms",
    ]
    if is_noisy(found):
        lines.append(f"warning: others kept up to {others_cores(found):.1f} cores busy; do not quote these figures")
    return "\n".join(lines)


def _steady_rows(ones: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = [["subjects", "statistics", "CPU µs", "DB", "ours", "mean ms", "p50 ms", "p99 ms", "behind s", "left"]]
    rows += [
        [str(subjects or "unique"), known, *_steady_cells(rounds)]
        for subjects in distinct(ones, "subjects")
        for known in distinct(ones, "statistics")
        if (rounds := select(ones, subjects=subjects, statistics=known))
    ]
    return rows


def _steady_cells(rounds: Sequence[dict[str, Any]]) -> list[str]:
    left = max(one["undelivered"] for one in rounds)
    # Had anybody waited for those that are left, the delays would be longer.
    at_least = "≥" if left else ""
    cells = [at_least + short(median_of(rounds, name)) for name in ("mean_ms", "p50_ms", "p99_ms")]
    return [*_cpu_cells(rounds), *cells, f"{at_least}{median_of(rounds, 'behind_s'):.2f}", f"{left:,}"]


def _cpu_cells(rounds: Sequence[dict[str, Any]]) -> list[str]:
    """Format the CPU of all processes, of it the database's where it has its own, and ours."""
    store, ours = (median_of(rounds, name) for name in ("store_cpu_us", "our_cpu_us"))
    both = statistics.median(one["store_cpu_us"] + one["our_cpu_us"] for one in rounds)
    return [f"{both:,.0f}", f"{store:,.0f}" if store else "–", f"{ours:,.0f}"]


def _alone_rows(found: Found) -> list[list[str]]:
    rows = [["engine", "CPU µs", "DB", "ours", "drained", f"at {ALONE_RATE:,}/s"]]
    for engine in distinct(found["alone"], "engine"):
        rounds = select(found["alone"], engine=engine)
        rates = [f"{median_of(rounds, name):,.0f}" for name in ("drained", "under_load")]
        rows.append([ENGINES[engine], *_cpu_cells(rounds), *rates])
    return rows


def _hot_rows(found: Found) -> list[list[str]]:
    rows = [["engine", "DB: first", "last", "ratio", "ours: first", "last", "ratio"]]
    for one in found["hot"]:
        cells = []
        for name in ("store_cpu_us", "our_cpu_us"):
            first, last = first_and_last(one[name])
            cells += [f"{first:,.0f}", f"{last:,.0f}", f"{last / first:.2f}x"] if first else ["–"] * 3
        rows.append([ENGINES[one["engine"]], *cells])
    return rows
