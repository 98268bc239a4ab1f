"""A few megabytes kept beside the database for the day the disk is full (R58).

Deleting needs room too. When a write finds no space the reserve is given up, so that work goes on and pruning can make
room, while arrivals are answered 503; it is made again as soon as there is space. Called by the writer.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

SIZE: Final = 4 << 20


class Reserve:
    """The file `<database>-reserve`."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + "-reserve")

    def make(self) -> bool:
        """Have it; says whether that went well. Only when there is room for as much again: else it is needed now."""
        if self._path.exists():
            return True
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, 2 * SIZE)
                os.ftruncate(descriptor, SIZE)
            finally:
                os.close(descriptor)
        except OSError:
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        """Let the database have the space."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
