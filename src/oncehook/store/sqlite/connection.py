"""The file of a SQLite store: opened for one writer at a time, migrated, copied; times and rows as it keeps them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from oncehook import clock, faults, model
from oncehook.errors import FileUnsafe, StoreError, StoreHeld, StoreUnavailable, Undecryptable
from oncehook.model import Clause, Engine
from oncehook.private import make_private, open_private
from oncehook.store.audit import entry_hash
from oncehook.store.cipher import Cipher
from oncehook.store.migrate import steps_from

Micros = int

SECOND: Final = 1_000_000
MINUTE: Final = 60_000_000
NEVER: Final = 1 << 62
"""Due at this moment: held until somebody replays or discards the dead letter at the head."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LONGEST: Final = 4096
"""Characters of an error or a reason that are kept."""


class Many:
    """A statement about many rows, run in few steps.

    With every step SQLite lets go of the interpreter's lock and has to win it back from the event loop. Row by row that
    costs more than the writing itself; so rows go in by the dozen.
    """

    def __init__(self, before: str, columns: int, after: str = "") -> None:
        row = f"({','.join('?' * columns)})"
        self._statements = [(n, f"{before} {','.join([row] * n)}{after}") for n in (48, 12, 3, 1)]

    def __call__(self, connection: sqlite3.Connection, rows: Sequence[Sequence[Any]]) -> int:
        """Run it for the rows in their order; returns how many were changed."""
        start = changed = 0
        for n, statement in self._statements:
            while len(rows) - start >= n:
                values = list(chain.from_iterable(rows[start : start + n]))
                changed += connection.execute(statement, values).rowcount
                start += n
        return changed

    @property
    def text(self) -> str:
        """Statement for a dozen rows, for tests of plans."""
        return self._statements[1][1]


class Insert(Many):
    def __init__(self, into: str, columns: int, otherwise: str = "") -> None:
        super().__init__(into + " VALUES", columns, " " + otherwise)


class Update(Many):
    """An UPDATE of many rows, each with values of its own: these are columns of `v`, under the names given."""

    def __init__(self, names: str, update: str) -> None:
        super().__init__(f"WITH v({names}) AS (VALUES", names.count(",") + 1, ") " + update)


class LookUp:
    """A statement that ends in a list of keys, run in few steps. Places that are left over hold NULL: no key."""

    def __init__(self, before: str) -> None:
        self._statements = [(n, f"{before} ({','.join('?' * n)})") for n in (32, 4, 1)]

    def __call__(self, connection: sqlite3.Connection, keys: Sequence[Any]) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        start = 0
        while start < len(keys):
            left = len(keys) - start
            n, statement = next(one for one in reversed(self._statements) if one[0] >= min(left, 32))
            part = [*keys[start : start + n], *[None] * (n - left)]
            found += connection.execute(statement, part).fetchall()
            start += n
        return found

    @property
    def text(self) -> str:
        """Statement for many keys, for tests of plans."""
        return self._statements[0][1]


COUNTERS: Final = Insert(
    "INSERT INTO counters (minute, source_id, destination_id, what, n)",
    5,
    "ON CONFLICT DO UPDATE SET n = n + excluded.n",
)


def count(connection: sqlite3.Connection, now: Micros, counts: Mapping[tuple[int, int, str], int]) -> None:
    """Add to the counters: (source, destination, what) -> how many."""
    minute = now - now % MINUTE
    COUNTERS(connection, [(minute, *where, n) for where, n in counts.items()])


def micros(seconds: float) -> Micros:
    return int(seconds * SECOND)


def to_micros(moment: datetime) -> Micros:
    return (moment - EPOCH) // timedelta(microseconds=1)


