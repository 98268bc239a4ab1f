"""Pictures of what was measured: one PNG per question, each once for a light and once for a dark page.

Takes the folder that `bench.whole` filled with JSON; draws what it finds there and leaves out what it does not. Bars
start at zero and carry their figures; the product is the only one in colour. Run by `scripts/bench plots FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bench import stack, steady_report, work_report
from bench.report import FLOORS
from bench.traffic import LARGE_SIZE

INGEST_NAMES = {
    "flask_sqlalchemy": "Flask + SQLAlchemy, SQLite",
    "fastapi_sqlalchemy": "FastAPI + SQLAlchemy, PostgreSQL",
    "django_redis": "Django + Redis SET NX, PostgreSQL",
    "fastapi_asyncpg": "FastAPI + raw asyncpg, PostgreSQL",
    "thin_sqlite": "bare ASGI, one row, SQLite",
    "thin_postgres": "bare ASGI, one row, PostgreSQL",
    "oncehook_sqlite": "oncehook, SQLite",
    "oncehook_postgres": "oncehook, PostgreSQL",
    "oncehook_postgres_2": "oncehook, PostgreSQL, 2 processes",
}
WORK_NAMES = {
    "pgqueuer": "PgQueuer, batches of 200",
    "oncehook_noop": "oncehook",
    "procrastinate": "procrastinate, lock",
    "dbos": "DBOS, partitioned queue",
    "oncehook_subject": "oncehook",
    "dbos_sqlite": "DBOS, partitioned queue",
    "oncehook_sqlite": "oncehook",
    "aiohttp": "bare aiohttp loop, no store",
    "oncehook_http_sqlite": "oncehook, SQLite",
    "oncehook_http_postgres": "oncehook, PostgreSQL",
}
SCENARIOS = {
    "No order, PostgreSQL, 2 processes": ("oncehook_noop", "pgqueuer"),
    "One at a time per subject, PostgreSQL, 2 processes": ("oncehook_subject", "procrastinate", "dbos"),
    "One at a time per subject, SQLite": ("oncehook_sqlite", "dbos_sqlite"),
    "HTTP deliveries, 64 in flight": ("oncehook_http_postgres", "oncehook_http_sqlite", "aiohttp"),
}
ENGINES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}


@dataclass(frozen=True)
class Look:
    """The colours of a page."""

    name: str
    page: str
    ink: str
    faint: str
    ours: str
    second: str
    other: str
    warmer: tuple[str, ...]
    """For what has an order: each warmer than the last."""


LOOKS = [
    Look("light", "#ffffff", "#1f2328", "#d1d9e0", "#0f766e", "#b45309", "#9aa4af",
         ("#0f766e", "#2563eb", "#9333ea", "#d97706", "#dc2626")),
    Look("dark", "#0d1117", "#e6edf3", "#30363d", "#2dd4bf", "#fbbf24", "#6e7781",
         ("#2dd4bf", "#60a5fa", "#c084fc", "#fbbf24", "#f87171")),
]  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One bar, and the text at its end."""

    label: str
    value: float
    note: str
    is_ours: bool


