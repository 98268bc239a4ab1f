"""Every sender against a scripted server: the exact requests, and what each API's errors come to.

The stand-ins in `oncehook.testing` behave like whole APIs; here the bytes are told one by one.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oncehook import whatsapp
from oncehook.errors import ConfigError, OncehookError
from oncehook.http_client.client import HttpClient
from oncehook.model import Category
from oncehook.retry import Policy
from oncehook.secret import Secret
from oncehook.whatsapp import (
    Contact,
    EvolutionApi,
    EvolutionGo,
    Link,
    Location,
    Media,
    MetaCloud,
    Poll,
    Reaction,
    Read,
    Reason,
    Sender,
    SendFailed,
    Sent,
    Template,
    Text,
)
from oncehook.whatsapp.evolution import wire_id
from oncehook.whatsapp.files import META_TYPES, FileTypes, OutgoingFile, prepare
from oncehook.whatsapp.outcomes import CATEGORY
from tests.whatsapp.scripted import Api, Asked, Behaviour, answer, cut, hang

TOKEN = "EAAG-canary-token-0123456789"
ADMIN = "admin-canary-0123456789"
TO = "+55 11 99999-0001"
NUMBER = "5511999990001"
JID = f"{NUMBER}@s.whatsapp.net"
LINK = "https://files.example/a"

META_OK = answer(200, {"messaging_product": "whatsapp", "messages": [{"id": "wamid.NEW"}]})
API_OK = answer(201, {"key": {"remoteJid": JID, "fromMe": True, "id": "3EB0NEW"}, "status": "PENDING"})
GO_OK = answer(200, {"message": "success", "data": {"Info": {"ID": "3EB0NEW"}, "Message": {}}})


def meta(api: Api, **settings: Any) -> Sender:
    return MetaCloud(TOKEN, "106540352242922", base_url=api.url, allow_private=True, **settings)


def evolution_api(api: Api, **settings: Any) -> Sender:
    return EvolutionApi(api.url, TOKEN, "my shop", allow_private=True, **settings)


def evolution_go(api: Api, **settings: Any) -> Sender:
    return EvolutionGo(api.url, TOKEN, instance="inst-1", admin_key=ADMIN, allow_private=True, **settings)


Making = Callable[..., Sender]
EVERY = pytest.mark.parametrize(
    ("make", "ok"),
    [(meta, META_OK), (evolution_api, API_OK), (evolution_go, GO_OK)],
    ids=["meta", "evolution-api", "evolution-go"],
)


@asynccontextmanager
async def sending(make: Making, *says: bytes | Behaviour, **settings: Any) -> AsyncIterator[tuple[Sender, Api]]:
    async with Api(list(says)).open() as api, make(api, **settings) as sender:
        yield sender, api


async def refusal(make: Making, *says: bytes | Behaviour, **settings: Any) -> SendFailed:
    async with sending(make, *says, **settings) as (sender, _):
        with pytest.raises(SendFailed) as raised:
            await sender.send_text(TO, "Hello")
        return raised.value


async def asked_for(make: Making, ok: bytes, message: whatsapp.Message, id: str | None = None) -> Asked:
    async with sending(make, ok) as (sender, api):
        await sender.send(message, id=id)
        return api.asked[0]


# -- what is sent ------------------------------------------------------------------------------

USER, META_GROUP = "US.13491208655302741918", "Y2FwaV9ncm91cDoxNzA1NTU1MDEzOToxMjAzNjM0MDQ2OTQyMzM4MjAZD"
# A user id in `to` would be answered 200 and never arrive.
META_USER = {"messaging_product": "whatsapp", "recipient_type": "individual", "recipient": USER}
META_TO = {"messaging_product": "whatsapp", "recipient_type": "individual", "to": NUMBER}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            Text(to=TO, text="Hello", reply_to="wamid.1", preview_url=True),
            META_TO
            | {"type": "text", "text": {"body": "Hello", "preview_url": True}, "context": {"message_id": "wamid.1"}},
        ),
        (
            Media(to=TO, kind="document", link=LINK, caption="Here", filename="a.pdf", mime="application/pdf"),
            META_TO | {"type": "document", "document": {"link": LINK, "caption": "Here", "filename": "a.pdf"}},
        ),
        (
            Media(to=TO, kind="image", id="99", caption="See", filename="a.jpg"),
            META_TO | {"type": "image", "image": {"id": "99", "caption": "See"}},
        ),
        (Media(to=TO, kind="sticker", link=LINK), META_TO | {"type": "sticker", "sticker": {"link": LINK}}),
        (
            Template(to=TO, name="hello", language="pt_BR", components=[{"type": "body"}]),
            META_TO
            | {
                "type": "template",
                "template": {"name": "hello", "language": {"code": "pt_BR"}, "components": [{"type": "body"}]},
            },
        ),
        (
            Reaction(to=TO, message_id="wamid.1", emoji=""),
            META_TO | {"type": "reaction", "reaction": {"message_id": "wamid.1", "emoji": ""}},
        ),
        (
            Text(to=USER, text="Hello", reply_to="wamid.1"),
            META_USER
            | {"type": "text", "text": {"body": "Hello", "preview_url": False}, "context": {"message_id": "wamid.1"}},
        ),
        (
            Reaction(to=USER, message_id="wamid.1", emoji="👍"),
            META_USER | {"type": "reaction", "reaction": {"message_id": "wamid.1", "emoji": "👍"}},
        ),
        (
            Text(to=META_GROUP, text="Hello"),
            {
                "messaging_product": "whatsapp",
                "recipient_type": "group",
                "to": META_GROUP,
                "type": "text",
                "text": {"body": "Hello", "preview_url": False},
            },
        ),
        (
            Link(to=TO, url="https://a.example", text="See", reply_to="wamid.1"),
            META_TO
            | {
                "type": "text",
                "text": {"body": "See https://a.example", "preview_url": True},
                "context": {"message_id": "wamid.1"},
            },
        ),
        (
            Location(to=TO, latitude=-23.5, longitude=-46.6, name="Shop"),
            META_TO | {"type": "location", "location": {"latitude": -23.5, "longitude": -46.6, "name": "Shop"}},
        ),
        (
            Contact(to=TO, name="Ana Souza", phone=TO, organization="Shop"),
            META_TO
            | {
                "type": "contacts",
                "contacts": [
                    {
                        "name": {"formatted_name": "Ana Souza", "first_name": "Ana Souza"},
                        "phones": [{"phone": f"+{NUMBER}", "type": "CELL", "wa_id": NUMBER}],
                        "org": {"company": "Shop"},
                    }
                ],
            },
        ),
        (
            Read(message_id="wamid.1"),
            {"messaging_product": "whatsapp", "status": "read", "message_id": "wamid.1"},
        ),
    ],
)
async def test_meta_is_asked_like_this(message: whatsapp.Message, expected: dict[str, Any]) -> None:
    asked = await asked_for(meta, META_OK, message)
    assert (asked.method, asked.path) == ("POST", "/v23.0/106540352242922/messages")
    assert asked.headers["authorization"] == f"Bearer {TOKEN}"
    assert asked.headers["content-type"] == "application/json"
    assert asked.json == expected


@pytest.mark.parametrize(
    ("message", "path", "expected"),
    [
        (
            Text(to=TO, text="Hello", reply_to="3EB0"),
            "message/sendText",
            {"number": NUMBER, "text": "Hello", "linkPreview": False, "quoted": {"key": {"id": "3EB0"}}},
        ),
        (
            Media(to=TO, kind="document", link=LINK, caption="Here", filename="a.pdf", mime="application/pdf"),
            "message/sendMedia",
            {
                "number": NUMBER,
                "mediatype": "document",
                "mimetype": "application/pdf",
                "caption": "Here",
                "media": LINK,
                "fileName": "a.pdf",
            },
        ),
        (Media(to=TO, kind="audio", link=LINK), "message/sendWhatsAppAudio", {"number": NUMBER, "audio": LINK}),
        (Media(to=TO, kind="sticker", link=LINK), "message/sendSticker", {"number": NUMBER, "sticker": LINK}),
        (
            Template(to=TO, name="hello"),
            "message/sendTemplate",
            {"number": NUMBER, "name": "hello", "language": "en_US", "components": []},
        ),
        (
            Reaction(to=TO, message_id="3EB0", emoji="👍", from_me=True),
            "message/sendReaction",
            {"key": {"remoteJid": JID, "fromMe": True, "id": "3EB0"}, "reaction": "👍"},
        ),
        (
            Reaction(to="120363@g.us", message_id="3EB0", emoji="👍"),
            "message/sendReaction",
            {"key": {"remoteJid": "120363@g.us", "fromMe": False, "id": "3EB0"}, "reaction": "👍"},
        ),
        (
            Reaction(to="120363@g.us", message_id="3EB0", emoji="👍", participant=TO),
            "message/sendReaction",
            {
                "key": {"remoteJid": "120363@g.us", "fromMe": False, "id": "3EB0", "participant": JID},
                "reaction": "👍",
            },
        ),
        (
            Text(to="120363@g.us", text="@5511999990001 look", delay=1200, mentions=[TO]),
            "message/sendText",
            {
                "number": "120363@g.us",
                "text": "@5511999990001 look",
                "linkPreview": False,
                "delay": 1200,
                "mentioned": [NUMBER],
            },
        ),
        (
            Media(to="120363@g.us", kind="image", link=LINK, mention_all=True),
            "message/sendMedia",
            {"number": "120363@g.us", "mediatype": "image", "media": LINK, "mentionsEveryOne": True},
        ),
        (
            Link(to=TO, url="https://a.example"),
            "message/sendText",
            {"number": NUMBER, "text": "https://a.example", "linkPreview": True},
        ),
        (
            Location(to=TO, latitude=-23.5, longitude=-46.6, name="Shop", address="Rua A, 1", reply_to="3EB0"),
            "message/sendLocation",
            {
                "number": NUMBER,
                "latitude": -23.5,
                "longitude": -46.6,
                "name": "Shop",
                "address": "Rua A, 1",
                "quoted": {"key": {"id": "3EB0"}},
            },
        ),
        (
            # Its schema asks for both.
            Location(to=TO, latitude=-23.5, longitude=-46.6),
            "message/sendLocation",
            {
                "number": NUMBER,
                "latitude": -23.5,
                "longitude": -46.6,
                "name": "-23.5, -46.6",
                "address": "-23.5, -46.6",
            },
        ),
        (
            Contact(to=TO, name="Ana", phone=TO, organization="Shop"),
            "message/sendContact",
            {
                "number": NUMBER,
                "contact": [{"fullName": "Ana", "phoneNumber": NUMBER, "wuid": NUMBER, "organization": "Shop"}],
            },
        ),
        (
            Poll(to=TO, question="When?", options=["Today", "Later"], max_answers=2),
            "message/sendPoll",
            {"number": NUMBER, "name": "When?", "values": ["Today", "Later"], "selectableCount": 2},
        ),
        (
            Read(to=TO, message_id="3EB0"),
            "chat/markMessageAsRead",
            {"readMessages": [{"remoteJid": JID, "fromMe": False, "id": "3EB0"}]},
        ),
    ],
)
async def test_evolution_api_is_asked_like_this(message: whatsapp.Message, path: str, expected: dict[str, Any]) -> None:
    asked = await asked_for(evolution_api, API_OK, message)
    assert (asked.method, asked.path) == ("POST", f"/{path}/my%20shop")
    assert asked.headers["apikey"] == TOKEN
    assert asked.json == expected


@pytest.mark.parametrize(
    ("message", "path", "expected"),
    [
        (
            Text(to=TO, text="Hello", reply_to="3EB0"),
            "/send/text",
            {"number": NUMBER, "text": "Hello", "quoted": {"messageId": "3EB0", "participant": JID}},
        ),
        (
            Text(to="120363@g.us", text="Hello", reply_to="3EB0"),
            "/send/text",
            {"number": "120363@g.us", "text": "Hello", "quoted": {"messageId": "3EB0", "participant": ""}},
        ),
        (
            Text(to=TO, text="See https://a.example", preview_url=True),
            "/send/link",
            {"number": NUMBER, "text": "See https://a.example"},
        ),
        (
            Media(to=TO, kind="video", link=LINK, caption="Look", filename="a.mp4"),
            "/send/media",
            {"number": NUMBER, "url": LINK, "type": "video", "caption": "Look", "filename": "a.mp4"},
        ),
        (Media(to=TO, kind="sticker", link=LINK), "/send/sticker", {"number": NUMBER, "sticker": LINK}),
        (
            Reaction(to=TO, message_id="3EB0", emoji=""),
            "/message/react",
            {"number": NUMBER, "reaction": "remove", "id": "3EB0", "fromMe": False},
        ),
        (
            Reaction(to="120363@g.us", message_id="3EB0", emoji="👍", participant="55119@lid"),
            "/message/react",
            {"number": "120363@g.us", "reaction": "👍", "id": "3EB0", "fromMe": False, "participant": "55119@lid"},
        ),
        (Read(to=TO, message_id="3EB0"), "/message/markread", {"number": NUMBER, "id": ["3EB0"]}),
        (
            Text(to="120363@g.us", text="@5511999990001 look", delay=1200, mentions=[TO]),
            "/send/text",
            {"number": "120363@g.us", "text": "@5511999990001 look", "delay": 1200, "mentionedJid": [JID]},
        ),
        (
            Media(to="120363@g.us", kind="image", link=LINK, mention_all=True),
            "/send/media",
            {"number": "120363@g.us", "url": LINK, "type": "image", "mentionAll": True},
        ),
        (
            Link(to=TO, url="https://a.example", text="See", title="A", description="B", image=LINK),
            "/send/link",
            {
                "number": NUMBER,
                "text": "See https://a.example",
                "url": "https://a.example",
                "title": "A",
                "description": "B",
                "imgUrl": LINK,
            },
        ),
        (
            # The server asks for both.
            Location(to=TO, latitude=-23.5, longitude=-46.6, address="Rua A, 1"),
            "/send/location",
            {
                "number": NUMBER,
                "latitude": -23.5,
                "longitude": -46.6,
                "name": "Rua A, 1",
                "address": "Rua A, 1",
            },
        ),
        (
            Contact(to=TO, name="Ana", phone=TO, organization="Shop"),
            "/send/contact",
            {"number": NUMBER, "vcard": {"fullName": "Ana", "phone": NUMBER, "organization": "Shop"}},
        ),
        (
            Poll(to=TO, question="When?", options=["Today", "Later"], reply_to="3EB0"),
            "/send/poll",
            {
                "number": NUMBER,
                "question": "When?",
                "options": ["Today", "Later"],
                "maxAnswer": 1,
                "quoted": {"messageId": "3EB0", "participant": JID},
            },
        ),
    ],
)
async def test_evolution_go_is_asked_like_this(message: whatsapp.Message, path: str, expected: dict[str, Any]) -> None:
    asked = await asked_for(evolution_go, GO_OK, message)
    assert (asked.method, asked.path) == ("POST", path)
    assert asked.headers["apikey"] == TOKEN
    assert asked.json == expected


@pytest.mark.parametrize("link", [{"url": "http://10.0.0.1/"}, {"url": LINK, "image": "http://127.0.0.1/a.png"}])
async def test_a_link_must_not_lead_into_a_private_network(link: dict[str, str]) -> None:
    async with EvolutionGo("https://evo.example", TOKEN) as sender:
        with pytest.raises(SendFailed, match="leads to no public address") as raised:
            await sender.send(Link(to=TO, **link))
        assert raised.value.reason is Reason.invalid


async def test_the_id_of_a_message_is_handed_on_and_is_always_the_same() -> None:
    text, own = Text(to=TO, text="Hello"), "evt_0199a4e80a0070008000000000000000"
    assert (await asked_for(meta, META_OK, text, own)).json["biz_opaque_callback_data"] == own
    assert (await asked_for(meta, META_OK, text, "x" * 600)).json["biz_opaque_callback_data"] == "x" * 512
    assert (await asked_for(evolution_go, GO_OK, text, own)).json["id"] == wire_id(own)
    assert (await asked_for(evolution_api, API_OK, text, own)).json["messageId"] == wire_id(own)
    assert wire_id(own) == "3EB05C2815BB543925A283"
    assert wire_id(own + "1") != wire_id(own)
    # It would be taken for the id of the message under the emoji.
    reaction = Reaction(to=TO, message_id="3EB0", emoji="👍")
    assert (await asked_for(evolution_go, GO_OK, reaction, own)).json["id"] == "3EB0"


@EVERY
async def test_a_message_that_was_taken_has_its_id(make: Making, ok: bytes) -> None:
    async with sending(make, ok) as (sender, api):
        sent = await sender.send_text(TO, "Hello")
        assert sent.message_id in ("wamid.NEW", "3EB0NEW")
        assert sent.status in (200, 201)
        assert sent.answer == ok.partition(b"\r\n\r\n")[2]
        assert len(api.asked) == 1


@EVERY
@pytest.mark.parametrize(
    "body", [b"", b"ok", b"[]", b"null", b'{"messages": []}', b'{"data": {"Info": null}}', b"{" * 9]
)
async def test_a_message_that_was_taken_without_an_id_was_taken(make: Making, ok: bytes, body: bytes) -> None:
    async with sending(make, answer(200, body)) as (sender, _):
        assert await sender.send_text(TO, "Hello") == Sent(None, 200, body)


@EVERY
async def test_the_conveniences_say_what_the_messages_say(make: Making, ok: bytes) -> None:
    async with sending(make, ok) as (sender, api):
        await sender.send_text(TO, "Hello", reply_to="1")
        await sender.send(Text(to=TO, text="Hello", reply_to="1"))
        await sender.send_media(TO, "image", link=LINK, caption="See")
        await sender.send(Media(to=TO, kind="image", link=LINK, caption="See"))
        await sender.react(TO, "1", "👍", from_me=True)
        await sender.send(Reaction(to=TO, message_id="1", emoji="👍", from_me=True))
        await sender.react(TO, "1", "👍", participant=TO)
        await sender.send(Reaction(to=TO, message_id="1", emoji="👍", participant=TO))
        await sender.send_link(TO, LINK, text="See", reply_to="1")
        await sender.send(Link(to=TO, url=LINK, text="See", reply_to="1"))
        await sender.send_location(TO, 1.5, 2.5, name="Shop", address="Rua A")
        await sender.send(Location(to=TO, latitude=1.5, longitude=2.5, name="Shop", address="Rua A"))
        await sender.send_contact(TO, "Ana", TO, organization="Shop")
        await sender.send(Contact(to=TO, name="Ana", phone=TO, organization="Shop"))
        if make is not meta:
            await sender.send_poll(TO, "When?", ("Today", "Later"), max_answers=2, delay=5, mentions=[TO])
            poll = Poll(to=TO, question="When?", options=["Today", "Later"], max_answers=2, delay=5, mentions=[TO])
            await sender.send(poll)
        await sender.mark_read("1", TO)
        await sender.send(Read(message_id="1", to=TO))
        if make is not evolution_go:
            await sender.send_template(TO, "hello", language="pt_BR")
            await sender.send(Template(to=TO, name="hello", language="pt_BR"))
        asked = [(one.path, one.body) for one in api.asked]
        assert asked[::2] == asked[1::2]


async def test_a_local_number_is_completed() -> None:
    async with sending(evolution_go, GO_OK, country="55") as (sender, api):
        await sender.send_text("(11) 99999-0001", "Hello")
        assert api.asked[0].json["number"] == NUMBER


# -- what is not even tried --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message", "reason"),
    [
        (meta, Text(to="call me", text="Hello"), Reason.invalid_number),
        (evolution_go, Text(to="123", text="Hello"), Reason.invalid_number),
        (evolution_go, Text(to="", text="Hello"), Reason.invalid_number),
        (
            evolution_go,
            Reaction(to="120363@g.us", message_id="1", emoji="👍", participant="me"),
            Reason.invalid_number,
        ),
        (meta, Text(to=TO, text=" "), Reason.invalid),
        (meta, Text(to="120363@g.us", text="Hello"), Reason.unsupported),
        (meta, Text(to="123456@lid", text="Hello"), Reason.unsupported),
        (evolution_api, Text(to=USER, text="Hello"), Reason.unsupported),
        (evolution_go, Text(to=USER, text="Hello"), Reason.unsupported),
        (evolution_go, Reaction(to=META_GROUP, message_id="1", emoji=""), Reason.unsupported),
        (evolution_api, Media(to=TO, kind="image", id="99"), Reason.unsupported),
        (evolution_go, Media(to=TO, kind="image", id="99"), Reason.unsupported),
        (evolution_go, Template(to=TO, name="hello"), Reason.unsupported),
        (evolution_api, Read(message_id="1"), Reason.invalid),
        (evolution_go, Read(message_id="1"), Reason.invalid),
        (meta, Poll(to=TO, question="When?", options=["Today", "Later"]), Reason.unsupported),
        (meta, Text(to=TO, text="Hello", delay=5), Reason.unsupported),
        (meta, Text(to=TO, text="Hello", mentions=[TO]), Reason.unsupported),
        (meta, Text(to=TO, text="Hello", mention_all=True), Reason.unsupported),
        (meta, Link(to=TO, url="https://a.example", title="Mine"), Reason.unsupported),
        (evolution_api, Link(to=TO, url="https://a.example", image=LINK), Reason.unsupported),
        (evolution_go, Text(to=TO, text="Hello", mentions=["me"]), Reason.invalid_number),
        (evolution_go, Text(to=TO, text="Hello", delay=30_000), Reason.invalid),
        (evolution_go, Contact(to=TO, name="Ana", phone="call me"), Reason.invalid_number),
        # Whoever reads the card would read a number that the sender never saw.
        (evolution_go, Contact(to=TO, name="Ana\nTEL:+1", phone=TO), Reason.invalid),
        (evolution_api, Contact(to=TO, name="Ana", phone=TO, organization="A\nB"), Reason.invalid),
    ],
)
async def test_what_cannot_be_sent_is_not_tried(make: Making, message: whatsapp.Message, reason: Reason) -> None:
    async with sending(make, answer(200)) as (sender, api):
        with pytest.raises(SendFailed) as raised:
            await sender.send(message)
        assert raised.value.reason is reason
        assert raised.value.category is Category.permanent
        assert not raised.value.unsure
        assert not api.asked


# -- what an answer means ----------------------------------------------------------------------


def meta_error(status: int, code: int, details: str = "", **headers: str) -> bytes:
    error = {
        "message": f"(#{code}) Something",
        "type": "OAuthException",
        "code": code,
        "error_data": {"messaging_product": "whatsapp", "details": details},
        "fbtrace_id": "Az8or2yhqkZfEZ",
    }
    return answer(status, {"error": error}, **headers)


@pytest.mark.parametrize(
    ("status", "code", "details", "reason"),
    [
        *[(429, code, "", Reason.rate_limited) for code in (4, 80007, 130429, 131048, 131056)],
        (400, 131056, "", Reason.rate_limited),
        (400, 131047, "More than 24 hours have passed", Reason.window_closed),
        (400, 131026, "Message Undeliverable", Reason.invalid_number),
        (400, 131030, "Recipient phone number not in allowed list", Reason.invalid_number),
        *[(401, code, "", Reason.unauthorized) for code in (0, 190)],
        *[(403, code, "", Reason.unauthorized) for code in (10, 200, 299, 368, 131005, 131031)],
        (500, 3, "", Reason.unauthorized),
        (400, 100, "Invalid parameter", Reason.invalid),
        (400, 131009, "Parameter value is not valid", Reason.invalid),
        (404, 132001, "Template does not exist", Reason.invalid),
        (400, 131053, "Media upload error: unsupported type", Reason.invalid),
        (400, 131053, "File size is larger than the limit: too large", Reason.too_large),
        (400, 131052, "The media is too big", Reason.too_large),
        (501, 131051, "", Reason.unsupported),
        *[(500, code, "", Reason.unavailable) for code in (1, 2, 131000, 131016)],
        (400, 1, "", Reason.unavailable),
        (400, 999999, "", Reason.invalid),
        (500, 999999, "", Reason.unavailable),
    ],
)
async def test_metas_codes_decide(status: int, code: int, details: str, reason: Reason) -> None:
    error = await refusal(meta, meta_error(status, code, details))
    assert (error.reason, error.category) == (reason, CATEGORY[reason])
    assert (error.status, error.api_code, error.unsure) == (status, str(code), False)
    assert str(error) == (details or f"(#{code}) Something")
    assert b"fbtrace_id" in error.answer


def api_error(status: int, *message: object) -> bytes:
    return answer(status, {"status": status, "error": "X", "response": {"message": list(message)}})


@pytest.mark.parametrize(
    ("says", "reason", "unsure"),
    [
        (api_error(400, {"jid": JID, "exists": False, "number": NUMBER}), Reason.invalid_number, False),
        (api_error(400, ['instance requires property "text"']), Reason.invalid, False),
        (api_error(401, "Unauthorized"), Reason.unauthorized, False),
        (api_error(404, 'The "my shop" instance does not exist'), Reason.invalid, False),
        (api_error(500, "Error: Connection Closed"), Reason.instance_offline, False),
        (answer(500, {"status": 500, "response": {"message": "Connection Closed"}}), Reason.instance_offline, False),
        (api_error(400, 'The "my shop" instance is not connected'), Reason.instance_offline, False),
        (api_error(400, "PrismaClientKnownRequestError: Invalid `create()`"), Reason.invalid, True),
        (api_error(500, "Error: Timed Out"), Reason.unavailable, True),
        # Baileys' Boom, put into a BadRequestException by sendMessageWithTyping
        (api_error(400, "Error: Timed Out"), Reason.unavailable, True),
        (api_error(400, "AxiosError: timeout of 10000ms exceeded"), Reason.unavailable, True),
        (api_error(400, "PrismaClientKnownRequestError: Timed out fetching a new connection"), Reason.invalid, True),
        (api_error(500, "Error: rate-overlimit"), Reason.rate_limited, False),
        (api_error(400, "Method not available in the Baileys service"), Reason.unsupported, False),
        (api_error(400, "maxContentLength size of 100 exceeded"), Reason.too_large, False),
        (answer(413, b"<html>Request Entity Too Large</html>"), Reason.too_large, False),
        (answer(500, {"message": "Internal server error"}), Reason.unavailable, False),
        (answer(404, b"<pre>Cannot POST /message/sendText</pre>"), Reason.invalid, False),
    ],
)
async def test_evolution_apis_words_decide(says: bytes, reason: Reason, unsure: bool) -> None:
    error = await refusal(evolution_api, says)
    assert (error.reason, error.category, error.unsure) == (reason, CATEGORY[reason], unsure)
    assert str(error)


@pytest.mark.parametrize(
    ("status", "said", "reason", "unsure"),
    [
        (500, "client disconnected", Reason.instance_offline, False),
        (500, "failed to connect client: no active session found", Reason.instance_offline, False),
        (500, "the store doesn't contain a device JID: not logged in", Reason.instance_offline, False),
        (500, f"number {NUMBER} is not registered on WhatsApp", Reason.invalid_number, False),
        (500, "could not parse phone: 55", Reason.invalid_number, False),
        (400, "phone number is required", Reason.invalid_number, False),
        (400, "message body is required", Reason.invalid, False),
        (500, "Invalid file format: 'image/gif'. Only 'image/jpeg' is accepted", Reason.invalid, False),
        (500, "invalid sticker URL", Reason.invalid, False),
        (500, "failed to convert image to WebP: failed to decode image: image: unknown format", Reason.invalid, False),
        (500, "failed to convert image to WebP: failed to fetch image from URL: EOF", Reason.unavailable, False),
        (
            500,
            "documentos não são suportados em canais do WhatsApp. Use imagem, vídeo, áudio ou enquete",
            Reason.unsupported,
            False,
        ),
        (
            500,
            "error during conversion: exit status 1, details: pipe:0: Invalid data found when processing input",
            Reason.invalid,
            False,
        ),
        (500, "info query returned status 429: rate-overlimit", Reason.rate_limited, False),
        (500, "file too large", Reason.too_large, False),
        (500, "timed out waiting for message send response", Reason.unavailable, True),
        (500, "websocket disconnected before message send returned response", Reason.instance_offline, True),
        (401, "not authorized", Reason.unauthorized, False),
        (500, "something else", Reason.unavailable, False),
    ],
)
async def test_evolution_gos_words_decide(status: int, said: str, reason: Reason, unsure: bool) -> None:
    error = await refusal(evolution_go, answer(status, {"error": said}))
    assert (error.reason, error.category, error.unsure) == (reason, CATEGORY[reason], unsure)
    assert str(error) == said


async def test_evolution_gos_missing_license_keeps_its_code_and_its_sentence() -> None:
    said = {
        "error": "service not activated",
        "code": "LICENSE_REQUIRED",
        "register_url": "http://go.example/manager/login",
        "message": "License required. Open the manager to activate your license.",
    }
    error = await refusal(evolution_go, answer(503, said))
    assert (error.reason, error.category, error.unsure) == (Reason.unavailable, Category.transient, False)
    assert (error.status, error.api_code) == (503, "LICENSE_REQUIRED")
    assert str(error) == "service not activated: License required. Open the manager to activate your license."


@EVERY
@pytest.mark.parametrize(
    ("status", "reason", "unsure"),
    [
        (301, Reason.invalid, False),
        (400, Reason.invalid, False),
        (401, Reason.unauthorized, False),
        (403, Reason.unauthorized, False),
        (408, Reason.unavailable, False),
        (413, Reason.too_large, False),
        (429, Reason.rate_limited, False),
        (500, Reason.unavailable, False),
        (502, Reason.unavailable, False),
        (503, Reason.unavailable, False),
        (504, Reason.unavailable, True),
        (524, Reason.unavailable, True),
        (600, Reason.unknown, False),
    ],
)
async def test_where_nothing_is_said_the_status_decides(
    make: Making, ok: bytes, status: int, reason: Reason, unsure: bool
) -> None:
    error = await refusal(make, answer(status, b"<html>", location="http://127.0.0.1:1/"))
    assert (error.reason, error.status, error.unsure) == (reason, status, unsure)
    assert str(error) == f"HTTP {status}"


@EVERY
async def test_retry_after_is_told(make: Making, ok: bytes) -> None:
    assert (await refusal(make, answer(429, b"", Retry_After="37"))).retry_after == 37.0
    assert (await refusal(make, answer(503, b"", Retry_After="soon"))).retry_after is None


# -- silence -----------------------------------------------------------------------------------


@EVERY
async def test_silence_after_the_request_went_out_leaves_it_unsure(make: Making, ok: bytes) -> None:
    for says in (hang, cut):
        error = await refusal(make, says)
        assert (error.reason, error.category, error.unsure) == (Reason.unavailable, Category.transient, True)
        assert error.status is None


@EVERY
async def test_where_nobody_listens_nothing_was_sent(make: Making, ok: bytes) -> None:
    async with Api([ok]).open() as api:
        pass
    async with make(api) as sender:
        with pytest.raises(SendFailed) as raised:
            await sender.send_text(TO, "Hello")
    assert (raised.value.reason, raised.value.unsure) == (Reason.unavailable, False)


async def test_a_connection_that_never_comes_about_leaves_nothing_unsure() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    sender = MetaCloud(TOKEN, "1", base_url="https://graph.example", timeout=0.2)
    sender._client = HttpClient(look_up=never)
    async with sender:
        with pytest.raises(SendFailed) as raised:
            await sender.send_text(TO, "Hello")
    assert str(raised.value) == "no answer within 0.2 s"
    assert not raised.value.unsure


async def test_a_message_that_met_a_closing_connection_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["oncehook.whatsapp.sender"], "_IDLE", 60.0)

    async def answer_once(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(META_OK)

    async with sending(meta, answer_once, cut, answer_once) as (sender, api):
        await sender.send_text(TO, "first")
        with pytest.raises(SendFailed) as raised:
            await sender.send_text(TO, "second")
        assert raised.value.unsure
        assert api.connections == 1, "the connection was kept"
        assert [one.json["text"]["body"] for one in api.asked] == ["first", "second"]


async def test_an_answer_that_is_cut_short_still_is_one() -> None:
    async def stop_in_the_middle(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        await asyncio.sleep(0.1)  # until it has come
        await hang(asked, writer)

    async with sending(meta, stop_in_the_middle) as (sender, _):
        assert await sender.send_text(TO, "Hello") == Sent(None, 200, b"{")


async def test_an_answer_longer_than_what_is_kept_is_read_for_its_id() -> None:
    thumbnail = "A" * 100_000
    said = {"message": {"jpegThumbnail": thumbnail}, "key": {"id": "3EB0NEW"}}
    async with sending(evolution_api, answer(201, said)) as (sender, _):
        sent = await sender.send_media(TO, "image", link=LINK)
        assert sent.message_id == "3EB0NEW"
        assert len(sent.answer) == 4096


async def test_an_answer_is_read_up_to_its_cap() -> None:
    async with Api([answer(200, b"x" * 100_000)]).open() as api:
        client = HttpClient(allow_private=True)
        await client.open()
        for most in (10, 4096, 50_000, 100_000):
            got = await client.request("PUT", f"{api.url}/", {}, within=60, most=most)
            assert len(got.body) == most
        await client.close()
        assert {(one.method, one.body) for one in api.asked} == {("PUT", b"")}


async def test_a_private_address_is_refused_unless_allowed() -> None:
    async with Api([META_OK]).open() as api:
        async with MetaCloud(TOKEN, "1", base_url=api.url) as sender:
            with pytest.raises(SendFailed, match="allow_private") as raised:
                await sender.send_text(TO, "Hello")
        assert raised.value.category is Category.permanent
        assert not raised.value.unsure
        assert not api.asked


# -- trying again ------------------------------------------------------------------------------

SOON = Policy(attempts=3, waits=(0.0, 0.0))


@EVERY
async def test_it_tries_again_when_told_to(make: Making, ok: bytes) -> None:
    async with sending(make, answer(502), answer(429), ok) as (sender, api):
        with pytest.raises(SendFailed):
            await sender.send_text(TO, "Hello")
        assert len(api.asked) == 1
        assert (await sender.send_text(TO, "Hello", retry=SOON)).status in (200, 201)
        assert len(api.asked) == 3


@EVERY
async def test_it_gives_up_after_its_attempts(make: Making, ok: bytes) -> None:
    async with sending(make, answer(503)) as (sender, api):
        with pytest.raises(SendFailed):
            await sender.send_text(TO, "Hello", retry=SOON)
        assert len(api.asked) == 3


async def test_what_is_permanent_is_not_tried_again() -> None:
    async with sending(meta, meta_error(401, 190, "The token has expired")) as (sender, api):
        with pytest.raises(SendFailed):
            await sender.send_text(TO, "Hello", retry=SOON)
        assert len(api.asked) == 1


@EVERY
async def test_what_may_have_been_sent_is_not_sent_again_unless_told(make: Making, ok: bytes) -> None:
    async with sending(make, cut, ok) as (sender, api):
        with pytest.raises(SendFailed):
            await sender.send_text(TO, "Hello", retry=SOON)
        assert len(api.asked) == 1
    async with sending(make, cut, ok) as (sender, api):
        await sender.send_text(TO, "Hello", retry=SOON, retry_unsure=True)
        assert len(api.asked) == 2


def moments(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    records = [vars(record) for record in caplog.records if record.name == "oncehook.whatsapp"]
    return [(record["moment"], record["fields"]) for record in records]


@EVERY
async def test_a_direct_send_counts_its_attempts_and_logs_one_line(
    make: Making, ok: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "oncehook")
    async with sending(make, answer(502), ok, answer(503)) as (sender, _):
        sent = await sender.send_text(TO, "Hello", retry=SOON)
        assert sent.attempts == 2
        ((moment, fields),) = moments(caplog)
        told = {"api": sender.api, "type": "message.text", "attempts": 2, "final_status": "done"}
        assert (moment, fields) == ("message.sent", told | {"status": sent.status, "message_id": sent.message_id})
        caplog.clear()
        with pytest.raises(SendFailed) as raised:
            await sender.send_text(TO, "Hello", retry=SOON)
        assert raised.value.attempts == 3
        ((moment, fields),) = moments(caplog)
        assert moment == "message.failed"
        assert fields.items() >= {"attempts": 3, "final_status": "dead", "category": "transient", "status": 503}.items()
        assert NUMBER not in caplog.text


async def test_a_refusal_is_logged_as_permanent_after_one_attempt(caplog: pytest.LogCaptureFixture) -> None:
    error = await refusal(meta, meta_error(400, 131047, "More than 24 hours have passed"))
    assert error.attempts == 1
    ((moment, fields),) = moments(caplog)
    assert (moment, fields["category"], fields["attempts"]) == ("message.failed", "permanent", 1)
    assert 'category=permanent reason=window_closed code=131047 status=400 error="More than 24' in caplog.text


async def test_an_attempt_of_a_delivery_logs_nothing_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "oncehook")
    async with sending(meta, META_OK, answer(503)) as (sender, _):
        assert (await sender.attempt(Text(to=TO, text="Hello"))).attempts == 1
        with pytest.raises(SendFailed):
            await sender.attempt(Text(to=TO, text="Hello"))
    assert moments(caplog) == []


async def test_retry_after_is_obeyed_up_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    policy = Policy(attempts=4, base=1.0, cap=20.0, jitter="none")
    says = [answer(429, b"", Retry_After=seconds) for seconds in ("9", "900", "0")]
    async with sending(meta, *says, META_OK) as (sender, _):
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            await sender.send_text(TO, "Hello", retry=policy)
    assert waited == [9.0, 20.0, 4.0]


# -- files -------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
OPUS = b"OggS\x00\x02" + bytes(20) + b"\x01\x13OpusHead" + bytes(20)
WEBP = b"RIFF\x16\x00\x00\x00WEBPVP8 " + bytes(14)


@dataclass
class Stored:
    key: str
    kind: whatsapp.MediaKind
    mime: str
    filename: str | None


class Unreachable(OncehookError):
    """The storage is away."""

    transient = True


@dataclass
class Shelf:
    """Keeps what it is given, and makes a new link each time."""

    kept: list[Any] = field(default_factory=list)
    links: int = 0
    error: OncehookError | None = None

    async def prepare(
        self,
        content: str | Path | bytes,
        /,
        *,
        filename: str | None = None,
        kind: whatsapp.MediaKind | None = None,
        types: FileTypes = META_TYPES,
    ) -> OutgoingFile:
        if isinstance(content, bytes):
            return prepare(content, filename=filename, kind=kind, types=types)
        return OutgoingFile(b"%PDF-1.7", kind or "document", "application/pdf", filename or "found.pdf")

    async def store(self, file: OutgoingFile, /) -> Stored:
        self.kept.append(file.data)
        return Stored("k1", file.kind, file.mime, file.filename)

    async def link(self, key: str, /) -> str:
        if self.error is not None:
            raise self.error
        self.links += 1
        return f"https://files.example/{key}?signature={self.links}"


async def test_a_file_is_stored_and_sent_as_what_it_is() -> None:
    shelf = Shelf()
    async with sending(meta, META_OK, files=shelf) as (sender, api):
        await sender.send_file(TO, Path("invoice.pdf"), caption="Here")
        await sender.send_file(TO, PNG, kind="image", filename="a.png", id="evt_1")
    assert shelf.kept == [b"%PDF-1.7", PNG]
    link = "https://files.example/k1?signature="
    assert api.asked[0].json["document"] == {"link": f"{link}1", "caption": "Here", "filename": "found.pdf"}
    assert api.asked[1].json["image"] == {"link": f"{link}2"}
    assert api.asked[1].json["biz_opaque_callback_data"] == "evt_1"


@EVERY
@pytest.mark.parametrize(
    ("content", "how", "reason"),
    [
        (OPUS, {"caption": "Listen"}, Reason.invalid),
        (WEBP, {"caption": "Look"}, Reason.invalid),
        (PNG, {"caption": "x" * 65_537}, Reason.invalid),
        (PNG, {"to": "call me"}, Reason.invalid_number),
    ],
)
async def test_what_cannot_be_sent_with_a_file_is_refused_before_the_upload(
    make: Making, ok: bytes, content: bytes, how: dict[str, str], reason: Reason
) -> None:
    shelf = Shelf()
    async with sending(make, ok, files=shelf) as (sender, api):
        for send in (sender.send_file, sender.prepare_file):
            with pytest.raises(SendFailed) as raised:
                await send(how.get("to", TO), content, caption=how.get("caption"))
            assert (raised.value.reason, raised.value.category) == (reason, Category.permanent)
    assert (shelf.kept, api.asked) == ([], [])


async def test_every_attempt_has_a_fresh_link() -> None:
    async with sending(evolution_go, answer(502), GO_OK, files=Shelf()) as (sender, api):
        await sender.send(Media(to=TO, kind="image", stored="k1"), retry=SOON)
        assert [one.json["url"][-1] for one in api.asked] == ["1", "2"]


async def test_a_storage_that_is_away_is_told_from_a_key_that_is_wrong() -> None:
    for error, category in ((Unreachable(), Category.transient), (OncehookError("No such key."), Category.permanent)):
        async with sending(meta, META_OK, files=Shelf(error=error)) as (sender, api):
            with pytest.raises(SendFailed) as raised:
                await sender.send(Media(to=TO, kind="image", stored="k1"))
            assert (raised.value.category, raised.value.unsure) == (category, False)
            assert not api.asked


async def test_without_storage_it_says_what_is_missing() -> None:
    async with sending(meta, META_OK) as (sender, api):
        with pytest.raises(ConfigError, match="no storage for files"):
            await sender.send_file(TO, b"x")
        with pytest.raises(ConfigError, match="no storage for files"):
            await sender.send(Media(to=TO, kind="image", stored="k1"))
        assert not api.asked


# -- instances ---------------------------------------------------------------------------------

NO_PROXY = {"enabled": False, "host": "", "port": "", "protocol": "", "username": "", "password": ""}


@pytest.mark.parametrize(
    ("make", "action", "options", "method", "path", "body"),
    [
        (
            meta,
            "info",
            {},
            "GET",
            "/v23.0/106540352242922?fields=id,display_phone_number,verified_name,quality_rating,"
            "code_verification_status,name_status,platform_type,throughput",
            None,
        ),
        (
            evolution_api,
            "create",
            {"number": NUMBER},
            "POST",
            "/instance/create",
            {"instanceName": "my shop", "integration": "WHATSAPP-BAILEYS", "qrcode": True, "number": NUMBER},
        ),
        (evolution_api, "connect", {}, "GET", "/instance/connect/my%20shop", None),
        (evolution_api, "connect", {"number": NUMBER}, "GET", f"/instance/connect/my%20shop?number={NUMBER}", None),
        (evolution_api, "state", {}, "GET", "/instance/connectionState/my%20shop", None),
        (evolution_api, "restart", {}, "POST", "/instance/restart/my%20shop", None),
        (evolution_api, "logout", {}, "DELETE", "/instance/logout/my%20shop", None),
        (evolution_api, "delete", {}, "DELETE", "/instance/delete/my%20shop", None),
        (
            evolution_api,
            "set-webhook",
            {"url": "https://in.example/in/evo", "events": "MESSAGES_UPSERT,QRCODE_UPDATED"},
            "POST",
            "/webhook/set/my%20shop",
            {
                "webhook": {
                    "enabled": True,
                    "url": "https://in.example/in/evo",
                    "headers": {},
                    "byEvents": False,
                    "base64": False,
                    "events": ["MESSAGES_UPSERT", "QRCODE_UPDATED"],
                }
            },
        ),
        (
            evolution_api,
            "set-proxy",
            {"proxy": "socks5://u:p%40ss@proxy.example:1080"},
            "POST",
            "/proxy/set/my%20shop",
            {
                "enabled": True,
                "host": "proxy.example",
                "port": "1080",
                "protocol": "socks5",
                "username": "u",
                "password": "p@ss",
            },
        ),
        (
            evolution_api,
            "set-proxy",
            {"proxy": "none"},
            "POST",
            "/proxy/set/my%20shop",
            {"enabled": False, "host": "", "port": "", "protocol": "", "username": "", "password": ""},
        ),
        (
            evolution_go,
            "create",
            {"name": "shop", "token": "t"},
            "POST",
            "/instance/create",
            {"name": "shop", "token": "t", "instanceId": "inst-1"},
        ),
        (
            evolution_go,
            "connect",
            {"webhook_url": "https://in.example/in/go", "subscribe": "MESSAGE,QRCODE"},
            "POST",
            "/instance/connect",
            {
                "webhookUrl": "https://in.example/in/go",
                "subscribe": ["MESSAGE", "QRCODE"],
                "immediate": True,
                "phone": "",
            },
        ),
        (evolution_api, "delete-proxy", {}, "POST", "/proxy/set/my%20shop", NO_PROXY),
        (evolution_api, "instances", {}, "GET", "/instance/fetchInstances", None),
        (
            evolution_api,
            "edit",
            {"to": TO, "message_id": "3EB0", "text": "Hi"},
            "POST",
            "/chat/updateMessage/my%20shop",
            {"number": NUMBER, "text": "Hi", "key": {"remoteJid": JID, "fromMe": True, "id": "3EB0"}},
        ),
        (
            evolution_api,
            "delete-message",
            {"to": "120363@g.us", "message_id": "3EB0", "from_me": False, "participant": TO},
            "DELETE",
            "/chat/deleteMessageForEveryone/my%20shop",
            {"id": "3EB0", "remoteJid": "120363@g.us", "fromMe": False, "participant": JID},
        ),
        (
            evolution_api,
            "message-status",
            {"message_id": "3EB0", "to": TO},
            "POST",
            "/chat/findStatusMessage/my%20shop",
            {"where": {"id": "3EB0", "remoteJid": JID}},
        ),
        (
            evolution_api,
            "presence",
            {"to": TO, "state": "composing"},
            "POST",
            "/chat/sendPresence/my%20shop",
            {"number": NUMBER, "presence": "composing", "delay": 1200},
        ),
        (evolution_go, "delete-proxy", {}, "DELETE", "/instance/proxy/inst-1", None),
        (evolution_go, "instances", {}, "GET", "/instance/all", None),
        (
            evolution_go,
            "edit",
            {"to": TO, "message_id": "3EB0", "text": "Hi"},
            "POST",
            "/message/edit",
            {"chat": JID, "messageId": "3EB0", "message": "Hi"},
        ),
        (
            evolution_go,
            "delete-message",
            {"to": TO, "message_id": "3EB0"},
            "POST",
            "/message/delete",
            {"chat": JID, "messageId": "3EB0"},
        ),
        (evolution_go, "message-status", {"message_id": "3EB0"}, "POST", "/message/status", {"id": "3EB0"}),
        (
            evolution_go,
            "presence",
            {"to": TO, "state": "recording"},
            "POST",
            "/message/presence",
            {"number": NUMBER, "state": "composing", "isAudio": True},
        ),
        (evolution_go, "status", {}, "GET", "/instance/status", None),
        (evolution_go, "qr", {}, "GET", "/instance/qr", None),
        (evolution_go, "pair", {"phone": NUMBER}, "POST", "/instance/pair", {"phone": NUMBER}),
        (evolution_go, "reconnect", {}, "POST", "/instance/reconnect", None),
        (evolution_go, "disconnect", {}, "POST", "/instance/disconnect", None),
        (evolution_go, "logout", {}, "DELETE", "/instance/logout", None),
        (evolution_go, "delete", {}, "DELETE", "/instance/delete/inst-1", None),
        (evolution_go, "info", {}, "GET", "/instance/info/inst-1", None),
        (
            evolution_go,
            "proxy",
            {"proxy": "http://proxy.example:8080"},
            "POST",
            "/instance/proxy/inst-1",
            {"protocol": "http", "host": "proxy.example", "port": "8080", "username": "", "password": ""},
        ),
        (evolution_go, "proxy", {"proxy": "none"}, "DELETE", "/instance/proxy/inst-1", None),
    ],
)
async def test_an_instance_is_called_like_this(
    make: Making, action: str, options: dict[str, Any], method: str, path: str, body: object
) -> None:
    async with sending(make, answer(200, {"message": "success"})) as (sender, api):
        assert await sender.instance(action, **options) == {"message": "success"}
        asked = api.asked[0]
        assert (asked.method, asked.path) == (method, path)
        assert (asked.json if asked.body else None) == body
        if make is evolution_go:
            of_admins = action in ("create", "delete", "proxy", "delete-proxy", "info", "instances")
            assert asked.headers["apikey"] == (ADMIN if of_admins else TOKEN)


async def test_a_summary_tells_who_is_connected_and_no_token() -> None:
    listed = [{"id": "1", "name": "shop", "token": "secret", "connected": True}, {"id": "2", "name": "b"}, None]
    async with sending(evolution_go, answer(200, {"message": "success", "data": listed})) as (sender, _):
        shop = {"name": "shop", "id": "1", "connected": True}
        b = {"name": "b", "id": "2", "connected": False}
        assert await sender.instance("summary") == {"instances": [shop, b], "total": 2, "connected": 1}
    theirs = [{"id": "1", "name": "shop", "connectionStatus": "open"}, {"name": "b", "connectionStatus": "close"}]
    async with sending(evolution_api, answer(200, theirs)) as (sender, _):
        told = await sender.instance("summary")
        assert (told["total"], told["connected"], told["instances"][0]) == (2, 1, shop)


@pytest.mark.parametrize("make", [evolution_api, evolution_go])
async def test_a_wrong_number_is_not_asked_about(make: Making) -> None:
    async with sending(make, answer(200)) as (sender, api):
        for action, more in (("edit", {"text": "x"}), ("delete_message", {})):
            with pytest.raises(SendFailed) as raised:
                await sender.instance(action, to="call me", message_id="1", **more)
            assert raised.value.reason is Reason.invalid_number
        assert not api.asked


@EVERY
async def test_every_action_has_its_method(make: Making, ok: bytes) -> None:
    async with Api([ok]).open() as api:
        sender = make(api)
        assert all(asyncio.iscoroutinefunction(getattr(sender, name)) for name in sender.actions.values())


async def test_a_qr_code_comes_whole_and_what_is_no_table_becomes_one() -> None:
    picture = "data:image/png;base64," + "A" * 300_000
    async with sending(evolution_api, answer(200, {"base64": picture}), answer(200, ["a"]), answer(204)) as (sender, _):
        assert await sender.instance("connect") == {"base64": picture}
        assert await sender.instance("state") == {"data": ["a"]}
        assert await sender.instance("logout") == {}


async def test_an_instance_call_fails_in_the_same_words() -> None:
    async with sending(evolution_go, answer(400, {"error": "client disconnected"}), answer(200, b"{")) as (sender, _):
        with pytest.raises(SendFailed) as raised:
            await sender.instance("logout")
        assert raised.value.reason is Reason.instance_offline
        with pytest.raises(SendFailed, match="cannot be read"):
            await sender.instance("qr")


async def test_an_action_that_is_not_there_or_asks_for_more_says_so() -> None:
    async with sending(evolution_go, GO_OK) as (sender, api):
        with pytest.raises(ConfigError, match='"evolution-go" has no action "fly"; there are create, connect'):
            await sender.instance("fly")
        with pytest.raises(ConfigError, match="takes phone"):
            await sender.instance("pair")
        with pytest.raises(ConfigError, match="takes nothing"):
            await sender.instance("status", loud="yes")
        assert not api.asked
    plain = EvolutionGo("https://evo.example", TOKEN)
    with pytest.raises(ConfigError, match="administrator"):
        await plain.instance("create", name="a", token="b")
    keyed = EvolutionGo("https://evo.example", TOKEN, admin_key=ADMIN)
    with pytest.raises(ConfigError, match="id of the instance"):
        await keyed.instance("delete")


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        (
            {"api": "meta", "token": TOKEN, "phone_number_id": "1", "version": None},
            "https://graph.facebook.com/v23.0/1",
        ),
        (
            {"api": "meta", "token": TOKEN, "phone_number_id": "1", "version": "v25.0", "country": "55"},
            "https://graph.facebook.com/v25.0/1",
        ),
        (
            {"api": "evolution-api", "base_url": "https://evo.example/", "api_key": TOKEN, "instance": "shop"},
            "https://evo.example shop",
        ),
        (
            {"api": "evolution-api", "base_url": "https://evo.example", "token": TOKEN, "instance": "shop"},
            "https://evo.example shop",
        ),
        (
            {"api": "evolution-go", "base_url": "https://go.example/x", "token": TOKEN, "admin_key": ADMIN},
            "https://go.example/x",
        ),
        (
            {"api": "evolution-go", "base_url": "https://go.example", "token": TOKEN, "instance": "i", "timeout": 5.0},
            "https://go.example i",
        ),
    ],
)
def test_a_table_of_settings_makes_a_sender(settings: dict[str, Any], address: str) -> None:
    made = whatsapp.sender(**settings)
    assert (made.api, made.address) == (settings["api"], address)
    assert made.timeout == settings.get("timeout", 30.0)
    assert repr(made) == f"<{type(made).__name__} {address}>"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"api": "telegram"}, "there are meta, evolution-api, evolution-go"),
        ({"api": "meta", "token": TOKEN}, "needs phone_number_id"),
        ({"api": "evolution-api"}, "needs base_url and api_key and instance"),
        ({"api": "meta", "token": TOKEN, "phone_number_id": "1", "instance": "x"}, "has no setting instance"),
        ({"api": "meta", "token": TOKEN, "phone_number_id": "1", "name": "x"}, "has no setting name"),
        ({"api": "meta", "token": TOKEN, "phone_number_id": ""}, "the id of the number"),
        ({"api": "meta", "token": " ", "phone_number_id": "1"}, "is empty"),
        ({"api": "meta", "token": f"{TOKEN}\nX: y", "phone_number_id": "1"}, "plain printable ASCII"),
        ({"api": "evolution-go", "token": TOKEN, "base_url": "ftp://x"}, "begins with http"),
        ({"api": "evolution-go", "token": TOKEN, "base_url": "https://x.example/?a=b"}, "question mark"),
        ({"api": "evolution-go", "token": TOKEN, "base_url": "https://x.example", "proxy": "ftp://x:1"}, "socks5://"),
    ],
)
def test_a_wrong_setting_says_what_is_wrong_and_no_secret(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        whatsapp.sender(**settings)
    assert why in str(raised.value)
    assert TOKEN not in f"{raised.value} {raised.value.hint}"


async def test_a_token_by_reference_is_read_at_each_call() -> None:
    environ = {"TOKEN": "first-token"}
    async with Api([META_OK]).open() as api:
        token = Secret.from_env("TOKEN", env=environ)
        async with MetaCloud(token, "1", base_url=api.url, allow_private=True) as sender:
            await sender.send_text(TO, "Hello")
            environ["TOKEN"] = "second-token"
            await sender.send_text(TO, "Hello")
        assert [one.headers["authorization"] for one in api.asked] == ["Bearer first-token", "Bearer second-token"]


@EVERY
async def test_an_answer_that_repeats_our_credentials_does_not_carry_them_on(make: Making, ok: bytes) -> None:
    said = {"error": f"bad key {TOKEN}", "message": f"bad key {TOKEN}"}
    error = await refusal(make, answer(400, said))
    async with sending(make, answer(200, said)) as (sender, _):
        sent = await sender.send_text(TO, "Hello")
        told = f"{sender!r} {sender.address}"
    for shown in (error.answer, sent.answer, str(error).encode(), repr(error).encode(), told.encode()):
        assert TOKEN.encode() not in shown
    assert b"[masked]" in error.answer


async def test_a_sender_that_is_not_open_says_so() -> None:
    with pytest.raises(ConfigError, match="not open"):
        await MetaCloud(TOKEN, "1").send_text(TO, "Hello")


def test_naming_a_sender_loads_no_http_library() -> None:
    code = (
        "import sys; from oncehook import whatsapp\n"
        "whatsapp.sender('meta', token='x' * 9, phone_number_id='1', proxy='socks5://p.example:1080')\n"
        "print([name for name in ('aiohttp', 'aiohttp_socks', 'boto3') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


# -- the page about it -------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs/how-to/whatsapp-senders.md").read_text()


async def test_the_snippets_of_the_page_run() -> None:
    said: dict[str, Any] = {"__name__": "snippet"}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "whatsapp-senders.md", "exec"), said)
    assert {said[name].api for name in ("cloud", "evolution", "go")} == set(whatsapp.APIS)
    async with Api([META_OK]).open() as api:
        await said["greet"](meta(api))
        assert len(api.asked) == 7
        assert await said["try_to"](meta(api)) == "sent"
    async with Api([meta_error(400, 131047, "Too late")]).open() as api:
        assert await said["try_to"](meta(api)) == "window_closed: Too late"
    async with sending(meta, META_OK, files=Shelf()) as (sender, api):
        await said["bill"](sender)
        assert api.asked[0].json["document"]["caption"] == "Your invoice"
    async with Api([answer(200, {"base64": "QR"})]).open() as api:
        assert await said["log_in"](evolution_api(api)) == "QR"


def test_the_page_names_every_reason_and_every_action() -> None:
    for name in [*(reason.value for reason in Reason), *(a for kind in whatsapp.APIS.values() for a in kind.actions)]:
        assert f"`{name.replace('_', '-')}`" in PAGE or f"`{name}`" in PAGE, name
