"""Files of WhatsApp messages at their providers: Meta, 360dialog, Evolution API, WAHA and Twilio.

Credentials go only to the provider's own addresses: what an event says about a host is not believed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from oncehook import payload
from oncehook.media import MediaAccess, MediaApi, MediaCalls, MediaFailed, MediaItem
from oncehook.model import Category

KINDS: Final = ("image", "audio", "video", "document", "sticker")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _host(url: str) -> str:
    return (urlsplit(url).hostname or "").lower()


class MetaMedia(MediaApi):
    """Meta's Cloud API: an id leads to an address, which is good for five minutes and asks for the token again."""

    api = "meta"
    types = tuple(f"{event}.{kind}" for event in ("message", "echo", "history") for kind in KINDS)
    base = "https://graph.facebook.com/v23.0"
    hosts = ("fbsbx.com", "facebook.com", "fbcdn.net", "whatsapp.net")
    """Domains to which the token may go, besides the API's own."""

    def find(self, body: bytes) -> list[MediaItem]:
        from oncehook.presets import whatsapp_cloud

        item = whatsapp_cloud.read(payload.parse(body)).item
        kind = item["type"]
        about = item[kind]
        if kind not in KINDS or not isinstance(about["id"], str):
            return []
        return [MediaItem(about["id"], _text(about.get("mime_type")) or "", _text(about.get("filename")))]

    def authorize(self, token: str) -> dict[str, str]:
        return {"authorization": f"Bearer {token}"}

    def locate(self, url: str, base: str) -> str:
        """Return the address of a file that the API names. Raises MediaFailed for one that may not have the token."""
        host = _host(url)
        if host != _host(base) and not any(host == one or host.endswith(f".{one}") for one in self.hosts):
            raise MediaFailed("the API names an address that is not its own", Category.permanent)
        return url

    async def fetch(self, item: MediaItem, access: MediaAccess, calls: MediaCalls) -> bytes:
        base = (access.url or self.base).rstrip("/")
        headers = self.authorize(access.token or "")
        about = await calls.ask("GET", f"{base}/{quote(item.id, safe='')}", headers)
        url = about.get("url") if isinstance(about, dict) else None
        if not isinstance(url, str):
            raise MediaFailed("the API names no address for it", Category.transient)
        return await calls.fetch(self.locate(url, base), headers)


class DialogMedia(MetaMedia):
    """360dialog: as at Meta, with a key of its own; the file is fetched through 360dialog, under the same path."""

    api = "360dialog"
    base = "https://waba-v2.360dialog.io"

    def authorize(self, token: str) -> dict[str, str]:
        return {"d360-api-key": token}

    def locate(self, url: str, base: str) -> str:
        parts = urlsplit(url)
        return base + parts.path + (f"?{parts.query}" if parts.query else "")


class EvolutionMedia(MediaApi):
    """Evolution API: the file is in the event (`base64`), or the instance decrypts it when it is asked."""

    api = "evolution-api"
    types = ("messages.upsert", "messages.set", "send.message")
    needs = ("token", "url")

    def find(self, body: bytes) -> list[MediaItem]:
        whole = payload.parse(body)
        data = whole["data"][0] if isinstance(whole["data"], list) else whole["data"]
        message = data["message"]
        for inner in _unwrap(message):
            for kind in KINDS:
                about = inner.get(f"{kind}Message")
                if isinstance(about, dict):
                    found = _text(message.get("base64")) or _text(data.get("base64"))
                    return [
                        MediaItem(
                            f"{whole['instance']}/{data['key']['id']}",
                            _text(about.get("mimetype")) or "",
                            _text(about.get("fileName")),
                            None if found is None else _decode(found),
                        )
                    ]
        return []

    async def fetch(self, item: MediaItem, access: MediaAccess, calls: MediaCalls) -> bytes:
        instance, _, id_ = item.id.rpartition("/")
        assert access.url is not None
        url = f"{access.url.rstrip('/')}/chat/getBase64FromMediaMessage/{quote(instance, safe='')}"
        headers = {"apikey": access.token or "", "content-type": "application/json"}
        asked = b'{"message":{"key":{"id":%s}},"convertToMp4":false}' % msgspec.json.encode(id_)
        about = await calls.ask("POST", url, headers, asked)
        found = about.get("base64") if isinstance(about, dict) else None
        if not isinstance(found, str):
            raise MediaFailed("the API does not have it", Category.transient)
        return _decode(found)


class WahaMedia(MediaApi):
    """WAHA: an address of its own, of which only the path is believed."""

    api = "waha"
    types = ("message", "message.any")
    needs = ("url",)

    def find(self, body: bytes) -> list[MediaItem]:
        about = payload.parse(body)["payload"]["media"]
        data = _text(about.get("data"))
        path = urlsplit(_text(about.get("url")) or "")
        if data is None and not path.path.startswith("/"):
            return []
        where = path.path + (f"?{path.query}" if path.query else "")
        content = None if data is None else _decode(data)
        return [MediaItem(where, _text(about.get("mimetype")) or "", _text(about.get("filename")), content)]

    async def fetch(self, item: MediaItem, access: MediaAccess, calls: MediaCalls) -> bytes:
        assert access.url is not None
        parts = urlsplit(access.url)
        headers = {} if access.token is None else {"x-api-key": access.token}
        return await calls.fetch(f"{parts.scheme}://{parts.netloc}{item.id}", headers)


class TwilioMedia(MediaApi):
    """Twilio: addresses of its API, for which the account and its token are asked; the file itself lies elsewhere."""

    api = "twilio"
    types = ("message.received",)
    signs_with_token = True
    base = "https://api.twilio.com"

    def find(self, body: bytes) -> list[MediaItem]:
        form = payload.parse_form(body)
        account, n = form["AccountSid"][0], int(form["NumMedia"][0])
        found = []
        for place in range(min(n, 10)):
            path = urlsplit(form[f"MediaUrl{place}"][0]).path
            if not path.startswith(f"/2010-04-01/Accounts/{account}/"):
                continue
            found.append(MediaItem(f"{account} {path}", form[f"MediaContentType{place}"][0]))
        return found

    async def fetch(self, item: MediaItem, access: MediaAccess, calls: MediaCalls) -> bytes:
        account, _, path = item.id.partition(" ")
        key = access.token or ""
        # An API key is its name and its secret; an auth token belongs to the account.
        login = key if ":" in key else f"{account}:{key}"
        headers = {"authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
        return await calls.fetch(f"{(access.url or self.base).rstrip('/')}{path}", headers)


def _unwrap(message: Any) -> Iterator[dict[str, Any]]:
    """Yield a message and those inside it: WhatsApp wraps some, and untrusted input could wrap a thousand times."""
    for _ in range(6):
        if not isinstance(message, dict):
            return
        yield message
        inner = next(
            (value["message"] for value in message.values() if isinstance(value, dict) and "message" in value), None
        )
        message = inner


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text.partition(";base64,")[2] or text, validate=True)
    except binascii.Error:
        raise MediaFailed("its base64 cannot be read", Category.permanent) from None
