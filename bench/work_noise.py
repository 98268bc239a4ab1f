"""How much of this machine was busy with something that is no part of the benchmark, between two moments."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from bench.engines import family_of, machine_seconds


class Neighbours:
    """Watches the machine from the moment it is made."""

    def __init__(self, store_pids: Sequence[int]) -> None:
        self._pids = [os.getpid(), *store_pids]
        self._began = self._clocks()

    def cores(self) -> float:
        """Cores that others kept busy since then."""
        elapsed, machine, ours = (after - before for after, before in zip(self._clocks(), self._began, strict=True))
        return max(0.0, machine - ours) / elapsed

    def _clocks(self) -> tuple[float, float, float]:
        # The store may be a child of ours, or not: nobody is counted twice.
        family = {process.pid: process for process in family_of(self._pids)}
        ours = 0.0
        for process in family.values():
            with suppress(psutil.NoSuchProcess):
                ours += sum(process.cpu_times()[:4])
        return time.monotonic(), machine_seconds(), ours