@contextmanager
def draw_figure(
    look: Look,
    path: Path,
    *,
    height: float,
    title: str,
    panels: int = 1,
    rows: Sequence[int] = (1,),
    foot: float = 0.0,
) -> Iterator[list[Any]]:
    """Axes on a figure that is saved at the end: panels beside one another, rows of these heights, room at the foot."""
    inks: dict[Any, str] = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), look.ink)
    with plt.rc_context({**inks, "font.size": 10, "font.family": "sans-serif"}):
        figure, grid = plt.subplots(
            len(rows),
            panels,
            figsize=(9, height),
            squeeze=False,
            facecolor=look.page,
            gridspec_kw={"height_ratios": rows},
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        for axes in grid.flat:
            axes.set_facecolor(look.page)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
        yield list(grid.flat)
        figure.tight_layout(rect=(0, foot / height, 1, 1))
        figure.savefig(path, dpi=150, facecolor=look.page)
        plt.close(figure)


def bars(look: Look, axes: Any, given: Sequence[Bar], widest: float = 0.0) -> None:
    """Bars below one another, the first on top, each with its figure; `widest` is shared by panels to be compared."""
    widest = widest or max(bar.value for bar in given)
    for place, bar in enumerate(reversed(given)):
        axes.barh(place, bar.value, height=0.62, color=look.ours if bar.is_ours else look.other)
        axes.text(bar.value + widest * 0.012, place, bar.note, va="center", fontsize=9)
    axes.set_yticks(range(len(given)), [bar.label for bar in reversed(given)])
    axes.set_xticks([])
    axes.set_xlim(0, widest * 1.42)


def ingest_bars(found: dict[str, Any]) -> list[Bar]:
    """Events per second, the fastest first; what a target compares carries its ratio."""
    speeds = {name: one["events_per_second"] for name, one in found["contestants"].items()}
    given = []
    for name in sorted(speeds, key=lambda name: -speeds[name]):
        notes = [f"{speeds[name]:,.0f}/s"]
        for ours, reference, _, _ in FLOORS:
            if reference == name and ours in speeds:
                engine = ENGINES[ours.removeprefix("oncehook_")]
                notes.append(f"oncehook on {engine} {speeds[ours] / speeds[name]:.3g}×")
        given.append(Bar(INGEST_NAMES[name], speeds[name], " · ".join(notes), name.startswith("oncehook")))
    return given


def draw_ingest(folder: Path, look: Look, path: Path) -> None:
    """Draw how many webhooks are durably taken."""
    found = _read(folder, "ingest")
    given = ingest_bars(found)
    title = "Webhooks taken in per second, answered after the commit (2 KB, 64 connections)"
    with draw_figure(look, path, height=0.42 * len(given) + 0.7, title=title) as (axes,):
        bars(look, axes, given)


def mix_bars(found: dict[str, Any], name: str) -> list[Bar]:
    """One engine with unique keys, with each share of repeated ones, and with large bodies."""
    unique = found["contestants"][name]["events_per_second"]
    speeds = {"unique keys": unique}
    for share in sorted({one["repeated"] for one in found["duplicates"][name]}):
        ones = [one["mixed"] for one in found["duplicates"][name] if one["repeated"] == share]
        speeds[f"{share:.0%} duplicates"] = statistics.median(ones)
    given = [Bar(label, speed, f"{speed:,.0f}/s · {speed / unique:.2f}×", True) for label, speed in speeds.items()]
    if large := found["large"].get(name):
        speed = statistics.median(one["figures"]["per_second"] for one in large)
        note = f"{speed:,.0f}/s · {speed * LARGE_SIZE / 1e6:,.0f} MB/s"
        given.append(Bar(f"{LARGE_SIZE >> 10} KB bodies", speed, note, True))
    return given


def draw_mixes(folder: Path, look: Look, path: Path) -> None:
    """Draw what repeated keys and large bodies change."""
    found = _read(folder, "ingest")
    names = list(found["duplicates"])
    title = "oncehook with repeated keys and with large bodies"
    with draw_figure(look, path, height=2.9, title=title, panels=len(names)) as panels:
        widest = max(bar.value for name in names for bar in mix_bars(found, name))
        for axes, name in zip(panels, names, strict=True):
            axes.set_title(ENGINES[name.removeprefix("oncehook_")], loc="left", fontsize=10)
            bars(look, axes, mix_bars(found, name), widest)


def work_bars(speeds: dict[str, float], names: Sequence[str]) -> list[Bar]:
    """Deliveries per second of one scenario; what a target compares carries its ratio."""
    given = [name for name in names if name in speeds]
    notes = {name: [f"{speeds[name]:,.0f}/s"] for name in given}
    several = sum(name.startswith("oncehook") for name in given) > 1
    for ours, reference, _, _ in work_report.FLOORS:
        if ours in notes and reference in notes:
            ratio = f"{speeds[ours] / speeds[reference]:.3g}×"
            if several:
                notes[ours].append(f"{ratio} of the {WORK_NAMES[reference].partition(',')[0]}")
            else:
                notes[reference].append(f"oncehook {ratio}")
    return [Bar(WORK_NAMES[n], speeds[n], " · ".join(notes[n]), n.startswith("oncehook")) for n in given]


def draw_work(folder: Path, look: Look, path: Path) -> None:
    """Draw how many deliveries are worked off."""
    speeds = {name: one["jobs_per_second"] for name, one in _read(folder, "work")["contestants"].items()}
    found = {title: work_bars(speeds, names) for title, names in SCENARIOS.items()}
    found = {title: given for title, given in found.items() if given}
    sizes = [len(given) for given in found.values()]
    title = "Deliveries worked off per second, all durable, handlers that do nothing"
    height = 0.4 * sum(sizes) + 0.55 * len(sizes) + 0.5
    with draw_figure(look, path, height=height, title=title, rows=sizes) as rows:
        for axes, (name, given) in zip(rows, found.items(), strict=True):
            axes.set_title(name, loc="left", fontsize=10)
            bars(look, axes, given)


def draw_latency(folder: Path, look: Look, path: Path) -> None:
    """Milliseconds until answered and until done, by rate."""
    found = _read(folder, "latency")
    title = "From the moment an event was due: answered, and its delivery done"
    with draw_figure(look, path, height=3.4, title=title, panels=2) as panels:
        top = max(pace["done_p99_ms"] for paces in found["engines"].values() for pace in paces)
        for axes, (engine, paces) in zip(panels, found["engines"].items(), strict=True):
            rates = range(len(paces))
            for what, color in (("answer", look.other), ("done", look.ours)):
                label = "answered" if what == "answer" else "done"
                p50, p99 = ([pace[f"{what}_{at}_ms"] for pace in paces] for at in ("p50", "p99"))
                axes.plot(rates, p50, color=color, marker="o", markersize=4, label=f"{label}, p50")
                axes.plot(rates, p99, color=color, marker="o", markersize=4, linestyle=":", label=f"{label}, p99")
            axes.annotate(f"{paces[-1]['done_p50_ms']:.1f}", (rates[-1], paces[-1]["done_p50_ms"]), xytext=(6, -3),
                          textcoords="offset points", fontsize=9)  # fmt: skip
            axes.set_xticks(rates, [f"{pace['rate']:,}/s" for pace in paces])
            axes.set_ylim(0, top * 1.1)
            axes.set_ylabel("ms")
            axes.grid(axis="y", color=look.faint, linewidth=0.6)
            axes.set_title(ENGINES[engine], loc="left", fontsize=10)
        panels[0].legend(frameon=False, fontsize=8, loc="upper left")


def draw_growth(folder: Path, look: Look, path: Path) -> None:
    """Draw what a lease costs as the queue of one subject grows."""
    leases = _read(folder, "growth")["leases"]
    title = "One lease beside a subject with a long line (µs per delivery)"
    with draw_figure(look, path, height=3.0, title=title) as (axes,):
        names = [f"{int(depth):,} waiting" for depth in next(iter(leases.values()))]
        lines(look, axes, {engine: list(costs.values()) for engine, costs in leases.items()}, names)


def draw_filled(folder: Path, look: Look, path: Path) -> None:
    """Draw what a store takes in as it fills up."""
    intake = _read(folder, "growth")["intake"]
    title = "Webhooks taken in per second, by what the store holds already"
    with draw_figure(look, path, height=3.0, title=title) as (axes,):
        names = [f"{size['events']:,} events" if size["events"] else "empty" for size in next(iter(intake.values()))]
        lines(look, axes, {engine: [size["per_second"] for size in sizes] for engine, sizes in intake.items()}, names)


def lines(look: Look, axes: Any, given: dict[str, list[float]], names: Sequence[str]) -> None:
    """Draw a line per engine over the same places, with its last value by its first."""
    colors = dict(zip(ENGINES, (look.ours, look.second), strict=True))
    for engine, values in given.items():
        color = colors[engine]
        axes.plot(range(len(names)), values, color=color, marker="o", markersize=4)
        note = f"{ENGINES[engine]}, {values[-1] / values[0]:.2f}× as much"
        axes.annotate(note, (len(names) - 1, values[-1]), xytext=(8, -3), textcoords="offset points", color=color)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.2, len(names) - 0.1)
    axes.set_ylim(0, max(value for values in given.values() for value in values) * 1.25)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=look.faint, linewidth=0.6)


