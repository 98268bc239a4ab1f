"""A stand-in for Evolution API v2: `/message/…/{instance}` and its instance calls, behind the header `apikey`.

Webhooks carry the JWT that Evolution makes out of `jwt_key`: made once, so that a copy or a retry brings the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from oncehook import clock
from oncehook.model import Arrival
from oncehook.testing.standins.base import StandIn, digits, jid, json_request, new_hex
from oncehook.testing.standins.server import Reply, Request

NAMES: Final = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    413: "Payload Too Large",
    429: "Too Many Requests",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
}

REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "sendText": ("number", "text"),
    "sendMedia": ("number", "mediatype", "media"),
    "sendWhatsAppAudio": ("number", "audio"),
    "sendSticker": ("number", "sticker"),
    "sendReaction": ("key", "reaction"),
    "sendLocation": ("number", "latitude", "longitude", "name", "address"),
    "sendContact": ("number", "contact"),
    "sendPoll": ("number", "name", "selectableCount", "values"),
}
"""What can be sent, and the fields without which it is refused."""

MESSAGE_TYPES: Final = {
    "text": "conversation",
    "image": "imageMessage",
    "video": "videoMessage",
    "audio": "audioMessage",
    "document": "documentMessage",
    "sticker": "stickerMessage",
    "reaction": "reactionMessage",
    "location": "locationMessage",
    "contact": "contactMessage",
    "poll": "pollCreationMessage",
}

MOST: Final = 136 << 20
"""Bytes of a body, base64 and all."""


class EvolutionHook(msgspec.Struct, frozen=True):
    """One event: its name, and its data."""

    event: str
    data: Any


class EvolutionApiStandIn(StandIn[EvolutionHook]):
    """See above.

    >>> with EvolutionApiStandIn() as evolution:
    ...     sender = EvolutionApi(evolution.url, evolution.api_key, evolution.instance, allow_private=True)
    ...     evolution.go_offline()
    """

    preset = "evolution-api"

    def __init__(
        self,
        *,
        api_key: str = "evolution-api-key",
        instance: str = "sales",
        number: str = "5511977770100",
        secret: str = "evolution-jwt-key",  # noqa: S107 - of a stand-in
        port: int = 0,
    ) -> None:
        """`secret` is the webhook's `jwt_key`; a source that takes the webhooks has the same."""
        super().__init__(secret=secret, port=port)
        self.api_key = api_key
        self.instance = instance
        self.number = number
        self.instances: dict[str, str] = {instance: "open"}
        """State of each instance: `open`, `connecting` or `close`."""
        self.settings: dict[str, dict[str, Any]] = {}
        """What was set last, by kind and instance: `webhook/sales`, `proxy/sales`."""
        self.read: list[str] = []
        """Messages that were marked as read, by id."""
        self.deleted: list[dict[str, Any]] = []
        """Messages that were taken back, by their keys."""
        self._expired = False
        self._absent: set[str] = set()

    # -- what goes wrong -----------------------------------------------------------------------

    def fail(
        self,
        status: int | None = None,
        *,
        message: object = None,
        retry_after: int | None = None,
        times: int | None = 1,
    ) -> None:
        """Answer the next calls with an error of this status, 500 unless said."""
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        answer = error(status or 500, message, headers)
        self.script(lambda request: answer, times)

    def expire_token(self) -> None:
        """From now on its key is refused; a new one is set with `renew_token`."""
        self._expired = True

    def renew_token(self, api_key: str | None = None) -> None:
        """A key is good again: the old one, or another."""
        self._expired, self.api_key = False, api_key or self.api_key

    def go_offline(self, instance: str | None = None) -> None:
        """The phone is not connected: whatever is sent meets "Connection Closed"."""
        self.instances[instance or self.instance] = "close"

    def go_online(self, instance: str | None = None) -> None:
        """It is connected again."""
        self.instances[instance or self.instance] = "open"

    def not_on_whatsapp(self, number: str) -> None:
        """Nobody on WhatsApp has this number."""
        self._absent.add(digits(number))

    # -- the API -------------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        """See StandIn."""
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        if parts == [""]:
            welcome = "Welcome to the Evolution API, it is working!"
            return Reply(200, {"status": 200, "message": welcome, "version": "2.3.6"})
        if self._expired or request.headers.get("apikey") != self.api_key:
            return error(401, "Unauthorized")
        if len(request.body) > MOST:
            return error(413, "request entity too large")
        match request.method, parts:
            case "POST", ["instance", "create"]:
                return self._create(request.json())
            case "GET", ["instance", "fetchInstances"]:
                return Reply(200, [{"name": name, "connectionStatus": self.instances[name]} for name in self.instances])
        if len(parts) == 3 and parts[2] not in self.instances:
            return error(404, [f'The "{parts[2]}" instance does not exist'])
        return self._of_instance(request, parts)

    def _of_instance(self, request: Request, parts: list[str]) -> Reply:
        match request.method, parts:
            case "POST", ["message", what, name] if what in REQUIRED:
                return self._message(what, name, request)
            case "POST", ["chat", "markMessageAsRead", name]:
                return self._mark_read(name, request.json())
            case "DELETE", ["chat", "deleteMessageForEveryone", name]:
                return self._delete_message(name, request.json())
            case "GET", ["instance", "connectionState", name]:
                return Reply(200, {"instance": {"instanceName": name, "state": self.instances[name]}})
            case "GET", ["instance", "connect", name]:
                return self._connect(name)
            case "DELETE", ["instance", "logout", name]:
                return self._log_out(name)
            case "DELETE", ["instance", "delete", name]:
                del self.instances[name]
                return _success("Instance deleted")
            case "POST", ["webhook" | "proxy" | "settings" as kind, "set", name]:
                self.settings[f"{kind}/{name}"] = request.json()
                return Reply(201, {kind: {"instanceName": name, **request.json()}})
            case "GET", ["webhook" | "proxy" | "settings" as kind, "find", name]:
                return Reply(200, self.settings.get(f"{kind}/{name}"))
        return error(404, [f"Cannot {request.method} {request.path}"])

    def _message(self, what: str, name: str, request: Request) -> Reply:
        fields = _fields(request)
        missing = [f'instance requires property "{field}"' for field in REQUIRED[what] if field not in fields]
        if missing:
            return error(400, [missing])
        if self.instances[name] != "open":
            # 2.3 answers 500 for words and 400 for media
            return error(500, "Connection Closed") if what == "sendText" else error(400, ["Error: Connection Closed"])
        key = fields.get("key")
        to = str(key.get("remoteJid", "") if isinstance(key, dict) else fields["number"])
        if digits(to) in self._absent:
            return error(400, [{"exists": False, "jid": jid(to), "number": to}])
        kind = _kind(what, fields)
        sent = self.take(f"3EB0{new_hex(18)}", to, kind, fields)
        return Reply(
            201,
            {
                "key": {"remoteJid": jid(to), "fromMe": True, "id": sent.id},
                "pushName": "",
                "status": "PENDING",
                "message": _content(kind, fields),
                "contextInfo": None,
                "messageType": MESSAGE_TYPES[kind],
                "messageTimestamp": int(clock.now()),
                "instanceId": "7c1f6a52-0000-4000-8000-000000000001",
                "source": "unknown",
            },
        )

    def _mark_read(self, name: str, fields: dict[str, Any]) -> Reply:
        messages = fields.get("readMessages")
        if not isinstance(messages, list):
            return error(400, [['instance requires property "readMessages"']])
        if self.instances[name] != "open":
            return error(500, ["Read messages fail", "Connection Closed"])
        self.read += [str(message.get("id")) for message in messages if isinstance(message, dict)]
        return Reply(201, {"message": "Read messages", "read": "success"})

    def _delete_message(self, name: str, key: dict[str, Any]) -> Reply:
        missing = [field for field in ("id", "fromMe", "remoteJid") if field not in key]
        if missing:
            return error(400, [[f'instance requires property "{field}"' for field in missing]])
        if self.instances[name] != "open":
            return error(500, ["Error while deleting message for everyone", "Connection Closed"])
        self.deleted.append(key)
        return Reply(201, {"key": {"remoteJid": key["remoteJid"], "fromMe": True, "id": f"3EB0{new_hex(18)}"}})

    def _create(self, fields: dict[str, Any]) -> Reply:
        name = fields.get("instanceName")
        if not isinstance(name, str) or not name:
            return error(400, [['instance requires property "instanceName"']])
        if name in self.instances:
            return error(403, [f'This name "{name}" is already in use.'])
        self.instances[name] = "connecting"
        made: dict[str, Any] = {
            "instance": {
                "instanceName": name,
                "instanceId": f"{new_hex(8)}-0000-4000-8000-{new_hex(12)}".lower(),
                "integration": fields.get("integration", "WHATSAPP-BAILEYS"),
                "webhookWaBusiness": None,
                "accessTokenWaBusiness": "",
                "status": "connecting",
            },
            "hash": fields.get("token") or new_hex(32),
            "webhook": {},
            "settings": {},
        }
        if fields.get("qrcode"):
            made["qrcode"] = _qr_code()
        return Reply(201, made)

    def _connect(self, name: str) -> Reply:
        if self.instances[name] == "open":
            return Reply(200, {"instance": {"instanceName": name, "state": "open"}})
        self.instances[name] = "connecting"
        return Reply(200, _qr_code())

    def _log_out(self, name: str) -> Reply:
        if self.instances[name] == "close":
            return error(400, [f'The "{name}" instance is not connected'])
        self.instances[name] = "close"
        return _success("Instance logged out")

    # -- webhooks ------------------------------------------------------------------------------

    def message(
        self, *, from_: str, text: str, id: str | None = None, name: str = "Ana", from_me: bool = False
    ) -> EvolutionHook:
        """A customer writes (`messages.upsert`); with `from_me`, what was written on the phone itself."""
        data = {
            "key": {"remoteJid": jid(from_), "fromMe": from_me, "id": id or f"3EB0{new_hex(18)}"},
            "pushName": name,
            "status": "SERVER_ACK" if from_me else "DELIVERY_ACK",
            "message": {"conversation": text},
            "messageType": "conversation",
            "messageTimestamp": int(clock.now()),
            "instanceId": "7c1f6a52-0000-4000-8000-000000000001",
            "source": "android",
        }
        return EvolutionHook("messages.upsert", data)

    def status(self, of: object, status: str, *, to: str | None = None) -> EvolutionHook:
        """How far a message has come (`messages.update`): `SERVER_ACK`, `DELIVERY_ACK`, `READ` or `PLAYED`."""
        data = {
            "keyId": str(getattr(of, "id", of)),
            "remoteJid": jid(str(to or getattr(of, "to", "5511988880142"))),
            "fromMe": True,
            "status": status,
            "instanceId": "7c1f6a52-0000-4000-8000-000000000001",
        }
        return EvolutionHook("messages.update", data)

    def event(self, event: str, data: object) -> EvolutionHook:
        """Any other event, such as `connection.update`."""
        return EvolutionHook(event, data)

    def webhooks(self, *hooks: EvolutionHook) -> Sequence[Arrival]:
        """One request for each: Evolution batches no messages."""
        return [json_request(msgspec.json.encode(self._envelope(hook))) for hook in hooks]

    def _envelope(self, hook: EvolutionHook) -> dict[str, Any]:
        # Local time with a Z behind it, as Evolution writes it: here the same as UTC.
        moment = clock.now_utc().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {
            "event": hook.event,
            "instance": self.instance,
            "data": hook.data,
            "destination": "https://example.com/in/evolution-api",
            "date_time": moment,
            "sender": jid(self.number),
            "server_url": self.url if self._listening is not None else "http://127.0.0.1:8080",
            "apikey": None,
        }


