"""What a run of the work benchmark found: jobs per second, ratios, and the targets they are held against.

Takes the `Results` that `bench.work` filled; gives text for people and JSON for programs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.disk import Disk
from bench.machine import version_of
from bench.report import Target, name_cpu, name_targets, short, table
from bench.verdicts import NOISY_CORES
from bench.work_contestants import CONTESTANTS, SCENARIOS, SUBJECTS, Contestant

FLOORS = [
    ("oncehook_noop", "pgqueuer", 1.0, 2.0),
    ("oncehook_subject", "procrastinate", 20.0, 60.0),
    ("oncehook_subject", "dbos", 10.0, 30.0),
    ("oncehook_sqlite", "dbos_sqlite", 20.0, 60.0),
    ("oncehook_http_sqlite", "aiohttp", 0.4, 0.7),
    ("oncehook_http_postgres", "aiohttp", 0.4, 0.7),
]
"""Contestant, what it is compared with, floor and moonshot of the ratio of jobs per second."""

DEEP_LIMIT, MANY_LIMIT = 1.1, 2.0
"""Lease cost with 100,000 waiting on one subject, and with 1,000,000 waiting in all, by that with 1,000."""
FLAT = 1.05
IDLE_LIMIT_MS, IDLE_MOONSHOT_MS = 10.0, 3.0


@dataclass(frozen=True)
class Settings:
    """How a run was asked for."""

    seconds: float
    rounds: int
    body: int
    waiting: int
    """How many wait in the largest backlog."""
    folder: Path | None


@dataclass(frozen=True)
class Measured:
    """One turn of a contestant."""

    jobs: int
    """How many it was given."""
    done: int
    """How many were done when it was stopped."""
    per_second: float
    """Between the moments when 5 % and 95 % of them were done: neither start nor tail counts."""
    worker_cpu_us: float
    """CPU per job of its processes, in the same time."""
    store_cpu_us: float
    """CPU per job of the database's processes, where it has its own."""
    others_cores: float
    """Cores that were busy with something else meanwhile: the sink, the kernel, or somebody who shares this machine."""


@dataclass(frozen=True)
class Backlog:
    """What a lease costs, in microseconds per delivery, by how many wait."""

    few: int
    deep: int
    many: int
    few_us: list[float]
    """One figure per turn: the lower quartile of its leases."""
    deep_us: list[float]
    many_us: list[float]
    others_cores: float
    """Cores that were busy with something else meanwhile."""

    def ratios(self) -> tuple[float, float]:
        """Deep and many, each by few: medians of what was measured side by side."""
        deep = statistics.median(a / b for a, b in zip(self.deep_us, self.few_us, strict=True))
        many = statistics.median(a / b for a, b in zip(self.many_us, self.few_us, strict=True))
        return deep, many


@dataclass(frozen=True)
class Idle:
    """One event at a time: milliseconds from its request to the moment its delivery was settled."""

    events: int
    p50_ms: float
    p99_ms: float
    answer_p50_ms: float
    """Of it until the sender had its answer."""
    others_cores: float
    """Cores that were busy with something else meanwhile."""


