"""One WhatsApp message, delivered many times, to two receivers and two workers: one row."""

import os

import psycopg

from oncehook import Event, Inbox

STORE = os.environ.get("STORE", "postgresql://localhost/support")

inbox = Inbox(STORE)
inbox.source("whatsapp", preset="whatsapp-cloud", secret_env="META_APP_SECRET", verify_token_env="META_VERIFY_TOKEN")


@inbox.on("whatsapp", "message.*")
async def store(event: Event, tx: psycopg.AsyncConnection) -> None:
    message = event.json()["entry"][0]["changes"][0]["value"]["messages"][0]
    # No unique index and no lock: the inbox is the judge of what is new, and the row commits with the completion.
    await tx.execute("INSERT INTO messages (wamid, sender) VALUES (%s, %s)", [message["id"], message["from"]])


if __name__ == "__main__":
    with psycopg.connect(STORE.partition("?")[0]) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS messages (wamid text NOT NULL, sender text NOT NULL)")