def error(status: int, message: object = None, headers: Mapping[str, str] | None = None) -> Reply:
    """An error as Evolution API writes it."""
    name = NAMES.get(status, "Error")
    said = {"status": status, "error": name, "response": {"message": name if message is None else message}}
    return Reply(status, said, headers or {})


def _success(message: str) -> Reply:
    return Reply(200, {"status": "SUCCESS", "error": False, "response": {"message": message}})


def _qr_code() -> dict[str, Any]:
    return {"pairingCode": None, "code": f"2@{new_hex(60)}", "base64": "data:image/png;base64,iVBORw0KGgo=", "count": 1}


def _fields(request: Request) -> dict[str, Any]:
    """The fields of JSON, or of a form whose file stands for the media."""
    if not request.headers.get("content-type", "").startswith("multipart/"):
        return request.json()
    parts = request.form()
    fields: dict[str, Any] = {name: part.text for name, part in parts.items() if name != "file"}
    return {**fields, "media": parts["file"].filename or ""} if "file" in parts else fields


def _kind(what: str, fields: dict[str, Any]) -> str:
    if what == "sendMedia":
        kind = str(fields["mediatype"])
        return kind if kind in MESSAGE_TYPES else "document"
    return "audio" if what == "sendWhatsAppAudio" else what.removeprefix("send").lower()


def _content(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    if kind == "text":
        return {"conversation": fields["text"]}
    if kind == "reaction":
        return {"reactionMessage": {"key": fields["key"], "text": fields["reaction"]}}
    told = ("caption", "fileName", "mimetype")
    return {MESSAGE_TYPES[kind]: {name: fields[name] for name in told if name in fields}}
