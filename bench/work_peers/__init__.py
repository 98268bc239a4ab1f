"""The programs of the work benchmark, each run as `python -m bench.work_peers.NAME fill` and then `… work`.

`fill` makes an empty store and puts jobs into it; `work` works them off until it is stopped. What is common to
all comes through the environment: every program is given the same jobs. Started by `bench.work_contestants`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator

BATCH = 500
"""Jobs put in at once, where a program has a way to do so."""


def setting(name: str, default: str | None = None) -> str:
    """Read a setting of the benchmark, e.g. where the store is."""
    return os.environ[f"BENCH_{name}"] if default is None else os.environ.get(f"BENCH_{name}", default)


def subject_of(n: int) -> str | None:
    """Return the subject of a job: so many in turn; none where order does not matter."""
    subjects = int(setting("SUBJECTS"))
    return f"subject-{n % subjects}" if subjects else None


def body_of(n: int) -> str:
    """Build the JSON that a job carries."""
    start = json.dumps({"id": f"job-{n:09}", "text": ""})[:-2]
    return start + "x" * (int(setting("BODY")) - len(start) - 2) + '"}'


def batches() -> Iterator[range]:
    """Yield the numbers of all jobs, some at a time."""
    count = int(setting("JOBS"))
    for start in range(0, count, BATCH):
        yield range(start, min(count, start + BATCH))


def run(fill: Callable[[], None], work: Callable[[], None]) -> None:
    """Do what the command line says."""
    {"fill": fill, "work": work}[sys.argv[1]]()
