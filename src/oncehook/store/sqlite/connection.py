"""The file of a SQLite store: opened for one writer at a time, migrated, copied; times and rows as it keeps them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from oncehook import clock, faults, model
from oncehook.errors import FileUnsafe, StoreError, StoreHeld, StoreUnavailable, Undecryptable
from oncehook.model import Clause, Engine, Id, Outcome
from oncehook.private import make_private, open_private
from oncehook.store.audit import entry_hash
from oncehook.store.cipher import Cipher
from oncehook.store.migrate import steps_from

Micros = int

SECOND: Final = 1_000_000
MINUTE: Final = 60_000_000
NEVER: Final = 1 << 62
"""A due time that never comes: held until a person replays or discards the dead letter at the head."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LONGEST: Final = 4096
"""Characters of an error or a reason that are kept."""


class Many:
    """A statement about many rows, run in few steps.

    At every step SQLite releases the interpreter's lock and has to win it back from the event loop. Row by row that
    costs more than the writing itself, so rows are inserted by the dozen.
    """

    def __init__(self, before: str, columns: int, after: str = "") -> None:
        row = f"({','.join('?' * columns)})"
        self._statements = [(n, f"{before} {','.join([row] * n)}{after}") for n in (48, 12, 3, 1)]

    def __call__(self, connection: sqlite3.Connection, rows: Sequence[Sequence[Any]]) -> int:
        """Run it for the rows in order; return how many were changed."""
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


class InsertRows:
    """An INSERT of many rows, one after the other, where no other thread wants the interpreter's lock.

    That is so on the loop's thread between two commits. There it is cheaper than `Insert`, for which SQLite keeps the
    rows apart by a coroutine of its own.
    """

    def __init__(self, into: str, columns: int, otherwise: str = "") -> None:
        self.text = f"{into} VALUES ({','.join('?' * columns)}) {otherwise}"
        """Statement for one row, also for tests of plans."""

    def __call__(self, connection: sqlite3.Connection, rows: Sequence[Sequence[Any]]) -> int:
        """Run it for the rows in their order; returns how many were changed."""
        statement = self.text
        return connection.executemany(statement, rows).rowcount if rows else 0


class Update(Many):
    """An UPDATE of many rows, each with its own values: columns of `v` with the given names."""

    def __init__(self, names: str, update: str) -> None:
        super().__init__(f"WITH v({names}) AS (VALUES", names.count(",") + 1, ") " + update)


class LookUp:
    """A statement that ends in a list of keys, run in few steps. Unused places are NULL, which matches no key."""

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
    """Add to the counters: (source, destination, name) -> count."""
    minute = now - now % MINUTE
    COUNTERS(connection, [(minute, *where, n) for where, n in counts.items()])


class StoreClock(NamedTuple):
    """The store's time: where it began, and what this machine's steady clock said then."""

    started_at: Micros
    started_steady: float

    def now(self) -> Micros:
        steady = clock.held or clock.steady()
        return self.started_at + int((steady - self.started_steady) * SECOND)


def micros(seconds: float) -> Micros:
    return int(seconds * SECOND)


def to_micros(moment: datetime) -> Micros:
    return (moment - EPOCH) // timedelta(microseconds=1)


def moment(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def moment_or_none(micros: int | None) -> datetime | None:
    return None if micros is None else moment(micros)


def clean_text(text: str) -> str:
    """Return text that the store can hold and show: without NUL and half surrogates, of limited length."""
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
"""The first release without the WAL-reset bug, which needs two writing connections."""

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.glusterfs", "fuse.sshfs", "glusterfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb2", "smb3", "smbfs"),
    }
)
_BESIDE: Final = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite creates beside a database, with the database's own permissions."""


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

    Existing files, including the log of a process that died, are closed to others, too. Raises FileUnsafe where one is
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
    connection.execute("PRAGMA page_size = 8192")  # before the first table; each page costs more than its bytes
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        connection.close()
        raise StoreUnavailable(f"{path} cannot be opened in WAL mode (it is in {mode} mode).")
    for setting in (
        # Always on, not only for an erasure: otherwise what was overwritten or removed earlier (an old error, the
        # oldest of many copies) would stay in the file as long as its page is free (S37).
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


def connect_beside(path: Path, cipher: Cipher) -> sqlite3.Connection:
    """Open a connection that writes while the owner lends the write lock; the log is left to the owner."""
    connection = connect(path, cipher)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA busy_timeout = 1000")
    return connection


def _spare_adapting() -> None:
    """Let `sqlite3` take bytes, ids, outcomes and None as they are.

    For each of them it looks for an adapter, in vain, and raises and drops an AttributeError on the way: a fifth of
    what it takes to store an arrival. So it is given adapters that hand back what they get, where there are none.
    """
    adapters: dict[type[Any], Callable[[Any], Any]] = {
        **dict.fromkeys((bytes, Id, *Id.__subclasses__()), bytes.__bytes__),
        Outcome: str.__str__,
        type(None): {}.get,
    }
    for kind, same in adapters.items():
        if (kind, sqlite3.PrepareProtocol) not in sqlite3.adapters:
            sqlite3.register_adapter(kind, same)


@contextlib.contextmanager
def opening_errors(path: Path) -> Iterator[None]:
    """Translate errors of the system or SQLite while opening a file into a sentence about the store."""
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
    """Return a warning where this SQLite has the WAL-reset bug. We are safe: no two connections write at a time."""
    if version >= SAFE_VERSION:
        return None
    return (
        f"SQLite {'.'.join(map(str, version))} has the WAL-reset bug (fixed in 3.51.3): "
        "never write to this file with another program while oncehook runs. Its own commands are safe."
    )


def apply_migrations(connection: sqlite3.Connection, *, migrate: bool) -> None:
    """Migrate the schema, each step in one transaction with its row; check that keys are unique."""
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
    """Checkpoint the log into the database and truncate it; False where a reader needs it, or the disk fails.

    A failure does no harm: what was committed stays in the log.
    """
    try:
        is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        log.warning("store.log_not_emptied", extra={"fields": {"error": str(error)}})
        return False
    return not is_busy


def disconnect(connection: sqlite3.Connection) -> None:
    """Close, ignoring errors of a failing disk."""
    with contextlib.suppress(sqlite3.Error):
        connection.close()


_DATA_CODES: Final = frozenset(
    {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE}
)
_PASSING_CODES: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM}
)


