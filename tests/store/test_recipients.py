"""UX.md 5: a plan marks the recipient when it has changed since an event was first delivered."""

from __future__ import annotations

from oncehook.model import Filter, digest
from oncehook.store.base import Store
from tests.store.conftest import Ground
from tests.store.making import MAIL, dead, dead_letters, deliver, settle, take_one

OLD, NEW, NEWEST = digest(b"old"), digest(b"new"), digest(b"newest")


async def changed(store: Store, force: bool = False) -> dict[str, int]:
    return dict((await store.plan_replay(Filter(), force=force)).changed)


async def test_only_what_went_elsewhere_at_first_is_marked(ground: Ground, store: Store) -> None:
    await store.note_recipients({1: OLD, 2: OLD})
    await dead_letters(store, None, None)
    await dead_letters(store, None, to=MAIL)
    assert await changed(store) == {}
    ground.forward(5)
    await store.note_recipients({1: NEW, 2: OLD})
    ground.forward(5)
    await dead_letters(store, None)  # this one has only ever gone to the new address
    assert await changed(store) == {"crm": 2}


async def test_what_waited_while_it_moved_was_first_delivered_there(ground: Ground, store: Store) -> None:
    """When it arrived says nothing: the first attempt counts."""
    await store.note_recipients({1: OLD})
    await deliver(store, None)
    ground.forward(5)
    await store.note_recipients({1: NEW})
    ground.forward(5)
    await settle(store, dead(await take_one(store)))
    assert await changed(store) == {}


async def test_moved_and_moved_back_is_as_before(ground: Ground, store: Store) -> None:
    for address in (OLD, NEW, OLD):
        await store.note_recipients({1: address})
        await dead_letters(store, None)
        ground.forward(5)
    assert await changed(store) == {"crm": 1}
    await store.note_recipients({1: NEWEST})
    assert await changed(store) == {"crm": 3}


async def test_what_is_unknown_is_not_marked(ground: Ground, store: Store) -> None:
    """Delivered before anybody took note, or closed without an attempt of its own."""
    await dead_letters(store, None)
    ground.forward(5)
    await store.note_recipients({1: OLD})
    ground.forward(5)
    await store.note_recipients({1: NEW})
    await store.note_recipients({})
    assert await changed(store) == {}


async def test_a_start_without_a_change_notes_nothing(ground: Ground, store: Store) -> None:
    for _ in range(3):
        await store.note_recipients({1: OLD, 2: NEW})
        ground.forward(1)
    assert len(ground.sql("SELECT * FROM recipients")) == 2
