"""A stand-in for Evolution Go: `/send/…`, `/message/…` and `/instance/…`, behind the header `apikey`.

The instance's token opens what belongs to the instance, the global key what belongs to all. Webhooks carry the token in
the body and nothing else that could prove anything, as they really do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from oncehook import clock
from oncehook.model import Arrival
from oncehook.testing.standins.base import StandIn, digits, jid, json_request, new_hex
from oncehook.testing.standins.server import Reply, Request

REQUIRED: Final[Mapping[str, Mapping[str, str]]] = {
    "text": {"text": "message body is required"},
    "link": {"text": "message body is required"},
    "media": {"url": "URL is required", "type": "media type is required"},
    "sticker": {"sticker": "sticker is required"},
    "location": {
        "latitude": "latitude is required",
        "longitude": "longitude is required",
        "address": "address is required",
        "name": "name is required",
    },
    "contact": {"vcard": "contact phone number is required"},
    "poll": {"question": "question is required", "options": "minimum 2 options are required"},
}
"""What can be sent, and what is said of a field that is missing."""

LATER: Final[Mapping[str, Mapping[str, str]]] = {
    "edit": {"chat": "chat is required", "message": "message is required", "messageId": "messageId is required"},
    "delete": {"chat": "chat is required", "messageId": "messageId is required"},
    "status": {"id": "id is required"},
    "presence": {"number": "phone number is required", "state": "state is required"},
}
"""What can be asked about messages and chats, and what is said of a field that is missing."""

OF_ALL: Final = ("create", "all", "info", "delete", "proxy", "forcereconnect", "logs")
"""Instance calls that need the global key."""


class EvolutionGoHook(msgspec.Struct, frozen=True):
    """One event: its name, its data, and its state where it has one."""

    event: str
    data: Any
    state: str | None = None


class EvolutionGoStandIn(StandIn[EvolutionGoHook]):
    """See above.

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
        """`token` is the instance's: the header of its calls, and the secret of a source that takes its webhooks."""
        super().__init__(secret=token, port=port)
        self.token = token
        self.admin_key = admin_key
        self.instance_id = instance_id
        self.instance = instance
        self.number = number
        self.is_connected = True
        self.webhook_url = ""
        """Set by `POST /instance/connect`."""
        self.instances: dict[str, dict[str, Any]] = {instance_id: {"id": instance_id, "name": instance, "token": token}}
        self.proxies: dict[str, dict[str, Any]] = {}
        self.read: list[str] = []
        """Messages that were marked as read, by id."""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """What was asked about messages that were sent: `edit`, `delete`, `status`, `presence`."""
        self._expired = False
        self._absent: set[str] = set()

    # -- what goes wrong -----------------------------------------------------------------------

    def fail(self, status: int | None = None, *, message: str = "internal error", times: int | None = 1) -> None:
        """Answer the next calls with an error of this status, 500 unless said."""
        answer = error(status or 500, message)
        self.script(lambda request: answer, times)

    def expire_token(self) -> None:
        """From now on the instance's token is refused; a new one is set with `renew_token`."""
        self._expired = True

    def renew_token(self, token: str | None = None) -> None:
        """A token is good again: the old one, or another, which webhooks then carry too."""
        self._expired, self.token = False, token or self.token
        self.secret = self.token

    def go_offline(self) -> None:
        """The phone is not connected: whatever is sent meets "client disconnected"."""
        self.is_connected = False

    def go_online(self) -> None:
        """It is connected again."""
        self.is_connected = True

    def not_on_whatsapp(self, number: str) -> None:
        """Nobody on WhatsApp has this number."""
        self._absent.add(digits(number))

    # -- the API -------------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        """See StandIn."""
        parts = request.path.strip("/").split("/")
        if parts == ["server", "ok"]:
            return Reply(200, {"status": "ok"})
        said = request.headers.get("apikey")
        if parts[0] == "instance" and len(parts) > 1 and parts[1] in OF_ALL:
            return self._of_all(request, parts[1:]) if said == self.admin_key else error(401, "not authorized")
        if said != self.token or self._expired:
            return error(401, "not authorized")
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
                return self._of_instance(request, parts[1:])
        return Reply(404, b"404 page not found", {"content-type": "text/plain"})

    def _message(self, what: str, request: Request) -> Reply:
        fields = _fields(request)
        for field, complaint in {"number": "phone number is required", **REQUIRED[what]}.items():
            if not fields.get(field):
                return error(400, complaint)
        if (trouble := self._trouble(str(fields["number"]))) is not None:
            return trouble
        return self._taken(str(fields["type"]) if what == "media" else what, fields)

    def _react(self, fields: dict[str, Any]) -> Reply:
        for field, complaint in (
            ("number", "phone number is required"),
            ("reaction", "message reaction is required"),
        ):
            if not fields.get(field):
                return error(400, complaint)
        # `id` is the message that is reacted to; the reaction gets one of its own
        return self._trouble(str(fields["number"])) or self._taken("reaction", fields, id=f"3EB0{new_hex(18)}")

    def _trouble(self, number: str) -> Reply | None:
        if not self.is_connected:
            return error(500, "client disconnected")
        if digits(number) in self._absent:
            return error(500, f"number {number} is not registered on WhatsApp")
        return None

    def _taken(self, kind: str, fields: dict[str, Any], *, id: str | None = None) -> Reply:
        chosen = id or str(fields.get("id") or f"3EB0{new_hex(18)}")
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
        if not fields.get("number"):
            return error(400, "phone number is required")
        ids = fields.get("id")
        if not isinstance(ids, list) or not ids:
            return error(400, "id is required")
        if (trouble := self._trouble(str(fields["number"]))) is not None:
            return trouble
        self.read += map(str, ids)
        return _success({"timestamp": _moment()})

    def _later(self, what: str, fields: dict[str, Any]) -> Reply:
        for field, complaint in LATER[what].items():
            if not fields.get(field):
                return error(400, complaint)
        if not self.is_connected:
            return error(500, "client disconnected")
        self.asked.append((what, fields))
        return _success({"timestamp": _moment()})

    # -- instances -----------------------------------------------------------------------------

    def _of_instance(self, request: Request, parts: list[str]) -> Reply:
        match request.method, parts:
            case "POST", ["connect"]:
                self.webhook_url = str(request.json().get("webhookUrl", ""))
                return _success({"jid": jid(self.number), "webhookUrl": self.webhook_url, "eventString": "MESSAGE"})
            case "GET", ["status"]:
                state = {"Connected": self.is_connected, "LoggedIn": self.is_connected, "Name": self.instance}
                return _success(state)
            case "GET", ["qr"]:
                if self.is_connected:
                    return error(400, "session already logged in")
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
                    return error(400, "client disconnected")
                self.go_offline()
                return _success()
        return Reply(404, b"404 page not found", {"content-type": "text/plain"})

    def _of_all(self, request: Request, parts: list[str]) -> Reply:
        match request.method, parts:
            case "POST", ["create"]:
                return self._create(request.json())
            case "GET", ["all"]:
                return _success(list(self.instances.values()))
            case _, [_, id] if id not in self.instances:
                return error(500, "record not found")
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
        for field in ("name", "token"):
            if not fields.get(field):
                return error(400, f"{field} is required")
        made = str(fields.get("instanceId") or f"{new_hex(8)}-0000-4000-8000-{new_hex(12)}".lower())
        self.instances[made] = {"id": made, "name": fields["name"], "token": fields["token"], "connected": False}
        return _success(self.instances[made])

    def _set_proxy(self, id: str, fields: dict[str, Any]) -> Reply:
        for field in ("host", "port"):
            if not fields.get(field):
                return error(400, f"{field} is required")
        self.proxies[id] = fields
        has_auth = bool(fields.get("username") and fields.get("password"))
        shown = {"protocol": fields.get("protocol", "http"), "host": fields["host"], "port": fields["port"]}
        return _success({**shown, "hasAuth": has_auth})

    # -- webhooks ------------------------------------------------------------------------------

    def message(
        self, *, from_: str, text: str, id: str | None = None, name: str = "Ana", from_me: bool = False
    ) -> EvolutionGoHook:
        """A customer writes (`Message`); with `from_me`, what was written on the phone itself."""
        info = {
            "Chat": jid(from_),
            "Sender": jid(self.number if from_me else from_),
            "IsFromMe": from_me,
            "IsGroup": False,
            "ID": id or f"3EB0{new_hex(18)}",
            "Type": "text",
            "PushName": name,
            "Timestamp": _moment(),
        }
        data = {"Info": info, "Message": {"conversation": text}, "IsEphemeral": False, "IsViewOnce": False}
        return EvolutionGoHook("Message", data)

    def receipt(self, *of: object, state: str = "Read", from_: str | None = None) -> EvolutionGoHook:
        """Messages have come so far: `Delivered` or `Read`. One receipt lists several of them.

        Each of `of` is one of `sent`, or an id; then `from_` says who has read them.
        """
        reader = jid(str(from_ or getattr(of[0], "to", "5511988880142")))
        data = {
            "Chat": reader,
            "Sender": reader,
            "IsFromMe": False,
            "IsGroup": False,
            "MessageIDs": [str(getattr(one, "id", one)) for one in of],
            "Timestamp": _moment(),
            "Type": "read" if state == "Read" else "",
        }
        return EvolutionGoHook("Receipt", data, state)

    def event(self, event: str, data: object, *, state: str | None = None) -> EvolutionGoHook:
        """Any other event, such as `Disconnected`."""
        return EvolutionGoHook(event, data, state)

    def webhooks(self, *hooks: EvolutionGoHook) -> Sequence[Arrival]:
        """One request for each."""
        return [json_request(msgspec.json.encode(self._envelope(hook))) for hook in hooks]

    def _envelope(self, hook: EvolutionGoHook) -> dict[str, Any]:
        state = {} if hook.state is None else {"state": hook.state}
        return {
            "event": hook.event,
            "data": hook.data,
            "instanceId": self.instance_id,
            "instanceName": self.instance,
            **state,
        }


def error(status: int, message: str) -> Reply:
    """An error as Evolution Go writes it."""
    return Reply(status, {"error": message})


def _success(data: object = None) -> Reply:
    return Reply(200, {"message": "success"} if data is None else {"message": "success", "data": data})


def _moment() -> str:
    return clock.now_utc().isoformat(timespec="seconds").replace("+00:00", "Z")


def _fields(request: Request) -> dict[str, Any]:
    """The fields of JSON, or of a form whose file stands for the address."""
    if not request.headers.get("content-type", "").startswith("multipart/"):
        return request.json()
    parts = request.form()
    fields: dict[str, Any] = {name: part.text for name, part in parts.items() if name != "file"}
    return {**fields, "url": parts["file"].filename or "file"} if "file" in parts else fields
