"""A stand-in for Evolution API v2: `/message/…/{instance}` and its instance calls, behind the header `apikey`.

Webhooks carry the JWT that Evolution makes from `jwt_key`: made once, so that copies and retries carry the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote

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

NAMES: Final = {**{status.value: status.phrase for status in HTTPStatus}, 413: "Payload Too Large"}
INSTANCE_ID: Final = "7c1f6a52-0000-4000-8000-000000000001"

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
"""Largest body in bytes, base64 included."""


class EvolutionHook(msgspec.Struct, frozen=True):
    """One event: its name and its data."""

    event: str
    data: Any


class EvolutionApiStandIn(WhatsAppStandIn[EvolutionHook]):
    """A server of Evolution API v2.

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
        """Sign webhooks with `secret`: the `jwt_key`, and the secret of the source that takes them."""
        super().__init__(token=api_key, secret=secret, port=port)
        self.instance = instance
        self.number = number
        self.instances: dict[str, str] = {instance: "open"}
        """State of each instance: `open`, `connecting` or `close`."""
        self.settings: dict[str, dict[str, Any]] = {}
        """Settings by kind and instance: `webhook/sales`, `proxy/sales`."""
        self.deleted: list[dict[str, Any]] = []
        """Keys of the messages that were deleted for everyone."""

    @property
    def api_key(self) -> str:
        """Return the server's API key."""
        return self.token

    # -- what goes wrong -----------------------------------------------------------------------

    def error(self, status: int, message: object = None) -> Reply:
        name = NAMES.get(status, "Error")
        return Reply(
            status, {"status": status, "error": name, "response": {"message": name if message is None else message}}
        )

    def go_offline(self, instance: str | None = None) -> None:
        """Disconnect the phone: whatever is sent fails with "Connection Closed"."""
        self.instances[instance or self.instance] = "close"

    def go_online(self, instance: str | None = None) -> None:
        """Connect the phone again."""
        self.instances[instance or self.instance] = "open"

    # -- the API -------------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        if parts == [""]:
            welcome = "Welcome to the Evolution API, it is working!"
            return Reply(200, {"status": 200, "message": welcome, "version": "2.3.6"})
        if self._expired or request.headers.get("apikey") != self.token:
            return self.error(401, "Unauthorized")
        if len(request.body) > MOST:
            return self.error(413, "request entity too large")
        match request.method, parts:
            case "POST", ["instance", "create"]:
                return self._create(request.json())
            case "GET", ["instance", "fetchInstances"]:
                return Reply(200, [{"name": name, "connectionStatus": self.instances[name]} for name in self.instances])
        if len(parts) == 3 and parts[2] not in self.instances:
            return self.error(404, [f'The "{parts[2]}" instance does not exist'])
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
        return self.error(404, [f"Cannot {request.method} {request.path}"])

    def _message(self, what: str, name: str, request: Request) -> Reply:
        fields = request.fields("media")
        missing = [f'instance requires property "{field}"' for field in REQUIRED[what] if field not in fields]
        if missing:
            return self.error(400, [missing])
        if self.instances[name] != "open":
            # 2.3 answers 500 for words and 400 for media
            return (
                self.error(500, "Connection Closed")
                if what == "sendText"
                else self.error(400, ["Error: Connection Closed"])
            )
        key = fields.get("key")
        to = str(key.get("remoteJid", "") if isinstance(key, dict) else fields["number"])
        if digits(to) in self._absent:
            return self.error(400, [{"exists": False, "jid": jid(to), "number": to}])
        kind = _kind(what, fields)
        sent = self.take(new_message_id(), to, kind, fields)
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
                "instanceId": INSTANCE_ID,
                "source": "unknown",
            },
        )

    def _mark_read(self, name: str, fields: dict[str, Any]) -> Reply:
        messages = fields.get("readMessages")
        if not isinstance(messages, list):
            return self.error(400, [['instance requires property "readMessages"']])
        if self.instances[name] != "open":
            return self.error(500, ["Read messages fail", "Connection Closed"])
        self.read += [str(message.get("id")) for message in messages if isinstance(message, dict)]
        return Reply(201, {"message": "Read messages", "read": "success"})

    def _delete_message(self, name: str, key: dict[str, Any]) -> Reply:
        missing = [field for field in ("id", "fromMe", "remoteJid") if field not in key]
        if missing:
            return self.error(400, [[f'instance requires property "{field}"' for field in missing]])
        if self.instances[name] != "open":
            return self.error(500, ["Error while deleting message for everyone", "Connection Closed"])
        self.deleted.append(key)
        return Reply(201, {"key": {"remoteJid": key["remoteJid"], "fromMe": True, "id": new_message_id()}})

    def _create(self, fields: dict[str, Any]) -> Reply:
        name = fields.get("instanceName")
        if not isinstance(name, str) or not name:
            return self.error(400, [['instance requires property "instanceName"']])
        if name in self.instances:
            return self.error(403, [f'This name "{name}" is already in use.'])
        self.instances[name] = "connecting"
        made: dict[str, Any] = {
            "instance": {
                "instanceName": name,
                "instanceId": new_instance_id(),
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
            return self.error(400, [f'The "{name}" instance is not connected'])
        self.instances[name] = "close"
        return _success("Instance logged out")

    # -- webhooks ------------------------------------------------------------------------------

    def message(
        self, *, from_: str, text: str, id: str | None = None, name: str = "Ana", from_me: bool = False
    ) -> EvolutionHook:
        """Build a customer's message (`messages.upsert`), or with `from_me` one written on the phone itself."""
        data = {
            "key": {"remoteJid": jid(from_), "fromMe": from_me, "id": id or new_message_id()},
            "pushName": name,
            "status": "SERVER_ACK" if from_me else "DELIVERY_ACK",
            "message": {"conversation": text},
            "messageType": "conversation",
            "messageTimestamp": int(clock.now()),
            "instanceId": INSTANCE_ID,
            "source": "android",
        }
        return EvolutionHook("messages.upsert", data)

    def status(self, of: object, status: str, *, to: str | None = None) -> EvolutionHook:
        """Build the status of a message (`messages.update`): `SERVER_ACK`, `DELIVERY_ACK`, `READ` or `PLAYED`."""
        message_id, recipient = read_reference(of, to)
        data = {
            "keyId": message_id,
            "remoteJid": jid(recipient),
            "fromMe": True,
            "status": status,
            "instanceId": INSTANCE_ID,
        }
        return EvolutionHook("messages.update", data)

    def event(self, event: str, data: object) -> EvolutionHook:
        """Build any other event, such as `connection.update`."""
        return EvolutionHook(event, data)

    def envelope(self, hook: EvolutionHook) -> dict[str, Any]:
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


def _success(message: str) -> Reply:
    return Reply(200, {"status": "SUCCESS", "error": False, "response": {"message": message}})


def _qr_code() -> dict[str, Any]:
    return {"pairingCode": None, "code": f"2@{new_hex(60)}", "base64": "data:image/png;base64,iVBORw0KGgo=", "count": 1}


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
    kept = ("caption", "fileName", "mimetype")
    return {MESSAGE_TYPES[kind]: {name: fields[name] for name in kept if name in fields}}
