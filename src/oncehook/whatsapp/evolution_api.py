"""Evolution API v2: an instance is a phone that is logged in to WhatsApp Web, and its name is in every path.

Its errors are sentences of several libraries in one list, so they are recognised by words. Two of them mislead: it
answers 400 when its own database fails (Prisma) and when WhatsApp is slow ("Timed Out"), and in both cases the message
may have been sent. The first stays permanent, because every retry would send the message again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final
from urllib.parse import quote

from oncehook.errors import ConfigError
from oncehook.http_client.proxy import NONE, read_proxy
from oncehook.whatsapp.evolution import (
    chat_of,
    list_names,
    location_fields,
    media_link,
    proxy_fields,
    summarise,
    wire_id,
)
from oncehook.whatsapp.files import CONVERTED_AUDIO, WEBP, FileTypes
from oncehook.whatsapp.messages import (
    Contact,
    Link,
    Location,
    Media,
    Message,
    Poll,
    Reaction,
    Read,
    Template,
    Text,
    link_text,
)
from oncehook.whatsapp.numbers import id_of
from oncehook.whatsapp.outcomes import Fault, Reason, reason_of
from oncehook.whatsapp.sender import Call, Credential, Sender, refuse_own_card, without_none

_OFFLINE: Final = ("connection closed", "connection terminated", "not connected", "logged out", "state: close")
_TOO_LARGE: Final = ("too large", "maxcontentlength", "media size", "file size")
_NOT_THERE: Final = ("method not available", "not implemented")
_DATABASE: Final = "prisma"
_SLOW: Final = ("timed out", "timeout")


_PICTURES: Final = ("image/jpeg", "image/png", WEBP, "image/gif", "image/tiff", "image/avif")
"""Types that sharp reads, which converts every image to JPEG and every sticker to WebP."""


class EvolutionApi(Sender):
    """An instance of Evolution API v2."""

    api = "evolution-api"
    message_id_path = ("key", "id")
    actions: ClassVar[Mapping[str, str]] = {
        "create": "create_instance",
        "connect": "connect",
        "state": "state",
        "status": "state",
        "qr": "connect",
        "pair": "pair",
        "restart": "restart",
        "logout": "logout",
        "delete": "delete_instance",
        "set_webhook": "set_webhook",
        "set_proxy": "set_proxy",
        "delete_proxy": "delete_proxy",
        "instances": "instances",
        "summary": "summary",
        "edit": "edit_message",
        "delete_message": "delete_message",
        "message_status": "message_status",
        "presence": "set_presence",
    }

    file_types: ClassVar[FileTypes] = {
        "image": _PICTURES,
        # Sent unconverted.
        "video": (
            *("video/mp4", "video/3gpp", "video/quicktime", "video/x-msvideo"),
            *("video/webm", "video/x-matroska", "video/mpeg"),
        ),
        "audio": CONVERTED_AUDIO,
        "sticker": _PICTURES,
    }

    def __init__(self, base_url: str, api_key: Credential, instance: str, **settings: Any) -> None:
        """Pass `settings` on to `Sender`: timeout, proxy, files, country, …; `instance` is a name."""
        if not instance:
            raise ConfigError("Evolution API needs the name of an instance.")
        super().__init__(base_url, api_key, name=instance, **settings)
        self.instance_name = instance
        self._quoted = quote(instance, safe="")
        self.address = f"{self.base_url} {instance}"

    def _authorization(self, key: str) -> dict[str, str]:
        return {"apikey": key}

    # -- requests and answers ------------------------------------------------------------------

    def _call_for(self, message: Message, id: str | None) -> Call:
        if isinstance(message, Read):
            chat = id_of(chat_of(message, "Evolution API"))
            key = {"remoteJid": chat, "fromMe": False, "id": message.message_id}
            return self._post("chat/markMessageAsRead", {"readMessages": [key]})
        if isinstance(message, Reaction):
            key = {"remoteJid": id_of(message.to), "fromMe": message.from_me, "id": message.message_id}
            author = {"participant": id_of(message.participant)} if message.participant else {}
            return self._post("message/sendReaction", {"key": key | author, "reaction": message.emoji})
        path, body = _content(message)
        body = {"number": message.to, **body}
        if not isinstance(message, Template):
            quoted = {"key": {"id": message.reply_to}} if message.reply_to else None
            everyone = message.mention_all or None
            named = without_none(quoted=quoted, mentioned=message.mentions or None, mentionsEveryOne=everyone)
            body |= named | without_none(delay=message.delay or None)
        if id is not None:
            body["messageId"] = wire_id(id)  # versions before 2026 ignore it
        return self._post(f"message/{path}", body)

    def _post(self, path: str, body: dict[str, Any]) -> Call:
        return Call("POST", f"/{path}/{self._quoted}", body)

    def _fault(self, status: int, data: Any) -> Fault:
        parts = list(_iter_parts(data))
        if any(isinstance(part, dict) and part.get("exists") is False for part in parts):
            return Fault(Reason.invalid_number, "Nobody on WhatsApp has this number.")
        text = "; ".join(str(part) for part in parts if not isinstance(part, dict))
        low = text.lower()
        if any(word in low for word in _OFFLINE):
            return Fault(Reason.instance_offline, text)
        if _DATABASE in low:
            return Fault(reason_of(status), text, unsure=True)
        if any(word in low for word in _SLOW):
            return Fault(Reason.unavailable, text, unsure=True)
        if "rate-overlimit" in low:
            return Fault(Reason.rate_limited, text)
        if any(word in low for word in _TOO_LARGE):
            return Fault(Reason.too_large, text)
        if any(word in low for word in _NOT_THERE):
            return Fault(Reason.unsupported, text)
        return Fault(reason_of(status), text)

    # -- the instance --------------------------------------------------------------------------

    async def create_instance(
        self, *, number: str | None = None, token: str | None = None, integration: str = "WHATSAPP-BAILEYS"
    ) -> dict[str, Any]:
        """Create it; the answer holds a QR code to log in with. Needs the server's own key."""
        body = {"instanceName": self.instance_name, "integration": integration, "qrcode": True}
        return await self._ask(
            Call("POST", "/instance/create", body | without_none(number=number or None, token=token or None))
        )

    async def connect(self, *, number: str | None = None) -> dict[str, Any]:
        """Fetch a QR code (`base64`, `code`) to log in with, or with `number` a code to type in."""
        query = f"?number={quote(number, safe='')}" if number else ""
        return await self._ask(Call("GET", f"/instance/connect/{self._quoted}{query}"))

    async def pair(self, phone: str) -> dict[str, Any]:
        """Fetch a code to type in on the phone instead of the QR code (`pairingCode`)."""
        return await self.connect(number=phone)

    async def state(self) -> dict[str, Any]:
        """Fetch whether the phone is connected: `open`, `connecting` or `close`."""
        return await self._ask(Call("GET", f"/instance/connectionState/{self._quoted}"))

    async def restart(self) -> dict[str, Any]:
        """Connect anew, without logging in again."""
        return await self._ask(Call("POST", f"/instance/restart/{self._quoted}"))

    async def logout(self) -> dict[str, Any]:
        """Log the phone out; the instance stays."""
        return await self._ask(Call("DELETE", f"/instance/logout/{self._quoted}"))

    async def delete_instance(self) -> dict[str, Any]:
        """Delete the instance with all it has stored."""
        return await self._ask(Call("DELETE", f"/instance/delete/{self._quoted}"))

    async def set_webhook(
        self,
        url: str,
        *,
        events: str | Sequence[str] = ("MESSAGES_UPSERT", "MESSAGES_UPDATE", "SEND_MESSAGE", "CONNECTION_UPDATE"),
        headers: Mapping[str, str] | None = None,
        enabled: bool = True,
    ) -> dict[str, Any]:
        """Send the instance's events to an inbox; `headers` come along with each (`jwt_key` signs them)."""
        webhook = {
            "enabled": enabled,
            "url": url,
            "headers": dict(headers or {}),
            "byEvents": False,
            "base64": False,
            "events": list_names(events),
        }
        return await self._ask(self._post("webhook/set", {"webhook": webhook}))

    async def set_proxy(self, proxy: str) -> dict[str, Any]:
        """Let the phone reach WhatsApp through a proxy; `none` removes it."""
        if proxy == NONE:
            return await self.delete_proxy()
        return await self._ask(self._post("proxy/set", {"enabled": True, **proxy_fields(read_proxy(proxy))}))

    async def delete_proxy(self) -> dict[str, Any]:
        """Let the phone reach WhatsApp without a proxy."""
        empty = {"host": "", "port": "", "protocol": "", "username": "", "password": ""}
        return await self._ask(self._post("proxy/set", {"enabled": False, **empty}))

    async def instances(self) -> dict[str, Any]:
        """List every instance that this key may see, as the server knows it (`data`)."""
        return await self._ask(Call("GET", "/instance/fetchInstances"))

    async def summary(self) -> dict[str, Any]:
        """List every instance by name, id and whether it is connected, without credentials."""
        return summarise(await self.instances(), lambda one: one.get("connectionStatus") == "open")

    # -- messages that were sent -----------------------------------------------------------------

    async def edit_message(self, to: str, message_id: str, text: str) -> dict[str, Any]:
        """Replace the words of a message of our own; WhatsApp allows it for 15 minutes."""
        number = self._normalise_number(to)
        key = {"remoteJid": id_of(number), "fromMe": True, "id": message_id}
        return await self._ask(self._post("chat/updateMessage", {"number": number, "text": text, "key": key}))

    async def delete_message(
        self, to: str, message_id: str, *, from_me: bool = True, participant: str | None = None
    ) -> dict[str, Any]:
        """Delete a message for everybody; in a group that we administer, one that `participant` wrote."""
        body = {"id": message_id, "remoteJid": id_of(self._normalise_number(to)), "fromMe": from_me}
        author = {"participant": id_of(self._normalise_number(participant))} if participant else {}
        path = f"/chat/deleteMessageForEveryone/{self._quoted}"
        return await self._ask(Call("DELETE", path, body | author))

    async def message_status(self, message_id: str, *, to: str | None = None) -> dict[str, Any]:
        """Fetch the status of a message as the server has stored it (`data`)."""
        chat = {"remoteJid": id_of(self._normalise_number(to))} if to else {}
        return await self._ask(self._post("chat/findStatusMessage", {"where": {"id": message_id, **chat}}))

    async def set_presence(self, to: str, state: str, *, delay: int = 1200) -> dict[str, Any]:
        """Show that we are `composing`, `recording` or `paused`, for so many milliseconds."""
        body = {"number": self._normalise_number(to), "presence": state, "delay": delay}
        return await self._ask(self._post("chat/sendPresence", body))


