"""What a run found: figures per contestant, ratios between them, and the targets they are held against.

Takes the `Results` that `bench.ingest` filled; gives text for people and JSON for programs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench import machine
from bench.contestants import CONTESTANTS
from bench.disk import Disk
from bench.drive import CONNECTIONS, Figures
from bench.traffic import BODY_SIZE, LARGE_SIZE, MIXES
from bench.verdicts import MIN_ROUNDS, NOISY_CORES

TITLES = {contestant.name: contestant.title for contestant in CONTESTANTS}
OURS = [contestant.name for contestant in CONTESTANTS if contestant.is_ours]
REFERENCES = [contestant.name for contestant in CONTESTANTS if not contestant.is_ours]

FLOORS = [
    ("oncehook_sqlite", "flask_sqlalchemy", 15.0, 30.0),
    ("oncehook_sqlite", "fastapi_asyncpg", 2.5, 5.0),
    ("oncehook_sqlite", "thin_sqlite", 0.6, 0.9),
    ("oncehook_postgres", "fastapi_sqlalchemy", 15.0, 30.0),
    ("oncehook_postgres", "django_redis", 8.0, 15.0),
    ("oncehook_postgres", "fastapi_asyncpg", 3.0, 6.0),
]
"""Ingest: contestant, what it is compared with, floor and moonshot of the ratio of events per second."""

DUPLICATES_FLOOR, DUPLICATES_MOONSHOT = 1.2, 2.0


@dataclass(frozen=True)
class Settings:
    """How a run was asked for."""

    seconds: float
    rounds: int
    wrk: str | None
    offered: float
    large: bool
    """Whether 64 KB bodies are measured too."""
    with_route: bool
    serve_options: list[str]
    folder: Path | None
    max_rate: int


@dataclass(frozen=True)
class Measured:
    """One load and what it cost."""

    figures: Figures
    server_cpu_us: float
    """CPU per event of the server's processes."""
    store_cpu_us: float
    """CPU per event of the database's processes, where it has its own."""
    others_cores: float
    """Cores that were busy with something else meanwhile: the kernel, or somebody who shares this machine."""


@dataclass(frozen=True)
class Mixed:
    """Events per second with a share of the keys repeated, beside those with unique keys in the same turn."""

    repeated: float
    unique: float
    mixed: float


