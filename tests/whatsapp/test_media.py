"""Files that messages refer to: fetched in the background, or when a handler asks, kept once, and never with a token
that goes elsewhere."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from oncehook import Event, Inbox
from oncehook.errors import ConfigError, Forbidden, InvalidSettings
from oncehook.media import KeptMedia, MediaFailed, sweep_media
from oncehook.model import EventId, Filter, StoredDelivery
from oncehook.presets._media import DialogMedia, EvolutionMedia, MetaMedia, TwilioMedia, WahaMedia
from oncehook.testing.standins import MetaStandIn
from oncehook.testing.standins.meta import Upload
from oncehook.testing.standins.server import LoopbackServer, Reply, Request
from oncehook.whatsapp.meta import MetaCloud
from tests.acceptance.test_large_bodies import address, files

__all__ = ["address"]
PNG = b"\x89PNG\r\n\x1a\n" + b"pixels" * 1000
ANA = "5511988880142"
KEY = "q8Tf0mI2x1vJ3o9r5yWz7bKc4dLe6nPsUaHgQfXtRiM="


@pytest.fixture
def meta() -> Iterator[MetaStandIn]:
    with MetaStandIn() as standin:
        yield standin


def make(address: str, tmp_path: Path, meta: MetaStandIn, media: Any = None, **options: Any) -> Inbox:
    inbox = Inbox(address, bodies=str(tmp_path / "bodies"), **options)
    given = {"token": meta.token, "url": f"{meta.url}/v23.0", "allow_private": True} if media is None else media
    inbox.source("whatsapp", preset="whatsapp-cloud", secret=meta.secret, verify_token="hello", media=given)
    return inbox


async def receive(
    inbox: Inbox, meta: MetaStandIn, file: bytes | None, kind: str = "image/png", source: str = "whatsapp"
) -> EventId:
    """Have Meta send a message with a file, which it has; None: no longer."""
    hook = meta.message(from_=ANA, type=kind.partition("/")[0], mime_type=kind)
    id_ = hook.item[kind.partition("/")[0]]["id"]
    if file is not None:
        meta.uploads[id_] = Upload(id_, file, kind, None)
    [request] = meta.signed(hook)
    receipt = await inbox.receive(source, request.headers, request.body)
    assert receipt.reply.status == 200, receipt.reply
    return EventId.parse(receipt.event_ids[0])


async def deliveries(inbox: Inbox) -> list[StoredDelivery]:
    return list((await inbox.admin.deliveries(Filter())).items)


async def kept(inbox: Inbox, event_id: EventId) -> list[KeptMedia]:
    event = await inbox.store.get_event(event_id)
    assert event is not None
    return await inbox.keep_media(event)


@pytest.mark.parametrize("encrypt", [None, KEY])
async def test_a_file_is_fetched_in_the_background_and_kept(
    address: str, tmp_path: Path, meta: MetaStandIn, encrypt: str | None
) -> None:
    inbox = make(address, tmp_path, meta, encrypt=encrypt)
    async with inbox.running():
        event_id = await receive(inbox, meta, PNG)
        await inbox.drain()
        [delivery] = await deliveries(inbox)
        assert (delivery.destination, delivery.status) == ("whatsapp-media", "done")
        meta.uploads.clear()  # they have expired
        [file] = await kept(inbox, event_id)
        assert (file.type, file.size, file.sha256) == ("image/png", len(PNG), hashlib.sha256(PNG).hexdigest())
        assert await file.read() == PNG
    [path] = files(tmp_path / "bodies")
    assert (PNG in path.read_bytes()) is (encrypt is None)


async def test_the_same_file_is_kept_once_and_goes_with_its_last_event(
    address: str, tmp_path: Path, meta: MetaStandIn
) -> None:
    inbox = make(address, tmp_path, meta)
    async with inbox.running():
        await receive(inbox, meta, PNG)
        await receive(inbox, meta, PNG)
        await inbox.drain()
        assert len(files(tmp_path / "bodies")) == 1
        assert await sweep_media(inbox.store, inbox.bodies, 0.0) == 0
        while await inbox.store.prune({}, 0.0):
            pass
        assert await sweep_media(inbox.store, inbox.bodies) == 0  # too young
        assert await sweep_media(inbox.store, inbox.bodies, 0.0) == 1


async def test_a_handler_gets_what_is_kept_or_fetches_it(address: str, tmp_path: Path, meta: MetaStandIn) -> None:
    """Whoever is first, both end in the same place."""
    inbox = make(address, tmp_path, meta)
    got: list[bytes] = []

    @inbox.on("whatsapp", "message.*")
    async def handle(event: Event) -> None:
        got.extend([await file.read() for file in await event.media()])

    async with inbox.running():
        await receive(inbox, meta, PNG)
        await inbox.drain()
        assert {one.status for one in await deliveries(inbox)} == {"done"}
    assert got == [PNG]
    assert len(files(tmp_path / "bodies")) == 1


async def test_an_event_without_files_has_none(address: str, tmp_path: Path, meta: MetaStandIn) -> None:
    inbox = make(address, tmp_path, meta)
    got: list[int] = []

    @inbox.on("whatsapp", "message.*")
    async def handle(event: Event) -> None:
        got.append(len(await event.media()))

    async with inbox.running():
        [request] = meta.signed(meta.message(from_=ANA, text="no file"))
        await inbox.receive("whatsapp", request.headers, request.body)
        await inbox.drain()
        assert [one.destination for one in await deliveries(inbox)] == ["handle"]
    assert got == [0]


async def test_the_token_may_be_that_of_a_sender(tmp_path: Path, meta: MetaStandIn) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/x.db")
    source = inbox.source("whatsapp", preset="whatsapp-cloud", secret=meta.secret, verify_token="hello", media="keep")
    keeper = inbox.media_keeper("whatsapp")
    assert keeper is not None
    assert (await keeper._access(None)).token is None
    inbox.sender("answers", MetaCloud(meta.token, meta.phone_number_id, base_url=meta.url, allow_private=True))
    assert (await keeper._access(None)).token == meta.token
    assert source.settings.media.max_size == 100 << 20


async def test_what_must_not_be_kept_is_a_dead_letter_and_the_rest_is_tried_again(
    address: str, tmp_path: Path, meta: MetaStandIn
) -> None:
    media = {"token": meta.token, "url": f"{meta.url}/v23.0", "allow_private": True}
    inbox = make(address, tmp_path, meta, {**media, "max_size": len(PNG), "types": ["image/*"]})
    async with inbox.running():
        large = await receive(inbox, meta, PNG * 2)
        refused = await receive(inbox, meta, PNG, "video/mp4")
        async with asyncio.timeout(20):
            while sum(one.status == "dead" for one in await deliveries(inbox)) < 2:
                await asyncio.sleep(0.01)
        errors = {one.event_id: str(one.last_error) for one in await deliveries(inbox)}
        assert "larger than" in errors[large]
        assert "are not kept" in errors[refused]
        meta.fail(status=503)
        later = await receive(inbox, meta, PNG)
        async with asyncio.timeout(20):
            while not any(one.event_id == later and one.last_error for one in await deliveries(inbox)):
                await asyncio.sleep(0.01)
        [delivery] = [one for one in await deliveries(inbox) if one.event_id == later]
        assert (delivery.status, delivery.category) == ("pending", "transient")
    assert files(tmp_path / "bodies") == []


def test_a_source_without_files_refuses_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="knows no files"):
        Inbox(f"sqlite:{tmp_path}/x.db").source("orders", preset="stripe", secret="whsec_x", media="keep")
    with pytest.raises(ConfigError, match='must be "keep"'):
        Inbox(f"sqlite:{tmp_path}/x.db").source("w", preset="twilio", secret="x" * 32, media="all")  # type: ignore[arg-type]


# -- sources that are stored while everything runs -----------------------------------------------


@pytest.fixture
def secret_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", KEY)


def settings(meta: MetaStandIn, **media: Any) -> dict[str, Any]:
    """A source as it is stored, with what its files are fetched with."""
    given = {"token": meta.token, "url": f"{meta.url}/v23.0", "allow_private": True, **media}
    return {"preset": "whatsapp-cloud", "secret": meta.secret, "verify_token": "hello", "media": given}


async def settled(inbox: Inbox, status: str, count: int = 1) -> list[StoredDelivery]:
    async with asyncio.timeout(20):
        while [one.status for one in await deliveries(inbox)].count(status) < count:  # type: ignore[arg-type]
            await asyncio.sleep(0.02)
    return [one for one in await deliveries(inbox) if one.status == status]


@pytest.mark.usefixtures("secret_key")
async def test_a_stored_source_keeps_media(address: str, tmp_path: Path, meta: MetaStandIn) -> None:
    """With a worker that had nothing to work for at its start."""
    inbox = Inbox(address, bodies=str(tmp_path / "bodies"))
    async with inbox.running():
        await inbox.define.source("late", **settings(meta))
        event_id = await receive(inbox, meta, PNG, source="late")
        [delivery] = await settled(inbox, "done")
        assert (delivery.destination, delivery.event_id) == ("late.media", event_id)
        meta.uploads.clear()
        [file] = await kept(inbox, event_id)
        assert await file.read() == PNG
        [request] = meta.signed(meta.message(from_=ANA, text="no file"))
        await inbox.receive("late", request.headers, request.body)
        assert len(await deliveries(inbox)) == 1
        assert (await inbox.admin.pause("late.media", actor="ann")).state == "paused"
        assert (await inbox.admin.resume("late.media", actor="ann")).kind == "media"
        with pytest.raises(InvalidSettings):
            await inbox.define.destination("late.media", url="https://elsewhere.example/")
    again = Inbox(address, bodies=str(tmp_path / "bodies"))
    async with again.running():  # also after a start
        await receive(again, meta, PNG, source="late")
        await settled(again, "done", 2)


@pytest.mark.usefixtures("secret_key")
async def test_another_process_keeps_the_media_of_a_stored_source(
    address: str, tmp_path: Path, meta: MetaStandIn
) -> None:
    receiver, worker = (Inbox(address, bodies=str(tmp_path / "bodies")) for _ in range(2))
    async with worker.running(), receiver.running(work=False):
        await receiver.define.source("late", **settings(meta))
        event_id = await receive(receiver, meta, PNG, source="late")
        await settled(receiver, "done")
        assert len(await kept(worker, event_id)) == 1


@pytest.mark.usefixtures("secret_key")
async def test_changes_of_a_stored_source_count_for_its_media(address: str, tmp_path: Path, meta: MetaStandIn) -> None:
    inbox = Inbox(address, bodies=str(tmp_path / "bodies"))
    got: list[bytes] = []

    @inbox.on("other")
    async def handle(event: Event) -> None:
        got.extend([await file.read() for file in await event.media()])

    async with inbox.running():
        await inbox.define.source("late", **{**settings(meta), "media": None})
        await receive(inbox, meta, PNG, source="late")
        assert await deliveries(inbox) == [], "it keeps none"
        await inbox.define.change("source", "late", media=settings(meta, token="wrong", types=["image/*"])["media"])
        await receive(inbox, meta, PNG, source="late")
        await settled(inbox, "dead")
        await inbox.define.change("source", "late", media=settings(meta)["media"])
        await inbox.define.route("late", "handle")
        await receive(inbox, meta, PNG + b"2", source="late")
        await settled(inbox, "done", 2)
        assert got == [PNG + b"2"]
        await inbox.admin.pause("late.media", actor="ann")
        event_id = await receive(inbox, meta, PNG + b"3", source="late")
        await settled(inbox, "done", 3)
        await inbox.define.change("source", "late", media=None)
        await inbox.admin.resume("late.media", actor="ann")
        dead = await settled(inbox, "dead", 2)
        assert any("keeps no media any more" in str(one.last_error) for one in dead), "it does not wait for ever"
        await inbox.define.delete("source", "late")
        event = await inbox.store.get_event(event_id)
        assert event is not None
        with pytest.raises(MediaFailed, match="keeps no media any more"):
            await inbox.keep_stored_media(event)
        assert await inbox.keep_media(event) == []


@pytest.mark.usefixtures("secret_key")
async def test_an_accounts_source_never_uses_the_token_of_another(
    address: str, tmp_path: Path, meta: MetaStandIn
) -> None:
    inbox = Inbox(address, bodies=str(tmp_path / "bodies"))
    for name, account in (("of-43", "43"), ("of-all", None)):
        sender = MetaCloud(f"token-{name}", meta.phone_number_id, base_url=meta.url)
        inbox.sender(name, sender, **({} if account is None else {"account": account}))
    of_42: dict[str, Any] = {"whatsapp": {"api": "meta", "token": "token-of-42", "phone_number_id": "42"}}

    async def token(source: str, account: str | None = None) -> str | None:
        found = await inbox.definitions.find_source(source)
        assert found is not None
        assert found.base.media_api is not None
        return (await inbox._build_keeper(found, found.base.media_api)._access(account)).token

    async with inbox.running():
        given = {**settings(meta), "media": "keep"}
        await inbox.define.source("mine", **given, account="42")
        await inbox.define.source("shared", **given, account="$.entry[0].id")
        assert await token("mine", "42") is None
        event_id = await receive(inbox, meta, PNG, source="mine")
        [dead] = await settled(inbox, "dead")
        assert (dead.event_id, dead.account) == (event_id, "42")
        assert "media.token of its source is not set" in str(dead.last_error)
        await inbox.define.destination("mine-too", **of_42, account="42")
        assert await token("mine", "42") == "token-of-42"
        assert await token("shared", "42") == "token-of-42"
        assert await token("shared", "43") == "token-of-43"
        assert await token("shared", "44") == await token("shared") == "token-of-all"
        # Its address is the customer's word: no token goes there that was not given with it.
        await inbox.define.change("source", "mine", media={"url": "https://evil.example"})
        assert await token("mine", "42") is None
        with pytest.raises(Forbidden, match="media"):
            await inbox.define.by("customer", "42").change("source", "mine", media={"allow_private": True})
        # Given to somebody else, it must not be asked for the files of the first one's events.
        await inbox.define.change("source", "mine", account="43")
        event = await inbox.store.get_event(event_id)
        assert event is not None
        with pytest.raises(MediaFailed, match="another account"):
            await inbox.keep_media(event)


@pytest.mark.parametrize(("owner", "status"), [("43", "dead"), (None, "dead"), ("42", "done")])
async def test_only_a_sender_of_the_same_account_lends_its_token(
    address: str, tmp_path: Path, meta: MetaStandIn, owner: str | None, status: str
) -> None:
    inbox = Inbox(address, bodies=str(tmp_path / "bodies"))
    media: Any = {"url": f"{meta.url}/v23.0", "allow_private": True}
    inbox.source(
        "whatsapp", preset="whatsapp-cloud", secret=meta.secret, verify_token="hello", media=media, account="42"
    )
    sender = MetaCloud(meta.token, meta.phone_number_id, base_url=meta.url, allow_private=True)
    inbox.sender("answers", sender, **({} if owner is None else {"account": owner}))
    async with inbox.running():
        await receive(inbox, meta, PNG)
        [delivery] = await settled(inbox, status)
        assert delivery.destination == "whatsapp-media"
        assert status == "done" or "media.token of its source is not set" in str(delivery.last_error)
    assert len(files(tmp_path / "bodies")) == (status == "done")


# -- what each provider's API is asked ---------------------------------------------------------


class Provider(LoopbackServer):
    """An API that answers by path, and notes what it was sent."""

    def __init__(self, answers: dict[str, Reply]) -> None:
        super().__init__()
        self.answers = answers

    def reply(self, request: Request) -> Reply:
        return self.answers.get(request.path, Reply(404, {}))


async def fetch(inbox: Inbox, name: str, content: bytes) -> list[bytes]:
    keeper = inbox.media_keeper(name)
    assert keeper is not None
    items = keeper.find(content)
    return [item.content if item.content is not None else await keeper._fetch(item) for item in items]


def inbox_of(
    tmp_path: Path, preset: str, provider: Provider, token: str | None = "key-of-the-api", **more: Any
) -> Inbox:
    inbox = Inbox(f"sqlite:{tmp_path}/x.db")
    media = {"url": provider.url, "allow_private": True, **({} if token is None else {"token": token})}
    inbox.source("whatsapp", preset=preset, secret="x" * 32, media=media, **more)  # type: ignore[arg-type]
    return inbox


async def test_360dialog_is_asked_under_its_own_address(tmp_path: Path) -> None:
    found = {"url": "https://lookaside.fbsbx.com/whatsapp_business/attachments/?mid=77&ext=1&hash=x"}
    answers = {"/77": Reply(200, found), "/whatsapp_business/attachments/": Reply(200, PNG)}
    with Provider(answers) as provider:
        inbox = inbox_of(tmp_path, "360dialog", provider)
        value = {"messages": [{"id": "w", "type": "image", "image": {"id": "77", "mime_type": "image/png"}}]}
        assert await fetch(inbox, "whatsapp", json.dumps(value).encode()) == [PNG]
        await inbox.media_keeper("whatsapp").close()  # type: ignore[union-attr]
    assert [dict(one.headers)["d360-api-key"] for one in provider.requests] == ["key-of-the-api"] * 2


async def test_meta_gets_the_token_only_at_its_own_addresses(tmp_path: Path) -> None:
    with Provider({"/77": Reply(200, {"url": "https://evil.example/x"})}) as provider:
        inbox = Inbox(f"sqlite:{tmp_path}/x.db")
        media: Any = {"url": provider.url, "allow_private": True, "token": "EAAtoken"}
        inbox.source("whatsapp", preset="whatsapp-cloud", secret="x" * 32, verify_token="y", media=media)
        value = {"id": "w", "from": ANA, "type": "image", "image": {"id": "77", "mime_type": "image/png"}}
        content = {"entry": [{"id": "1", "changes": [{"field": "messages", "value": {"messages": [value]}}]}]}
        with pytest.raises(MediaFailed, match="not its own"):
            await fetch(inbox, "whatsapp", json.dumps(content).encode())
        await inbox.media_keeper("whatsapp").close()  # type: ignore[union-attr]


@pytest.mark.parametrize("inline", [False, True])
async def test_evolution_decrypts_a_file_or_has_sent_it_along(tmp_path: Path, inline: bool) -> None:
    path = "/chat/getBase64FromMediaMessage/sales"
    with Provider({path: Reply(201, {"base64": base64.b64encode(PNG).decode(), "mimetype": "image/png"})}) as provider:
        inbox = inbox_of(tmp_path, "evolution-api", provider)
        message: dict[str, Any] = {"imageMessage": {"mimetype": "image/png", "url": "https://mmg.whatsapp.net/x"}}
        event: dict[str, Any] = {
            "event": "messages.upsert",
            "instance": "sales",
            "server_url": "https://evil.example",
            "data": {"key": {"id": "3EB0", "remoteJid": "x"}, "message": {"ephemeralMessage": {"message": message}}},
        }
        if inline:
            event["data"]["message"]["base64"] = base64.b64encode(PNG).decode()
        assert await fetch(inbox, "whatsapp", json.dumps(event).encode()) == [PNG]
        await inbox.media_keeper("whatsapp").close()  # type: ignore[union-attr]
    asked = [(one.method, dict(one.headers)["apikey"], one.json()) for one in provider.requests]
    assert asked == (
        [] if inline else [("POST", "key-of-the-api", {"message": {"key": {"id": "3EB0"}}, "convertToMp4": False})]
    )


async def test_of_wahas_address_only_the_path_counts(tmp_path: Path) -> None:
    with Provider({"/api/files/default/f.oga": Reply(200, PNG)}) as provider:
        inbox = inbox_of(tmp_path, "waha", provider)
        about = {"url": "http://evil.example:3000/api/files/default/f.oga", "mimetype": "audio/ogg", "filename": None}
        event = {"event": "message", "session": "default", "payload": {"id": "1", "hasMedia": True, "media": about}}
        assert await fetch(inbox, "whatsapp", json.dumps(event).encode()) == [PNG]
        assert await fetch(inbox, "whatsapp", json.dumps({**event, "payload": {"hasMedia": False}}).encode()) == []
        await inbox.media_keeper("whatsapp").close()  # type: ignore[union-attr]
    assert [dict(one.headers)["x-api-key"] for one in provider.requests] == ["key-of-the-api"]


async def test_twilio_redirects_and_the_token_stays_behind(tmp_path: Path) -> None:
    path = "/2010-04-01/Accounts/AC42/Messages/MM1/Media/ME1"
    with Provider({"/elsewhere": Reply(200, PNG)}) as provider:
        provider.answers[path] = Reply(307, b"", {"location": f"{provider.url}/elsewhere"})
        inbox = inbox_of(tmp_path, "twilio", provider, token=None, public_url="https://x.example/in/twilio")
        form = {
            "MessageSid": "MM1", "AccountSid": "AC42", "NumMedia": "2", "MediaContentType0": "image/png",
            "MediaUrl0": f"https://evil.example{path}", "MediaUrl1": "https://api.twilio.com/elsewhere",
            "MediaContentType1": "image/png",
        }  # fmt: skip
        assert await fetch(inbox, "whatsapp", urlencode(form).encode()) == [PNG]
        await inbox.media_keeper("whatsapp").close()  # type: ignore[union-attr]
    first, second = provider.requests
    login = base64.b64encode(b"AC42:" + b"x" * 32).decode()
    assert dict(first.headers)["authorization"] == f"Basic {login}"
    assert "authorization" not in dict(second.headers)


def test_bodies_of_another_shape_have_no_files(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/x.db")
    inbox.source("whatsapp", preset="waha", secret="x" * 32)
    keeper = inbox.media_keeper("whatsapp")
    assert keeper is not None
    for api in (MetaMedia(), DialogMedia(), EvolutionMedia(), WahaMedia(), TwilioMedia()):
        keeper.api = api
        for content in (
            b"",
            b"{}",
            b"[]",
            b'"x"',
            b"\xff",
            b'{"data": 1}',
            b'{"payload": {"media": []}}',
            b"NumMedia=x",
        ):
            assert keeper.find(content) == []
