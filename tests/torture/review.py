"""The security review, repeated: `scripts/fuzz --minutes 60 --only framings,pages --seed 7`.

Each part tries what it has by heart, then goes on by chance until its share of the time is over. One table tells how
many were tried, accepted though they must not be, ended in an error of ours or in a 5xx, and how long the slowest took.
Ends with 1 when there is a finding. Loopback only.
"""

from __future__ import annotations

import argparse
import logging
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MOST_PRINTED = 20
"""Findings of a part that are printed one by one."""


@dataclass
class Tally:
    """The result of one part: a row of the table."""

    part: str
    tried: int = 0
    accepted: int = 0
    crashes: int = 0
    failed: int = 0
    slowest: float = 0.0
    printed: list[str] = field(default_factory=list)

    @property
    def findings(self) -> int:
        return self.accepted + self.crashes + self.failed

    def accept(self, what: str) -> None:
        """Count something that must have been refused."""
        self.accepted += 1
        self._note(f"accepted wrongly: {what}")

    def crash(self, what: str) -> None:
        """Count an error that nobody was meant to see."""
        self.crashes += 1
        self._note(f"crashed: {what}")

    def fail(self, what: str) -> None:
        """Count a 5xx."""
        self.failed += 1
        self._note(f"5xx: {what}")

    def _note(self, what: str) -> None:
        if len(self.printed) < MOST_PRINTED:
            self.printed.append(f"{self.part}: {what}")

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Count one try, and how long it takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.tried += 1
            self.slowest = max(self.slowest, time.perf_counter() - began)


@dataclass
class Budget:
    """The time that a part may go on by chance, and the dice for it."""

    seconds: float
    seed: int
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    @property
    def is_left(self) -> bool:
        return time.monotonic() - self.began < self.seconds


Part = Callable[[Tally, Budget, Path], None]


class Errors(logging.Handler):
    """A log handler that counts tracebacks of a server under test as crashes, whatever the sender was answered."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.ERROR)
        self._tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.name.startswith(("asyncio", "uvicorn")):
            error = record.exc_info[1] if record.exc_info else None
            self._tally.crash(f"{record.name}: {record.getMessage()} {error!r}")


def run(name: str, part: Part, seconds: float, seed: int) -> Tally:
    """Run a part; return its result."""
    tally = Tally(name)
    errors = Errors(tally)
    logging.getLogger().addHandler(errors)
    try:
        with tempfile.TemporaryDirectory(prefix="oncehook-fuzz-") as folder:
            part(tally, Budget(seconds, seed), Path(folder))
    finally:
        logging.getLogger().removeHandler(errors)
    return tally


def parts() -> dict[str, Part]:
    """Return every part by name, in the order of the table."""
    from tests.torture import review_calls, review_pages, review_wire

    return {
        "framings": review_wire.framings,
        "damaged": review_wire.damaged_requests,
        "readers": review_wire.readers,
        "signatures": review_calls.signatures,
        "addresses": review_calls.addresses,
        "pages": review_pages.pages,
        "roles": review_pages.roles,
    }


def table(tallies: Sequence[Tally]) -> str:
    """Return the rows, aligned."""
    rows = [("part", "tried", "accepted wrongly", "crashes", "5xx", "slowest")]
    rows += [
        (t.part, f"{t.tried:,}", f"{t.accepted:,}", f"{t.crashes:,}", f"{t.failed:,}", f"{t.slowest * 1000:,.0f} ms")
        for t in tallies
    ]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts; return the exit code."""
    known = parts()
    reader = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    reader.add_argument("--minutes", type=float, default=2.0, help="for all parts together")
    reader.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="repeats the dice of a run")
    reader.add_argument("--only", default=",".join([*known, "flood"]), help="parts, by comma")
    given = reader.parse_args(arguments)
    chosen = given.only.split(",")
    for name in chosen:
        if name not in {*known, "flood"}:
            reader.error(f"there is no part {name}; there are {', '.join([*known, 'flood'])}")
    share = given.minutes * 60 / len(chosen)
    tallies = []
    for name in chosen:
        if name != "flood":
            sys.stderr.write(f"fuzz {name} for {share:.0f} s, seed {given.seed}\n")
            tallies.append(run(name, known[name], share, given.seed))
    lines = [table(tallies)] if tallies else []
    lines += [text for tally in tallies for text in tally.printed]
    is_slow = False
    if "flood" in chosen:
        from tests.torture import review_flood

        outcome = review_flood.measure(min(share / 2, 60.0))
        lines.append(outcome.table())
        is_slow = not outcome.holds
    found = sum(tally.findings for tally in tallies)
    lines.append(f"{found:,} findings in {sum(tally.tried for tally in tallies):,} tries, seed {given.seed}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found or is_slow else 0


if __name__ == "__main__":
    sys.exit(main())
