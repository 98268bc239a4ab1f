"""A copy of a SQLite store as it is at one moment, made while another process goes on writing it.

`copy` reads one snapshot, page by page, and writes it beside the target first: a file of the target's name is a whole
backup, checked and on the disk. `oncehook db backup` calls it; nothing else does.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from oncehook.errors import StoreUnavailable

PAGES: Final = 512
"""Pages between two reports."""


def copy(store: Path, target: Path, report: Callable[[int, int], object] = lambda done, total: None) -> None:
    """Copy the store into a file that is not there yet. `report` is told pages done and pages in all.

    Raises StoreUnavailable when there is no store, or the copy is not sound; OSError when it cannot be written.
    """
    if not store.exists():
        raise StoreUnavailable(f"There is no store at {store} yet.", hint="Start `oncehook serve` once.")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    # Bodies are in it: for its owner's eyes, as the store itself is.
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        _copy(store, partial, report)
        _sync(partial)
        if target.exists():
            raise FileExistsError(f"{target} is there already")
        partial.rename(target)
        _sync(target.parent)
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{store} cannot be copied: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _copy(store: Path, partial: Path, report: Callable[[int, int], object]) -> None:
    reading = f"{store.absolute().as_uri()}?mode=ro"
    with (
        closing(sqlite3.connect(reading, uri=True, isolation_level=None, timeout=10)) as ours,
        closing(sqlite3.connect(partial, isolation_level=None)) as theirs,
    ):
        # One read transaction around it all: the copy is of one moment, and writers do not make it begin again.
        ours.execute("BEGIN")
        ours.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        ours.backup(theirs, pages=PAGES, progress=lambda _, left, total: report(total - left, total))
        theirs.execute("PRAGMA journal_mode = DELETE")
        found = theirs.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreUnavailable(f"The copy of {store} is not sound: {found}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
