"""A WhatsApp bot: it answers whoever writes, sends the price list to whoever asks, and n8n hears of everything.

`oncehook.toml` says where messages come from and how answers go out; here is only what is answered.
"""

from pathlib import Path

from oncehook import Event, Inbox
from oncehook.whatsapp import Message, Sender
from oncehook.whatsapp.destination import SenderDestination
from oncehook.whatsapp.storage import S3Files

HERE = Path(__file__).parent
PRICE_LIST = HERE / "price-list.csv"

inbox = Inbox.from_toml(HERE / "oncehook.toml")
files = S3Files.from_env()  # ONCEHOOK_S3_…, R2_… or AWS_…: WhatsApp fetches files from there


def sender_of(name: str) -> Sender:
    destination = inbox.destinations[name]
    assert isinstance(destination, SenderDestination)
    return destination.sender


async def answer(event: Event) -> None:
    """Runs once for each message, and again only when it fails: the key makes one answer of all attempts."""
    received = event.whatsapp
    if (
        not received.is_direct or not received.text
    ):  # groups, the status of friends, what was written on the phone itself
        return
    destination = f"answers-{event.source}"
    if "price list" in received.text.lower():
        sender = sender_of(destination)
        message: Message = await sender.prepare_file(
            received.chat, PRICE_LIST, caption="Our prices", reply_to=received.id
        )
    else:
        message = received.reply_to("Thank you! Ask for the price list, or wait for one of us.")
    await inbox.send_message(destination, message, key=event.idempotency_key)


for source, written in (("meta", "message.text"), ("evolution", "messages.upsert"), ("go", "Message")):
    if source in inbox.sources:
        sender_of(f"answers-{source}").files = files
        inbox.on(source, written, retry="quick")(answer)
