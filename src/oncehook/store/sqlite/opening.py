"""How a SQLite file is opened so that it keeps its promises, and what its errors mean.

The promises: WAL with `synchronous=FULL` (R2), one writing connection, no mmap, never on a network file system
(R61), files that only their owner can read (S38), a schema this program knows, a dedup index that stands (R66).
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from oncehook import clock, faults
from oncehook.errors import FileUnsafe, StoreError, StoreUnavailable
from oncehook.model import Engine
from oncehook.private import make_private
from oncehook.store.cipher import Cipher
from oncehook.store.migrate import steps_from
from oncehook.store.sqlite import bodies

log = logging.getLogger("oncehook.store")

SAFE_VERSION: Final = (3, 51, 3)
"""The first release without the WAL-reset bug, which needs two writing connections to strike."""

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.glusterfs", "fuse.sshfs", "glusterfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb2", "smb3", "smbfs"),
    }
)


_BESIDE: Final = ("-wal", "-shm", "-journal")
"""How SQLite calls the files that it makes beside a database, with the rights of the database itself."""


def make_local_folder(path: Path, *, instead: str) -> None:
    """Make the folder of a file, for its owner only. Raises StoreError on a network file system."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = file_system(path.parent)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold.",
            hint=f"Put the file on a local disk, or use {instead}.",
        )


def prepare_folder(path: Path) -> None:
    """Make the folder and the file, readable by their owner only, and refuse a network file system.

    What is there already, the log of a process that died included, is made so too. Raises FileUnsafe where it is
    not ours.
    """
    make_local_folder(path, instead="PostgreSQL")
    for ending in _BESIDE:
        make_private(path.with_name(path.name + ending))
    make_private(path, create=True)


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system a folder is on; empty where the system does not tell."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    here = str(folder.resolve())
    best, kind = "", ""
    for line in lines:
        _, mounted, name, *_ = line.split(" ")
        at = mounted.replace("\\040", " ").rstrip("/")
        if (here == at or here.startswith(at + "/")) and len(at) >= len(best):
            best, kind = at, name
    return kind


def connect(path: Path, cipher: Cipher) -> sqlite3.Connection:
    """The one connection that writes. Refuses a file that cannot do WAL."""
    _spare_adapting()
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.execute("PRAGMA page_size = 4096")  # before the first table; keys dirty a page each: small ones
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        connection.close()
        raise StoreUnavailable(f"{path} cannot be opened in WAL mode (it is in {mode} mode).")
    for setting in (
        # Always, and not only while a subject is erased: what was overwritten or thrown away before, an earlier error
        # or the oldest of many copies, would stay in the file for as long as its page is free (S37).
        "PRAGMA secure_delete = ON",
        "PRAGMA synchronous = FULL",
        "PRAGMA fullfsync = ON",
        "PRAGMA checkpoint_fullfsync = ON",
        "PRAGMA mmap_size = 0",
        "PRAGMA cache_size = -32768",
        "PRAGMA temp_store = MEMORY",
        "PRAGMA journal_size_limit = 67108864",
    ):
        connection.execute(setting)
    bodies.teach(connection, cipher)
    return connection


def _spare_adapting() -> None:
    """Let `sqlite3` take bytes and None as they are.

    For each of them it looks for an adapter, in vain, and raises and drops an AttributeError on the way: a seventh of
    what it takes to store an arrival. So it is given adapters that hand back what they get, where there are none.
    """
    adapters: dict[type[Any], Callable[[Any], Any]] = {bytes: bytes, type(None): {}.get}
    for kind, same in adapters.items():
        if (kind, sqlite3.PrepareProtocol) not in sqlite3.adapters:
            sqlite3.register_adapter(kind, same)


