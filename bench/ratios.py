"""Is the product as far ahead as it should be? Each ratio that has a goal, measured in turns and held against it.

A is what the product is compared with, B the product. A has two turns in each round, so that the report knows how much
the same program differs from itself. Run by `scripts/bench ratios [NAME ...]`; talk on stderr, report on stdout, record
in JSON, exit 1 when a load failed. Intake on a full store is `scripts/bench growth`, which takes much longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench import contestants, pairs, part, turns, work_contestants
from bench.pairs import Found, Pair, Run, Side
from bench.traffic import MIXES
from bench.turns import OFFERED, Places
from bench.verdicts import Goal

MEASURES = {"ingest": "events/s", "duplicates": "events/s", "answers": "p50 ms", "http": "deliveries/s"}
"""What the goal is for, by load."""
REPEATED = max(MIXES)
TITLES = {
    "ingest": "taken in",
    "duplicates": "taken in",
    "answers": f"answered at {OFFERED}/s offered",
    "http": "delivered by HTTP",
}
INGEST = {one.name: one for one in contestants.CONTESTANTS}
WORK = {one.name: one for one in work_contestants.CONTESTANTS}


@dataclass(frozen=True)
class Ratio:
    """Two contestants, the same load, and what B by A should be."""

    name: str
    load: str
    a: str
    b: str
    goal: Goal

    @property
    def engines(self) -> set[str]:
        """Return what has to run for it."""
        known = WORK if self.load == "http" else INGEST
        return {known[self.a].engine, known[self.b].engine}

    @property
    def title(self) -> str:
        """Say what is compared."""
        return f"{self.name}  {TITLES[self.load]}"


RATIOS = [
    Ratio("sqlite-asyncpg", "ingest", "fastapi_asyncpg", "oncehook_sqlite", Goal(4.0)),
    Ratio("postgres-asyncpg", "ingest", "fastapi_asyncpg", "oncehook_postgres", Goal(4.5)),
    Ratio("sqlite-bare", "ingest", "thin_sqlite", "oncehook_sqlite", Goal(0.9)),
    Ratio("sqlite-duplicates", "duplicates", "oncehook_sqlite", "oncehook_sqlite", Goal(1.3)),
    Ratio("postgres-duplicates", "duplicates", "oncehook_postgres", "oncehook_postgres", Goal(1.3)),
    Ratio("sqlite-http", "http", "aiohttp", "oncehook_http_sqlite", Goal(0.7)),
    Ratio("postgres-http", "http", "aiohttp", "oncehook_http_postgres", Goal(0.7)),
    Ratio("sqlite-p50", "answers", "thin_sqlite", "oncehook_sqlite", Goal(2.0, at_most=True)),
    Ratio("postgres-p50", "answers", "thin_postgres", "oncehook_postgres", Goal(2.0, at_most=True)),
]


def make_pair(ratio: Ratio, places: Places) -> Pair:
    """Build the load of both contestants."""
    if ratio.load == "duplicates":
        a = Side(f"{ratio.a}, unique keys", make_run("ingest", ratio.a, places))
        b = Side(f"{ratio.b}, {REPEATED:.0%} duplicates", make_run(ratio.load, ratio.b, places))
    else:
        a, b = (Side(name, make_run(ratio.load, name, places)) for name in (ratio.a, ratio.b))
    return Pair(ratio.title, a, b, {MEASURES[ratio.load]: ratio.goal}, steps=1 if ratio.load == "http" else 2)


def make_run(load: str, name: str, places: Places) -> Run:
    """Build the turn of one contestant."""
    settings = places.settings
    if load == "http":
        return partial(turns.run_http, one=WORK[name], place=places.queue, seconds=settings.seconds)
    if load == "answers":
        return partial(turns.run_answers, one=INGEST[name], place=places.intake, settings=settings)
    repeated = REPEATED if load == "duplicates" else 0.0
    return partial(turns.run_ingest, one=INGEST[name], place=places.intake, settings=settings, repeated=repeated)


def run(arguments: argparse.Namespace) -> Found:
    """Measure the ratios that were asked for; return plain values."""
    wanted = [one for one in RATIOS if one.name in arguments.names]
    with turns.open_places(
        set().union(*[one.engines for one in wanted]),
        seconds=arguments.seconds,
        max_rate=arguments.max_rate,
        folder=arguments.folder,
        receivers=arguments.receivers,
        duplicates=any(one.load == "duplicates" for one in wanted),
    ) as places:
        return turns.run_pairs([make_pair(one, places) for one in wanted], arguments.rounds, places)


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = [one.name for one in RATIOS]
    parser = argparse.ArgumentParser(prog="scripts/bench ratios", description=str(__doc__).split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names)} (default: all)")
    pairs.add_options(parser, "ratios")
    arguments = parser.parse_args(words)
    for name in arguments.names:
        if name not in names:
            parser.error(f"{name}: there are {', '.join(names)}")
    arguments.names = arguments.names or names
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the report; return the exit status."""
    arguments = read_arguments(words)
    return part.print_report("ratios", lambda: run(arguments), pairs.render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