def _content(message: Text | Link | Media | Location | Contact | Poll | Template) -> tuple[str, dict[str, Any]]:
    if isinstance(message, Text):
        return "sendText", {"text": message.text, "linkPreview": message.preview_url}
    if isinstance(message, Link):
        refuse_own_card(message, "Evolution API")
        return "sendText", {"text": link_text(message), "linkPreview": True}
    if isinstance(message, Location):
        return "sendLocation", location_fields(message)
    if isinstance(message, Contact):
        card = {"fullName": message.name, "phoneNumber": message.phone, "wuid": message.phone}
        return "sendContact", {"contact": [card | without_none(organization=message.organization)]}
    if isinstance(message, Poll):
        poll = {"name": message.question, "values": message.options, "selectableCount": message.max_answers}
        return "sendPoll", poll
    if isinstance(message, Template):
        named = {"name": message.name, "language": message.language, "components": message.components}
        return "sendTemplate", named
    link = media_link(message, "Evolution API")
    if message.kind == "audio":
        return "sendWhatsAppAudio", {"audio": link}
    if message.kind == "sticker":
        return "sendSticker", {"sticker": link}
    named = without_none(mimetype=message.mime, caption=message.caption, fileName=message.filename)
    return "sendMedia", {"mediatype": message.kind, "media": link, **named}


def _iter_parts(data: Any) -> Iterator[Any]:
    """Yield the sentences and objects of an error, wherever this version puts them: a text, a list, nested lists."""
    if isinstance(data, dict) and "exists" not in data:
        data = [data[name] for name in ("response", "message") if name in data] or [data.get("error")]
    if isinstance(data, list):
        for one in data:
            yield from _iter_parts(one)
    elif data is not None:
        yield data
