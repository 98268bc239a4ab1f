"""Evolution Go: an instance is known by its token, and calls about instances need the administrator's key.

Nearly every failure is a 500 with a sentence, so the sentence decides: an unknown number is permanent, a disconnected
phone is not. The id of an outgoing message becomes its id at WhatsApp, so a retry cannot show it twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from oncehook.whatsapp.numbers import PERSON, id_of
from oncehook.whatsapp.outcomes import Fault, Reason, build_unsupported, reason_of
from oncehook.whatsapp.sender import Call, Credential, Sender, without_none

_SENTENCES: Final[Sequence[tuple[Reason, tuple[str, ...]]]] = (
    (
        Reason.instance_offline,
        ("client disconnected", "no active session", "not logged in", "not connected", "websocket", "connect client"),
    ),
    (
        Reason.invalid_number,
        ("not registered on whatsapp", "not on whatsapp", "not found in whatsapp", "could not parse", "phone number"),
    ),
    (Reason.rate_limited, ("rate-overlimit", "status 429", "error 429")),
    (Reason.too_large, ("too large", "too big")),
    (Reason.unsupported, ("documentos não são suportados",)),  # documents, in a channel
    (
        Reason.invalid,
        (
            "is required",
            "invalid file format",
            "invalid media type",
            "invalid sticker url",
            "failed to decode image",
            "invalid data found",  # ffmpeg, for a sound file that is none
            "missing ",
            "invalid character",
        ),
    ),
)
_MAY_BE_SENT: Final = ("timed out", "deadline exceeded", "before message send returned")


class EvolutionGo(Sender):
    """An instance of Evolution Go."""

    api = "evolution-go"
    message_id_path = ("data", "Info", "ID")
    actions: ClassVar[Mapping[str, str]] = {
        "create": "create_instance",
        "connect": "connect",
        "status": "status",
        "qr": "qr",
        "pair": "pair",
        "reconnect": "reconnect",
        "disconnect": "disconnect",
        "logout": "logout",
        "delete": "delete_instance",
        "proxy": "set_proxy",
        "delete_proxy": "delete_proxy",
        "info": "info",
        "instances": "instances",
        "summary": "summary",
        "edit": "edit_message",
        "delete_message": "delete_message",
        "message_status": "message_status",
        "presence": "set_presence",
    }

    file_types: ClassVar[FileTypes] = {
        "image": ("image/jpeg", "image/png", WEBP),
        "video": ("video/mp4",),
        "audio": CONVERTED_AUDIO,
        "sticker": (WEBP, "image/png"),
    }

    def __init__(
        self,
        base_url: str,
        token: Credential,
        *,
        instance: str | None = None,
        admin_key: Credential | None = None,
        **settings: Any,
    ) -> None:
        """Pass `settings` on to `Sender`: timeout, proxy, files, …; `instance` is an id, for calls about it."""
        super().__init__(base_url, token, name=instance, **settings)
        self.instance_id = instance
        self._admin_key = admin_key
        self.address = f"{self.base_url} {instance}" if instance else self.base_url

    def _authorization(self, key: str) -> dict[str, str]:
        return {"apikey": key}

    def _credentials(self) -> Sequence[Credential]:
        return (self._key,) if self._admin_key is None else (self._key, self._admin_key)

    # -- requests and answers ------------------------------------------------------------------

    def _call_for(self, message: Message, id: str | None) -> Call:
        if isinstance(message, Read):
            chat = chat_of(message, "Evolution Go")
            return Call("POST", "/message/markread", {"number": chat, "id": [message.message_id]})
        if isinstance(message, Reaction):
            # `id` is the message that the reaction is to; the reaction cannot have an id of its own.
            emoji = message.emoji or "remove"
            body = {"number": message.to, "reaction": emoji, "id": message.message_id, "fromMe": message.from_me}
            author = {"participant": id_of(message.participant)} if message.participant else {}
            return Call("POST", "/message/react", body | author)
        if isinstance(message, Template):
            raise build_unsupported("Evolution Go", "templates")
        path, body = _content(message)
        body = {"number": message.to, **body}
        if message.reply_to:
            body["quoted"] = _quote(message.reply_to, message.to)
        mentions = [id_of(number) for number in message.mentions] or None
        body |= without_none(delay=message.delay or None, mentionedJid=mentions, mentionAll=message.mention_all or None)
        if id is not None:
            body["id"] = wire_id(id)
        return Call("POST", f"/send/{path}", body)

    def _fault(self, status: int, data: Any) -> Fault:
        text = _join_error(data)
        low = text.lower()
        if status in (401, 403):
            return Fault(Reason.unauthorized, text)
        reason = next((reason for reason, words in _SENTENCES if any(word in low for word in words)), reason_of(status))
        code = data.get("code") if isinstance(data, dict) else None
        api_code = code if isinstance(code, str) and code else None
        return Fault(reason, text, api_code, unsure=any(word in low for word in _MAY_BE_SENT))

    # -- the instance --------------------------------------------------------------------------

    async def create_instance(self, name: str, *, token: str, proxy: str | None = None) -> dict[str, Any]:
        """Create an instance with this `token`. Needs the administrator's key."""
        body: dict[str, Any] = {"name": name, "token": token}
        if self.instance_id:
            body["instanceId"] = self.instance_id
        if proxy:
            body["proxy"] = proxy_fields(read_proxy(proxy))
        return await self._ask(self._as_admin("POST", "/instance/create", body))

    async def connect(
        self,
        *,
        webhook_url: str = "",
        subscribe: str | Sequence[str] = ("MESSAGE", "SEND_MESSAGE", "READ_RECEIPT", "CONNECTION", "QRCODE"),
        phone: str = "",
    ) -> dict[str, Any]:
        """Begin to log in, and set where events go; fetch the QR code with `qr`."""
        body = {"webhookUrl": webhook_url, "subscribe": list_names(subscribe), "immediate": True, "phone": phone}
        return await self._ask(Call("POST", "/instance/connect", body))

    async def status(self) -> dict[str, Any]:
        """Fetch whether it is connected and logged in."""
        return await self._ask(Call("GET", "/instance/status"))

    async def qr(self) -> dict[str, Any]:
        """Fetch the QR code to log in with."""
        return await self._ask(Call("GET", "/instance/qr"))

    async def pair(self, phone: str) -> dict[str, Any]:
        """Fetch a code to type in on the phone instead of the QR code."""
        return await self._ask(Call("POST", "/instance/pair", {"phone": phone}))

    async def reconnect(self) -> dict[str, Any]:
        """Connect anew, without logging in again."""
        return await self._ask(Call("POST", "/instance/reconnect"))

    async def disconnect(self) -> dict[str, Any]:
        """Disconnect from WhatsApp without logging out."""
        return await self._ask(Call("POST", "/instance/disconnect"))

    async def logout(self) -> dict[str, Any]:
        """Log the phone out; the instance stays."""
        return await self._ask(Call("DELETE", "/instance/logout"))

    async def delete_instance(self) -> dict[str, Any]:
        """Delete the instance. Needs the administrator's key."""
        return await self._ask(self._as_admin("DELETE", f"/instance/delete/{self._instance()}"))

    async def info(self) -> dict[str, Any]:
        """Fetch all that the server knows of it. Needs the administrator's key."""
        return await self._ask(self._as_admin("GET", f"/instance/info/{self._instance()}"))

    async def set_proxy(self, proxy: str) -> dict[str, Any]:
        """Let it reach WhatsApp through a proxy; `none` removes it. Needs the administrator's key."""
        if proxy == NONE:
            return await self.delete_proxy()
        path = f"/instance/proxy/{self._instance()}"
        return await self._ask(self._as_admin("POST", path, proxy_fields(read_proxy(proxy))))

    async def delete_proxy(self) -> dict[str, Any]:
        """Let it reach WhatsApp without a proxy. Needs the administrator's key."""
        return await self._ask(self._as_admin("DELETE", f"/instance/proxy/{self._instance()}"))

    async def instances(self) -> dict[str, Any]:
        """List every instance as the server knows it, tokens included (`data`). Needs the administrator's key."""
        return await self._ask(self._as_admin("GET", "/instance/all"))

    async def summary(self) -> dict[str, Any]:
        """List every instance by name, id and whether it is connected. Needs the administrator's key."""
        return summarise(await self.instances(), lambda one: one.get("connected") is True)

    # -- messages that were sent -----------------------------------------------------------------

    async def edit_message(self, to: str, message_id: str, text: str) -> dict[str, Any]:
        """Replace the words of a message of our own."""
        body = {"chat": id_of(self._normalise_number(to)), "messageId": message_id, "message": text}
        return await self._ask(Call("POST", "/message/edit", body))

    async def delete_message(self, to: str, message_id: str) -> dict[str, Any]:
        """Delete a message of our own for everybody."""
        body = {"chat": id_of(self._normalise_number(to)), "messageId": message_id}
        return await self._ask(Call("POST", "/message/delete", body))

    async def message_status(self, message_id: str) -> dict[str, Any]:
        """Fetch the status of a message as the server has stored it."""
        return await self._ask(Call("POST", "/message/status", {"id": message_id}))

    async def set_presence(self, to: str, state: str) -> dict[str, Any]:
        """Show that we are `composing`, `recording` or `paused`."""
        audio = state == "recording"
        body = {"number": self._normalise_number(to), "state": "composing" if audio else state, "isAudio": audio}
        return await self._ask(Call("POST", "/message/presence", body))

    def _as_admin(self, method: str, path: str, body: dict[str, Any] | None = None) -> Call:
        if self._admin_key is None:
            raise ConfigError("This call needs the administrator's key of Evolution Go.", hint="Give admin_key=….")
        return Call(method, path, body, key=self._admin_key)

    def _instance(self) -> str:
        if not self.instance_id:
            raise ConfigError("This call needs the id of the instance.", hint="Give instance=….")
        return quote(self.instance_id, safe="")


