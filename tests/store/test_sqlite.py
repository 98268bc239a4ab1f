"""What only SQLite has to promise: one writer, the right settings, a file that is guarded (R2, R61, S38)."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from oncehook import clock
from oncehook.errors import MigrationNeeded, StoreError, StoreHeld, StoreUnavailable
from oncehook.model import DeliveryId, EventId, Filter, Outcome, new_id
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite import SqliteStore, connection
from oncehook.store.sqlite.connection import Hold, connect, disconnect, holder
from tests.store.making import enrolled, intake, item


async def test_the_file_is_opened_so_that_it_keeps_its_promises(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "new" / "inbox.db")
    await store.open()
    try:
        connection = store._writer._connection
        settings = {
            name: connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "mmap_size", "page_size", "busy_timeout")
        }
    finally:
        await store.close()
    assert settings == {"journal_mode": "wal", "synchronous": 2, "mmap_size": 0, "page_size": 8192, "busy_timeout": 0}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / "inbox.db").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new" / "inbox.db-lock").stat().st_mode) == 0o600


async def test_values_pass_as_they_are_and_nobodys_adapter_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(value: bytes) -> bytes:
        return value

    monkeypatch.setattr(sqlite3, "adapters", {(bytes, sqlite3.PrepareProtocol): mine})
    given: dict[type, object] = {}
    monkeypatch.setattr(sqlite3, "register_adapter", given.__setitem__)
    disconnect(connect(tmp_path / "one.db", Cipher()))
    assert bytes not in given
    assert {type(None), EventId, DeliveryId, Outcome} <= given.keys()
    monkeypatch.undo()
    with closing(connect(tmp_path / "two.db", Cipher())) as connection:
        values = [b"", b"\x00\xff", None, bytearray(b"x"), "", 1, 0.5, new_id(), Outcome.conflict]
        assert [connection.execute("SELECT ?", (value,)).fetchone()[0] for value in values] == values
        same = b"not a copy"
        assert sqlite3.adapt(same) is same


async def test_an_old_library_is_a_finding_of_doctor_and_no_warning_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first line of a newcomer's first server would be about a bug that cannot touch it."""
    assert "WAL-reset" in (connection.warn_of_old_library((3, 51, 2)) or "")
    assert connection.warn_of_old_library((3, 51, 3)) is None
    with caplog.at_level(logging.WARNING, "oncehook"):
        store = SqliteStore(tmp_path / "inbox.db")
        await store.open()
        await store.close()
    assert not caplog.records


async def test_the_next_group_is_begun_before_the_last_is_answered(tmp_path: Path) -> None:
    """While the disk works on it, the loop has time for the answers."""
    store = SqliteStore(tmp_path / "inbox.db")
    await store.open()
    try:
        await enrolled(store)
        writer = store._writer
        first = store.record(intake(item("a")))
        while writer._waiting:
            await asyncio.sleep(0)
        second = store.record(intake(item("b")))  # its commit cannot have been heard of: that takes a turn of the loop
        left: list[int] = []
        first.future.add_done_callback(lambda _: left.append(len(writer._waiting)))
        await asyncio.gather(first.future, second.future)
    finally:
        await store.close()
    assert left == [0]


async def test_one_process_owns_the_file_and_others_find_it(tmp_path: Path) -> None:
    first, second = SqliteStore(tmp_path / "inbox.db"), SqliteStore(tmp_path / "inbox.db")
    await first.open()
    first.announce("http://127.0.0.1:4020", "a token")
    try:
        found = holder(tmp_path / "inbox.db")
        assert found is not None
        assert (found.address, found.token) == ("http://127.0.0.1:4020", "a token")
        await second.open(write=False)
        assert (await second.find_events(Filter())).items == []
        await second.close()
    finally:
        await first.close()
    assert holder(tmp_path / "inbox.db") is None


async def test_who_reads_writes_nothing_and_leaves_the_log_alone(tmp_path: Path) -> None:
    """Also when the last one closes it: the WAL-reset bug needs a second one that writes or tidies up."""
    left, names = tmp_path / "left", ("inbox.db", "inbox.db-wal")
    left.mkdir()
    store = SqliteStore(tmp_path / "inbox.db")
    await store.open()
    try:
        await store.register_names(["orders"], [])
        await store.audit("somebody", "act", "target", {})
        for name in names:  # as a process that was killed leaves them
            shutil.copy(tmp_path / name, left)
    finally:
        await store.close()
    before = [(left / name).read_bytes() for name in names]
    reader = SqliteStore(left / "inbox.db")
    await reader.open(write=False)
    assert [line.actor for line in await reader.audit_log()] == ["somebody"]
    assert set((await reader.name_ids()).sources) == {"orders"}
    with pytest.raises(StoreHeld, match="reading only"):
        await reader.audit("somebody", "act", "target", {})
    with pytest.raises(StoreHeld, match="reading only"):
        reader.record(intake(item("o1")))
    await reader.close()
    assert [(left / name).read_bytes() for name in names] == before
    assert not (left / "inbox.db-lock").exists()


