"""An outgoing message as an event: what its type, its subject and its body are, and what is shown of it.

`Inbox.send_message` asks when a message is emitted; the desk asks before a person sends one again.
"""

from __future__ import annotations

from oncehook.model import Preview, line
from oncehook.whatsapp.messages import InvalidMessage, Media, Message, check, read_message, summary
from oncehook.whatsapp.numbers import normalise


def type_of(message: Message) -> str:
    """`message.text`, `message.image`, `message.template`: media by what they are."""
    return f"message.{message.kind if isinstance(message, Media) else message.__struct_config__.tag}"


def subject_of(message: Message, country: str | None = None) -> str | None:
    """Whom it goes to, in one way of writing, so that what one person gets comes in order.

    Raises InvalidMessage for what could never be sent: better now than in a dead letter.
    """
    check(message)
    return None if message.to is None else normalise(message.to, country=country)


def preview(body: bytes) -> Preview | None:
    """To whom an event's body would be sent and what it says, in a line each; None when it is no message."""
    try:
        message = read_message(body)
    except InvalidMessage:
        return None
    return Preview(line(message.to or "", 64), line(summary(message)))
