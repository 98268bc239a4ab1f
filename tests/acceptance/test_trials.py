"""S22: a test reveals only what its asker may learn, comes rarely, is guarded and audited; and samples are real."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from oncehook import clock
from oncehook.event import Event
from oncehook.inbox import Inbox
from oncehook.model import Filter
from oncehook.verify.standard import signer
from oncehook.web import api
from oncehook.web.live import Broadcast
from tests.acceptance.admin_house import House, access
from tests.acceptance.sink import Sink

SECRET = "whsec_b25jZWhvb2stdGVzdA=="


@asynccontextmanager
async def inbox_house(folder: Path, url: str, *, work: bool = False, **how: Any) -> AsyncIterator[tuple[House, Inbox]]:
    inbox = Inbox(f"sqlite:{folder / 'inbox.db'}")
    inbox.source("stripe", preset="stripe", secret="whsec_house")
    inbox.source("plain", verify="none", key="$.id")
    inbox.source("square", preset="square", secret="s", public_url="https://example.com/in/square")
    inbox.destination("n8n", url=url, sign=SECRET, **{"allow_private": True, "timeout": "60s", **how})

    @inbox.on("stripe", name="books")
    async def books(event: Event) -> None: ...

    async with inbox.running(work=work):
        made = api.routes(inbox.admin, access(), Broadcast())
        yield House(inbox.store, Starlette(routes=made), Broadcast(), [], inbox.admin), inbox


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    async with Sink((200,)).open() as made:
        yield made


async def test_a_test_is_a_signed_request_that_leaves_nothing_behind(tmp_path: Path, sink: Sink) -> None:
    async with inbox_house(tmp_path, sink.url) as (house, inbox):
        told = await house.post("/destinations/n8n/test", role="admin")
        assert (told["destination"], told["answered"], told["status"], told["error"]) == ("n8n", "2xx", 200, None)
        [sent] = sink.requests
        body = json.loads(sent.body)
        assert (body["type"], body["destination"]) == ("oncehook.test", "n8n")
        assert (sent.headers["oncehook-trigger"], sent.headers["oncehook-source"]) == ("test", "oncehook")
        assert sent.headers["webhook-id"] == body["id"]
        made = signer(SECRET.encode())(body["id"].encode(), sent.headers["webhook-timestamp"].encode(), sent.body)
        assert sent.headers["webhook-signature"] == made.decode()
        assert (await inbox.store.find_events(Filter())).items == []
        [line] = (await house.get("/audit"))["items"]
        assert (line["actor"], line["act"], line["target"]) == ("admin", "test", "n8n")


@pytest.mark.parametrize("status", [204, 302, 404, 500, 418])
async def test_an_operator_learns_only_the_class(tmp_path: Path, status: int) -> None:
    async with (
        Sink([(status, {}, b"canary-body")]).open() as sink,
        inbox_house(tmp_path, sink.url) as (house, _),
    ):
        answer = await house.ask("POST", "/destinations/n8n/test", role="operator")
        told = {"destination": "n8n", "answered": f"{status // 100}xx", "status": None, "error": None, "seconds": None}
        assert answer.json == told
        clock.forward(11)
        answer = await house.ask("POST", "/destinations/n8n/test", role="admin")
        assert answer.json["status"] == status
        assert "canary-body" not in answer.body.decode(), "not even an admin is shown what was said"
        clock.forward(-11)


async def test_who_is_not_there_and_who_may_not_be_reached_look_alike(tmp_path: Path, sink: Sink) -> None:
    """Guarded like every attempt; an operator cannot tell a closed port from a forbidden network."""
    told = []
    for number, (url, how) in enumerate(
        [("http://127.0.0.1:9/x", {}), (sink.url, {"allow_private": False}), ("http://nowhere.invalid/x", {})]
    ):
        (folder := tmp_path / str(number)).mkdir()
        # who looks up names here may be slow to say that there is none
        async with inbox_house(folder, url, timeout="2s", **how) as (house, _):
            told.append(await house.post("/destinations/n8n/test"))
    assert [one["answered"] for one in told] == ["none"] * 3
    assert told[0] == told[1] == told[2]
    assert sink.requests == []


async def test_one_test_every_ten_seconds(tmp_path: Path, sink: Sink) -> None:
    async with inbox_house(tmp_path, sink.url) as (house, _):
        await house.post("/destinations/n8n/test")
        again = await house.ask("POST", "/destinations/n8n/test", role="admin")
        assert (again.status, again.json["code"]) == (429, "tested_too_soon")
        assert 1 <= int(again.headers["retry-after"]) <= 10
        clock.forward(10.5)
        await house.post("/destinations/n8n/test")
        clock.forward(-10.5)
        assert len(sink.requests) == 2


async def test_a_test_takes_nothing_from_the_worker(tmp_path: Path, sink: Sink) -> None:
    """It has connections of its own, and the breaker hears nothing of it."""
    sink.answers = (500,)
    async with inbox_house(tmp_path, sink.url, work=True, breaker={"failures": 1}) as (house, inbox):
        await house.post("/destinations/n8n/test")
        assert (await inbox.store.levels())["n8n"].failures == 0
        [shown] = [one for one in (await house.get("/destinations"))["items"] if one["name"] == "n8n"]
        assert shown["breaker"] == "closed"


async def test_only_web_addresses_can_be_tested_and_only_by_operators(tmp_path: Path, sink: Sink) -> None:
    async with inbox_house(tmp_path, sink.url) as (house, _):
        assert await house.refused("POST", "/destinations/books/test") == (400, "bad_request")
        assert await house.refused("POST", "/destinations/nobody/test") == (404, "not_found")
        assert await house.refused("POST", "/destinations/n8n/test", role="viewer") == (403, "forbidden")
        assert sink.requests == []


# -- samples -----------------------------------------------------------------------------------


async def test_a_sample_comes_in_like_any_other(tmp_path: Path, sink: Sink) -> None:
    async with inbox_house(tmp_path, sink.url, work=True) as (house, inbox):
        told = await house.post("/sources/stripe/sample", {})
        assert (told["source"], told["status"], told["outcome"]) == ("stripe", 200, "accepted")
        [event_id] = told["event_ids"]
        event = await house.get(f"/events/{event_id}")
        assert (event["source"], event["type"]) == ("stripe", told["type"])
        assert [one["destination"] for one in event["deliveries"]] == ["books"]
        assert dict(event["headers"])["user-agent"] == "oncehook-sample"
        await inbox.drain()
        [line] = [one for one in (await house.get("/audit"))["items"] if one["act"] == "sample"]
        assert (line["actor"], line["target"], line["detail"]) == ("olga", "stripe", {"type": told["type"]})
        kinds = list(inbox.sources["stripe"].preset.samples)  # type: ignore[union-attr]
        assert (await house.post("/sources/stripe/sample", {"type": kinds[-1]}))["type"] == kinds[-1]
        signed_url = await house.post("/sources/square/sample")
        assert signed_url["outcome"] == "accepted"


async def test_a_sample_that_cannot_be_made_is_refused(tmp_path: Path, sink: Sink) -> None:
    async with inbox_house(tmp_path, sink.url) as (house, inbox):
        assert await house.refused("POST", "/sources/plain/sample") == (400, "bad_request")
        assert await house.refused("POST", "/sources/stripe/sample", {"type": "x"}) == (400, "bad_request")
        assert await house.refused("POST", "/sources/nobody/sample") == (404, "not_found")
        assert await house.refused("POST", "/sources/stripe/sample", role="viewer") == (403, "forbidden")
        assert (await inbox.store.find_events(Filter())).items == []


async def test_where_only_the_sender_can_sign_no_sample_is_offered() -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    inbox = Inbox("sqlite:./never-opened.db")
    inbox.source("mail", preset="sendgrid", secret=pem)
    inbox.source("stripe", preset="stripe", secret="whsec_house")
    assert await inbox.admin.sample_types("mail") == ()
    assert await inbox.admin.sample_types("stripe") != ()


# -- a recipient that has moved ----------------------------------------------------------------


async def test_a_plan_says_that_the_address_has_changed(tmp_path: Path, sink: Sink) -> None:
    sink.answers = (400,)
    first = f"{sink.url}/before"
    async with routed(tmp_path, first) as (house, inbox):
        await house.post("/sources/stripe/sample")
        await inbox.drain()
        [recipient] = (await house.post("/replays/plan", {"query": "status:dead"}))["recipients"]
        assert recipient["changed"] == 0
    async with routed(tmp_path, f"{sink.url}/after") as (house, _):
        plan = await house.post("/replays/plan", {"query": "status:dead"})
        assert (plan["recipients"][0]["changed"], plan["recipients"][0]["address"][-6:]) == (1, "/after")
        assert "This was first delivered to another address than n8n has now." in plan["notes"]
    async with routed(tmp_path, f"{sink.url}/looking", work=False) as (house, _):
        pass  # somebody who only looks, with settings of his own, moves nobody
    async with routed(tmp_path, first) as (house, _):
        plan = await house.post("/replays/plan", {"query": "status:dead"})
        assert plan["recipients"][0]["changed"] == 0


@asynccontextmanager
async def routed(folder: Path, url: str, *, work: bool = True) -> AsyncIterator[tuple[House, Inbox]]:
    """Stripe's events to one address."""
    inbox = Inbox(f"sqlite:{folder / 'inbox.db'}")
    inbox.source("stripe", preset="stripe", secret="whsec_house")
    inbox.destination("n8n", url=url, allow_private=True)
    inbox.route("stripe", "n8n")
    async with inbox.running(work=work):
        app = Starlette(routes=api.routes(inbox.admin, access(), Broadcast()))
        yield House(inbox.store, app, Broadcast(), [], inbox.admin), inbox
