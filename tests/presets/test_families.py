"""The WhatsApp family on what its senders really send: what becomes an event, and its type, key and subject."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.presets.families import HASH, Made, Payload, cloud, dialog360, evolution_api, evolution_go
from tests.presets.messaging import counts, ground

FAMILIES: Mapping[str, Mapping[str, Payload]] = {
    "whatsapp-cloud": cloud.PAYLOADS,
    "360dialog": dialog360.PAYLOADS,
    "evolution-api": evolution_api.PAYLOADS,
    "evolution-go": evolution_go.PAYLOADS,
}


@pytest.mark.parametrize("preset", FAMILIES)
async def test_every_payload_becomes_its_events_and_comes_again_as_a_duplicate(tmp_path: Path, preset: str) -> None:
    assert len(FAMILIES[preset]) >= 20
    for number, (name, payload) in enumerate(FAMILIES[preset].items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with ground(folder, preset) as place:
            assert (await place.send(payload.body)).outcome == "accepted", name
            events = await place.events()
            made = [
                Made(event.type, HASH if wanted.key == HASH else str(event.key), event.subject)
                for event, wanted in zip(events, payload.made, strict=True)
            ]
            assert made == payload.made, name
            assert not any(event.marks for event in events), name
            assert await place.outcome(payload.body) == "duplicate", name


# -- one person, one subject -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "names"),
    [
        (
            "whatsapp-cloud",
            ("Chatwoot: phone and user id, without metadata", "Chatwoot: user id only, without metadata"),
        ),
        ("360dialog", ("phone and user id", "user id, later")),
    ],
)
async def test_who_has_both_names_joins_who_has_one(tmp_path: Path, preset: str, names: tuple[str, str]) -> None:
    async with ground(tmp_path, preset) as place:
        for name in names:
            await place.send(FAMILIES[preset][name].body)
        assert {event.subject for event in await place.events()} == {cloud.CHATWOOT_USER}


async def test_a_status_joins_the_person_who_wrote(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        for name in ("user id only", "delivered, with every id", "delivered, without a phone number"):
            await place.send(cloud.PAYLOADS[name].body)
        assert {event.subject for event in await place.events()} == {f"{cloud.NUMBER}:{cloud.PARENT}"}


async def test_a_group_is_one_subject_for_messages_and_statuses(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        for name in ("in a group", "read in a group"):
            await place.send(cloud.PAYLOADS[name].body)
        assert {event.subject for event in await place.events()} == {f"{cloud.NUMBER}:{cloud.GROUP}"}


async def test_a_call_is_one_subject_from_ringing_to_its_end(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        for name in ("call of the business", "call rings", "call is accepted", "call is over"):
            await place.send(cloud.PAYLOADS[name].body)
        events = await place.events()
        assert len(events) == 4
        assert {event.subject for event in events} == {f"{cloud.NUMBER}:{cloud.CALL}"}
        assert {event.rank for event in events} == {None}


# -- grouped anew ------------------------------------------------------------------------------


async def test_a_flat_batch_is_taken_apart_and_a_regrouped_copy_is_a_duplicate(tmp_path: Path) -> None:
    bodies = [dialog360.PAYLOADS[name].body for name in ("user id only", "phone and user id", "user id, later")]
    together = {
        "contacts": [one for body in bodies for one in body["contacts"]],
        "messages": [one for body in bodies for one in body["messages"]],
        "statuses": dialog360.PAYLOADS["read"].body["statuses"],
    }
    async with ground(tmp_path, "360dialog") as place:
        assert counts(await place.send(together)) == (4, 0, 0)
        assert json.loads((await place.events())[1].body)["messages"] == bodies[1]["messages"]
        for body in (*bodies, dialog360.PAYLOADS["read"].body):
            assert await place.outcome(body) == "duplicate"
        other = {"messages": [*reversed(together["messages"])], "contacts": []}
        assert counts(await place.send(other)) == (0, 3, 0)


async def test_history_is_taken_apart_and_a_regrouped_copy_is_a_duplicate(tmp_path: Path) -> None:
    whole = cloud.PAYLOADS["history"].body
    chunk = whole["entry"][0]["changes"][0]["value"]["history"][0]
    async with ground(tmp_path, "whatsapp-cloud") as place:
        assert counts(await place.send(whole)) == (3, 0, 0)
        for thread in chunk["threads"]:
            for message in thread["messages"]:
                alone = {**chunk, "threads": [{**thread, "messages": [message]}]}
                assert await place.outcome(cloud.document("history", history=[alone])) == "duplicate"
        # What was live before is another event than the copy that history brings.
        assert await place.outcome(cloud.PAYLOADS["text"].body) == "accepted"