def is_data_error(error: Exception) -> bool:
    """Tell whether one row is to blame, not the disk: the database refuses it, or Python cannot bind it."""
    if isinstance(error, sqlite3.Error):
        return primary_code(error) in _DATA_CODES
    return isinstance(error, ValueError | OverflowError | TypeError)


def is_broken(error: Exception) -> bool:
    """Tell whether the connection can no longer be trusted: I/O errors, corruption. A full disk only rolls back
    (R58)."""
    return not is_data_error(error) and primary_code(error) not in _PASSING_CODES


def is_full(error: Exception) -> bool:
    return primary_code(error) == sqlite3.SQLITE_FULL


def is_blocked(error: Exception) -> bool:
    """Tell whether another program holds the write lock, which is temporary."""
    return primary_code(error) == sqlite3.SQLITE_BUSY


def primary_code(error: Exception) -> int | None:
    """Return SQLite's primary result code of an error."""
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


_descriptors: weakref.WeakSet[OpenLock | socket.socket] = weakref.WeakSet()


def close_in_child(descriptor: OpenLock | socket.socket) -> None:
    """Have a process that is forked off this one close what it inherits: it would keep the other end from noticing
    that we are gone, and the lock from whoever takes over."""
    _descriptors.add(descriptor)


def _close_inherited() -> None:
    for descriptor in list(_descriptors):
        number = descriptor.detach()
        if number >= 0:
            os.close(number)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_inherited)


class OpenLock:
    """A file that is locked for as long as it is open."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
        close_in_child(self)

    def lock(self) -> bool:
        """Lock it for oneself, if nobody else's lock is in the way; tells whether that is so."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def detach(self) -> int:
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def release(self) -> None:
        if (descriptor := self.detach()) >= 0:
            os.close(descriptor)


class Hold(OpenLock):
    """The ownership of one database file, kept until `release`. Raises StoreHeld where somebody else has it."""

    def __init__(self, database: Path, *, tries: int = 5) -> None:
        super().__init__(_lock_path(database))
        if not self._take(tries):
            other = _read_holder(self._descriptor)
            super().release()
            raise _refusal(database, other)
        self.announce()

    def _take(self, tries: int) -> bool:
        # A command that only asks who holds the file (`holder`) has it locked for a moment: try more than once.
        for _ in range(tries):
            if self.lock():
                return True
            if tries > 1:
                threading.Event().wait(0.05)
        return False

    def announce(self, address: str = "", token: str = "") -> None:
        text = json.dumps({"pid": os.getpid(), "address": address, "token": token}).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    def release(self) -> None:
        """Let another process own it. The file stays: removing it would race with the next holder."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
        super().release()


class Presence(OpenLock):
    """A process that has the store open for writing, as its owner or as a client; lasts until `release`."""

    def __init__(self, database: Path) -> None:
        super().__init__(database.with_name(database.name + "-users"))
        self._share()

    def _share(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # in the way is at most an owner that asks whether it is alone

    def is_alone(self) -> bool:
        """Tell whether there is no other such process now. To be asked by the owner only."""
        is_alone = self.lock()
        self._share()
        return is_alone


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
        f"Process {other.pid} owns {database}{where}, and takes no clients.",
        hint="Stop it first, or put the file where sockets can be made.",
    )


SIZE: Final = 4 << 20


class Reserve:
    """The file `<database>-reserve`."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + "-reserve")

    def make(self) -> bool:
        """Create the file if twice its size is free (otherwise the space is needed now); return whether it exists."""
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
        """Free the space for the database."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


PAGES: Final = 512
"""Pages between two reports."""


def copy(store: Path, target: Path, report: Callable[[int, int], object] = lambda done, total: None) -> None:
    """Copy the store into a new file. `report` is called with the pages done and the pages in all.

    Raises StoreUnavailable when there is no store, or the copy is damaged; OSError when it cannot be written.
    """
    if not store.exists():
        raise StoreUnavailable(f"There is no store at {store} yet.", hint="Start `oncehook serve` once.")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    # It contains bodies, so only its owner may read it, as with the store itself.
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
        # One read transaction around it all: the copy is of one moment, and a write does not restart it.
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
    """Register the functions that SAYS calls."""

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