@contextlib.contextmanager
def telling(path: Path) -> Iterator[None]:
    """While a file is opened: what the system or SQLite says against it, as a sentence about the store."""
    try:
        yield
    except FileUnsafe as error:
        raise StoreUnavailable(f"{path} cannot be opened: {error}", hint=error.hint) from error
    except (OSError, sqlite3.Error) as error:
        said = (isinstance(error, OSError) and error.strerror) or error
        raise StoreUnavailable(
            f"{path} cannot be opened: {said}", hint="Check `store`, and who may write to that folder."
        ) from error


def warn_of_old_library(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> str | None:
    """A sentence when this SQLite has the WAL-reset bug. We are safe by writing with one connection only."""
    if version >= SAFE_VERSION:
        return None
    return (
        f"SQLite {'.'.join(map(str, version))} has the WAL-reset bug (fixed in 3.51.3): "
        "never write to this file with another program while oncehook runs. Its own commands are safe."
    )


def migrate(connection: sqlite3.Connection, *, migrate: bool) -> None:
    """Bring the schema up to date, each step in one transaction with its row; prove that dedup stands."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations"
        " (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL)"
    )
    for step in steps_from(Engine.sqlite, version(connection), migrate=migrate):
        with transaction(connection):
            for statement in _statements(step.sql):
                connection.execute(statement)
            connection.execute(
                "INSERT INTO migrations (version, name, applied_at) VALUES (?,?,?)",
                (step.version, step.name, int(clock.now() * 1_000_000)),
            )
            faults.point("before_migration_commit")
    _prove_dedup_index(connection)


def version(connection: sqlite3.Connection) -> int:
    """The schema's version; 0 for an empty file."""
    known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'migrations'").fetchone()
    if known is None:
        return 0
    (number,) = connection.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()
    return int(number)


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script one by one: `executescript` would commit on its own."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _prove_dedup_index(connection: sqlite3.Connection) -> None:
    unique = connection.execute(
        "SELECT 1 FROM pragma_index_list('keys') AS l, pragma_index_info(l.name) AS c"
        " WHERE l.\"unique\" AND NOT l.partial AND c.name = 'hash'"
    ).fetchone()
    if unique is None:
        raise StoreError("The unique index on keys.hash is missing: duplicates could not be recognised.")


def verify(connection: sqlite3.Connection) -> None:
    """Read the whole file and commit one write: after a failure, only this makes the store ready again."""
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StoreError(f"The database is damaged: {verdict}", hint="Restore a backup.")
    with transaction(connection):
        connection.execute("UPDATE marks SET value = value WHERE name = 'clock'")


def empty_log(connection: sqlite3.Connection) -> bool:
    """Fold the log into the database and cut it off; False where that cannot be: a reader needs it, or the disk fails.

    A failure does no harm: what was committed stays in the log.
    """
    try:
        is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        log.warning("store.log_not_emptied", extra={"fields": {"error": str(error)}})
        return False
    return not is_busy


def disconnect(connection: sqlite3.Connection) -> None:
    """Close; what a failing disk says about it no longer matters."""
    with contextlib.suppress(sqlite3.Error):
        connection.close()


_DATA_CODES: Final = frozenset(
    {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE}
)
_PASSING_CODES: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM}
)


def is_data_error(error: Exception) -> bool:
    """One row is to blame, not the disk: the database refuses it, or Python could not even hand it over."""
    if isinstance(error, sqlite3.Error):
        return primary_code(error) in _DATA_CODES
    return isinstance(error, ValueError | OverflowError | TypeError)


def is_broken(error: Exception) -> bool:
    """The connection can no longer be believed: I/O errors, corruption. A full disk only rolls back (R58)."""
    return not is_data_error(error) and primary_code(error) not in _PASSING_CODES


def is_full(error: Exception) -> bool:
    """There is no space left."""
    return primary_code(error) == sqlite3.SQLITE_FULL


def is_blocked(error: Exception) -> bool:
    """Another program holds the write lock; it will let go."""
    return primary_code(error) == sqlite3.SQLITE_BUSY


def primary_code(error: Exception) -> int | None:
    """SQLite's own number for an error, without its finer shades."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
