"""The messages that every sender takes, and their JSON as the body of an event.

An outgoing message is JSON such as `{"to": "+55 11 99999-0001", "text": "On its way"}`; `type` may be left out where
the fields imply it. Read by the sender destination and by previews; a body that cannot be read is a permanent failure.
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


class _Chat(_Outgoing, frozen=True, kw_only=True):
    to: str
    reply_to: str | None = None
    """The id of the message that this one answers."""
    delay: int = 0
    """Milliseconds for which we are shown typing before it is sent (Evolution)."""
    mentions: list[str] = []
    """Numbers of the mentioned members of a group; the text names them as `@5511…` (Evolution)."""
    mention_all: bool = False
    """Whether everybody in the group is mentioned (Evolution)."""


class Text(_Chat, frozen=True, kw_only=True, tag="text"):
    """A text."""

    text: str
    preview_url: bool = False
    """Whether the first link in it is shown with a picture."""


class Link(_Chat, frozen=True, kw_only=True, tag="link"):
    """A URL, shown as a card; by default WhatsApp takes title, text and image from the page itself."""

    url: str
    text: str = ""
    """Text before the URL."""
    title: str | None = None
    """A title instead of the page's (Evolution Go)."""
    description: str | None = None
    image: str | None = None
    """The URL of an image."""


class Location(_Chat, frozen=True, kw_only=True, tag="location"):
    """A place on the map."""

    latitude: float
    longitude: float
    name: str | None = None
    address: str | None = None


class Contact(_Chat, frozen=True, kw_only=True, tag="contact"):
    """A contact's name and number."""

    name: str
    phone: str
    organization: str | None = None


class Poll(_Chat, frozen=True, kw_only=True, tag="poll"):
    """A question, and the answers to choose from (Evolution)."""

    question: str
    options: list[str]
    max_answers: int = 1
    """Answers that one person may choose."""


class Media(_Chat, frozen=True, kw_only=True, tag="media"):
    """An image, a video, a sound, a document or a sticker: from exactly one of three places."""

    kind: MediaKind
    link: str | None = None
    """A URL from which WhatsApp fetches it."""
    id: str | None = None
    """Its id from an upload to the API (Meta)."""
    stored: str | None = None
    """Its key in the sender's file storage; each attempt makes a fresh link, so that no retry finds it expired."""
    caption: str | None = None
    filename: str | None = None
    mime: str | None = None


class Template(_Outgoing, frozen=True, kw_only=True, tag="template"):
    """An approved template, for when the 24 hours after the customer's last message are over (Meta)."""

    to: str
    name: str
    language: str = "en_US"
    components: list[dict[str, Any]] = []


class Reaction(_Outgoing, frozen=True, kw_only=True, tag="reaction"):
    """An emoji on a message; an empty one removes it."""

    to: str
    message_id: str
    emoji: str
    from_me: bool = False
    """Whether the message was one of our own."""
    participant: str | None = None
    """Who wrote the message, in a group: WhatsApp finds it by chat, author and id (Evolution)."""


class Read(_Outgoing, frozen=True, kw_only=True, tag="read"):
    """A read receipt for a received message."""

    message_id: str
    to: str | None = None
    """Who wrote the message: Evolution needs it, Meta does not."""


Message = Text | Media | Link | Location | Contact | Poll | Template | Reaction | Read

LONGEST: Final = 65_536
"""Characters of a text or a caption that WhatsApp takes at most; Meta takes fewer, and answers so."""

_PLACES: Final = ("link", "id", "stored")
_WEB: Final = ("https://", "http://")
_WITHOUT_CAPTION: Final = ("audio", "sticker")
"""Kinds that WhatsApp shows without a caption."""
_OPTIONS: Final = range(2, 13)
"""Answers that a poll may have."""
_IMPLIED_TYPES: Final = {
    "url": "link",
    "text": "text",
    "kind": "media",
    "latitude": "location",
    "question": "poll",
    "phone": "contact",
    "name": "template",
    "emoji": "reaction",
    "message_id": "read",
}
"""The type that the first present field implies, where none is given."""


