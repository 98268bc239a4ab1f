"""Measures the disk that the stores of a run lie on: how long does one fsync take?

The latency targets are multiples of this, so that they mean the same on a fast and on a slow disk.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

BLOCK = 8192


@dataclass(frozen=True)
class Disk:
    """Time of one appended block and its fsync."""

    p50_ms: float
    p99_ms: float
    samples: int

    @property
    def is_memory(self) -> bool:
        """Too fast for a disk: durability costs nothing here, and the figures say little."""
        return self.p50_ms < 0.005


def measure(folder: Path, *, seconds: float) -> list[float]:
    """Append and fsync for some time; the times in milliseconds."""
    times = []
    path = folder / "fsync"
    block = os.urandom(BLOCK)
    with path.open("wb", buffering=0) as file:
        deadline = time.perf_counter() + seconds
        while (started := time.perf_counter()) < deadline:
            file.write(block)
            os.fsync(file.fileno())
            times.append((time.perf_counter() - started) * 1000)
    path.unlink()
    return times


def summarize(times: list[float]) -> Disk:
    """Median and 99th percentile of what `measure` found."""
    ordered = sorted(times)
    return Disk(ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], len(ordered))
