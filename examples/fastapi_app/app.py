"""Hooks in a FastAPI application: a mount for senders, a route of one's own, the dashboard."""

import os
from typing import Annotated, Literal

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


def staff(request: Request) -> tuple[str, Literal["operator"]] | None:
    """Whose name goes into the audit log, and what they may do. Ask your own session here."""
    name = request.headers.get("x-user")
    return (name, "operator") if name else None


app = FastAPI(lifespan=inbox.lifespan)
app.mount("/hooks", inbox.asgi())
app.mount("/inbox", inbox.dashboard(authorize=staff))
app.add_exception_handler(Answered, answer)


@app.post("/payments")
async def payments(hook: Annotated[Received, Depends(received(inbox, "payments"))]) -> Response:
    """Runs for genuine requests only, once they are kept: `hook.json()`, `hook.is_new`, `hook.event_ids`."""
    return hook.response()


@app.get("/shipped")
async def list_shipped() -> list[str | None]:
    return shipped
