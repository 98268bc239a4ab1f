"""A chat product: customers connect their WhatsApp numbers, and each has webhooks of its own.

One source takes the messages of all numbers. Which customer a number belongs to is an alias, and where a customer's
webhook goes is a row: both are made over the API while this runs.
"""

import os

from oncehook import Event, Inbox

inbox = Inbox(os.environ.get("STORE", "sqlite:./oncehook.db"))
inbox.source(
    "whatsapp",
    preset="whatsapp-cloud",
    secret_env="META_APP_SECRET",
    verify_token_env="META_VERIFY_TOKEN",
    account="$.entry[0].changes[0].value.metadata.phone_number_id",
    budget="30s",
)


@inbox.on("whatsapp", "message.*")
async def keep(event: Event) -> None:
    """Tell the customer's webhooks, in the transaction that marks this message done."""
    if event.account is None:
        return  # a number that no customer has connected: its message is kept, and nobody is told
    message = event.whatsapp
    payload = {"account": event.account, "message": message.id, "from": message.sender, "text": message.text}
    event.emit("app", "message_created", payload, key=message.id, subject=event.subject, account=event.account)
