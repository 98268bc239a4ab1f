"""The archive: events are written out before they are pruned, by the day, and come back to be replayed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oncehook import Event, Inbox, clock
from oncehook.archive import Archive, unpack
from oncehook.cli import cli
from oncehook.errors import ArchiveInvalid, ObjectsUnavailable, Undecryptable
from oncehook.model import EventId, Filter
from oncehook.objects import FolderObjects
from oncehook.store.cipher import Cipher
from tests.acceptance.test_large_bodies import HEADERS, KEY, TOKEN, address, body, files

__all__ = ["address"]
DAY = 86_400.0


@pytest.fixture(autouse=True)
def _moved() -> Iterator[None]:
    yield
    clock.forward(-clock._skew)


def make(address: str, tmp_path: Path, **options: Any) -> Inbox:
    inbox = Inbox(address, bodies=str(tmp_path / "bodies"), **options)
    inbox.source("orders", verify={"scheme": "bearer"}, secret=TOKEN, key="$.id", subject="$.who", max_body="8MiB")

    @inbox.on("orders")
    async def handle(event: Event) -> None: ...

    return inbox


async def fill(inbox: Inbox) -> dict[str, bytes]:
    sent = {}
    for content in (body("1", size=10), body("2"), body("3", size=20)):
        receipt = await inbox.receive("orders", HEADERS, content)
        sent[receipt.event_ids[0]] = content
    await inbox.drain()
    return sent


def archive_of(inbox: Inbox, tmp_path: Path) -> Archive:
    return Archive(inbox.store, inbox.bodies, FolderObjects(tmp_path / "archive"))


@pytest.mark.parametrize("encrypt", [None, KEY])
async def test_a_day_is_written_out_then_pruned_and_comes_back(
    address: str, tmp_path: Path, encrypt: str | None
) -> None:
    inbox = make(address, tmp_path, encrypt=encrypt)
    async with inbox.running():
        sent = await fill(inbox)
        archive = archive_of(inbox, tmp_path)
        assert await archive.prune({}, 3600.0) == 0  # its day is not over
        await _age(inbox, 3)
        assert await archive.prune({}, DAY) == 3
        assert (await inbox.admin.events(Filter())).items == []
        [path] = files(tmp_path / "archive")
        day = path.parent.name
        assert (b'"who"' in path.read_bytes()) is False
        [name] = await archive.names(day)
        events = await archive.read(name)
        assert {event.id: event.body for event in events} == sent
        assert [one.destination for event in events for one in event.deliveries] == ["handle"] * 3
        counted = [both async for both in archive.bring_back(events, DAY, "me")]
        assert counted == [(3, 3)]
        for id_, content in sent.items():
            assert await inbox.admin.body(EventId.parse(id_)) == content
        assert [check for check in await inbox.check() if not check.ok] == []
        if encrypt is not None:
            with pytest.raises(Undecryptable):
                unpack(path.read_bytes(), path.name, Cipher())


async def _age(inbox: Inbox, days: int) -> None:
    """Make everything that is kept older."""
    store: Any = inbox.store
    if store.embedded:
        await store._writer.call(
            lambda c, _: c.execute("UPDATE events SET received_at = received_at - ?", (days * 86_400_000_000,))
        )
    else:
        await store.execute("UPDATE events SET received_at = received_at - make_interval(days => $1)", [days])


async def test_nothing_is_pruned_that_could_not_be_archived(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = make(address, tmp_path)
    async with inbox.running():
        await fill(inbox)
        await _age(inbox, 3)
        archive = archive_of(inbox, tmp_path)

        async def fail(*_: object, **__: object) -> bool:
            raise ObjectsUnavailable

        monkeypatch.setattr(archive.objects, "put", fail)
        with pytest.raises(ObjectsUnavailable):
            await archive.prune({}, DAY)
        assert len((await inbox.admin.events(Filter())).items) == 3


async def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"\x28\xb5\x2f\xfd" + b"x" * 30):
        with pytest.raises(ArchiveInvalid):
            unpack(content, "x.jsonl.zst", Cipher())


def test_the_command_prunes_into_the_archive_and_brings_a_day_back(tmp_path: Path) -> None:
    import asyncio

    async def before() -> None:
        inbox = make(f"sqlite:{tmp_path}/inbox.db", tmp_path)
        async with inbox.running():
            await fill(inbox)
            await _age(inbox, 40)

    asyncio.run(before())
    (tmp_path / "oncehook.toml").write_text(
        f'store = "sqlite:{tmp_path}/inbox.db"\nbodies = "{tmp_path}/bodies"\narchive = "{tmp_path}/archive"\n'
    )
    config = ["--config", str(tmp_path / "oncehook.toml")]
    run = CliRunner()
    pruned = run.invoke(cli, ["db", "prune", "--json", *config])
    assert json.loads(pruned.stdout)["events"] == 3, pruned.output
    [path] = files(tmp_path / "archive")
    back = run.invoke(cli, ["import", "archive", path.parent.name, "--json", *config])
    assert json.loads(back.stdout) == {"read": 3, "new": 3}, back.output
    again = run.invoke(cli, ["import", "archive", str(path), "--json", *config])
    assert json.loads(again.stdout) == {"read": 3, "new": 0}, again.output
    kept = run.invoke(cli, ["db", "prune", "--json", *config])
    assert json.loads(kept.stdout)["events"] == 0
    missing = run.invoke(cli, ["import", "archive", "2020-01-01", *config])
    assert missing.exit_code != 0
