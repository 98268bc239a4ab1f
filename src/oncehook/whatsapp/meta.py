"""Meta's WhatsApp Cloud API: messages and errors as the Graph API writes them.

Its error codes tell what went wrong, while its HTTP statuses hardly do: a closed window and a wrong parameter are both
400.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final
from urllib.parse import quote

from oncehook.errors import ConfigError
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
from oncehook.whatsapp.numbers import is_group_id, is_user_id
from oncehook.whatsapp.outcomes import Fault, Reason, build_unsupported, reason_of
from oncehook.whatsapp.sender import Call, Credential, Sender, refuse_own_card, without_none

BASE_URL: Final = "https://graph.facebook.com"
VERSION: Final = "v23.0"

_LONGEST_ID: Final = 512
_ABOUT_THE_NUMBER: Final = (
    "id,display_phone_number,verified_name,quality_rating,code_verification_status,name_status,platform_type,throughput"
)

_REASONS: Final[Mapping[Reason, tuple[int, ...]]] = {
    # 131048: too many were blocked or reported; 131056: too many to the same person; 133016: registered too often
    Reason.rate_limited: (4, 17, 32, 613, 80007, 130429, 131048, 131056, 133016),
    Reason.window_closed: (470, 131047),
    # 131021: to oneself; 131026: not on WhatsApp, or never agreed; 131030: not on a test number's list
    Reason.invalid_number: (131021, 131026, 131030),
    # 368, 131031: the account is blocked; 131042: it is not paid for; 131037, 131045, 133010: not set up
    Reason.unauthorized: (0, 3, 10, 102, 190, 368, 131005, 131031, 131037, 131042, 131045, 133006, 133010),
    Reason.unsupported: (131051,),
    Reason.unavailable: (1, 2, 131000, 131016, 131057, 133004),
    # 131049, 131050, 130472: Meta will not deliver this one to this person, and asks not to be asked again
    Reason.invalid: (33, 100, 130472, 130497, 131008, 131009, 131049, 131050, 131052, 131053),
}
_BY_CODE: Final = {code: reason for reason, codes in _REASONS.items() for code in codes}
_MEDIA: Final = (131052, 131053)


class MetaCloud(Sender):
    """A number on Meta's Cloud API.

    >>> async with MetaCloud(token, "106540352242922") as whatsapp:
    ...     await whatsapp.send_text("+55 11 99999-0001", "On its way")
    """

    api = "meta"
    takes_meta_ids = True
    message_id_path = ("messages", 0, "id")
    actions: ClassVar[Mapping[str, str]] = {"info": "number_info"}

    def __init__(
        self,
        token: Credential,
        phone_number_id: str,
        *,
        version: str = VERSION,
        base_url: str = BASE_URL,
        **settings: Any,
    ) -> None:
        """Pass `settings` on to `Sender`: timeout, proxy, files, country, allow_private, ca."""
        if not phone_number_id:
            raise ConfigError("Meta needs a phone_number_id: the id of the number, not the number itself.")
        super().__init__(base_url, token, name=phone_number_id, **settings)
        self._number = f"/{quote(version, safe='')}/{quote(phone_number_id, safe='')}"
        self.address = f"{self.base_url}{self._number}"

    def _authorization(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    async def number_info(self) -> dict[str, Any]:
        """Fetch the number behind the id: how it is shown, its quality, its throughput."""
        return await self._ask(Call("GET", f"{self._number}?fields={_ABOUT_THE_NUMBER}"))

    # -- requests and answers ------------------------------------------------------------------

    def _call_for(self, message: Message, id: str | None) -> Call:
        body: dict[str, Any] = {"messaging_product": "whatsapp"}
        if isinstance(message, Read):
            body |= {"status": "read", "message_id": message.message_id}
            return Call("POST", f"{self._number}/messages", body)
        if "@" in message.to:
            raise build_unsupported(
                "Meta's API", f"to {message.to.partition('@')[2]} ids; only to numbers and ids of Meta's"
            )
        if any(getattr(message, option, None) for option in ("delay", "mentions", "mention_all")):
            raise build_unsupported("Meta's API", "with a delay or mentions")
        kind, content = _content(message)
        body |= {**_address(message.to), "type": kind, kind: content}
        if reply_to := getattr(message, "reply_to", None):
            body["context"] = {"message_id": reply_to}
        if id is not None:
            body["biz_opaque_callback_data"] = id[:_LONGEST_ID]
        return Call("POST", f"{self._number}/messages", body)

    def _fault(self, status: int, data: Any) -> Fault:
        error = data.get("error") if isinstance(data, dict) else None
        if not isinstance(error, dict):
            return Fault(reason_of(status))
        code = error.get("code")
        extra = error.get("error_data")
        details = extra.get("details") if isinstance(extra, dict) else None
        text = str(details or error.get("message") or "")
        return Fault(_reason(code, text, status), text, None if code is None else str(code))


def _address(to: str) -> dict[str, str]:
    # Meta answers 200 for a user id in `to`, but takes its digits for a phone number and never delivers.
    if is_user_id(to):
        return {"recipient_type": "individual", "recipient": to}
    return {"recipient_type": "group" if is_group_id(to) else "individual", "to": to}


def _content(
    message: Text | Link | Media | Location | Contact | Poll | Template | Reaction,
) -> tuple[str, dict[str, Any] | list[dict[str, Any]]]:
    if isinstance(message, Text):
        return "text", {"body": message.text, "preview_url": message.preview_url}
    if isinstance(message, Link):
        refuse_own_card(message, "Meta's API")
        return "text", {"body": link_text(message), "preview_url": True}
    if isinstance(message, Location):
        fields = {"latitude": message.latitude, "longitude": message.longitude}
        return "location", fields | without_none(name=message.name, address=message.address)
    if isinstance(message, Contact):
        return "contacts", [_card(message)]
    if isinstance(message, Poll):
        raise build_unsupported("Meta's API", "polls")
    if isinstance(message, Media):
        named = {"filename": message.filename} if message.kind == "document" else {}
        return message.kind, without_none(link=message.link, id=message.id, caption=message.caption, **named)
    if isinstance(message, Template):
        components = {"components": message.components} if message.components else {}
        return "template", {"name": message.name, "language": {"code": message.language}, **components}
    return "reaction", {"message_id": message.message_id, "emoji": message.emoji}


def _card(contact: Contact) -> dict[str, Any]:
    card = {
        "name": {"formatted_name": contact.name, "first_name": contact.name},
        "phones": [{"phone": f"+{contact.phone}", "type": "CELL", "wa_id": contact.phone}],
    }
    return card | without_none(org={"company": contact.organization} if contact.organization else None)


def _reason(code: object, text: str, status: int) -> Reason:
    if not isinstance(code, int):
        return reason_of(status)
    if code in _MEDIA and any(word in text.lower() for word in ("too large", "too big", "file size", "size limit")):
        return Reason.too_large
    if 200 <= code < 300:
        return Reason.unauthorized
    if 132000 <= code < 133000:  # all errors about templates
        return Reason.invalid
    return _BY_CODE.get(code) or reason_of(status)
