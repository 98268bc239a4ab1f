"""The history of a run: who did what and when, in the order in which the driver saw it.

Senders, the nemesis, proxies and the sink write it; handlers write the ledger, which is the same for their processes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that was done: an order sent, an answer, a fault."""

    t: float
    actor: str
    op: str
    about: str
    pid: int = 0


class History:
    """Kept in a file as well, so that a run that went wrong can be read afterwards."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self.moments: list[Moment] = []

    def add(self, actor: str, op: str, about: str = "", pid: int = 0) -> None:
        moment = Moment(time.time(), actor, op, about, pid)
        self.moments.append(moment)
        self._file.write(json.dumps(asdict(moment)) + "\n")

    def fault(self, kind: str, about: str = "", pid: int = 0) -> None:
        """Something was broken on purpose."""
        self.add("nemesis", kind, about, pid)

    def close(self) -> None:
        self._file.close()

    def pids(self, op: str) -> set[int]:
        """The processes to which this was done."""
        return {moment.pid for moment in self.moments if moment.op == op}

    def when(self, op: str) -> dict[int, float]:
        """When it was done to each of them, the last time."""
        return {moment.pid: moment.t for moment in self.moments if moment.op == op}

    def faults(self) -> Counter[str]:
        """How often each kind of fault was injected."""
        return Counter(moment.op for moment in self.moments if moment.actor == "nemesis")
