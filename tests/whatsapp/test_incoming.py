"""An incoming message, as a handler sees it: alike from every API, on what their senders really send."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given

from oncehook.whatsapp import IncomingMessage, NoMessage
from oncehook.whatsapp.incoming import read_incoming
from tests.presets.families import Said, cloud, evolution_api, evolution_go
from tests.presets.messaging import json_values
from tests.presets.test_families import FAMILIES

# Of a batch a handler sees its parts.
EACH = [(preset, name) for preset, payloads in FAMILIES.items() for name, one in payloads.items() if len(one.made) == 1]


@pytest.mark.parametrize(("preset", "name"), EACH, ids=lambda part: part)
def test_a_handler_sees_the_message(preset: str, name: str) -> None:
    payload = FAMILIES[preset][name]
    if payload.said is None:
        with pytest.raises(NoMessage):
            read_incoming(payload.body)
        return
    received = read_incoming(payload.body)
    assert Said(received.chat, received.sender, received.text, received.from_me) == payload.said
    assert received.id
    is_alone = payload.said.chat == payload.said.sender != evolution_go.CHANNEL
    assert received.is_direct == (is_alone and not payload.said.from_me)
    answer = received.reply_to("On its way")
    assert (answer.to, answer.text, answer.reply_to) == (payload.said.chat, "On its way", received.id)
    assert received.reply_to("On its way", quote=False).reply_to is None


@pytest.mark.parametrize("junk", [None, 7, "text", [], {}, [None], [[]], {"id": {}}], ids=repr)
def test_no_shape_is_mistaken_for_a_message(junk: object) -> None:
    shapes: list[object] = [
        junk,
        {"messages": junk},
        {"messages": [junk]},
        {"entry": junk},
        {"event": "x", "data": junk},
        {"event": "x", "data": {"key": junk}},
        {"event": "x", "data": {"Info": junk, "Message": junk}},
        cloud.document(messages=[{"id": junk}]),
        cloud.document("history", history=[{"threads": [{"id": junk, "messages": [junk]}]}]),
    ]
    for shape in shapes:
        with pytest.raises(NoMessage):
            read_incoming(shape)


NAMES = ["entry", "changes", "value", "messages", "contacts", "history", "threads", "from", "id", "text", "body"]
EVOLUTION = [
    "key",
    "remoteJid",
    "id",
    "message",
    "conversation",
    "Info",
    "Chat",
    "Sender",
    "ID",
    "Message",
    "editedMessage",
]


@given(json_values(NAMES), json_values(EVOLUTION))
def test_no_shape_makes_it_stumble(meta: Any, evolution: Any) -> None:
    for shape in (
        meta,
        cloud.document(messages=[meta]),
        {"event": "x", "data": evolution},
        {"event": "x", "data": [evolution]},
    ):
        with contextlib.suppress(NoMessage):
            read_incoming(shape)


@pytest.mark.parametrize("chat", [evolution_go.GROUP, evolution_go.CHANNEL, "status@broadcast", cloud.GROUP])
def test_what_is_written_to_many_is_not_direct(chat: str) -> None:
    assert not IncomingMessage("3EB0", chat, chat, "Hi", from_me=False).is_direct
    assert not IncomingMessage("3EB0", chat, cloud.SHEENA, "Hi", from_me=False).is_direct


def test_a_message_in_a_thousand_wrappers_has_no_words() -> None:
    content: dict[str, Any] = {"conversation": "deep"}
    for _ in range(900):
        content = {"ephemeralMessage": {"message": content}}
    body = evolution_api.envelope("messages.upsert", evolution_api.raw(content, "ephemeralMessage"))
    assert read_incoming(body).text == ""