@dataclass
class Results:
    """Everything that a run found."""

    settings: Settings
    disk: Disk | None = None
    rounds: dict[str, list[Measured]] = field(default_factory=dict)
    duplicates: dict[str, list[Mixed]] = field(default_factory=dict)
    latency: dict[str, list[Figures]] = field(default_factory=dict)
    large: dict[str, list[Measured]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def fail(self, name: str, reason: str) -> None:
        """Leave out a contestant whose figures cannot be trusted."""
        self.failures[name] = reason
        for kept in (self.rounds, self.duplicates, self.latency, self.large):
            kept.pop(name, None)

    @property
    def others_cores(self) -> float:
        """Return the most that somebody else disturbed a load."""
        return max((one.others_cores for rounds in self.rounds.values() for one in rounds), default=0.0)

    @property
    def is_noisy(self) -> bool:
        """Tell whether the ratios of this run say more about the neighbours than about the contestants."""
        return self.others_cores > NOISY_CORES

    def per_second(self, name: str) -> float | None:
        """Return the events per second: the median of the rounds."""
        rounds = self.rounds.get(name)
        return statistics.median(one.figures.per_second for one in rounds) if rounds else None

    def mixed_ratio(self, name: str, repeated: float) -> float | None:
        """Return events per second with repeated keys by those with unique ones: the median of the rounds."""
        found = [one.mixed / one.unique for one in self.duplicates.get(name, ()) if one.repeated == repeated]
        return statistics.median(found) if found else None

    def ratio(self, name: str, reference: str) -> float | None:
        """Return how many times the reference's events per second it reaches."""
        ours, theirs = self.per_second(name), self.per_second(reference)
        return ours / theirs if ours and theirs else None

    def cpu_us(self, name: str) -> float | None:
        """Return the CPU per event of server and database together: the median of the rounds."""
        rounds = self.rounds.get(name)
        return statistics.median(one.server_cpu_us + one.store_cpu_us for one in rounds) if rounds else None

    def thrift(self, name: str, reference: str) -> float | None:
        """Return how many times less CPU per event it takes: steadier than `ratio` on a shared machine."""
        ours, theirs = self.cpu_us(name), self.cpu_us(reference)
        return theirs / ours if ours and theirs else None


@dataclass(frozen=True)
class Target:
    """A figure and what it should reach; `reached` says how far it came."""

    what: str
    value: float
    unit: str
    floor: float | None
    moonshot: float | None
    lower_is_better: bool = False

    @property
    def reached(self) -> Literal["moonshot", "floor"] | None:
        """Return the highest mark that the value reaches."""
        if self.moonshot is not None and self._passes(self.moonshot):
            return "moonshot"
        if self.floor is not None and self._passes(self.floor):
            return "floor"
        return None

    def _passes(self, mark: float) -> bool:
        return self.value <= mark if self.lower_is_better else self.value >= mark

    def line(self) -> str:
        """`15x floor, 30x moonshot: 31.2x moonshot reached`."""
        marks = [f"{short(self.floor)}{self.unit} floor"] if self.floor is not None else []
        if self.moonshot is not None:
            marks.append(f"{short(self.moonshot)}{self.unit} moonshot")
        verdict = f"{self.reached} reached" if self.reached else "not reached"
        return f"{self.what:<62} {', '.join(marks)}: {short(self.value)}{self.unit} {verdict}"


def targets(results: Results) -> list[Target]:
    """List the targets that this run can judge."""
    found = []
    for name, reference, floor, moonshot in FLOORS:
        ratio = results.ratio(name, reference)
        if ratio is not None:
            found.append(Target(f"{name} / {reference}", ratio, "x", floor, moonshot))
    for name in OURS:
        found += _latency_targets(results, name)
        if (ratio := results.mixed_ratio(name, 0.9)) is not None:
            what = f"{name}, 90 % duplicates / unique keys"
            found.append(Target(what, ratio, "x", DUPLICATES_FLOOR, DUPLICATES_MOONSHOT))
    return found


def _latency_targets(results: Results, name: str) -> list[Target]:
    loads = results.latency.get(name)
    if not loads or results.disk is None:
        return []
    at = f"{name}, {results.settings.offered:.0f} events/s offered"
    p50 = statistics.median(one.p50_ms for one in loads)
    p99 = statistics.median(one.p99_ms for one in loads)
    return [
        Target(f"{at}: p99", p99, " ms", 5 * results.disk.p99_ms + 10, None, lower_is_better=True),
        Target(f"{at}: p50", p50, " ms", None, 2 * results.disk.p50_ms, lower_is_better=True),
    ]


def render(results: Results) -> str:
    """Render the report as text."""
    parts = [_heading(results), table(_main_rows(results))]
    if ratios := _ratio_rows(results, results.ratio):
        parts += ["times less CPU per event than (all processes)", table(_ratio_rows(results, results.thrift))]
        parts += ["times as many events/s as", table(ratios)]
    if results.latency:
        parts += [f"latency at {results.settings.offered:.0f} events/s offered", table(_latency_rows(results))]
    if results.duplicates:
        parts += ["times as many events/s as with unique keys", table(_mix_rows(results))]
    if results.large:
        parts += [f"{LARGE_SIZE >> 10} KB bodies", table(_large_rows(results))]
    parts += ["set up", table([[name, _setup(name)] for name in results.rounds])]
    if judged := targets(results):
        # Somebody else's work slows the references that use all cores more than it slows us.
        parts += [
            name_targets(results.settings.rounds, results.is_noisy),
            "\n".join(f"  {target.line()}" for target in judged),
        ]
    return "\n\n".join(parts)


def name_targets(rounds: int, is_noisy: bool) -> str:
    """Head the list of targets with how much it is worth."""
    if is_noisy:
        return "targets (no verdict: this machine was busy with other work)"
    if rounds < MIN_ROUNDS:
        return f"targets (no verdict: {rounds} of {MIN_ROUNDS} rounds; `scripts/bench ratios` also measures the noise)"
    return "targets"


def _heading(results: Results) -> str:
    settings = results.settings
    lines = [
        f"{BODY_SIZE} bytes of signed JSON, unique keys, keep-alive, {CONNECTIONS} connections, durable",
        f"{settings.rounds} rounds of {settings.seconds:g} s by {'wrk' if settings.wrk else 'our own generator'}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}",
    ]
    if results.disk is not None:
        found = results.disk
        lines.append(f"disk: fsync p50 {found.p50_ms:.3f} ms, p99 {found.p99_ms:.3f} ms")
        if found.is_memory:
            lines.append("warning: this folder is not on a disk; use --folder")
    if results.is_noisy:
        lines.append(f"warning: others kept up to {results.others_cores:.1f} cores busy; do not quote these figures")
    return "\n".join(lines)


def _main_rows(results: Results) -> list[list[str]]:
    rows = [["contestant", "CPU µs/event", "events/s", "spread", "p50 ms", "p99 ms", "failed", "others' cores", ""]]
    for name, rounds in sorted(results.rounds.items(), key=lambda item: -(results.per_second(item[0]) or 0)):
        speeds = [one.figures.per_second for one in rounds]
        server = statistics.median(one.server_cpu_us for one in rounds)
        store = statistics.median(one.store_cpu_us for one in rounds)
        rows.append(
            [
                name,
                name_cpu(server, store),
                f"{statistics.median(speeds):,.0f}",
                f"{min(speeds):,.0f}–{max(speeds):,.0f}",
                f"{statistics.median(one.figures.p50_ms for one in rounds):.1f}",
                f"{statistics.median(one.figures.p99_ms for one in rounds):.1f}",
                f"{sum(one.figures.refused + one.figures.broken for one in rounds):,}",
                f"{max(one.others_cores for one in rounds):.2f}",
                TITLES[name],
            ]
        )
    return rows


def _ratio_rows(results: Results, ratio: Callable[[str, str], float | None]) -> list[list[str]]:
    ours = [name for name in OURS if name in results.rounds]
    references = [name for name in REFERENCES if name in results.rounds]
    if not ours or not references:
        return []
    return [
        ["", *references],
        *[[name, *[f"{short(ratio(name, reference))}x" for reference in references]] for name in ours],
    ]


def _latency_rows(results: Results) -> list[list[str]]:
    rows = [["contestant", "p50 ms", "p99 ms", "max ms", "of it the generator's own p50"]]
    for name, loads in results.latency.items():
        medians = [
            statistics.median(values)
            for values in zip(*[(one.p50_ms, one.p99_ms, one.max_ms, one.delay_p50_ms) for one in loads], strict=True)
        ]
        rows.append([name, *[f"{value:.2f}" for value in medians]])
    return rows


def _mix_rows(results: Results) -> list[list[str]]:
    shares = [f"{repeated:.0%} duplicates" for repeated in MIXES]
    found = {name: [results.mixed_ratio(name, repeated) for repeated in MIXES] for name in results.duplicates}
    return [["contestant", *shares], *[[name, *[f"{short(one)}x" for one in ones]] for name, ones in found.items()]]


def _large_rows(results: Results) -> list[list[str]]:
    rows = [["contestant", "events/s", "MB/s", "p50 ms", "p99 ms"]]
    for name, loads in results.large.items():
        speed = statistics.median(one.figures.per_second for one in loads)
        p50, p99 = (statistics.median(getattr(one.figures, at) for one in loads) for at in ("p50_ms", "p99_ms"))
        rows.append([name, f"{speed:,.0f}", f"{speed * LARGE_SIZE / 1e6:,.0f}", f"{p50:.1f}", f"{p99:.1f}"])
    return rows


def _setup(name: str) -> str:
    """Describe how a contestant is set up, and of what it is made."""
    (one,) = (contestant for contestant in CONTESTANTS if contestant.name == name)
    made_of = ", ".join(f"{package} {version}" for package, version in one.versions.items())
    return f"{one.setup} ({made_of})" if made_of else one.setup


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first and the last to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def name_cpu(ours: float, store: float) -> str:
    """Format CPU per event of all processes, of ours, and of the database's where it has its own: `121 = 76 + 45`."""
    return f"{ours + store:,.0f} = {ours:,.0f} + {store:,.0f}" if store else f"{ours:,.0f}"


def short(value: float | None) -> str:
    """Format three digits, or whole numbers where there are more."""
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def write_json(results: Results, path: Path) -> None:
    """Write the report for programs."""
    path.write_text(json.dumps(as_json(results), indent=2) + "\n")


def as_json(results: Results) -> dict[str, Any]:
    """Return the report as plain values."""
    settings = {**asdict(results.settings), "folder": None, "wrk": bool(results.settings.wrk)}
    return {
        "settings": settings,
        "machine": machine.describe(),
        "noisy": results.is_noisy,
        "disk": asdict(results.disk) if results.disk else None,
        "contestants": {
            name: {
                "title": TITLES[name],
                "setup": _setup(name),
                "events_per_second": results.per_second(name),
                "rounds": [asdict(one) for one in rounds],
                "cpu_us_per_event": results.cpu_us(name),
                "ratios": {other: results.ratio(name, other) for other in REFERENCES if other in results.rounds},
                "cpu_ratios": {other: results.thrift(name, other) for other in REFERENCES if other in results.rounds},
            }
            for name, rounds in results.rounds.items()
        },
        "duplicates": {name: [asdict(one) for one in mixes] for name, mixes in results.duplicates.items()},
        "latency": {name: [asdict(one) for one in loads] for name, loads in results.latency.items()},
        "large": {name: [asdict(one) for one in loads] for name, loads in results.large.items()},
        "targets": [{**asdict(target), "reached": target.reached} for target in targets(results)],
        "failures": results.failures,
    }
