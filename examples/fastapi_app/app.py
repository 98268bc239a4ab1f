"""Hooks in a FastAPI application: a mount for senders, a route of one's own, the dashboard."""

import os
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response

from oncehook import Event, Inbox
from oncehook.contrib.asgi import Answered, Received, answer, received

inbox = Inbox(os.environ.get("STORE", "sqlite:./oncehook.db"))
inbox.source("orders", verify="none", key="$.id", subject="$.customer")
inbox.source("payments", preset="stripe", secret_env="STRIPE_SECRET")

shipped: list[str | None] = []


@inbox.on("orders", "order.*", retry="quick")
async def ship(event: Event) -> None:
    shipped.append(event.key)


def is_staff(request: Request) -> str | None:
    return "operator" if request.headers.get("x-user") == "staff" else None  # ask your own session here


app = FastAPI(lifespan=inbox.lifespan)
app.mount("/hooks", inbox.asgi())
app.mount("/inbox", inbox.dashboard(authorize=is_staff))
app.add_exception_handler(Answered, answer)


@app.post("/payments")
async def payments(hook: Annotated[Received, Depends(received(inbox, "payments"))]) -> Response:
    """Runs for genuine requests only, once they are kept: `hook.json()`, `hook.is_new`, `hook.event_ids`."""
    return hook.response()


@app.get("/shipped")
async def list_shipped() -> list[str | None]:
    return shipped