@dataclass
class Results:
    """Everything that a run found."""

    settings: Settings
    disk: Disk | None = None
    rounds: dict[str, list[Measured]] = field(default_factory=dict)
    backlog: dict[str, Backlog] = field(default_factory=dict)
    """By engine."""
    idle: dict[str, list[Idle]] = field(default_factory=dict)
    """By engine, one per round."""
    failures: dict[str, str] = field(default_factory=dict)

    def fail(self, name: str, reason: str) -> None:
        """Leave out a contestant whose figures cannot be trusted."""
        self.failures[name] = reason
        self.rounds.pop(name, None)

    def per_second(self, name: str) -> float | None:
        """Jobs per second: the median of the rounds."""
        rounds = self.rounds.get(name)
        return statistics.median(one.per_second for one in rounds) if rounds else None

    def ratio(self, name: str, reference: str) -> float | None:
        """Return how many times the reference's jobs per second it reaches."""
        ours, theirs = self.per_second(name), self.per_second(reference)
        return ours / theirs if ours and theirs else None

    def cpu_us(self, name: str) -> float | None:
        """CPU per job of workers and database together: the median of the rounds."""
        rounds = self.rounds.get(name)
        return statistics.median(one.worker_cpu_us + one.store_cpu_us for one in rounds) if rounds else None

    def thrift(self, name: str, reference: str) -> float | None:
        """Return how many times less CPU per job it takes: steadier than `ratio` on a shared machine."""
        ours, theirs = self.cpu_us(name), self.cpu_us(reference)
        return theirs / ours if ours and theirs else None

    def spread(self, name: str, reference: str) -> str:
        """Return the ratio's range over rounds."""
        pairs = zip(self.rounds[name], self.rounds[reference], strict=False)
        ratios = [ours.per_second / theirs.per_second for ours, theirs in pairs]
        return f"{short(min(ratios))}–{short(max(ratios))}"

    @property
    def others_cores(self) -> float:
        """Return the most that somebody else disturbed a turn. Where HTTP is delivered, the sink does not count."""
        scenarios = {one.name: one.scenario for one in CONTESTANTS}
        found = [one.others_cores for name in self.rounds if scenarios[name] != "http" for one in self.rounds[name]]
        found += [one.others_cores for loads in self.idle.values() for one in loads]
        return max([*found, *(one.others_cores for one in self.backlog.values())], default=0.0)


def targets(results: Results) -> list[Target]:
    """List the targets that this run can judge."""
    found = []
    for name, reference, floor, moonshot in FLOORS:
        ratio = results.ratio(name, reference)
        if ratio is not None:
            found.append(Target(f"{name} / {reference}", ratio, "x", floor, moonshot))
    for engine, backlog in results.backlog.items():
        deep, many = backlog.ratios()
        at = f"lease on {engine}, "
        what = f"{at}{backlog.deep:,} more on one subject / {backlog.few:,} waiting"
        found.append(Target(what, deep, "x", DEEP_LIMIT, FLAT, lower_is_better=True))
        what = f"{at}{backlog.many:,} / {backlog.few:,} waiting"
        found.append(Target(what, many, "x", MANY_LIMIT, FLAT, lower_is_better=True))
    for engine, loads in results.idle.items():
        p50 = statistics.median(one.p50_ms for one in loads)
        what = f"accept to done on {engine}, idle, one event: p50"
        found.append(Target(what, p50, " ms", IDLE_LIMIT_MS, IDLE_MOONSHOT_MS, lower_is_better=True))
    return found


def render(results: Results) -> str:
    """Render the report as text."""
    parts = [_heading(results)]
    for scenario in SCENARIOS:
        chosen = [one for one in CONTESTANTS if one.scenario == scenario and one.name in results.rounds]
        if chosen:
            parts.append(table(_rows(results, chosen)))
    if len(ratios := _ratio_rows(results)) > 1:
        parts.append(table(ratios))
    if results.backlog:
        parts.append(table(_backlog_rows(results)))
    if results.idle:
        parts.append(table(_idle_rows(results)))
    if judged := targets(results):
        heading = name_targets(results.settings.rounds, results.others_cores > NOISY_CORES)
        parts += [heading, "\n".join(f"  {target.line()}" for target in judged)]
    return "\n\n".join(parts)


def _heading(results: Results) -> str:
    settings = results.settings
    lines = [
        f"jobs of {settings.body} bytes; where there are subjects, {SUBJECTS} of them in turn; everything durable",
        "jobs/s between the moments when 5 % and 95 % were done, by the database's own record",
        f"{settings.rounds} rounds of about {settings.seconds:g} s, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}",
    ]
    if results.disk is not None:
        lines.append(f"disk: fsync p50 {results.disk.p50_ms:.3f} ms, p99 {results.disk.p99_ms:.3f} ms")
        if results.disk.is_memory:
            lines.append("warning: this folder is not on a disk; use --folder")
    if results.others_cores > NOISY_CORES:
        lines.append(f"warning: others kept up to {results.others_cores:.1f} cores busy; do not quote these figures")
    return "\n".join(lines)


