"""A stand-in for Evolution Go: `/send/…`, `/message/…` and `/instance/…`, behind the header `apikey`.

The instance's token gives access to the instance, the global key to all. Like real ones, webhooks have the token in the
body and no other proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from oncehook import clock
from oncehook.testing.standins.base import (
    WhatsAppStandIn,
    digits,
    jid,
    new_hex,
    new_instance_id,
    new_message_id,
    read_reference,
)
from oncehook.testing.standins.server import Reply, Request

REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "text": ("number", "text"),
    "link": ("number", "text"),
    "media": ("number", "url", "type"),
    "sticker": ("number", "sticker"),
    "location": ("number", "latitude", "longitude", "address", "name"),
    "contact": ("number", "vcard"),
    "poll": ("number", "question", "options"),
}

LATER: Final[Mapping[str, tuple[str, ...]]] = {
    "edit": ("chat", "message", "messageId"),
    "delete": ("chat", "messageId"),
    "status": ("id",),
    "presence": ("number", "state"),
}
"""Required fields of the calls about messages that were sent and about chats."""

COMPLAINTS: Final = {
    "number": "phone number is required",
    "text": "message body is required",
    "url": "URL is required",
    "type": "media type is required",
    "vcard": "contact phone number is required",
    "options": "minimum 2 options are required",
    "reaction": "message reaction is required",
}
"""Error texts for a missing field, where it is not called by its own name."""

ADMIN_CALLS: Final = ("create", "all", "info", "delete", "proxy", "forcereconnect", "logs")
"""Calls about instances that need the global key."""


class EvolutionGoHook(msgspec.Struct, frozen=True):
    """One event: its name, its data, and its state if it has one."""

    event: str
    data: Any
    state: str | None = None


class EvolutionGoStandIn(WhatsAppStandIn[EvolutionGoHook]):
    """A server of Evolution Go.

    >>> with EvolutionGoStandIn() as evolution:
    ...     sender = EvolutionGo(evolution.url, evolution.token, admin_key=evolution.admin_key, allow_private=True)
    ...     evolution.not_on_whatsapp("5511900000000")
    """

    preset = "evolution-go"

    def __init__(
        self,
        *,
        token: str = "evolution-go-token",  # noqa: S107 - of a stand-in
        admin_key: str = "evolution-go-admin-key",
        instance_id: str = "0d9d2c1e-0000-4000-8000-000000000001",
        instance: str = "sales",
        number: str = "5511977770100",
        port: int = 0,
    ) -> None:
        """Use the instance's `token` as the key of its calls and as the secret of a source of its webhooks."""
        super().__init__(token=token, secret=token, port=port)
        self.admin_key = admin_key
        self.instance_id = instance_id
        self.instance = instance
        self.number = number
        self.is_connected = True
        self.webhook_url = ""
        """Set by `POST /instance/connect`."""
        self.instances: dict[str, dict[str, Any]] = {instance_id: {"id": instance_id, "name": instance, "token": token}}
        self.proxies: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """Calls about messages that were sent: `edit`, `delete`, `status`, `presence`."""

    # -- what goes wrong -----------------------------------------------------------------------

    def error(self, status: int, message: object = None) -> Reply:
        return Reply(status, {"error": "internal error" if message is None else message})

    def renew_token(self, token: str | None = None) -> None:
        """Accept the token again, or another one instead of it, which webhooks then carry too."""
        super().renew_token(token)
        self.secret = self.token

    def go_offline(self) -> None:
        """Disconnect the phone: whatever is sent fails with "client disconnected"."""
        self.is_connected = False

    def go_online(self) -> None:
        """Connect the phone again."""
        self.is_connected = True

    # -- the API -------------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        parts = request.path.strip("/").split("/")
        if parts == ["server", "ok"]:
            return Reply(200, {"status": "ok"})
        key = request.headers.get("apikey")
        if parts[0] == "instance" and len(parts) > 1 and parts[1] in ADMIN_CALLS:
            return (
                self._answer_admin(request, parts[1:]) if key == self.admin_key else self.error(401, "not authorized")
            )
        if key != self.token or self._expired:
            return self.error(401, "not authorized")
        match request.method, parts:
            case "POST", ["send", what] if what in REQUIRED:
                return self._message(what, request)
            case "POST", ["message", "react"]:
                return self._react(request.json())
            case "POST", ["message", "markread"]:
                return self._mark_read(request.json())
            case "POST", ["message", what] if what in LATER:
                return self._later(what, request.json())
            case _, ["instance", *_]:
                return self._answer_instance(request, parts[1:])
        return Reply(404, b"404 page not found", {"content-type": "text/plain"})

    def _message(self, what: str, request: Request) -> Reply:
        fields = request.fields("url")
        return (
            self._check(fields, REQUIRED[what])
            or self._check_number(str(fields["number"]))
            or self._accept(str(fields["type"]) if what == "media" else what, fields)
        )

    def _react(self, fields: dict[str, Any]) -> Reply:
        return (
            self._check(fields, ("number", "reaction"))
            or self._check_number(str(fields["number"]))
            # `id` is the message that the reaction is to; the reaction has its own
            or self._accept("reaction", fields, id=new_message_id())
        )

    def _check(self, fields: dict[str, Any], required: Iterable[str]) -> Reply | None:
        missing = next((field for field in required if not fields.get(field)), None)
        return None if missing is None else self.error(400, COMPLAINTS.get(missing, f"{missing} is required"))

    def _check_number(self, number: str) -> Reply | None:
        if not self.is_connected:
            return self.error(500, "client disconnected")
        if digits(number) in self._absent:
            return self.error(500, f"number {number} is not registered on WhatsApp")
        return None

    def _accept(self, kind: str, fields: dict[str, Any], *, id: str | None = None) -> Reply:
        chosen = id or str(fields.get("id") or new_message_id())
        sent = self.take(chosen, str(fields["number"]), kind, fields)
        info = {
            "Chat": jid(sent.to),
            "Sender": jid(self.number),
            "IsFromMe": True,
            "IsGroup": sent.to.endswith("@g.us"),
            "ID": sent.id,
            "ServerID": 0,
            "Type": "ExtendedTextMessage" if kind == "text" else f"{kind.capitalize()}Message",
            "PushName": "",
            "Timestamp": _moment(),
        }
        content = {"extendedTextMessage": {"text": fields["text"]}} if kind == "text" else {}
        return _success({"Info": info, "Message": content, "MessageContextInfo": None})

    def _mark_read(self, fields: dict[str, Any]) -> Reply:
        if (refusal := self._check(fields, ("number",))) is not None:
            return refusal
        ids = fields.get("id")
        if not isinstance(ids, list) or not ids:
            return self.error(400, "id is required")
        if (refusal := self._check_number(str(fields["number"]))) is not None:
            return refusal
        self.read += map(str, ids)
        return _success({"timestamp": _moment()})

    def _later(self, what: str, fields: dict[str, Any]) -> Reply:
        if (refusal := self._check(fields, LATER[what])) is not None:
            return refusal
        if not self.is_connected:
            return self.error(500, "client disconnected")
        self.asked.append((what, fields))
        return _success({"timestamp": _moment()})

    # -- instances -----------------------------------------------------------------------------

    def _answer_instance(self, request: Request, parts: list[str]) -> Reply:
        match request.method, parts:
            case "POST", ["connect"]:
                self.webhook_url = str(request.json().get("webhookUrl", ""))
                return _success({"jid": jid(self.number), "webhookUrl": self.webhook_url, "eventString": "MESSAGE"})
            case "GET", ["status"]:
                state = {"Connected": self.is_connected, "LoggedIn": self.is_connected, "Name": self.instance}
                return _success(state)
            case "GET", ["qr"]:
                if self.is_connected:
                    return self.error(400, "session already logged in")
                return _success({"Qrcode": "data:image/png;base64,iVBORw0KGgo=", "Code": f"2@{new_hex(60)}"})
            case "POST", ["pair"]:
                return _success({"PairingCode": new_hex(8)})
            case "POST", ["disconnect"]:
                self.go_offline()
                return _success()
            case "POST", ["reconnect"]:
                self.go_online()
                return _success()
            case "DELETE", ["logout"]:
                if not self.is_connected:
                    return self.error(400, "client disconnected")
                self.go_offline()
                return _success()
        return Reply(404, b"404 page not found", {"content-type": "text/plain"})

    def _answer_admin(self, request: Request, parts: list[str]) -> Reply:
        match request.method, parts:
            case "POST", ["create"]:
                return self._create(request.json())
            case "GET", ["all"]:
                return _success(list(self.instances.values()))
            case _, [_, id] if id not in self.instances:
                return self.error(500, "record not found")
            case "GET", ["info", id]:
                return _success(self.instances[id])
            case "DELETE", ["delete", id]:
                del self.instances[id]
                return _success()
            case "POST", ["proxy", id]:
                return self._set_proxy(id, request.json())
            case "DELETE", ["proxy", id]:
                self.proxies.pop(id, None)
                return _success()
            case "POST", ["forcereconnect", _]:
                self.go_online()
                return _success()
            case "GET", ["logs", _]:
                return _success([])
        return Reply(404, b"404 page not found", {"content-type": "text/plain"})

    def _create(self, fields: dict[str, Any]) -> Reply:
        if (refusal := self._check(fields, ("name", "token"))) is not None:
            return refusal
        made = str(fields.get("instanceId") or new_instance_id())
        self.instances[made] = {"id": made, "name": fields["name"], "token": fields["token"], "connected": False}
        return _success(self.instances[made])

    def _set_proxy(self, id: str, fields: dict[str, Any]) -> Reply:
        if (refusal := self._check(fields, ("host", "port"))) is not None:
            return refusal
        self.proxies[id] = fields
        has_auth = bool(fields.get("username") and fields.get("password"))
        shown = {"protocol": fields.get("protocol", "http"), "host": fields["host"], "port": fields["port"]}
        return _success({**shown, "hasAuth": has_auth})

    # -- webhooks ------------------------------------------------------------------------------

    def message(
        self, *, from_: str, text: str, id: str | None = None, name: str = "Ana", from_me: bool = False
    ) -> EvolutionGoHook:
        """Build a customer's message (`Message`), or with `from_me` one written on the phone itself."""
        info = {
            "Chat": jid(from_),
            "Sender": jid(self.number if from_me else from_),
            "IsFromMe": from_me,
            "IsGroup": False,
            "ID": id or new_message_id(),
            "Type": "text",
            "PushName": name,
            "Timestamp": _moment(),
        }
        data = {"Info": info, "Message": {"conversation": text}, "IsEphemeral": False, "IsViewOnce": False}
        return EvolutionGoHook("Message", data)

    def receipt(self, *of: object, state: str = "Read", from_: str | None = None) -> EvolutionGoHook:
        """Build a receipt, `Delivered` or `Read`, of one or more messages.

        Each of `of` is one of `sent`, or an id, which needs `from_`: who has read them.
        """
        reader = jid(read_reference(of[0], from_)[1])
        data = {
            "Chat": reader,
            "Sender": reader,
            "IsFromMe": False,
            "IsGroup": False,
            "MessageIDs": [read_reference(one, from_)[0] for one in of],
            "Timestamp": _moment(),
            "Type": "read" if state == "Read" else "",
        }
        return EvolutionGoHook("Receipt", data, state)

    def event(self, event: str, data: object, *, state: str | None = None) -> EvolutionGoHook:
        """Build any other event, such as `Disconnected`."""
        return EvolutionGoHook(event, data, state)

    def envelope(self, hook: EvolutionGoHook) -> dict[str, Any]:
        state = {} if hook.state is None else {"state": hook.state}
        return {
            "event": hook.event,
            "data": hook.data,
            "instanceId": self.instance_id,
            "instanceName": self.instance,
            **state,
        }


def _success(data: object = None) -> Reply:
    return Reply(200, {"message": "success"} if data is None else {"message": "success", "data": data})


def _moment() -> str:
    return clock.now_utc().isoformat(timespec="seconds").replace("+00:00", "Z")
