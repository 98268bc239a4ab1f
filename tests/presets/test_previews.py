"""Where a person's text stands, provider by provider, and which types are volume. Payloads are theirs, by value."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import pytest

from oncehook import presets
from oncehook.errors import ConfigError
from oncehook.model import LONGEST_BODY, Arrival, ArrivalId, EventDetails, EventId, Mark, new_id, pack_head
from oncehook.sources import Source, build
from oncehook.verify import Nothing

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
JSON = (b"content-type", b"application/json")
FORM = (b"content-type", b"application/x-www-form-urlencoded; charset=UTF-8")


def source_of(name: str | None = None, **settings: Any) -> Source:
    preset = None if name is None else presets.load(name)
    needed = {"verify_token": b"t", "public_url": "https://example.com/in/x"}
    given = {need: needed[need] for need in (preset.needs if preset else ()) if need in needed}
    return build(name or "plain", preset=preset, verify=Nothing(), **{"key": "$.id", **given, **settings})


def kept(body: bytes, *, header: tuple[bytes, bytes] = JSON, query: bytes = b"", batch: bool = False) -> EventDetails:
    """An event as it stands in the store: of a part of a batch, the head is with the batch."""
    head = b"" if batch else pack_head(Arrival("x", [header], body, query, path="/in/x"))
    return EventDetails(
        EventId(new_id()),
        1,
        "x",
        "t",
        None,
        None,
        NOW,
        None,
        Mark.none,
        None,
        None,
        head,
        body,
        batch_id=ArrivalId(new_id()) if batch else None,
        copies=1,
        same_as=None,
    )


def says(source: Source, body: object, **how: Any) -> str | None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return source.preview_of(kept(raw, **how))


def cloud(**value: Any) -> dict[str, Any]:
    metadata = {"display_phone_number": "16505551111", "phone_number_id": "123456123"}
    change = {"value": {"messaging_product": "whatsapp", "metadata": metadata, **value}, "field": "messages"}
    return {"object": "whatsapp_business_account", "entry": [{"id": "0", "changes": [change]}]}


def message(kind: str, **content: Any) -> dict[str, Any]:
    return cloud(messages=[{"from": "16315551181", "id": "ABGG", "timestamp": "1504902988", "type": kind, **content}])


def evolution(**said: Any) -> dict[str, Any]:
    key = {"remoteJid": "5511988880142@s.whatsapp.net", "fromMe": False, "id": "3EB0"}
    return {"event": "messages.upsert", "instance": "sales", "data": {"key": key, "message": said}}


def go(**said: Any) -> dict[str, Any]:
    info = {"Chat": "5511988880142@s.whatsapp.net", "ID": "3EB0", "IsFromMe": False, "Type": "text"}
    return {"event": "Message", "instanceId": "1", "data": {"Info": info, "Message": said}}


def page(**item: Any) -> dict[str, Any]:
    sender = {"sender": {"id": "1"}, "recipient": {"id": "2"}, "timestamp": 1}
    return {"object": "page", "entry": [{"id": "2", "time": 1, "messaging": [{**sender, **item}]}]}


SAID: list[tuple[str, Any, str | None]] = [
    ("whatsapp-cloud", message("text", text={"body": "Quero pagar"}), "Quero pagar"),
    ("whatsapp-cloud", message("image", image={"id": "1", "mime_type": "image/jpeg", "caption": "Nota"}), "Nota"),
    ("whatsapp-cloud", message("image", image={"id": "1", "mime_type": "image/jpeg"}), None),
    ("whatsapp-cloud", message("video", video={"id": "1", "caption": "Veja"}), "Veja"),
    ("whatsapp-cloud", message("document", document={"id": "1", "caption": "Pedido", "filename": "a.pdf"}), "Pedido"),
    ("whatsapp-cloud", message("document", document={"id": "1", "filename": "a.pdf"}), "a.pdf"),
    ("whatsapp-cloud", message("button", button={"text": "No", "payload": "No-Button-Payload"}), "No"),
    (
        "whatsapp-cloud",
        message("interactive", interactive={"type": "button_reply", "button_reply": {"id": "u", "title": "Sim"}}),
        "Sim",
    ),
    (
        "whatsapp-cloud",
        message("interactive", interactive={"type": "list_reply", "list_reply": {"id": "u", "title": "Azul"}}),
        "Azul",
    ),
    ("whatsapp-cloud", message("reaction", reaction={"message_id": "w", "emoji": "\U0001f600"}), "\U0001f600"),
    ("whatsapp-cloud", cloud(message_echoes=[{"id": "w", "type": "text", "text": {"body": "Da loja"}}]), "Da loja"),
    ("whatsapp-cloud", cloud(statuses=[{"id": "w", "status": "read", "recipient_id": "1"}]), None),
    ("360dialog", message("text", text={"body": "Quero pagar"}), "Quero pagar"),
    ("evolution-api", evolution(conversation="Oi"), "Oi"),
    (
        "evolution-api",
        evolution(extendedTextMessage={"text": "Oi, veja https://x.example"}),
        "Oi, veja https://x.example",
    ),
    ("evolution-api", evolution(imageMessage={"caption": "Nota", "mimetype": "image/jpeg"}), "Nota"),
    ("evolution-api", evolution(videoMessage={"caption": "Veja"}), "Veja"),
    ("evolution-api", evolution(documentMessage={"caption": "Pedido", "fileName": "a.pdf"}), "Pedido"),
    (
        "evolution-api",
        evolution(documentWithCaptionMessage={"message": {"documentMessage": {"caption": "Pedido 7"}}}),
        "Pedido 7",
    ),
    ("evolution-api", evolution(listResponseMessage={"title": "Azul", "singleSelectReply": {}}), "Azul"),
    ("evolution-api", evolution(buttonsResponseMessage={"selectedDisplayText": "Sim"}), "Sim"),
    ("evolution-api", evolution(templateButtonReplyMessage={"selectedDisplayText": "Sim"}), "Sim"),
    ("evolution-api", evolution(reactionMessage={"text": "\U0001f44d"}), "\U0001f44d"),
    ("evolution-api", {"event": "messages.set", "data": [{"message": {"conversation": "Antes"}}]}, "Antes"),
    ("evolution-api", {"event": "presence.update", "data": {"id": "5511@s.whatsapp.net", "presences": {}}}, None),
    ("evolution-go", go(conversation="Oi"), "Oi"),
    ("evolution-go", go(extendedTextMessage={"text": "Oi de novo"}), "Oi de novo"),
    ("evolution-go", go(imageMessage={"caption": "Nota", "mimetype": "image/jpeg"}), "Nota"),
    ("evolution-go", {"event": "Receipt", "state": "Read", "data": {"MessageIDs": ["3EB0"]}}, None),
    ("waha", {"event": "message", "session": "default", "payload": {"id": "false_1@c.us_A", "body": "Oi"}}, "Oi"),
    ("messenger", page(message={"mid": "m", "text": "Aberto?"}), "Aberto?"),
    ("messenger", page(postback={"mid": "m", "title": "Get started", "payload": "START"}), "Get started"),
    ("messenger", page(read={"watermark": 1}), None),
    ("telegram", {"update_id": 1, "message": {"chat": {"id": 1}, "text": "/start"}}, "/start"),
    ("telegram", {"update_id": 1, "message": {"chat": {"id": 1}, "photo": [], "caption": "Nota"}}, "Nota"),
    (
        "telegram",
        {"update_id": 1, "callback_query": {"id": "3", "message": {"text": "Confirm?"}, "data": "confirm"}},
        "confirm",
    ),
    ("slack", {"type": "event_callback", "event": {"type": "app_mention", "text": "<@U1> help"}}, "<@U1> help"),
    ("n8n", {"event": "message.received", "data": {"messageId": "3", "text": "Oi"}}, "Oi"),
    ("n8n", {"type": "command", "message": "Publica o post"}, "Publica o post"),
    ("stripe", {"id": "evt_1", "type": "invoice.paid"}, None),
]


@pytest.mark.parametrize(("name", "body", "text"), SAID)
def test_a_preset_says_where_a_persons_text_stands(name: str, body: Any, text: str | None) -> None:
    assert says(source_of(name), body) == text
    assert says(source_of(name), body, batch=True) == text


def test_forms_are_read_too() -> None:
    twilio = urlencode({"MessageSid": "SM1", "Body": "Cancel my order", "From": "+15550100142"}).encode()
    assert says(source_of("twilio"), twilio, header=FORM) == "Cancel my order"
    slack = urlencode({"command": "/deploy", "text": "main to staging", "team_id": "T1"}).encode()
    assert says(source_of("slack"), slack, header=FORM) == "/deploy main to staging"


# -- settings ----------------------------------------------------------------------------------


def test_a_source_says_it_itself_and_a_preset_is_overruled() -> None:
    assert says(source_of(preview="$.note"), {"note": "ring twice"}) == "ring twice"
    assert says(source_of(), {"text": "not asked for"}) is None
    assert says(source_of("waha", preview="$.payload.from"), {"payload": {"from": "1@c.us", "body": "Oi"}}) == "1@c.us"
    assert says(source_of(preview=[["$.who", "?$.what"]]), {"who": "Ana", "what": "pays"}) == "Ana pays"
    assert says(source_of(preview=lambda context: context.data["lines"][-1]), {"lines": ["a", "b"]}) == "b"
    assert says(source_of(preview=lambda context: context.data["lines"][-1]), {"lines": []}) is None
    assert says(source_of(preview="header:X-Note"), {}, header=(b"x-note", b"by hand")) == "by hand"


@pytest.mark.parametrize("wrong", ["text", ["$.a", "b"], {"of": "$.a", "order": ["x"]}, []])
def test_a_rule_that_cannot_be_meant_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        source_of(preview=wrong)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", None),
        (b"{", None),
        (b"\xff\xfe", None),
        (b'{"note": {"a": 1}}', None),
        (b'{"note": null}', None),
        (b'{"note": "  \\n "}', None),
        (b'{"note": 42}', "42"),
        (b'{"note": "a\\u0000b\\u202ec\\ud800d\\n\\te"}', None),  # no JSON that anybody could read
        (b'{"note": "a\\u0000b\\u202ec\\n\\te"}', "abc e"),
        (b'{"note": "' + b"x" * 1000 + b'"}', "x" * 299 + "…"),
        (b'{"note": "hidden", "rest": "' + b"x" * LONGEST_BODY + b'"}', None),
    ],
)
def test_whatever_was_sent_it_is_one_short_line_or_nothing(body: bytes, text: str | None) -> None:
    assert says(source_of(preview="$.note"), body) == text


# -- volume ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "counted", "others"),
    [
        ("whatsapp-cloud", "message.text message.image echo.text", "status.sent status.read account_update"),
        ("360dialog", "message.text", "status.delivered"),
        (
            "evolution-api",
            "messages.upsert send.message",
            "messages.update messages.set presence.update connection.update chats.update contacts.upsert",
        ),
        ("evolution-go", "Message SendMessage", "Receipt Presence ChatPresence HistorySync Connected PushName"),
        ("waha", "message message.any", "message.ack message.reaction presence.update session.status"),
        ("messenger", "message message.echo postback", "read delivery reaction"),
        ("twilio", "message.received", "message.sent message.delivered call.ringing"),
    ],
)
def test_messages_are_volume_and_receipts_are_not(name: str, counted: str, others: str) -> None:
    volume = source_of(name).volume
    assert volume is not None
    assert [kind for kind in counted.split() if not volume.match(kind)] == []
    assert [kind for kind in others.split() if volume.match(kind)] == []


def test_where_types_are_ones_own_everything_is_volume() -> None:
    assert source_of("waha", type="$.kind").volume is None
    assert source_of("stripe").volume is None
