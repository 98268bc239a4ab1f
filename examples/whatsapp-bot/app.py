"""A WhatsApp bot: it answers whoever writes, sends the price list to whoever asks, and n8n hears of everything.

`oncehook.toml` says where messages come from and how answers go out; here is only what is answered.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncehook import Event, Inbox
from oncehook.destinations.sender import SenderDestination
from oncehook.whatsapp import Sender, Text
from oncehook.whatsapp.storage import S3Files

HERE = Path(__file__).parent
PRICE_LIST = HERE / "price-list.csv"

inbox = Inbox.from_toml(HERE / "oncehook.toml")
files = S3Files.from_env()  # ONCEHOOK_S3_…, R2_… or AWS_…: WhatsApp fetches files from there


@dataclass
class Received:
    """What somebody wrote, whichever API it came over."""

    to: str
    """Where the answer goes."""
    text: str
    id: str


def from_meta(data: Any) -> Received | None:
    message = data["entry"][0]["changes"][0]["value"]["messages"][0]
    return Received(f"+{message['from']}", message["text"]["body"], message["id"])


def from_evolution(data: Any) -> Received | None:
    data = data["data"]
    key, content = data["key"], data.get("message") or {}
    text = content.get("conversation") or content.get("extendedTextMessage", {}).get("text")
    return _from_phone(key["remoteJid"], text, key["id"], from_me=key["fromMe"])


def from_go(data: Any) -> Received | None:
    info, content = data["data"]["Info"], data["data"].get("Message") or {}
    text = content.get("conversation") or content.get("extendedTextMessage", {}).get("text")
    return _from_phone(info["Chat"], text, info["ID"], from_me=info["IsFromMe"])


def _from_phone(chat: str, text: str | None, id: str, *, from_me: bool) -> Received | None:
    """Groups, the status of friends and what was written on the phone itself come here, too: no answer to those."""
    is_person = chat.endswith(("@s.whatsapp.net", "@lid"))
    return Received(chat, text, id) if text and is_person and not from_me else None


READ = {"meta": from_meta, "evolution": from_evolution, "go": from_go}


def sender_of(name: str) -> Sender:
    destination = inbox.destinations[name]
    assert isinstance(destination, SenderDestination)
    return destination.sender


async def answer(event: Event) -> None:
    """Runs once for each message, and again only when it fails: the key makes one answer of all attempts."""
    received = READ[event.source](event.json())
    if received is None:
        return
    destination = f"answers-{event.source}"
    if "price list" in received.text.lower():
        sender = sender_of(destination)
        message: Any = await sender.prepare_file(received.to, PRICE_LIST, caption="Our prices", reply_to=received.id)
    else:
        message = Text(to=received.to, text="Thank you! Ask for the price list, or wait for one of us.")
    await inbox.send_message(destination, message, key=event.idempotency_key)


for source, written in (("meta", "message.text"), ("evolution", "messages.upsert"), ("go", "Message")):
    if source in inbox.sources:
        sender_of(f"answers-{source}").files = files
        inbox.on(source, written, retry="quick")(answer)
