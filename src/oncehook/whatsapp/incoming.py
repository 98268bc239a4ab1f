"""An incoming message, read alike from Meta's Cloud API, 360dialog, Evolution API and Evolution Go.

`Event.whatsapp` calls `read_incoming` with the JSON of an event; the shape tells which API wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from oncehook.errors import GiveUp
from oncehook.whatsapp.messages import InvalidMessage, Text
from oncehook.whatsapp.numbers import PERSON, is_group_id, normalise


class NoMessage(GiveUp):
    """This event holds no WhatsApp message that somebody wrote."""

    code = "no_message"


@dataclass(frozen=True, slots=True)
class IncomingMessage:
    """A received message, alike for every API."""

    id: str
    chat: str
    """The person or group that an answer goes to: `to` for a sender of the same API."""
    sender: str
    """The author's phone number, or WhatsApp's id where the number is withheld."""
    text: str
    """Its text, its caption, or the button that was pressed; empty where it has none."""
    from_me: bool
    """Whether the business wrote it itself, on its phone or over the API."""

    @property
    def is_direct(self) -> bool:
        """Return whether a person wrote it to the business alone: not in a group, a channel or a status."""
        is_person = self.chat.partition("@")[2] in ("", "lid") and not is_group_id(self.chat)
        return is_person and self.chat == self.sender and not self.from_me

    def reply_to(self, text: str, *, quote: bool = True) -> Text:
        """Build the message that answers this one, for `Inbox.send_message`; `quote=False` does not cite it."""
        return Text(to=self.chat, text=text, reply_to=self.id if quote else None)


def read_incoming(data: Any) -> IncomingMessage:
    """Read the message of an event. Raises NoMessage for anything else."""
    try:
        if isinstance(data, dict) and isinstance(data.get("event"), str) and "data" in data:
            inner = data["data"][0] if isinstance(data["data"], list) else data["data"]
            if "Info" in inner:
                return _from_evolution_go(inner)
            if "key" in inner:
                return _from_evolution_api(inner, data.get("sender"))
        return _from_meta(data)
    except (LookupError, TypeError, AttributeError):
        raise NoMessage from None


# -- Meta and 360dialog ------------------------------------------------------------------------

_META_TEXTS: Final[Sequence[Sequence[str]]] = (
    ("text", "body"),
    ("button", "text"),
    ("interactive", "button_reply", "title"),
    ("interactive", "list_reply", "title"),
    ("interactive", "nfm_reply", "body"),
    ("image", "caption"),
    ("video", "caption"),
    ("document", "caption"),
)


def _from_meta(data: Any) -> IncomingMessage:
    from oncehook.presets import whatsapp_cloud  # imported here, because a program that only sends needs no presets

    notice = whatsapp_cloud.read(data)
    if notice.kind not in ("message", "echo", "history"):
        raise NoMessage
    item, person = notice.item, notice.person
    # The number is preferred: it also reaches people whom an older app cannot find by user id.
    other = person.phone or person.user_id or person.parent
    from_me = item.get("from") == notice.business if notice.kind == "history" else notice.kind == "echo"
    return IncomingMessage(
        _text(item["id"]),
        _text(notice.group or other),
        _text(item["from"] if from_me else other),
        _words(item, _META_TEXTS),
        from_me,
    )


# -- Evolution ---------------------------------------------------------------------------------

_TEXTS: Final[Sequence[Sequence[str]]] = (
    ("conversation",),
    ("extendedTextMessage", "text"),
    ("imageMessage", "caption"),
    ("videoMessage", "caption"),
    ("documentMessage", "caption"),
    ("buttonsResponseMessage", "selectedDisplayText"),
    ("buttonsResponseMessage", "Response", "SelectedDisplayText"),
    ("templateButtonReplyMessage", "selectedDisplayText"),
    ("listResponseMessage", "title"),
    ("interactiveResponseMessage", "body", "text"),
)
_WRAPPED: Final = (
    "ephemeralMessage",
    "viewOnceMessage",
    "viewOnceMessageV2",
    "viewOnceMessageV2Extension",
    "documentWithCaptionMessage",
    "protocolMessage",
    "editedMessage",
)
_DEEPEST: Final = 6
"""Wrappers that are opened: WhatsApp nests a few, and untrusted input could nest a thousand."""


def _from_evolution_api(data: Mapping[str, Any], own: Any) -> IncomingMessage:
    key = data["key"]
    chat = _jid(key["remoteJid"], key.get("remoteJidAlt"), key.get("senderPn"))
    from_me = key.get("fromMe") is True
    member = key.get("participant") or data.get("participant")
    sender = own if from_me and own else member
    author = _jid(sender, key.get("participantAlt"), key.get("participantPn")) if sender else chat
    return IncomingMessage(_text(key["id"]), chat, author, _content(data.get("message") or data), from_me)


def _from_evolution_go(data: Mapping[str, Any]) -> IncomingMessage:
    info = data["Info"]
    chat, sender = info["Chat"], _jid(info["Sender"], info.get("SenderAlt"))
    from_me = info.get("IsFromMe") is True
    alternative = info.get("RecipientAlt") if from_me else info.get("SenderAlt")
    return IncomingMessage(_text(info["ID"]), _jid(chat, alternative), sender, _content(data.get("Message")), from_me)


def _jid(value: Any, *alternatives: Any) -> str:
    """Return a normalised id; for a hidden one (`@lid`), the phone number where it is included."""
    jid = _text(value)
    if jid.endswith("@lid"):
        jid = next((one for one in alternatives if isinstance(one, str) and one.endswith(f"@{PERSON}")), jid)
    try:
        return normalise(jid)
    except InvalidMessage:  # a reply to it will be refused
        return jid


def _content(content: Any) -> str:
    for inner in _unwrap(content):
        if found := _words(inner, _TEXTS):
            return found
    return ""


def _unwrap(content: Any) -> Iterator[Any]:
    for _ in range(_DEEPEST):
        yield content
        if not isinstance(content, dict):
            return
        wrapper = next((content[name] for name in _WRAPPED if isinstance(content.get(name), dict)), None)
        content = None if wrapper is None else wrapper.get("message", wrapper)


# -- values ------------------------------------------------------------------------------------


def _words(content: Any, places: Sequence[Sequence[str]]) -> str:
    for place in places:
        found = content
        for name in place:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, str) and found:
            return found
    return ""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise NoMessage
    return value