def draw_steady(folder: Path, look: Look, path: Path) -> None:
    """Draw how many events wait: a row per rate, a column per engine and what its planner knows."""
    found = _read(folder, "steady")
    ones, step = found["steady"], found["backlog_seconds"]
    columns = list(dict.fromkeys((one["scene"]["engine"], one["scene"]["statistics"]) for one in ones))
    rates = sorted(steady_report.distinct(ones, "rate"))
    subjects = sorted(steady_report.distinct(ones, "subjects"), key=lambda count: count or math.inf, reverse=True)
    usual = set(subjects) <= set(steady_report.SUBJECTS)  # then a number has the same colour in every picture
    colors = dict(zip(steady_report.SUBJECTS if usual else subjects, cycle(look.warmer), strict=False))
    longest = step * (max(len(one["backlog"]) for one in ones) - 1)
    title = f"Events waiting while {found['seconds']:g} s of steady traffic is received and delivered"
    height = 1.9 * len(rates) + 1.2
    with draw_figure(
        look, path, height=height, title=title, panels=len(columns), rows=[1] * len(rates), foot=0.3
    ) as panels:
        places = [(rate, column) for rate in rates for column in columns]
        for axes, (rate, (engine, known)) in zip(panels, places, strict=True):
            here = steady_report.select(ones, rate=rate, engine=engine, statistics=known)
            for count in subjects:
                waiting = usual_backlog(steady_report.select(here, subjects=count))
                seconds = [step * n for n in range(len(waiting))]
                axes.plot(seconds, waiting, color=colors[count], linewidth=1.2)
            axes.axvline(found["seconds"], color=look.other, linewidth=0.8)
            axes.set_yscale("symlog", linthresh=1, linscale=0.6)
            axes.set_ylim(0, 1.5 * max(10, *[most for one in ones for most in one["backlog"]]))
            axes.set_xlim(0, longest)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.grid(axis="y", color=look.faint, linewidth=0.6)
            if rate == rates[0]:
                axes.set_title(
                    ENGINES[engine] + (f", {known}" if engine == "postgres" else ""), loc="left", fontsize=10
                )
            if rate == rates[-1]:
                axes.set_xlabel("seconds")
            if (engine, known) == columns[0]:
                axes.set_ylabel(f"waiting at {rate:,}/s")
            else:
                axes.tick_params(labelleft=False)
        keys = [Line2D([], [], color=colors[count], label=steady_report.name_subjects(count)) for count in subjects]
        keys.append(Line2D([], [], color=look.other, linewidth=0.8, label="last event"))
        panels[0].figure.legend(handles=keys, loc="lower center", ncols=len(keys), frameon=False, fontsize=9)


