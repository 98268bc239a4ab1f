"""A program that type checkers must take as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oncehook import Event, Inbox, OldSecret

inbox = Inbox("sqlite:./x.db")
inbox.source("payments", preset="stripe", secret_env="STRIPE_SECRET", subject="$.data.object.customer")
inbox.source("shop", preset="shopify", secret=["new", OldSecret("old", until="2026-12-01")], keep_keys="30d")
inbox.source(
    "orders", verify={"scheme": "hmac", "header": "X-Signature"}, secret={"env": "ORDERS"}, key=["$.id", ["$.a"]],
    on_missing_key="body_hash:10s", on_conflict="reject", max_body=1 << 20, budget=0.5, ip_allow=["10.0.0.0/8"],
)  # fmt: skip
inbox.source("own", verify=lambda arrival, secret: True, key=lambda context: context.header("x-id"))
inbox.destination(
    "crm", url="https://crm.example/", headers={"X-Team": "billing"}, retry={"attempts": 3, "factor": 2}, ca=Path("ca"),
    breaker={"failures": 3, "open": "30s"}, permanent=[409], rate="50/s", allow_private=True,
)  # fmt: skip
inbox.route("orders", "crm", when={"type": ["a", "b"]}, coalesce="any", on_dead="hold")


@inbox.on("payments", "invoice.*", retry="quick", concurrency=4, coalesce=True, when={"$.amount": ">1000"})
async def book(event: Event) -> None: ...


@inbox.on("orders", retry=["1s", "2m"], timeout=20)
def ship(event: Event) -> None: ...


@inbox.on("orders")
async def keep(event: Event, tx: Any) -> int:
    return 1


inbox.on("orders", name="anything")(lambda event: None)
inbox.on("orders", name="printed")(print)
