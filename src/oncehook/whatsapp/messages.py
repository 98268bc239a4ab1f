"""What can be sent over WhatsApp: the words of every sender, and how they are written as the body of an event.

An outgoing message is JSON such as `{"to": "+55 11 99999-0001", "text": "On its way"}`; `type` may be left out where
the fields tell. Read by the sender destination and by whoever previews a message; what cannot be read will never be
sendable, so it is a permanent failure.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from oncehook.errors import OncehookError

MediaKind = Literal["image", "video", "audio", "document", "sticker"]


class InvalidMessage(OncehookError):
    """This is no message that could be sent."""

    code = "message_invalid"


class _Outgoing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A message to somebody."""


class Text(_Outgoing, frozen=True, kw_only=True, tag="text"):
    """Words."""

    to: str
    text: str
    reply_to: str | None = None
    """The id of the message that this one answers."""
    preview_url: bool = False
    """Whether the first link in it is shown with a picture."""


class Media(_Outgoing, frozen=True, kw_only=True, tag="media"):
    """A picture, a film, a sound, a document or a sticker: from exactly one of three places."""

    to: str
    kind: MediaKind
    link: str | None = None
    """A web address from which WhatsApp fetches it."""
    id: str | None = None
    """What the API called it when it was uploaded there (Meta)."""
    stored: str | None = None
    """Its name in the sender's file storage; each attempt makes a fresh link, so that no retry finds it expired."""
    caption: str | None = None
    filename: str | None = None
    mime: str | None = None
    reply_to: str | None = None


class Template(_Outgoing, frozen=True, kw_only=True, tag="template"):
    """Words approved beforehand, for when the 24 hours after the customer's last message are over (Meta)."""

    to: str
    name: str
    language: str = "en_US"
    components: list[dict[str, Any]] = []


class Reaction(_Outgoing, frozen=True, kw_only=True, tag="reaction"):
    """An emoji on a message; an empty one takes it back."""

    to: str
    message_id: str
    emoji: str
    from_me: bool = False
    """Whether the message was one of our own."""
    participant: str | None = None
    """Who wrote the message, in a group: WhatsApp finds it by chat, author and id (Evolution)."""


class Read(_Outgoing, frozen=True, kw_only=True, tag="read"):
    """The two blue ticks on a message that was received."""

    message_id: str
    to: str | None = None
    """Whose message it was: Evolution asks for it, Meta does not."""


Message = Text | Media | Template | Reaction | Read

LONGEST: Final = 65_536
"""Characters of a text or a caption that WhatsApp carries at all; Meta takes fewer, and says so."""

_PLACES: Final = ("link", "id", "stored")
_SPEECHLESS: Final = ("audio", "sticker")
"""Kinds that WhatsApp shows without words."""
_TELLING: Final = {"text": "text", "kind": "media", "name": "template", "emoji": "reaction", "message_id": "read"}
"""Which field tells the type, where nobody said it; the first that is there."""


def read_message(body: bytes) -> Message:
    """The message that an event's body holds. Raises InvalidMessage, with the field that is wrong."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        if "type" not in fields:
            fields["type"] = next((kind for field, kind in _TELLING.items() if field in fields), None)
        message: Message = msgspec.convert(fields, Message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"The message cannot be read: {_shortened(str(error))}") from None
    check(message)
    return message


def check(message: Message) -> None:
    """Raises InvalidMessage for what no API would take."""
    if isinstance(message, Text) and not message.text.strip():
        raise InvalidMessage("A text without words cannot be sent.")
    if isinstance(message, Media):
        _check_media(message)
    if isinstance(message, Template) and not message.name:
        raise InvalidMessage("A template needs its name.")
    if isinstance(message, Reaction | Read) and not message.message_id:
        raise InvalidMessage("Which message? message_id is empty.")
    if len(getattr(message, "text", None) or getattr(message, "caption", None) or "") > LONGEST:
        raise InvalidMessage(f"WhatsApp takes no more than {LONGEST:,} characters; send a longer text as a file.")
    try:
        msgspec.json.encode(message)
    except (UnicodeEncodeError, TypeError, RecursionError):
        raise InvalidMessage("The message cannot be written as JSON: half a character, or no plain value.") from None


def _check_media(media: Media) -> None:
    if sum(getattr(media, place) is not None for place in _PLACES) != 1:
        raise InvalidMessage("Media needs exactly one of link, id and stored.")
    if media.link is not None and not media.link.startswith(("https://", "http://")):
        raise InvalidMessage("The link of media begins with https:// or http://.")
    if media.caption and media.kind in _SPEECHLESS:
        raise InvalidMessage(f"WhatsApp shows no caption with {media.kind}; send the words as a text.")


def _shortened(text: str) -> str:
    """An error may repeat what a stranger wrote."""
    return text if len(text) <= 200 else text[:199] + "…"


def summary(message: Message) -> str:
    """The message in one line, for previews and lists."""
    if isinstance(message, Text):
        return message.text
    if isinstance(message, Media):
        return " ".join(part for part in (f"[{message.kind}]", message.filename, message.caption) if part)
    if isinstance(message, Template):
        return f"[template {message.name} {message.language}]"
    if isinstance(message, Reaction):
        return f"[reaction {message.emoji or 'taken back'}]"
    return "[read]"