def read_message(body: bytes) -> Message:
    """Read the message from an event's body. Raises InvalidMessage, with the field that is wrong."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        if "type" not in fields:
            fields["type"] = next((kind for field, kind in _IMPLIED_TYPES.items() if field in fields), None)
        message: Message = msgspec.convert(fields, Message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"The message cannot be read: {_shorten(str(error))}") from None
    check(message)
    return message


def check(message: Message) -> None:
    """Refuse what no API would take. Raises InvalidMessage."""
    if isinstance(message, Text) and not message.text.strip():
        raise InvalidMessage("A text without words cannot be sent.")
    if isinstance(message, Media):
        _check_media(message)
    if isinstance(message, Link) and not message.url.startswith(_WEB):
        raise InvalidMessage("The url of a link begins with https:// or http://.")
    if isinstance(message, Location) and not (abs(message.latitude) <= 90 and abs(message.longitude) <= 180):
        raise InvalidMessage("A location needs a latitude of -90 to 90 and a longitude of -180 to 180.")
    if isinstance(message, Contact):
        _check_contact(message)
    if isinstance(message, Poll):
        _check_poll(message)
    if isinstance(message, _Chat) and message.delay < 0:
        raise InvalidMessage("A delay cannot be negative.")
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
    if media.link is not None and not media.link.startswith(_WEB):
        raise InvalidMessage("The link of media begins with https:// or http://.")
    if media.caption and media.kind in _WITHOUT_CAPTION:
        raise InvalidMessage(f"WhatsApp shows no caption with {media.kind}; send the words as a text.")


def _check_contact(contact: Contact) -> None:
    if not contact.name.strip():
        raise InvalidMessage("A contact needs a name.")
    # The APIs put them into a vCard, where a line break would begin a new field.
    if not all((text or "").isprintable() for text in (contact.name, contact.organization)):
        raise InvalidMessage("The name and the organization of a contact are one line each.")


def _check_poll(poll: Poll) -> None:
    if not poll.question.strip():
        raise InvalidMessage("A poll needs a question.")
    if len(poll.options) not in _OPTIONS or len(set(poll.options)) != len(poll.options) or not all(poll.options):
        raise InvalidMessage(f"A poll needs {_OPTIONS[0]} to {_OPTIONS[-1]} different options.")
    if not 1 <= poll.max_answers <= len(poll.options):
        raise InvalidMessage("max_answers of a poll is 1 or more, and no more than there are options.")


def _shorten(text: str) -> str:
    # the library's error may repeat untrusted text
    return text if len(text) <= 200 else text[:199] + "…"


def link_text(link: Link) -> str:
    """Return the text of a link, with its URL at the end unless it contains it."""
    return link.text if link.url in link.text else f"{link.text} {link.url}".strip()


def summary(message: Message) -> str:
    """Summarise the message in one line, for previews and lists."""
    if isinstance(message, Text):
        return message.text
    if isinstance(message, Media):
        return " ".join(part for part in (f"[{message.kind}]", message.filename, message.caption) if part)
    if isinstance(message, Link):
        return link_text(message)
    if isinstance(message, Location):
        place = (message.name, message.address, f"{message.latitude:g}, {message.longitude:g}")
        return " ".join(part for part in ("[location]", *place) if part)
    if isinstance(message, Contact):
        return f"[contact] {message.name} {message.phone}"
    if isinstance(message, Poll):
        return f"[poll] {message.question}"
    if isinstance(message, Template):
        return f"[template {message.name} {message.language}]"
    if isinstance(message, Reaction):
        return f"[reaction {message.emoji or 'taken back'}]"
    return "[read]"


def type_of(message: Message) -> str:
    """Return the type of the event that carries a message: `message.text`, `message.image`, `message.template`."""
    return f"message.{message.kind if isinstance(message, Media) else message.__struct_config__.tag}"
