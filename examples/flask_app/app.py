"""Hooks in a Flask application."""

import os
from pathlib import Path

from flask import Flask

from oncehook import Event, Inbox
from oncehook.contrib.flask import init_app

inbox = Inbox(os.environ.get("STORE", "sqlite:./oncehook.db"))
inbox.source("orders", verify="none", key="$.id", subject="$.customer")


@inbox.on("orders", "order.*", retry="quick")
def ship(event: Event) -> None:
    with Path("shipped.txt").open("a") as ledger:
        ledger.write(f"{event.key}\n")


app = Flask(__name__)
bridge = init_app(inbox, app, url_prefix="/hooks")


@app.post("/orders/<order>")
def place(order: str) -> dict[str, str]:
    """An event of our own goes the same way."""
    event_id = bridge.call(inbox.emit("orders", "order.placed", {"id": order}, key=f"placed-{order}"))
    return {"event_id": event_id}