async def test_who_reads_wants_a_schema_it_knows(tmp_path: Path) -> None:
    (tmp_path / "inbox.db").touch()
    reader = SqliteStore(tmp_path / "inbox.db")
    with pytest.raises(MigrationNeeded):
        await reader.open(write=False)
    await reader.close()
    assert (tmp_path / "inbox.db").stat().st_size == 0


async def test_a_look_at_the_lock_does_not_keep_a_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Hold(tmp_path / "inbox.db")
    flock, refused = fcntl.flock, []

    def until_refused(descriptor: int, operation: int) -> None:
        try:
            flock(descriptor, operation)
        except OSError:
            refused.append(operation)
            asked.release()
            raise

    monkeypatch.setattr(fcntl, "flock", until_refused)
    store = SqliteStore(tmp_path / "inbox.db")
    await store.open()
    await store.close()
    assert len(refused) == 1


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n")
    assert connection.file_system(tmp_path, mounts) == kind
    assert connection.file_system(tmp_path.parent, mounts) == "ext4"
    monkeypatch.setattr(connection, "file_system", lambda folder: kind)
    with pytest.raises(StoreError, match="network file system"):
        connection.prepare_folder(tmp_path / "inbox.db")


async def test_time_never_runs_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R64: a clock that is set forward and back again freezes nothing, and a restart goes on from the highest time."""
    day = 86_400.0
    real = clock.now
    monkeypatch.setattr(clock, "now", lambda: real() + day)
    store = SqliteStore(tmp_path / "inbox.db")
    await store.open()
    ahead = store._writer.now()
    await store.ping()
    await store.close()
    monkeypatch.setattr(clock, "now", real)
    again = SqliteStore(tmp_path / "inbox.db")
    await again.open()
    try:
        assert again._writer.now() >= ahead
        before = again._writer.now()
        await asyncio.sleep(0.01)
        assert again._writer.now() > before
    finally:
        await again.close()


async def test_a_full_database_rolls_back_and_goes_on(tmp_path: Path) -> None:
    """R58: SQLite's own "full" is not a broken file: 503 for the group, and the same connection resumes."""
    store = SqliteStore(tmp_path / "inbox.db")
    await store.open()
    try:
        await enrolled(store)
        connection = store._writer._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 4}")
        with pytest.raises(StoreUnavailable, match="full"):
            await store.record(intake(item("large", body=b"x" * 200_000))).future
        assert store._writer.broken is None
        connection.execute("PRAGMA max_page_count = 1073741823")
        (verdict,) = await store.record(intake(item("large", body=b"x" * 200_000))).future
        assert verdict.outcome == "accepted"
        assert store._writer._connection is connection
    finally:
        await store.close()


async def test_after_a_failed_write_only_the_disk_is_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R59: an I/O error stops all writing; the file is opened anew and read before anything is written again."""
    store = SqliteStore(tmp_path / "inbox.db")
    await store.open()
    try:
        await enrolled(store)
        suspect = store._writer._connection
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        try:
            with pytest.raises(StoreUnavailable):
                await store.record(intake(item("lost"))).future
            with pytest.raises(StoreUnavailable, match="reopened"):
                store.record(intake(item("refused at once")))
            with pytest.raises(StoreUnavailable):
                await store.ping()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        while store._writer.broken is not None:
            await asyncio.sleep(0.01)
        assert store._writer._connection is not suspect
        assert "store.reopened" in [vars(record).get("moment") for record in caplog.records]
        (verdict,) = await store.record(intake(item("lost"))).future
        assert verdict.outcome == "accepted"
    finally:
        await store.close()


async def test_a_damaged_file_is_not_written_to(tmp_path: Path) -> None:
    """R59, R66: without its dedup index the store does not start."""
    path = tmp_path / "inbox.db"
    store = SqliteStore(path)
    await store.open()
    await store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("ALTER TABLE keys RENAME TO old_keys")
        connection.execute("CREATE TABLE keys AS SELECT * FROM old_keys")
    with pytest.raises(StoreError, match="unique index"):
        await SqliteStore(path).open()


async def test_a_foreign_lock_is_waited_for_without_stopping_the_loop(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "inbox.db")
    await store.open()
    try:
        await enrolled(store)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as rival:
            rival.execute("BEGIN IMMEDIATE")
            pending = store.record(intake(item("order-1")))
            turns = 0
            for _ in range(20):
                await asyncio.sleep(0.005)
                turns += 1
            assert turns == 20
            assert not pending.future.done()
            rival.execute("ROLLBACK")
        (verdict,) = await pending.future
        assert verdict.outcome == "accepted"
    finally:
        await store.close()
