"""Large bodies: kept as objects beside the store, written before the commit, and gone when nobody needs them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncehook import Event, Inbox, clock
from oncehook.bodies import GRACE
from oncehook.errors import BodyMissing, ObjectsUnavailable
from oncehook.model import EventId, Filter
from tests.schemas import built_schema
from tests.servers import store_url

KEY = "q8Tf0mI2x1vJ3o9r5yWz7bKc4dLe6nPsUaHgQfXtRiM="
TOKEN = "a-token-of-more-than-32-characters"
HEADERS = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:{tmp_path}/inbox.db"
        return
    with built_schema() as schema:
        mark = "&" if "?" in store_url() else "?"
        yield f"{store_url()}{mark}schema={schema}"


def make(address: str, tmp_path: Path, **options: Any) -> Inbox:
    inbox = Inbox(address, bodies=str(tmp_path / "bodies"), **options)
    inbox.source("orders", verify={"scheme": "bearer"}, secret=TOKEN, key="$.id", subject="$.who", max_body="8MiB")
    return inbox


@pytest.fixture
async def inbox(address: str, tmp_path: Path) -> AsyncIterator[Inbox]:
    made = make(address, tmp_path)
    async with made.running():
        yield made


def body(id_: str, who: str = "anna", size: int = 400_000, fill: str = "x") -> bytes:
    return json.dumps({"id": id_, "who": who, "text": fill * size}).encode()


async def send(inbox: Inbox, content: bytes) -> tuple[str, EventId]:
    receipt = await inbox.receive("orders", HEADERS, content)
    assert receipt.reply.status == 200, receipt.reply
    return receipt.outcome, EventId.parse(receipt.event_ids[0])


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def until_files(folder: Path, n: int) -> None:
    async with asyncio.timeout(20):
        while len(files(folder)) != n:
            await asyncio.sleep(0.01)


async def test_a_large_body_is_an_object_and_a_small_one_is_not(inbox: Inbox, tmp_path: Path) -> None:
    large = body("1")
    _, event_id = await send(inbox, large)
    _, small = await send(inbox, body("2", size=10))
    [path] = files(tmp_path / "bodies")
    assert path.read_bytes() == large
    assert path.name.startswith(event_id.hex())
    assert await inbox.admin.body(event_id) == large
    assert await inbox.admin.body(small) == body("2", size=10)
    shown = await inbox.admin.event(event_id, with_body=True)
    assert (shown.size, shown.event.body) == (len(large), large)
    assert (await inbox.admin.event(event_id)).event.body == b""
    assert {one.size for one in (await inbox.admin.events(Filter())).items} == {len(large), len(body("2", size=10))}
    assert [check.detail for check in await inbox.check() if check.name == "bodies"] == [
        f"1 large bodies are at {tmp_path}/bodies"
    ]
    assert await inbox.bodies.sweep() == 0


async def test_handlers_get_it_at_once_and_when_it_is_tried_again(address: str, tmp_path: Path) -> None:
    inbox = make(address, tmp_path, encrypt=KEY)
    got: list[bytes] = []

    @inbox.on("orders", retry=[0.01])
    async def handle(event: Event) -> None:
        got.append(event.body)
        if event.attempt == 1:
            raise ConnectionError

    async with inbox.running():
        await send(inbox, body("1"))
        await inbox.drain()
    assert got == [body("1"), body("1")]
    [path] = files(tmp_path / "bodies")
    assert b"xxxx" not in path.read_bytes()  # encrypted, as it would be in the store


async def test_a_duplicate_leaves_nothing_and_a_conflict_keeps_its_own(inbox: Inbox, tmp_path: Path) -> None:
    first, event_id = await send(inbox, body("1"))
    again, _ = await send(inbox, body("1"))
    await until_files(tmp_path / "bodies", 1)
    other, _ = await send(inbox, body("1", fill="y"))
    assert (first, again, other) == ("accepted", "duplicate", "conflict")
    assert len(files(tmp_path / "bodies")) == 2
    [later] = [one for one in await inbox.admin.arrivals(event_id) if one.body_differs]
    assert await inbox.admin.arrival_body(event_id, later.id) == body("1", fill="y")
    assert await inbox.bodies.sweep() == 0


async def test_a_place_that_fails_means_503_and_no_event(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> bool:
        raise ObjectsUnavailable

    monkeypatch.setattr(inbox.bodies.objects, "put", fail)
    receipt = await inbox.receive("orders", HEADERS, body("1"))
    assert receipt.reply.status == 503
    assert json.loads(receipt.reply.body)["code"] == "objects_unavailable"
    assert (await inbox.admin.events(Filter())).items == []
    monkeypatch.undo()
    assert (await send(inbox, body("1")))[0] == "accepted"


async def test_an_object_without_a_row_goes_when_no_commit_can_follow(inbox: Inbox, tmp_path: Path) -> None:
    """A process was killed between the object and the commit."""
    await send(inbox, body("1"))
    [path] = files(tmp_path / "bodies")
    orphan = path.with_name("01" * 16 + "-" + "00" * 32)
    orphan.write_bytes(b"orphan")
    assert await inbox.bodies.sweep() == 0
    clock.forward(GRACE + 60)
    try:
        assert await inbox.bodies.sweep() == 1
    finally:
        clock.forward(-GRACE - 60)
    assert files(tmp_path / "bodies") == [path]


async def test_erased_and_pruned_events_take_their_bodies_with_them(inbox: Inbox, tmp_path: Path) -> None:
    await send(inbox, body("1", who="anna"))
    _, kept = await send(inbox, body("2", who="bob"))
    await inbox.admin.erase("anna", actor="me", reason="asked by letter 7")
    [path] = files(tmp_path / "bodies")
    assert path.name.startswith(kept.hex())
    while await inbox.store.prune({}, 0.0):
        pass
    clock.forward(GRACE + 60)
    try:
        assert await inbox.bodies.sweep() == 1
    finally:
        clock.forward(-GRACE - 60)


async def test_a_lost_body_is_a_clear_error_and_fails_the_attempt(address: str, tmp_path: Path) -> None:
    inbox = make(address, tmp_path)

    @inbox.on("orders", retry=[])
    async def handle(event: Event) -> None: ...

    async with inbox.running(work=False):
        _, event_id = await send(inbox, body("1"))
    files(tmp_path / "bodies")[0].unlink()
    inbox = make(address, tmp_path)
    inbox.on("orders", retry=[])(handle)
    async with inbox.running():
        with pytest.raises(BodyMissing, match="not at"):
            await inbox.admin.body(event_id)
        await inbox.drain()
        [delivery] = (await inbox.admin.deliveries(Filter())).items
        assert (delivery.status, str(delivery.last_error).split(":")[0]) == ("dead", "body_missing")
        shown = await inbox.admin.event(event_id, with_body=True)
        assert shown.unreadable is not None
        assert [check.ok for check in await inbox.check() if check.name == "bodies"] == [False]


async def test_what_a_program_emits_may_be_large_too(inbox: Inbox, tmp_path: Path) -> None:
    event_id = EventId.parse(await inbox.emit("app", "made", b"e" * 300_000, key="1"))
    assert len(files(tmp_path / "bodies")) == 1
    assert await inbox.admin.body(event_id) == b"e" * 300_000


async def test_a_damaged_body_is_not_handed_out(inbox: Inbox, tmp_path: Path) -> None:
    _, event_id = await send(inbox, body("1"))
    files(tmp_path / "bodies")[0].write_bytes(b"something else")
    with pytest.raises(BodyMissing, match="damaged"):
        await inbox.admin.body(event_id)
