"""Hooks in a Flask application."""

import os
from pathlib import Path
from typing import Literal

from flask import Flask, Request

from oncehook import Event, Inbox
from oncehook.contrib.flask import init_app

inbox = Inbox(os.environ.get("STORE", "sqlite:./oncehook.db"))
inbox.source("orders", verify="none", key="$.id", subject="$.customer")


@inbox.on("orders", "order.*", retry="quick")
def ship(event: Event) -> None:
    with Path("shipped.txt").open("a") as ledger:
        ledger.write(f"{event.key}\n")


def staff(request: Request) -> tuple[str, Literal["operator"]] | None:
    """Whose name goes into the audit log, and what they may do. Ask your own session here."""
    name = request.headers.get("X-User")
    return (name, "operator") if name else None


app = Flask(__name__)
bridge = init_app(inbox, app, url_prefix="/hooks", dashboard="/inbox", authorize=staff)


@app.post("/orders/<order>")
def place(order: str) -> dict[str, str]:
    """An event of our own goes the same way."""
    event_id = bridge.call(inbox.emit("orders", "order.placed", {"id": order}, key=f"placed-{order}"))
    return {"event_id": event_id}
