"""Counts that limits are held to, in all and by network: of one process, or of all processes of a server together.

Processes share them in memory: each writes its own row and reads all of them, so that none waits for another.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections import Counter
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from oncehook import clock

CONNECTIONS: Final = 0
BODIES: Final = 1
DROPPED: Final = 2
"""Tables of counts: open connections, bytes of unfinished bodies, and of bodies for no source."""
_TABLES: Final = 3
_SLOTS: Final = 16_384
"""Networks that share one are counted together: with a few thousand of them, that is rare and costs them little."""
_WIDTH: Final = _SLOTS + 1
_ROW: Final = _TABLES * _WIDTH


class NetworkCount:
    """A count in all and by network, of one process."""

    processes = 1
    """Processes that count together."""

    def __init__(self) -> None:
        self.own = 0
        """Sum over all networks, of this process."""
        self._of: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.own

    def add(self, network: str, by: int) -> None:
        self.own += by
        self._of[network] += by
        if not self._of[network]:
            del self._of[network]

    def of(self, network: str) -> int:
        """Return the count of one network."""
        return self._of[network]

    def own_of(self, network: str) -> int:
        """Return what this process counts of one network."""
        return self._of[network]


class SharedCounts:
    """Memory of the counts of several processes, one row each."""

    def __init__(self, descriptor: int, processes: int, row: int, seed: bytes) -> None:
        """`seed` keeps outsiders from choosing networks that share a slot with somebody else's."""
        self.descriptor = descriptor
        self.processes = processes
        self.seed = seed
        self._row = row
        self._cells = memoryview(mmap.mmap(descriptor, processes * _ROW * 8)).cast("q")
        self.slot_of = lru_cache(maxsize=4096)(self._slot_of)

    @classmethod
    def create(cls, processes: int) -> SharedCounts:
        """Make the memory, with nothing counted; this process has the first row."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("oncehook-counts")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.write(descriptor, bytes(processes * _ROW * 8))  # written, for a page without a block could not be later
        return cls(descriptor, processes, 0, clock.random_bytes(16))

    def count_of(self, table: int) -> SharedNetworkCount:
        return SharedNetworkCount(self, table)

    def add(self, place: int, by: int) -> None:
        self._cells[self._row * _ROW + place] += by

    def sum(self, place: int) -> int:
        return sum(self._cells[row * _ROW + place] for row in range(self.processes))

    def clear(self, row: int) -> None:
        """Forget what a process counted that is gone."""
        self._cells[row * _ROW : (row + 1) * _ROW] = memoryview(bytes(_ROW * 8)).cast("q")

    def _slot_of(self, network: str) -> int:
        return int.from_bytes(blake2b(network.encode(), digest_size=4, key=self.seed).digest()) % _SLOTS


class SharedNetworkCount(NetworkCount):
    """A count of several processes together."""

    def __init__(self, counts: SharedCounts, table: int) -> None:
        super().__init__()
        self.processes = counts.processes
        self._counts = counts
        self._place = table * _WIDTH

    @property
    def total(self) -> int:
        return self._counts.sum(self._place)

    def add(self, network: str, by: int) -> None:
        super().add(network, by)
        self._counts.add(self._place, by)
        self._counts.add(self._place + 1 + self._counts.slot_of(network), by)

    def of(self, network: str) -> int:
        return self._counts.sum(self._place + 1 + self._counts.slot_of(network))