def moment(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def moment_or_none(micros: int | None) -> datetime | None:
    return None if micros is None else moment(micros)


def clean_text(text: str) -> str:
    """Return text that the store can hold and show: no NUL, no half surrogates, not without end."""
    return text[:LONGEST].replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def write_audit(
    connection: sqlite3.Connection, now: Micros, actor: str, act: str, target: str, detail: Mapping[str, object]
) -> None:
    last, before = connection.execute("SELECT n, hash FROM audit_chain").fetchone()
    words = (clean_text(actor), clean_text(act), clean_text(target), json.dumps(detail, default=str))
    entry = (last + 1, now, *words)
    hashed = entry_hash(before, *entry)
    connection.execute(
        "INSERT INTO audit (n, at, actor, act, target, detail, hash) VALUES (?,?,?,?,?,?,?)", (*entry, hashed)
    )
    connection.execute("UPDATE audit_chain SET n = ?, hash = ?", (last + 1, hashed))


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
"""Endings of the files that SQLite makes beside a database, with the rights of the database itself."""


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
    """Return the type of the file system a folder is on; empty where the system does not tell."""
    try:
        known = mounts.read_text().splitlines()
    except OSError:
        return ""
    here = str(folder.resolve())
    best, kind = "", ""
    for mount in known:
        _, mounted, name, *_ = mount.split(" ")
        at = mounted.replace("\\040", " ").rstrip("/")
        if (here == at or here.startswith(at + "/")) and len(at) >= len(best):
            best, kind = at, name
    return kind


def connect(path: Path, cipher: Cipher) -> sqlite3.Connection:
    """Open the one connection that writes. Refuses a file that cannot do WAL."""
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
    teach(connection, cipher)
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
def opening_errors(path: Path) -> Iterator[None]:
    """Turn what the system or SQLite raises while a file is opened into a sentence about the store."""
    try:
        yield
    except FileUnsafe as error:
        raise StoreUnavailable(f"{path} cannot be opened: {error}", hint=error.hint) from error
    except (OSError, sqlite3.Error) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise StoreUnavailable(
            f"{path} cannot be opened: {reason}", hint="Check `store`, and who may write to that folder."
        ) from error


def warn_of_old_library(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> str | None:
    """Return a warning where this SQLite has the WAL-reset bug. We are safe by writing with one connection only."""
    if version >= SAFE_VERSION:
        return None
    return (
        f"SQLite {'.'.join(map(str, version))} has the WAL-reset bug (fixed in 3.51.3): "
        "never write to this file with another program while oncehook runs. Its own commands are safe."
    )


def apply_migrations(connection: sqlite3.Connection, *, migrate: bool) -> None:
    """Bring the schema up to date, each step in one transaction with its row; prove that keys are unique."""
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
    """Return the schema's version; 0 for an empty file."""
    known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'migrations'").fetchone()
    if known is None:
        return 0
    (number,) = connection.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()
    return int(number)


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script one by one: `executescript` would commit on its own."""
    statement = ""
    for part in script.splitlines(keepends=True):
        statement += part
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
    """Close, and ignore what a failing disk raises."""
    with contextlib.suppress(sqlite3.Error):
        connection.close()


_DATA_CODES: Final = frozenset(
    {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE}
)
_PASSING_CODES: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM}
)


def is_data_error(error: Exception) -> bool:
    """Tell whether one row is to blame, not the disk: the database refuses it, or Python cannot even hand it over."""
    if isinstance(error, sqlite3.Error):
        return primary_code(error) in _DATA_CODES
    return isinstance(error, ValueError | OverflowError | TypeError)


def is_broken(error: Exception) -> bool:
    """Tell whether the connection is to be distrusted: I/O errors, corruption. A full disk only rolls back (R58)."""
    return not is_data_error(error) and primary_code(error) not in _PASSING_CODES


def is_full(error: Exception) -> bool:
    return primary_code(error) == sqlite3.SQLITE_FULL


def is_blocked(error: Exception) -> bool:
    """Tell whether another program holds the write lock; it will let go."""
    return primary_code(error) == sqlite3.SQLITE_BUSY


def primary_code(error: Exception) -> int | None:
    """Return SQLite's number for an error, without its finer shades."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


@dataclass(slots=True, frozen=True)
class FileHolder:
    """The process that writes now. Its address and token are empty while it serves nothing."""

    pid: int
    address: str = ""
    token: str = ""
    age: float = 0.0
    """Seconds since it took the file, or announced where it can be reached."""


def _lock_path(database: Path) -> Path:
    return database.with_name(database.name + "-lock")


class Hold:
    """The right to write one database file, kept until `release`."""

    def __init__(self, database: Path) -> None:
        self._descriptor = open_private(_lock_path(database), os.O_RDWR | os.O_CREAT)
        if not self._take():
            other = _read_holder(self._descriptor)
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
        text = json.dumps({"pid": os.getpid(), "address": address, "token": token}).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    def release(self) -> None:
        """Let another process write. The file stays: removing it would race with the next holder."""
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def holder(database: Path) -> FileHolder | None:
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
        return _read_holder(descriptor)
    else:
        return None
    finally:
        os.close(descriptor)


def _read_holder(descriptor: int) -> FileHolder:
    try:
        status = os.fstat(descriptor)
        fields = json.loads(os.pread(descriptor, status.st_size, 0) or b"{}")
        age = clock.now() - status.st_mtime
        return FileHolder(int(fields["pid"]), str(fields["address"]), str(fields["token"]), age)
    except (OSError, ValueError, KeyError):
        return FileHolder(0)


def _refusal(database: Path, other: FileHolder) -> StoreHeld:
    where = f" and serves {other.address}" if other.address else ""
    return StoreHeld(
        f"Process {other.pid} writes {database}{where}; SQLite takes one writing process.",
        hint="Send to that process, stop it first, or use PostgreSQL for several processes.",
    )


SIZE: Final = 4 << 20


class Reserve:
    """The file `<database>-reserve`."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + "-reserve")

    def make(self) -> bool:
        """Make the file, if there is room for as much again (else it is needed now); returns whether it is there."""
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


PAGES: Final = 512
"""Pages between two reports."""


def copy(store: Path, target: Path, report: Callable[[int, int], object] = lambda done, total: None) -> None:
    """Copy the store into a file that is not there yet. `report` is called with pages done and pages in all.

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


def teach(connection: sqlite3.Connection, cipher: Cipher) -> None:
    """Give a connection the functions that SAYS calls."""

    def encrypted_says(body: bytes, event_id: bytes, clauses: str) -> bool:
        try:
            return says(cipher.decrypt(body, "body", event_id), clauses)
        except Undecryptable:
            return False

    connection.create_function("body_says", 2, says, deterministic=True)
    connection.create_function("encrypted_says", 3, encrypted_says, deterministic=True)


def says(body: bytes, clauses: str) -> bool:
    return model.says(body, _decode_clauses(clauses))


@lru_cache(maxsize=32)
def _decode_clauses(clauses: str) -> list[Clause]:
    return msgspec.json.decode(clauses, type=list[Clause])
