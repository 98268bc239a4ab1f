"""Places of objects: a folder, and a bucket of a real server that checks signatures and conditions."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.whatsapp.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, fresh_prefix, shared_s3

from oncehook import clock
from oncehook.errors import ConfigError, ObjectsUnavailable
from oncehook.objects import BucketObjects, FolderObjects, Objects, check_name, copy_folder, open_objects
from oncehook.secret import Secret


def bucket(prefix: str, **options: object) -> BucketObjects:
    given = {
        "endpoint": shared_s3().endpoint,
        "region": "us-east-1",
        "access_key": Secret.from_program(ACCESS_KEY),
        "secret_key": Secret.from_program(SECRET_KEY),
        "allow_private": True,
        **options,
    }
    return BucketObjects(f"s3://{BUCKET}/{prefix}", **given)  # type: ignore[arg-type]


@pytest.fixture(params=["folder", "bucket"])
async def objects(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Objects]:
    place: Objects = FolderObjects(tmp_path / "kept") if request.param == "folder" else bucket(fresh_prefix())
    yield place
    await place.close()


async def listed(objects: Objects, prefix: str) -> dict[str, int]:
    return {one.name: one.size async for page in objects.list(prefix) for one in page}


async def test_an_object_is_kept_found_listed_and_deleted(objects: Objects) -> None:
    before = clock.now_utc() - timedelta(minutes=5)
    assert await objects.put("bodies/1/2026-11-18/a", b"x" * 300_000)
    assert await objects.put("bodies/1/2026-11-19/b", b"yy")
    assert await objects.put("media/1/c", b"")
    assert await objects.get("bodies/1/2026-11-18/a") == b"x" * 300_000
    assert await objects.get("media/1/c") == b""
    assert await objects.get("bodies/1/none") is None
    assert await listed(objects, "bodies/1/") == {"bodies/1/2026-11-18/a": 300_000, "bodies/1/2026-11-19/b": 2}
    assert await listed(objects, "bodies/") == await listed(objects, "bodies/1/")
    assert await listed(objects, "nothing/") == {}
    assert all([one.modified > before async for page in objects.list("bodies/") for one in page])
    await objects.delete(["bodies/1/2026-11-18/a", "bodies/1/never"])
    assert await listed(objects, "bodies/") == {"bodies/1/2026-11-19/b": 2}


async def test_of_two_that_write_a_new_object_one_wins(objects: Objects) -> None:
    assert await objects.put("a/b", b"first", new=True)
    assert not await objects.put("a/b", b"second", new=True)
    assert await objects.get("a/b") == b"first"
    assert await objects.put("a/b", b"third")
    assert await objects.get("a/b") == b"third"


@pytest.mark.parametrize("name", ["../a", "/a", "a/../b", "a//b", "", "a/", ".hidden", "a b", "a\x00"])
async def test_a_name_cannot_lead_elsewhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot name"):
        check_name(name)
    with pytest.raises(ValueError, match="cannot name"):
        await FolderObjects(tmp_path).put(name, b"")


async def test_only_the_owner_reads_a_folder_and_half_a_file_is_none(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path / "kept")
    await objects.put("a/b", b"secret")
    assert stat.S_IMODE((tmp_path / "kept" / "a" / "b").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    old, young = tmp_path / "kept" / "a" / ".part-old", tmp_path / "kept" / "a" / ".part-young"
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (clock.now() - 7200, clock.now() - 7200))
    assert await listed(objects, "a/") == {"a/b": 6}
    assert (old.exists(), young.exists()) == (False, True)
    copy_folder(tmp_path / "kept", tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()] == ["b"]
    await objects.close()


async def test_a_folder_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file in the way")
    with pytest.raises(ObjectsUnavailable, match="cannot be used"):
        await FolderObjects(tmp_path / "kept").put("a/b", b"")


async def test_a_private_endpoint_must_be_allowed() -> None:
    with pytest.raises(ConfigError, match="not a public address"):
        await bucket("x", allow_private=False).put("a", b"")


async def test_a_bucket_that_refuses_is_unavailable_and_tells_no_secret() -> None:
    with pytest.raises(ObjectsUnavailable) as refused:
        await bucket("x", secret_key=Secret.from_program("wrong-and-not-to-be-seen")).put("a", b"")
    assert "wrong-and" not in str(refused.value)


def test_an_address_names_a_bucket_or_a_folder(tmp_path: Path) -> None:
    assert isinstance(open_objects("s3://bucket/prefix"), BucketObjects)
    assert isinstance(open_objects(str(tmp_path)), FolderObjects)
    assert open_objects(f"file://{tmp_path}").address == str(tmp_path)
