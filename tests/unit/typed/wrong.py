"""A program in which type checkers must find every line that says so."""

from __future__ import annotations

from oncehook import Event, Inbox

inbox = Inbox("sqlite:./x.db")
inbox.source("a", verify="none", on_missing_key="acept")  # wrong
inbox.source("b", verify="none", on_conflict="rejct")  # wrong
inbox.source("c", verify="none", subjct="$.id")  # wrong
inbox.source("d", verify="none", max_body=None)  # wrong
inbox.route("a", "crm", coalesce="anny")  # wrong
inbox.route("a", "crm", on_dead="stop")  # wrong
inbox.destination("crm", url="https://crm.example/", retry="quik")  # wrong
inbox.destination("erp", url="https://erp.example/", retry={"factr": 2})  # wrong
inbox.destination("n8n", url="https://n8n.example/", preset="n9n")  # wrong
inbox.destination("x", url="https://x.example/", concurency=3)  # wrong


@inbox.on("a", retyr="quick")  # wrong
async def one(event: Event) -> None: ...


@inbox.on("a", latest_wins="yes")  # wrong
async def two(event: Event) -> None: ...


@inbox.on("a")  # wrong
async def three() -> None: ...


@inbox.on("a")  # wrong
def four(event: Event, foo: int) -> None: ...


@inbox.on  # wrong
def five(event: Event) -> None: ...
