"""Who writes a SQLite file: one process at a time, and where to find it.

The holder keeps an flock on a small file beside the database and writes into it its process id, its address and
a token for local commands. A second writer is refused with that advice; commands talk to the holder instead.
The lock dies with the process, so a crash leaves nothing to clean up.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from oncehook import clock
from oncehook.errors import StoreHeld
from oncehook.private import open_private


@dataclass(slots=True, frozen=True)
class Holder:
    """The process that writes now. Its address and token are empty while it serves nothing."""

    pid: int
    address: str = ""
    token: str = ""
    age: float = 0.0
    """Seconds since it took the file, or said where it can be reached."""


def _lock_path(database: Path) -> Path:
    return database.with_name(database.name + "-lock")


class Hold:
    """The right to write one database file, kept until `release`."""

    def __init__(self, database: Path) -> None:
        self._descriptor = open_private(_lock_path(database), os.O_RDWR | os.O_CREAT)
        if not self._take():
            other = _read(self._descriptor)
            os.close(self._descriptor)
            raise _refusal(database, other)
        self.announce()

    def _take(self) -> bool:
        # A command that only asks who holds the file (`holder`) has it locked for a moment: try more than once.
        for _ in range(5):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                threading.Event().wait(0.05)
            else:
                return True
        return False

    def announce(self, address: str = "", token: str = "") -> None:
        """Tell commands where this process can be reached."""
        text = json.dumps({"pid": os.getpid(), "address": address, "token": token}).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    def release(self) -> None:
        """Let another process write. The file stays: removing it would race with the next holder."""
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def holder(database: Path) -> Holder | None:
    """Return the process that writes this database now, or None. Raises FileUnsafe.

    Somebody else's lock file could send commands, and what they carry, to any address. Root may look at all of them.
    """
    try:
        descriptor = open_private(_lock_path(database), os.O_RDWR, as_root=True)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return _read(descriptor)
    else:
        return None
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Holder:
    try:
        status = os.fstat(descriptor)
        fields = json.loads(os.pread(descriptor, status.st_size, 0) or b"{}")
        age = clock.now() - status.st_mtime
        return Holder(int(fields["pid"]), str(fields["address"]), str(fields["token"]), age)
    except (OSError, ValueError, KeyError):
        return Holder(0)


def _refusal(database: Path, other: Holder) -> StoreHeld:
    where = f" and serves {other.address}" if other.address else ""
    return StoreHeld(
        f"Process {other.pid} writes {database}{where}; SQLite takes one writing process.",
        hint="Send to that process, stop it first, or use PostgreSQL for several processes.",
    )
