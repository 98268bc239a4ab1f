"""Stored definitions: one commit for row, version and audit entry; changes in order of commit; what waits for one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from oncehook.errors import DefinitionChanged, Exists, InUse, NotFound
from oncehook.model import (
    DefinitionChange,
    DefinitionChanges,
    DefinitionWrite,
    Noun,
    StoredDefinition,
    address_hash,
    new_id,
)
from oncehook.store.base import Store, StoreObserver
from tests.store.conftest import Ground
from tests.store.making import dead, deliver_one, done, look, settle, statuses, take_one
from tests.waiting import until


def write(name: str, act: Any = "create", noun: Noun = Noun.source, **fields: Any) -> DefinitionWrite:
    if noun is Noun.source and act != "delete":
        fields.setdefault("address", address_hash(name))
    return DefinitionWrite(act=act, noun=noun, name=name, actor="ann", detail='{"after": 1}', **fields)


async def make(store: Store, name: str, **fields: Any) -> StoredDefinition:
    made = await store.write_definition(write(name, **fields))
    assert made is not None
    return made


async def delete(store: Store, one: StoredDefinition, **fields: Any) -> None:
    gone = await store.write_definition(write(one.name, "delete", one.noun, expected=one.version, **fields))
    assert gone is None


async def test_a_definition_is_kept_as_given(store: Store) -> None:
    before = (await store.definition_changes(-1)).version
    made = await make(store, "trigger", settings='{"given": {}}', secrets=b"\x00\xff", account="42", largest_body=7)
    [found] = await store.find_definitions(Noun.source, ["trigger", "nobody"])
    assert found == made
    assert (found.settings, found.secrets) == ('{"given": {}}', b"\x00\xff")
    assert (found.account, found.is_enabled) == ("42", True)
    assert found.version == before + 1
    changes = await store.definition_changes(before)
    assert (changes.version, changes.largest_body) == (before + 1, 7)
    assert [one.name for one in changes.changed] == ["trigger"]
    [line] = await store.audit_log(limit=1)
    assert (line.actor, line.act, line.target, line.detail) == ("ann", "create", "source trigger", {"after": 1})


async def test_a_name_and_an_address_are_taken_once(store: Store) -> None:
    made = await make(store, "trigger")
    with pytest.raises(Exists, match="already"):
        await make(store, "trigger")
    with pytest.raises(Exists, match="address"):
        await make(store, "other", address=address_hash("trigger"))
    assert (await store.definition_changes(-1)).version == made.version, "what was refused changes nothing"
    assert len(await store.audit_log()) == 1
    await delete(store, made)
    again = await make(store, "trigger")
    assert again.id == made.id, "an id is its name's for ever"
    assert again.created_at >= made.changed_at


async def test_of_two_changes_the_second_must_have_seen_the_first(store: Store) -> None:
    made = await make(store, "trigger")
    changed = await store.write_definition(write("trigger", "change", expected=made.version, settings="[1]"))
    assert changed is not None
    assert changed.version > made.version
    for act in ("change", "delete"):
        with pytest.raises(DefinitionChanged):
            await store.write_definition(write("trigger", act, expected=made.version))
    with pytest.raises(NotFound):
        await store.write_definition(write("nobody", "change", expected=1))
    [found] = await store.find_definitions(Noun.source, ["trigger"])
    assert found.settings == "[1]"


async def test_changes_are_told_in_order_of_commit_with_deletions(store: Store) -> None:
    start = (await store.definition_changes(-1)).version
    made = [await make(store, f"s{n}") for n in range(3)]
    await delete(store, made[1])
    changes = await store.definition_changes(start)
    assert [(one.name, one.is_enabled) for one in changes.changed] == [("s0", True), ("s2", True), ("s1", False)]
    assert [one.version for one in changes.changed] == [start + 1, start + 3, start + 4]
    assert changes.version == start + 4
    assert (await store.definition_changes(start + 4)).changed == []
    assert await store.find_definitions(Noun.source, ["s1"]) == []
    assert await store.find_sources([address_hash("s1")]) == []


async def test_many_at_once_get_versions_without_gaps(store: Store) -> None:
    start = (await store.definition_changes(-1)).version
    made = await asyncio.gather(*(make(store, f"s{n}") for n in range(20)))
    assert sorted(one.version for one in made) == list(range(start + 1, start + 21))


async def test_a_source_comes_with_its_routes_and_takes_them_along(store: Store) -> None:
    source = await make(store, "trigger")
    target = await make(store, "crm-2", noun=Noun.destination)
    route = await make(store, "rte_1", noun=Noun.route, source="trigger", destination="crm-2")
    assert route.id == target.id
    found = await store.find_sources([address_hash("trigger"), address_hash("nobody")])
    assert [(one.noun, one.name, one.is_led_nowhere) for one in found] == [
        (Noun.source, "trigger", False),
        (Noun.route, "rte_1", False),
    ]
    assert [one.led_to for one in found] == [None, target.settings]
    disabled = await store.write_definition(
        write("crm-2", "disable", Noun.destination, expected=target.version, is_enabled=False)
    )
    assert disabled is not None
    [led] = await store.find_routes(["trigger"])
    assert led.is_led_nowhere
    assert [one.name for one in await store.find_routes_to(["crm-2"])] == ["rte_1"]
    assert [one.name for one in await store.find_destinations([target.id])] == ["crm-2"]
    start = (await store.definition_changes(-1)).version
    await delete(store, source)
    gone = await store.definition_changes(start)
    assert [(one.noun, one.source) for one in gone.changed] == [(Noun.route, "trigger"), (Noun.source, None)]
    assert await store.find_routes(["trigger"]) == []


async def test_lists_go_on_after_a_name_and_within_an_account(store: Store) -> None:
    for name, account in (("a", "1"), ("b", "2"), ("c", "1"), ("d", None)):
        await make(store, name, account=account)
    assert [one.name for one in await store.list_definitions(Noun.source, limit=2)] == ["a", "b"]
    assert [one.name for one in await store.list_definitions(Noun.source, after="b")] == ["c", "d"]
    assert [one.name for one in await store.list_definitions(Noun.source, account="1")] == ["a", "c"]
    assert await store.list_definitions(Noun.route) == []


async def test_what_deliveries_wait_for_is_not_deleted(store: Store) -> None:
    crm = await make(store, "crm", noun=Noun.destination)
    waiting = await deliver_one(store)
    with pytest.raises(InUse, match="still wait for crm"):
        await delete(store, crm)
    await settle(store, done(await take_one(store)))
    await delete(store, crm)
    assert await statuses(store, [waiting]) == ["done"]


async def test_what_waits_is_discarded_with_its_destination(store: Store) -> None:
    """Also what is leased, and dead letters; nothing that came later, and nothing of others."""
    crm = await make(store, "crm", noun=Noun.destination)
    died = await deliver_one(store)
    await settle(store, dead(await take_one(store)))
    leased = await deliver_one(store)
    lease = await take_one(store)
    waiting = await deliver_one(store)
    before = new_id()
    later = await deliver_one(store)
    await delete(store, crm, unless_waiting=False)
    assert await store.discard_waiting(crm.id, before, "its destination was deleted", limit=2) == 2
    assert await store.discard_waiting(crm.id, before, "its destination was deleted") == 1
    assert await store.discard_waiting(crm.id, before, "its destination was deleted") == 0
    assert await statuses(store, [died, leased, waiting]) == ["discarded"] * 3
    assert (await look(store, later)).status in ("pending", "leased")
    assert (await look(store, waiting)).reason == "its destination was deleted"
    assert not (await store.settle([done(lease)])).ours, "who worked on it is told that it is gone"


class Told(StoreObserver):
    def __init__(self) -> None:
        self.changes: list[DefinitionChanges] = []

    def note_definitions(self, changes: DefinitionChanges) -> None:
        self.changes.append(changes)

    @property
    def changed(self) -> list[DefinitionChange]:
        return [one for changes in self.changes for one in changes.changed]


async def test_every_process_is_told(ground: Ground, store: Store) -> None:
    """At once where it was made; elsewhere by notice or look."""
    other, told = ground.make(), Told()
    await other.open(told)
    try:
        await until(lambda: other.learns_changes)
        made = await make(store, "trigger")
        await until(lambda: [one.name for one in told.changed] == ["trigger"])
        await delete(store, made)
        await until(lambda: [one.is_enabled for one in told.changed] == [True, False])
        assert told.changes[-1].version == (await store.definition_changes(-1)).version
        elsewhere = await make(other, "elsewhere")
        assert told.changed[-1].version == elsewhere.version, "whoever changes knows it before the answer"
    finally:
        await other.close()


async def test_deleted_rows_go_after_a_day(ground: Ground, store: Store) -> None:
    made, stays = await make(store, "trigger"), await make(store, "stays")
    await delete(store, made)
    while await store.prune({}, 30 * 86_400.0):
        pass
    assert len(ground.sql("SELECT name FROM definitions")) == 2
    ground.forward(86_401)
    while await store.prune({}, 30 * 86_400.0):
        pass
    assert ground.sql("SELECT name FROM definitions") == [("stays",)]
    assert await store.find_definitions(Noun.source, ["stays"]) == [stays]


async def test_sources_that_keep_events_longer_are_found(store: Store) -> None:
    await make(store, "plain", settings=json.dumps({"given": {"preset": "n8n"}, "hidden": {}}))
    kept = await make(store, "kept", settings=json.dumps({"given": {"keep_events": "90d"}, "hidden": {}}))
    assert await store.find_kept_sources() == [kept]