def _rows(results: Results, chosen: Sequence[Contestant]) -> list[list[str]]:
    rows = [["contestant", "CPU µs/job", "jobs/s", "spread", "jobs", "processes", "others' cores", ""]]
    for contestant in sorted(chosen, key=lambda one: -(results.per_second(one.name) or 0)):
        turns = results.rounds[contestant.name]
        speeds = [one.per_second for one in turns]
        worker = statistics.median(one.worker_cpu_us for one in turns)
        store = statistics.median(one.store_cpu_us for one in turns)
        rows.append(
            [
                contestant.name,
                name_cpu(worker, store),
                f"{statistics.median(speeds):,.0f}",
                f"{min(speeds):,.0f}–{max(speeds):,.0f}",
                f"{max(one.jobs for one in turns):,}",
                f"{contestant.processes}",
                f"{max(one.others_cores for one in turns):.2f}",
                f"{contestant.title}{versions(contestant)}: {contestant.setup}",
            ]
        )
    return rows


def _ratio_rows(results: Results) -> list[list[str]]:
    rows = [["compared", "times less CPU per job", "times the jobs/s", "spread"]]
    for name, reference, _, _ in FLOORS:
        ratio, thrift = results.ratio(name, reference), results.thrift(name, reference)
        if ratio is not None and thrift is not None:
            rows.append([f"{name} / {reference}", short(thrift), short(ratio), results.spread(name, reference)])
    return rows


def _backlog_rows(results: Results) -> list[list[str]]:
    rows = [["one lease, µs per delivery", "waiting", "median", "spread"]]
    for engine, backlog in results.backlog.items():
        for what, waiting, figures in (
            ("", backlog.few, backlog.few_us),
            (", and a deep subject", backlog.few + backlog.deep, backlog.deep_us),
            ("", backlog.many, backlog.many_us),
        ):
            median = statistics.median(figures)
            spread = f"{min(figures):.1f}–{max(figures):.1f}"
            rows.append([f"{engine}{what}", f"{waiting:,}", f"{median:.1f}", spread])
    return rows


def _idle_rows(results: Results) -> list[list[str]]:
    rows = [["accept to done, idle", "p50 ms", "p99 ms", "of it until answered", "p50 spread"]]
    for engine, loads in results.idle.items():
        p50s = [one.p50_ms for one in loads]
        rows.append(
            [
                engine,
                f"{statistics.median(p50s):.2f}",
                f"{max(one.p99_ms for one in loads):.2f}",
                f"{statistics.median(one.answer_p50_ms for one in loads):.2f}",
                f"{min(p50s):.2f}–{max(p50s):.2f}",
            ]
        )
    return rows


def versions(contestant: Contestant) -> str:
    """Of the packages it is made of, as they are installed."""
    return "".join(f" {version_of(package)}" for package in contestant.packages)


def write_json(results: Results, path: Path) -> None:
    """Write the report for programs."""
    path.write_text(json.dumps(as_json(results), indent=2) + "\n")


def as_json(results: Results) -> dict[str, Any]:
    """Return the report as plain values."""
    by_name = {one.name: one for one in CONTESTANTS}
    return {
        "settings": {**asdict(results.settings), "folder": None},
        "machine": machine.describe(),
        "noisy": results.others_cores > NOISY_CORES,
        "disk": asdict(results.disk) if results.disk else None,
        "contestants": {
            name: {
                "title": by_name[name].title,
                "setup": by_name[name].setup,
                "versions": {package: version_of(package) for package in by_name[name].packages},
                "jobs_per_second": results.per_second(name),
                "rounds": [asdict(one) for one in turns],
                "cpu_us_per_job": results.cpu_us(name),
            }
            for name, turns in results.rounds.items()
        },
        "ratios": [
            {
                "contestant": name,
                "reference": reference,
                "jobs_per_second": results.ratio(name, reference),
                "cpu": results.thrift(name, reference),
            }
            for name, reference, _, _ in FLOORS
        ],
        "backlog": {engine: asdict(one) for engine, one in results.backlog.items()},
        "idle": {engine: [asdict(one) for one in loads] for engine, loads in results.idle.items()},
        "targets": [{**asdict(target), "reached": target.reached} for target in targets(results)],
        "failures": results.failures,
    }
