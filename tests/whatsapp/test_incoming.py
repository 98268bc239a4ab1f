"""An incoming message, as a handler sees it: alike from every API, on what their senders really send."""

from __future__ import annotations

import pytest

from oncehook.whatsapp import NoMessage
from oncehook.whatsapp.incoming import read_incoming
from tests.presets.families import Said, cloud, evolution_go
from tests.presets.test_families import FAMILIES

EACH = [(preset, name) for preset, payloads in FAMILIES.items() for name in payloads]


@pytest.mark.parametrize(("preset", "name"), EACH, ids=lambda part: part)
def test_a_handler_sees_the_message(preset: str, name: str) -> None:
    payload = FAMILIES[preset][name]
    if len(payload.made) > 1:
        return  # a handler sees its parts
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
