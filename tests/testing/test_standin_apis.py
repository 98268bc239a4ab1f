"""The stand-ins' own words: paths, authorisation, success bodies, error bodies with their codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncehook.testing.standins import EvolutionApiStandIn, EvolutionGoStandIn, MetaStandIn, N8nStandIn
from oncehook.testing.standins.meta import ERRORS
from tests.testing.calling import Said, call, multipart

TO = "5511988880142"


# -- Meta --------------------------------------------------------------------------------------


@pytest.fixture
def meta() -> Iterator[MetaStandIn]:
    with MetaStandIn() as standin:
        yield standin


def graph(meta: MetaStandIn, path: str, body: object = None, **options: Any) -> Said:
    headers = {"authorization": f"Bearer {meta.token}", **options.pop("headers", {})}
    return call(f"{meta.url}/v23.0/{path}", body, headers, **options)


def message(meta: MetaStandIn, type: str = "text", to: str = f"+{TO}", **content: Any) -> Said:
    fields = {"messaging_product": "whatsapp", "to": to, "type": type, type: content or {"body": "Hi"}}
    return graph(meta, f"{meta.phone_number_id}/messages", fields)


def refusal(said: Said) -> tuple[int, int]:
    error = said.json()["error"]
    assert error["type"] == "OAuthException"
    assert error["message"]
    assert error["fbtrace_id"]
    return said.status, error["code"]


def test_meta_answers_with_a_wamid(meta: MetaStandIn) -> None:
    said = message(meta, body="Olá")
    [sent] = meta.sent
    assert said.json() == {
        "messaging_product": "whatsapp",
        "contacts": [{"input": f"+{TO}", "wa_id": TO}],
        "messages": [{"id": sent.id}],
    }
    assert (sent.to, sent.type, sent.text) == (TO, "text", "Olá")
    assert sent.id.startswith("wamid.")
    message(meta)
    assert meta.sent[1].id != sent.id


def test_meta_wants_a_token_that_is_good(meta: MetaStandIn) -> None:
    path = f"{meta.phone_number_id}/messages"
    assert refusal(call(f"{meta.url}/v23.0/{path}", {})) == (401, 104)
    assert refusal(graph(meta, path, {}, headers={"authorization": "Bearer other"})) == (401, 190)
    meta.expire_token()
    said = message(meta)
    assert refusal(said) == (401, 190)
    assert said.json()["error"]["error_subcode"] == 463
    meta.renew_token()
    assert message(meta).status == 200


def test_meta_knows_its_own_number_only(meta: MetaStandIn) -> None:
    said = graph(meta, "999/messages", {"messaging_product": "whatsapp"})
    assert (said.status, said.json()["error"]["code"], said.json()["error"]["error_subcode"]) == (400, 100, 33)
    assert graph(meta, meta.phone_number_id, method="GET").json()["id"] == meta.phone_number_id


@pytest.mark.parametrize("code", ERRORS)
def test_meta_fails_with_its_own_codes(meta: MetaStandIn, code: int) -> None:
    meta.fail(code=code)
    assert refusal(message(meta)) == (ERRORS[code][0], code)
    assert message(meta).status == 200
    assert len(meta.sent) == 1


def test_meta_fails_by_status_too(meta: MetaStandIn) -> None:
    meta.fail(429, retry_after=7)
    said = message(meta)
    assert refusal(said) == (429, 130429)
    assert said.headers["retry-after"] == "7"


def test_meta_window_is_closed_for_all_but_templates_until_the_customer_writes(meta: MetaStandIn) -> None:
    meta.close_window(TO)
    said = message(meta)
    assert refusal(said) == (400, 131047)
    assert "24 hours" in said.json()["error"]["error_data"]["details"]
    assert message(meta, "template", name="hello", language={"code": "en_US"}).status == 200
    assert message(meta, to="4915100000000").status == 200
    meta.message(from_=TO, text="still here")
    assert message(meta).status == 200


def test_meta_refuses_what_it_cannot_send(meta: MetaStandIn) -> None:
    meta.not_on_whatsapp("49 151 0")
    assert refusal(message(meta, to="491510")) == (400, 131026)
    assert refusal(message(meta, body="x" * 4097)) == (400, 100)
    assert refusal(message(meta, "image", link="https://x.example/a.png", id="1")) == (400, 131009)
    assert refusal(message(meta, "image", id="1")) == (400, 131053)
    assert refusal(message(meta, "hologram", body="x")) == (400, 100)
    assert refusal(graph(meta, f"{meta.phone_number_id}/messages", {"to": TO})) == (400, 100)
    assert refusal(graph(meta, f"{meta.phone_number_id}/messages", {"messaging_product": "whatsapp"})) == (400, 100)
    assert meta.sent == []


def test_meta_marks_as_read(meta: MetaStandIn) -> None:
    fields = {"messaging_product": "whatsapp", "status": "read", "message_id": "wamid.1"}
    assert graph(meta, f"{meta.phone_number_id}/messages", fields).json() == {"success": True}
    assert (meta.read, meta.sent) == (["wamid.1"], [])


def test_meta_keeps_uploads_of_every_byte(meta: MetaStandIn) -> None:
    content = bytes(range(256)) * 3 + b"\r\n--edge\r\n\r\n"
    body, headers = multipart({"messaging_product": "whatsapp", "type": "image/png"}, ("a.png", "image/png", content))
    media = graph(meta, f"{meta.phone_number_id}/media", body, headers=headers).json()["id"]
    assert meta.uploads[media].content == content
    assert message(meta, "image", id=media).status == 200
    about = graph(meta, media, method="GET").json()
    assert (about["mime_type"], about["file_size"]) == ("image/png", len(content))
    assert call(about["url"], method="GET", headers={"authorization": f"Bearer {meta.token}"}).body == content
    assert graph(meta, media, method="DELETE").json() == {"success": True}
    assert graph(meta, media, method="GET").status == 400


@pytest.mark.parametrize(("kind", "size", "code"), [("image/png", (5 << 20) + 1, 131053), ("font/otf", 1, 100)])
def test_meta_refuses_uploads_that_are_too_large_or_of_another_kind(
    meta: MetaStandIn, kind: str, size: int, code: int
) -> None:
    body, headers = multipart({"messaging_product": "whatsapp"}, ("a", kind, b"x" * size))
    assert refusal(graph(meta, f"{meta.phone_number_id}/media", body, headers=headers)) == (400, code)
    assert meta.uploads == {}


# -- Evolution API -----------------------------------------------------------------------------


@pytest.fixture
def evolution() -> Iterator[EvolutionApiStandIn]:
    with EvolutionApiStandIn() as standin:
        yield standin


def ask(evolution: EvolutionApiStandIn, path: str, body: object = None, **options: Any) -> Said:
    return call(f"{evolution.url}/{path}", body, {"apikey": evolution.api_key}, **options)


def complaint(said: Said) -> tuple[int, Any]:
    fields = said.json()
    assert set(fields) == {"status", "error", "response"}
    assert fields["status"] == said.status
    return said.status, fields["response"]["message"]


def test_evolution_answers_201_with_a_key(evolution: EvolutionApiStandIn) -> None:
    said = ask(evolution, "message/sendText/sales", {"number": TO, "text": "Hi"})
    [sent] = evolution.sent
    fields = said.json()
    assert (said.status, fields["status"]) == (201, "PENDING")
    assert fields["key"] == {"remoteJid": f"{TO}@s.whatsapp.net", "fromMe": True, "id": sent.id}
    assert (fields["message"], fields["messageType"]) == ({"conversation": "Hi"}, "conversation")
    assert (sent.to, sent.type, sent.text) == (TO, "text", "Hi")


@pytest.mark.parametrize(
    ("what", "fields", "kind"),
    [
        ("sendMedia", {"number": TO, "mediatype": "image", "media": "https://x.example/a.png"}, "image"),
        ("sendWhatsAppAudio", {"number": TO, "audio": "https://x.example/a.ogg"}, "audio"),
        ("sendSticker", {"number": TO, "sticker": "https://x.example/a.webp"}, "sticker"),
        ("sendReaction", {"key": {"remoteJid": f"{TO}@s.whatsapp.net", "id": "1"}, "reaction": "👍"}, "reaction"),
    ],
)
def test_evolution_sends_other_kinds(
    evolution: EvolutionApiStandIn, what: str, fields: dict[str, Any], kind: str
) -> None:
    assert ask(evolution, f"message/{what}/sales", fields).json()["messageType"] == f"{kind}Message"
    assert [sent.type for sent in evolution.sent] == [kind]
    missing = ask(evolution, f"message/{what}/sales", {})
    assert complaint(missing)[0] == 400
    assert "requires property" in missing.json()["response"]["message"][0][0]


def test_evolution_refuses(evolution: EvolutionApiStandIn) -> None:
    text = {"number": TO, "text": "Hi"}
    assert complaint(call(f"{evolution.url}/message/sendText/sales", text)) == (401, "Unauthorized")
    evolution.expire_token()
    assert complaint(ask(evolution, "message/sendText/sales", text)) == (401, "Unauthorized")
    evolution.renew_token("another")
    status, said = complaint(ask(evolution, "message/sendText/other", text))
    assert (status, said) == (404, ['The "other" instance does not exist'])
    evolution.not_on_whatsapp(TO)
    status, said = complaint(ask(evolution, "message/sendText/sales", text))
    assert (status, said) == (400, [{"exists": False, "jid": f"{TO}@s.whatsapp.net", "number": TO}])
    assert complaint(ask(evolution, "message/sendSmoke/sales", text))[0] == 404
    assert evolution.sent == []


def test_evolution_offline(evolution: EvolutionApiStandIn) -> None:
    evolution.go_offline()
    assert complaint(ask(evolution, "message/sendText/sales", {"number": TO, "text": "Hi"})) == (
        500,
        "Connection Closed",
    )
    state = ask(evolution, "instance/connectionState/sales", method="GET").json()
    assert state == {"instance": {"instanceName": "sales", "state": "close"}}
    evolution.go_online()
    assert ask(evolution, "message/sendText/sales", {"number": TO, "text": "Hi"}).status == 201


def test_evolution_instances(evolution: EvolutionApiStandIn) -> None:
    made = ask(evolution, "instance/create", {"instanceName": "new", "qrcode": True})
    assert (made.status, made.json()["instance"]["status"]) == (201, "connecting")
    assert made.json()["qrcode"]["code"]
    assert complaint(ask(evolution, "instance/create", {"instanceName": "new"}))[0] == 403
    assert ask(evolution, "instance/connect/new", method="GET").json()["code"]
    assert ask(evolution, "webhook/set/new", {"webhook": {"url": "http://x"}}).status == 201
    assert evolution.settings["webhook/new"] == {"webhook": {"url": "http://x"}}
    assert ask(evolution, "instance/logout/new", method="DELETE").json()["status"] == "SUCCESS"
    assert complaint(ask(evolution, "instance/logout/new", method="DELETE"))[0] == 400
    assert ask(evolution, "instance/delete/new", method="DELETE").json()["error"] is False
    assert [one["name"] for one in ask(evolution, "instance/fetchInstances", method="GET").json()] == ["sales"]


def test_evolution_marks_as_read(evolution: EvolutionApiStandIn) -> None:
    said = ask(evolution, "chat/markMessageAsRead/sales", {"readMessages": [{"remoteJid": TO, "id": "1"}]})
    assert (said.status, evolution.read) == (201, ["1"])


# -- Evolution Go ------------------------------------------------------------------------------


@pytest.fixture
def go() -> Iterator[EvolutionGoStandIn]:
    with EvolutionGoStandIn() as standin:
        yield standin


def tell(go: EvolutionGoStandIn, path: str, body: object = None, *, key: str | None = None, **options: Any) -> Said:
    return call(f"{go.url}/{path}", body, {"apikey": key or go.token}, **options)


def test_go_answers_with_info_under_the_callers_id(go: EvolutionGoStandIn) -> None:
    said = tell(go, "send/text", {"number": TO, "text": "Hi", "id": "3EB0MINE"}).json()
    assert (said["message"], said["data"]["Info"]["ID"]) == ("success", "3EB0MINE")
    assert said["data"]["Info"]["Chat"] == f"{TO}@s.whatsapp.net"
    tell(go, "send/text", {"number": TO, "text": "Hi"})
    assert [sent.id == "3EB0MINE" for sent in go.sent] == [True, False]


def test_go_sends_media_by_address_and_by_form(go: EvolutionGoStandIn) -> None:
    assert tell(go, "send/media", {"number": TO, "url": "https://x.example/a.png", "type": "image"}).status == 200
    body, headers = multipart({"number": TO, "type": "document"}, ("a.pdf", "application/pdf", b"%PDF"))
    assert call(f"{go.url}/send/media", body, {"apikey": go.token, **headers}).status == 200
    assert [sent.type for sent in go.sent] == ["image", "document"]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("send/text", {"text": "Hi"}, "phone number is required"),
        ("send/text", {"number": TO}, "message body is required"),
        ("send/media", {"number": TO, "type": "image"}, "URL is required"),
        ("send/sticker", {"number": TO}, "sticker is required"),
        ("message/react", {"number": TO}, "message reaction is required"),
        ("message/markread", {"number": TO, "id": []}, "id is required"),
    ],
)
def test_go_says_what_is_missing(go: EvolutionGoStandIn, path: str, fields: dict[str, Any], said: str) -> None:
    answer = tell(go, path, fields)
    assert (answer.status, answer.json()) == (400, {"error": said})


def test_go_refuses(go: EvolutionGoStandIn) -> None:
    text = {"number": TO, "text": "Hi"}
    assert tell(go, "send/text", text, key="other").json() == {"error": "not authorized"}
    go.expire_token()
    assert tell(go, "send/text", text).status == 401
    go.renew_token()
    go.go_offline()
    assert tell(go, "send/text", text).json() == {"error": "client disconnected"}
    go.go_online()
    go.not_on_whatsapp(TO)
    answer = tell(go, "send/text", text)
    assert (answer.status, answer.json()) == (500, {"error": f"number {TO} is not registered on WhatsApp"})
    assert go.sent == []


def test_go_reacts_and_reads(go: EvolutionGoStandIn) -> None:
    assert tell(go, "message/react", {"number": TO, "reaction": "👍", "id": "1"}).json()["data"]["Info"]["ID"] != "1"
    assert tell(go, "message/markread", {"number": TO, "id": ["1", "2"]}).status == 200
    assert (go.sent[0].type, go.read) == ("reaction", ["1", "2"])


def test_go_instances(go: EvolutionGoStandIn) -> None:
    assert tell(go, "instance/all", method="GET").status == 401  # that needs the global key
    admin = go.admin_key
    made = tell(go, "instance/create", {"name": "new", "token": "t"}, key=admin).json()["data"]["id"]
    assert len(tell(go, "instance/all", key=admin, method="GET").json()["data"]) == 2
    assert tell(go, f"instance/proxy/{made}", {"host": "h", "port": "1"}, key=admin).json()["data"]["hasAuth"] is False
    assert tell(go, f"instance/delete/{made}", key=admin, method="DELETE").status == 200
    assert tell(go, f"instance/info/{made}", key=admin, method="GET").status == 500
    assert tell(go, "instance/connect", {"webhookUrl": "http://x"}).json()["data"]["webhookUrl"] == "http://x"
    assert tell(go, "instance/status", method="GET").json()["data"]["Connected"] is True
    assert tell(go, "instance/qr", method="GET").status == 400
    assert tell(go, "instance/logout", method="DELETE").status == 200
    assert tell(go, "instance/qr", method="GET").json()["data"]["Code"]


# -- n8n ---------------------------------------------------------------------------------------


def test_n8n_writes_executions_down_and_deduplicates_nothing() -> None:
    with N8nStandIn("orders", "leads") as n8n:
        for _ in range(2):
            assert call(n8n.webhook("orders"), {"id": 1}).json() == {"message": "Workflow was started"}
        runs = [(run.n, run.path, run.body) for run in n8n.executions]
        assert runs == [(1, "orders", {"id": 1}), (2, "orders", {"id": 1})]


def test_n8n_knows_active_flows_only() -> None:
    with N8nStandIn() as n8n:
        address = n8n.webhook()
        n8n.deactivate()
        said = call(address, {})
        assert (said.status, said.json()["message"]) == (404, 'The requested webhook "POST orders" is not registered.')
        n8n.activate("orders")
        assert call(address, {}).status == 200
        assert call(address, method="GET").status == 404


def test_n8n_header_auth() -> None:
    with N8nStandIn(auth=("X-Key", "k")) as n8n:
        assert call(n8n.webhook(), {}).status == 403
        assert call(n8n.webhook(), {}, {"x-key": "k"}).status == 200
        assert len(n8n.executions) == 1
