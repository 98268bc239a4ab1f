"""Everything in one run: each part in turn, its JSON and its text kept beside one another, pictures at the end.

Every part is also a command of its own (`scripts/bench ingest`), and a part that fails does not keep the others from
running. Run by `scripts/bench`; talk on stderr, reports on stdout, exit 1 when a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import growth, ingest, latency, machine, memory, plots, stack, steady, work
from bench.engines import ROOT

PARTS = {
    "ingest": ingest.main,
    "latency": latency.main,
    "memory": memory.main,
    "stack": stack.main,
    "work": work.main,
    "steady": steady.main,
    "growth": growth.main,
}
HAS_ROUNDS = ("ingest", "work")


def words_for(part: str, arguments: argparse.Namespace) -> list[str]:
    """Build the command line of one part."""
    words = ["--json", str(arguments.out / f"{part}.json"), "--seconds", f"{arguments.seconds:g}"]
    if part in HAS_ROUNDS:
        words += ["--rounds", str(arguments.rounds)]
    if part == "work":
        words += ["--waiting", str(arguments.waiting)]
    if part == "steady":
        # One rate, and not the hot subject: with `scripts/bench steady` alone it takes an hour.
        words += ["--rate", "1000", "--only", "steady", "alone"]
    if part == "growth":
        words += [word for size in arguments.events for word in ("--events", str(size))] or ["--no-intake"]
    if arguments.folder:
        words += ["--folder", str(arguments.folder)]
    return words


def run_part(part: str, arguments: argparse.Namespace) -> bool:
    """Run one part; what it prints is kept, and printed."""
    print(f"== {part}", file=sys.stderr)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        failed = PARTS[part](words_for(part, arguments)) != 0
    (arguments.out / f"{part}.txt").write_text(printed.getvalue())
    print(f"== {part}\n\n{printed.getvalue()}", flush=True)
    return not failed


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=str(__doc__).split("\n")[0],
        epilog="Parts: " + ", ".join(PARTS) + "; `scripts/bench PART --help` says more.",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load (default: 5)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every contestant (default: 2)")
    parser.add_argument("--waiting", type=int, default=1_000_000, help="the largest backlog (default: 1000000)")
    parser.add_argument(
        "--events", type=int, action="append", default=[], help="growth: also intake on a store of this size (repeat)"
    )
    parser.add_argument("--leave-out", action="append", default=[], choices=list(PARTS), help="a part (repeat)")
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench/results", help="where reports go (default: bench/results)"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run all parts, then draw."""
    arguments = read_arguments(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "machine.json").write_text(json.dumps(machine.describe(), indent=2) + "\n")
    went_well = [run_part(part, arguments) for part in PARTS if part not in arguments.leave_out]
    print("\n".join(map(str, plots.draw_all(arguments.out))))
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