def usual_backlog(rounds: Sequence[dict[str, Any]]) -> list[float]:
    """Return the median of the rounds at each moment; nothing waits in one that is over."""
    return [statistics.median(moment) for moment in zip_longest(*[one["backlog"] for one in rounds], fillvalue=0)]


def draw_stack(folder: Path, look: Look, path: Path) -> None:
    """Draw where the CPU of one arrival goes."""
    found = _read(folder, "stack")
    with draw_figure(
        look, path, height=3.6, title="Where the CPU of one arrival goes (µs, in our process)", panels=2
    ) as panels:
        widest = max(value for engine in found["layers"] for _, value in stack.rows(found, engine))
        for axes, engine in zip(panels, found["layers"], strict=True):
            layers = stack.rows(found, engine)
            total, whole = sum(value for _, value in layers), found["whole"][engine]["server_cpu_us"]
            given = [Bar(name, value, f"{value:.1f} · {value / total:.0%}", True) for name, value in layers]
            axes.set_title(f"{ENGINES[engine]}: {total:.0f} µs, {whole:.0f} under full load", loc="left", fontsize=10)
            bars(look, axes, given, widest)
        panels[1].set_yticks([])


PLOTS: dict[str, tuple[str, str, Callable[[Path, Look, Path], None]]] = {
    "ingest": ("ingest", "contestants", draw_ingest),
    "mixes": ("ingest", "duplicates", draw_mixes),
    "work": ("work", "contestants", draw_work),
    "latency": ("latency", "engines", draw_latency),
    "steady": ("steady", "steady", draw_steady),
    "growth": ("growth", "leases", draw_growth),
    "filled": ("growth", "intake", draw_filled),
    "stack": ("stack", "layers", draw_stack),
}
"""Picture: the file and the figures in it that it needs, and who draws it."""


def draw_all(folder: Path) -> list[Path]:
    """Draw every picture for which there are figures."""
    made = []
    for name, (file, needed, draw) in PLOTS.items():
        if not (folder / f"{file}.json").exists() or not _read(folder, file).get(needed):
            continue
        for look in LOOKS:
            path = folder / f"{name}-{look.name}.png"
            draw(folder, look, path)
            made.append(path)
    return made


def _read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Draw what is there."""
    parser = argparse.ArgumentParser(prog="scripts/bench plots", description=str(__doc__).split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the JSON lies, and where the pictures go")
    made = draw_all(parser.parse_args(words).folder)
    print("\n".join(map(str, made)))
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main())
