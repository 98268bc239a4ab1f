"""S38: a file that only its owner may read is made so, or refused; never taken as it lies there."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from oncehook.errors import FileUnsafe, StoreUnavailable
from oncehook.private import make_private, open_private
from oncehook.settings import development
from oncehook.store.sqlite import SqliteStore
from oncehook.store.sqlite.connection import Hold, holder

STRANGER = 12_345


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file somebody else's; where we may not do that, become somebody else."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def opened(path: Path) -> None:
    os.close(open_private(path, os.O_RDWR | os.O_CREAT))


def made(path: Path) -> None:
    make_private(path, create=True)


WAYS = pytest.mark.parametrize("way", [opened, made])


@WAYS
@pytest.mark.parametrize("was", [0o666, 0o644, 0o640, 0o604, 0o600])
def test_a_file_of_ours_is_closed_to_others(tmp_path: Path, way: Callable[[Path], None], was: int) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    path.chmod(was)
    way(path)
    assert (mode(path), path.read_text()) == (0o600, "kept")


@WAYS
def test_a_new_file_is_ours_alone_whatever_the_mask_says(tmp_path: Path, way: Callable[[Path], None]) -> None:
    before = os.umask(0)
    try:
        way(tmp_path / "file")
    finally:
        os.umask(before)
    assert mode(tmp_path / "file") == 0o600


@WAYS
def test_a_link_is_not_followed(tmp_path: Path, way: Callable[[Path], None]) -> None:
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "file").symlink_to(tmp_path / "theirs")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    for name in ("file", "nowhere"):
        with pytest.raises(FileUnsafe, match="symbolic link") as raised:
            way(tmp_path / name)
        assert raised.value.hint
    assert (tmp_path / "theirs").read_text() == "kept"
    assert not (tmp_path / "not there").exists()


@WAYS
def test_somebody_elses_file_is_refused(
    tmp_path: Path, way: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("theirs")
    path.chmod(0o666)
    give_away(path, monkeypatch)
    with pytest.raises(FileUnsafe, match="belongs to user"):
        way(path)
    assert (mode(path), path.read_text()) == (0o666, "theirs")


@WAYS
def test_what_is_no_file_is_refused(tmp_path: Path, way: Callable[[Path], None]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileUnsafe, match="is not a file"):
        way(tmp_path / "pipe")


# -- who uses it -----------------------------------------------------------------------------------

BESIDE = ("", "-lock", "-users", "-wal", "-shm")


async def open_store(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    await store.close()


async def test_every_file_of_a_store_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    for ending in BESIDE:
        (tmp_path / f"inbox.db{ending}").touch(0o666)
        (tmp_path / f"inbox.db{ending}").chmod(0o666)
    store = SqliteStore(path)
    await store.open()
    found = {file.name: mode(file) for file in tmp_path.iterdir()}
    await store.close()
    assert {f"inbox.db{ending}" for ending in (*BESIDE, "-reserve", "-users", ".sock")} == found.keys()
    assert set(found.values()) == {0o600}


@pytest.mark.parametrize("ending", BESIDE)
async def test_a_store_that_somebody_else_prepared_is_refused(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / f"inbox.db{ending}"
    theirs.touch()
    theirs.chmod(0o666)
    give_away(theirs, monkeypatch)
    with pytest.raises(StoreUnavailable, match="belongs to user"):
        await open_store(tmp_path / "inbox.db")
    assert theirs.read_bytes() == b"", "neither an event nor the token of local commands"


@pytest.mark.parametrize("ending", BESIDE)
async def test_a_store_that_is_a_link_is_refused(tmp_path: Path, ending: str) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / f"inbox.db{ending}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable, match="symbolic link"):
        await open_store(tmp_path / "inbox.db")
    assert (tmp_path / "elsewhere").read_bytes() == b""


def test_a_command_asks_nobody_elses_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address and token are believed: a command would send there what it was told to send to us."""
    held = Hold(tmp_path / "inbox.db")
    held.announce("http://127.0.0.1:4020", "a token")
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(FileUnsafe, match="belongs to user"):
        holder(tmp_path / "inbox.db")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = holder(tmp_path / "inbox.db")
    assert found is not None
    assert found.token == "a token", "root may look at anybody's"
    held.release()


def test_development_keys_are_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    keys = tmp_path / "oncehook" / "development-keys.json"
    development.kept_secret("a")
    keys.chmod(0o644)
    development.kept_secret("a")
    assert mode(keys) == 0o600
    keys.rename(tmp_path / "moved")
    keys.symlink_to(tmp_path / "moved")
    with pytest.raises(FileUnsafe, match="symbolic link"):
        development.kept_secret("a")
