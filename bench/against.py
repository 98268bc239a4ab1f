"""Is this tree slower than another commit? Both under the same loads, in one run and in turns.

The commit is checked out beside this tree and runs in processes of its own, with the packages of this environment. It
has two turns in each round, so that the report knows how much the same program differs from itself. Run by
`scripts/bench --against COMMIT` (`scripts/bench ingest --against COMMIT`: one part); talk on stderr, report on stdout,
record in JSON, exit 1 when a load failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench import contestants, pairs, part, steady, turns, work_contestants
from bench.engines import ROOT
from bench.pairs import Figures, Found, Pair, Side
from bench.steady_report import Scene
from bench.trees import HERE, check_out, name_commit
from bench.turns import Places
from bench.verdicts import CPU, Goal

PARTS = ("ingest", "work", "latency", "steady")
STEADY_RATE = 1_000


@dataclass(frozen=True)
class Load:
    """Something that both trees do in every round."""

    title: str
    run: Callable[..., Figures]
    steps: int = 1
    here: dict[str, Any] = field(default_factory=dict)
    """What is different for this tree."""


def list_loads(arguments: argparse.Namespace, places: Places) -> list[Load]:
    """List what was asked for: every contestant of `bench.ingest` and `bench.work` that is the product, and more."""
    loads = []
    about: dict[str, Any] = {"place": places.queue, "seconds": arguments.seconds}
    if "ingest" in arguments.parts:
        for one in contestants.CONTESTANTS:
            if one.is_ours and one.processes == 1 and one.engine in arguments.engine:
                receive = partial(turns.run_ingest, one=one, place=places.intake, settings=places.settings)
                # The commit may not know the option.
                here = {"place": contestants.with_receivers(places.intake, arguments.receivers)}
                loads.append(Load(f"ingest  {one.engine}", receive, 2, here))
    if "work" in arguments.parts:
        loads += [
            Load(f"work  {job.name}", partial(turns.run_work, one=job, **about))
            for job in work_contestants.CONTESTANTS
            if job.is_ours and job.engine in arguments.engine
        ]
    for engine in arguments.engine if "latency" in arguments.parts else ():
        offer = partial(turns.run_latency, engine=engine, prepared=places.intake.traffic, **about)
        loads.append(Load(f"latency  {engine}", offer))
    for engine in arguments.engine if "steady" in arguments.parts else ():
        scene = Scene(engine, arguments.rate, arguments.subjects, "fresh")
        loads.append(Load(f"steady  {scene}", partial(turns.run_steady, scene=scene, **about)))
        alone = partial(turns.run_work, one=steady.contestant_of(engine), **about)
        loads.append(Load(f"steady  {engine}  one subject drained", alone))
    return loads


def read_goals(arguments: argparse.Namespace) -> dict[str, Goal]:
    """Return what every load is held to, by measure."""
    goals = {}
    if arguments.cpu_goal is not None:
        goals[CPU] = Goal(arguments.cpu_goal, at_most=True)
    if arguments.rate_goal is not None:
        goals |= {rate: Goal(arguments.rate_goal) for rate in ("events/s", "deliveries/s")}
    return goals


def run(arguments: argparse.Namespace) -> Found:
    """Run every load on both trees, round after round; return plain values."""
    other, here = name_commit(arguments.against), HERE
    if arguments.receivers:
        here += f" with --receivers {arguments.receivers}"
    goals = read_goals(arguments)
    about = {"seconds": arguments.seconds, "max_rate": arguments.max_rate, "folder": arguments.folder}
    with check_out(arguments.against) as tree, turns.open_places(arguments.engine, **about) as places:
        wanted = [
            Pair(
                load.title,
                Side(other, partial(load.run, tree=tree)),
                Side(here, partial(load.run, tree=ROOT, **load.here)),
                goals,
                load.steps,
            )
            for load in list_loads(arguments, places)
        ]
        return {"against": other, **turns.run_pairs(wanted, arguments.rounds, places)}


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", usage="%(prog)s [PART ...] --against COMMIT [options]",
        description=str(__doc__).split("\n")[0],
    )  # fmt: skip
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--against", metavar="COMMIT", required=True, help="side A; side B is this tree")
    parser.add_argument("--cpu-goal", type=float, metavar="RATIO", help="CPU per event should be at most this, B / A")
    parser.add_argument("--rate-goal", type=float, metavar="RATIO", help="rates should be at least this, B / A")
    parser.add_argument(
        "--rate", type=pairs.read_count, default=STEADY_RATE, help=f"steady: events per second (default: {STEADY_RATE})"
    )
    parser.add_argument(
        "--subjects", type=steady.read_subjects, default=0, metavar="N", help="steady: how many (default: unique)"
    )
    parser.add_argument("--engine", action="append", choices=pairs.ENGINES, help="only this (repeat)")
    pairs.add_options(parser, "against")
    arguments = parser.parse_args(words)
    for one in arguments.parts:
        if one not in PARTS:
            parser.error(f"{one}: only {', '.join(PARTS)} can be run like this")
    arguments.parts = arguments.parts or PARTS
    if arguments.receivers and list(arguments.parts) != ["ingest"]:
        parser.error("--receivers: only ingest can be run with it")
    arguments.engine = arguments.engine or pairs.ENGINES
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report; return the exit status."""
    arguments = read_arguments(words)
    return part.print_report("against", lambda: run(arguments), pairs.render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
