"""Two sides of one load, in turns: A, B and A again, round after round, and what follows from them.

A shared machine changes its speed from minute to minute, so sides are compared in one run only. Used by
`bench.against` (another commit and this tree) and `bench.ratios` (a reference and the product).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.engines import ROOT, BenchError
from bench.progress import Progress
from bench.report import short, table
from bench.verdicts import MIN_ROUNDS, NOISY_CORES, Comparison, Goal, compare
from bench.work_noise import Neighbours

ENGINES = ("sqlite", "postgres")
SIDES = ("a", "b", "again")

Figures = dict[str, float]
"""By their measure; of `…/s` more is better, of everything else less."""
Run = Callable[[Progress, str], Figures]
"""Takes one turn; gets a label for its progress."""
Found = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One of two that are compared at a load."""

    name: str
    run: Run


@dataclass(frozen=True)
class Pair:
    """A load for two sides."""

    title: str
    a: Side
    b: Side
    goals: Mapping[str, Goal] = field(default_factory=dict)
    """What B by A should be, by measure."""
    steps: int = 1
    """Steps of the progress in one turn."""

    def side(self, which: str) -> Side:
        """Return whose turn `a`, `b` or `again` is."""
        return self.b if which == "b" else self.a


def take_turns(rounds: int, pairs: Sequence[Pair]) -> Iterator[tuple[int, Pair, str]]:
    """Yield the number of the round, a pair, and which of `SIDES` has its turn.

    Both sides of a pair follow one another, and another is the first each time, because it might find a colder machine.
    """
    for number in range(rounds):
        for at, pair in enumerate(pairs):
            first = (number + at) % len(SIDES)
            for which in (*SIDES[first:], *SIDES[:first]):
                yield number, pair, which


def run_pairs(pairs: Sequence[Pair], rounds: int, store_pids: Sequence[int]) -> Found:
    """Run all turns; return plain values. Only rounds in which all turns went well are compared."""
    progress = Progress(rounds * len(SIDES) * sum(pair.steps for pair in pairs))
    turns: dict[str, list[dict[str, Any]]] = {pair.title: [{} for _ in range(rounds)] for pair in pairs}
    failures: dict[str, str] = {}
    for number, pair, which in take_turns(rounds, pairs):
        side, neighbours = pair.side(which), Neighbours(store_pids)
        try:
            figures = side.run(progress, f"round {number + 1} of {rounds}  {pair.title}  {side.name}")
        except BenchError as error:
            failures[f"{pair.title}  {side.name}"] = str(error)
            progress.result(f"FAILED: {error}")
            continue
        progress.result(", ".join(f"{name} {short(value)}" for name, value in figures.items()))
        turns[pair.title][number][which] = {"figures": figures, "others_cores": neighbours.cores()}
    return {
        "rounds": rounds,
        "pairs": [describe(pair, turns[pair.title]) for pair in pairs],
        "failures": failures,
    }


def describe(pair: Pair, turns: Sequence[dict[str, Any]]) -> Found:
    """Return what a pair came to, with everything that was measured."""
    return {
        "title": pair.title,
        "a": pair.a.name,
        "b": pair.b.name,
        "measures": [{**asdict(one), "text": str(one)} for one in compare_all(pair, turns)],
        "turns": list(turns),
    }


def compare_all(pair: Pair, turns: Sequence[dict[str, Any]]) -> list[Comparison]:
    """Compare every measure that both sides have."""
    whole = [one for one in turns if len(one) == len(SIDES)]
    if not whole:
        return []
    others = [one[which]["others_cores"] for one in whole for which in SIDES]
    found = []
    for name in whole[0]["b"]["figures"]:
        if all(name in one["a"]["figures"] for one in whole):
            values = [[one[which]["figures"][name] for one in whole] for which in SIDES]
            found.append(compare(name, *values, others_cores=others, goal=pair.goals.get(name)))
    return found


def render(found: Found) -> str:
    """Render the report as text: of each measure both sides, their ratio, the noise, and a verdict."""
    rounds = found["rounds"]
    parts = [
        f"{rounds} round{'s' * (rounds != 1)} of A, B and A again, loads of {found['seconds']:g} s; "
        f"disk: fsync p50 {found['disk']['p50_ms']:.3f} ms\n"
        "CPU µs: per event, of all processes. B / A: the median of the rounds and their range; noise: A / A.\n"
        f"A verdict needs {MIN_ROUNDS} rounds that agree, a median outside the noise, and neighbours that keep at most "
        f"{NOISY_CORES} cores busy."
    ]
    for pair in found["pairs"]:
        rows = [["", "A", "range", "B", "range", "B / A"]]
        for one in pair["measures"]:
            sides = [cell for side in (one["a"], one["b"]) for cell in _cells(side)]
            rows.append([one["measure"], *sides, one["text"]])
        text = table(rows) if len(rows) > 1 else "  no round in which every turn went well"
        parts.append(f"{pair['title']}\n  A: {pair['a']}   B: {pair['b']}\n{text}")
    return "\n\n".join(parts)


def _cells(spread: Mapping[str, float]) -> list[str]:
    return [short(spread["median"]), f"{short(spread['least'])}–{short(spread['most'])}"]


# -- the command line --------------------------------------------------------------------------


def read_count(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add what every comparison can be asked for."""
    record = ROOT / "bench/results" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    parser.add_argument(
        "--rounds", type=read_count, default=MIN_ROUNDS, help=f"of A, B and A again (default: {MIN_ROUNDS})"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load, roughly (default: 5)")
    parser.add_argument("--receivers", type=read_count, metavar="N", help="pass on to `oncehook serve` of this tree")
    parser.add_argument("--max-rate", type=read_count, default=30_000, help="events/s to prepare for (default: 30000)")
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument(
        "--json", type=Path, default=record, metavar="FILE", help="where the record goes (default: bench/results)"
    )
