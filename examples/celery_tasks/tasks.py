"""The Celery application: what was there before oncehook, and stays as it is."""

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery

from oncehook import once

REDIS = os.environ.get("REDIS", "redis://127.0.0.1:6379/0")

app = Celery("tasks", broker=REDIS, backend=REDIS)


@app.task(name="billing.handle_invoice", acks_late=True)
def handle_invoice(event: dict[str, Any]) -> None:
    book(event["idempotency_key"], json.loads(event["body"])["id"])


@once(key="key", store=REDIS, keep="24h")
def book(key: str, invoice: str) -> None:
    """Celery may run a task twice; this is done once."""
    with Path("booked.txt").open("a") as ledger:
        ledger.write(f"{invoice}\n")