def _content(message: Text | Link | Media | Location | Contact | Poll) -> tuple[str, dict[str, Any]]:
    if isinstance(message, Text):
        return ("link" if message.preview_url and "://" in message.text else "text"), {"text": message.text}
    if isinstance(message, Link):
        # The server sends the text and ignores `url`; the card shows the page whose URL is in the text.
        shown = without_none(title=message.title, description=message.description, imgUrl=message.image)
        return "link", {"text": link_text(message), "url": message.url, **shown}
    if isinstance(message, Location):
        return "location", location_fields(message)
    if isinstance(message, Contact):
        card = {"fullName": message.name, "phone": message.phone}
        return "contact", {"vcard": card | without_none(organization=message.organization)}
    if isinstance(message, Poll):
        poll = {"question": message.question, "options": message.options, "maxAnswer": message.max_answers}
        return "poll", poll
    link = media_link(message, "Evolution Go")
    if message.kind == "sticker":
        return "sticker", {"sticker": link}
    named = without_none(caption=message.caption, filename=message.filename)
    return "media", {"url": link, "type": message.kind, **named}


def _quote(message_id: str, to: str) -> dict[str, str]:
    # In a chat of two, the other person wrote the quoted message; in a group, its author is unknown here.
    author = id_of(to)
    return {"messageId": message_id, "participant": author if author.endswith(f"@{PERSON}") else ""}


def _join_error(data: Any) -> str:
    """Join the short word (`error`) and the sentence (`message`) of a failure."""
    if not isinstance(data, dict):
        return ""
    error = data.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error.get("code")
    return ": ".join(str(part) for part in (error, data.get("message")) if part)
