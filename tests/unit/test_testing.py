"""What users' tests get: signed samples, repeated or forged, into an inbox or over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.kept import kept_events

from oncehook import presets
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.inbox import Inbox
from oncehook.model import Arrival
from oncehook.settings import development
from oncehook.testing import send, signed
from oncehook.verify import Custom


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    made = Inbox(f"sqlite:{tmp_path}/x.db")
    signs = {"scheme": "hmac", "header": "X-Sign"}
    made.source("stripe", preset="stripe", secret="whsec_for_tests", budget="90s")
    made.source("orders", verify=signs, secret="s", key="$.order.id", subject="$.who", budget="90s")
    made.source("sms", preset="twilio", secret="token", public_url="https://public.example/in/sms")
    return made


@pytest.fixture(autouse=True)
def own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Development keys of this test alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


# -- into an inbox -----------------------------------------------------------------------------


async def test_the_same_hook_twice_is_one_event(inbox: Inbox) -> None:
    async with inbox.running():
        first, second = await send(inbox, "stripe", "invoice.paid", repeat=2)
        assert (first.status, first.json()["status"]) == (200, "accepted")
        assert (second.status, second.json()["status"]) == (200, "duplicate")
        assert first.json()["event_id"] == second.json()["event_id"]
        [other] = await send(inbox, "stripe", "invoice.paid")
        assert other.json()["status"] == "accepted"
        assert [event.type for event in await kept_events(inbox.store)] == ["invoice.paid"] * 2


async def test_a_forged_one_is_refused(inbox: Inbox) -> None:
    async with inbox.running():
        for source in ("stripe", "orders", "sms"):
            [answer] = await send(inbox, source, forge=True)
            assert (answer.status, answer.json()["code"]) == (401, "signature_invalid")
        assert await kept_events(inbox.store) == []


async def test_a_body_of_ones_own(inbox: Inbox) -> None:
    async with inbox.running():
        [as_json] = await send(inbox, "stripe", "invoice.paid", body={"id": "evt_1", "type": "my.own"})
        [as_bytes] = await send(inbox, "stripe", body=b'{"id":"evt_1","type":"my.own"}')
        assert (as_json.json()["status"], as_bytes.json()["status"]) == ("accepted", "duplicate")
        [event] = await kept_events(inbox.store)
        assert (event.key, event.type) == ("evt_1", "my.own")


async def test_a_source_without_a_preset_gets_what_its_rules_look_for(inbox: Inbox) -> None:
    async with inbox.running():
        first, second = await send(inbox, "orders", "order.paid", repeat=2)
        assert (first.json()["status"], second.json()["status"]) == ("accepted", "duplicate")
        [event] = await kept_events(inbox.store)
        assert event.key
        assert event.subject
        assert event.type == "order.paid"


async def test_a_signed_url_is_the_registered_one(inbox: Inbox) -> None:
    async with inbox.running():
        [answer] = await send(inbox, "sms", "message.received")
        assert answer.status == 200


async def test_without_a_type_it_is_the_first_sample(inbox: Inbox) -> None:
    async with inbox.running():
        await send(inbox, "stripe")
        [event] = await kept_events(inbox.store)
        assert event.type == next(iter(presets.load("stripe").samples))


async def test_an_unknown_type_is_told(inbox: Inbox) -> None:
    async with inbox.running():
        with pytest.raises(ConfigError, match="no sample"):
            await send(inbox, "stripe", "invoice.payed")
        with pytest.raises(KeyError):
            await send(inbox, "strype", "invoice.paid")


async def test_a_batch(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/x.db")
    inbox.add(development.source("sendgrid")).settings.budget = 90.0
    async with inbox.running():
        first, second = await send(inbox, "sendgrid", "batch", repeat=2)
        assert first.json()["accepted"] == second.json()["duplicates"] == 3


# -- the request itself ------------------------------------------------------------------------


def test_signed_gives_a_request_that_verifies(inbox: Inbox) -> None:
    source = inbox.sources["stripe"]
    hook = signed(source, "invoice.paid")
    source.verifier(hook)
    assert hook.body != signed(source, "invoice.paid").body  # fresh at every call
    with pytest.raises(SignatureInvalid):
        source.verifier(signed(source, "invoice.paid", forge=True))


def test_signed_by_a_presets_name(tmp_path: Path) -> None:
    hook = signed("github", "push")
    development.source("github").verifier(hook)
    assert dict(hook.headers)[b"x-github-event"] == b"push"
    assert (tmp_path / "state" / "oncehook" / "development-keys.json").stat().st_mode & 0o777 == 0o600


def test_development_keys_stay_the_same_as_long_as_they_fit(tmp_path: Path) -> None:
    file = tmp_path / "state" / "oncehook" / "development-keys.json"
    first = {name: development.source(name).secrets for name in ("sendgrid", "github")}
    assert {name: development.source(name).secrets for name in ("sendgrid", "github")} == first
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "sendgrid": kept["github"]}))  # as if the preset had had another scheme
    source = development.source("sendgrid")
    source.verifier(signed(source, "open"))
    assert development.source("github").secrets == first["github"]


def test_a_file_of_an_event_without_a_sample_gets_its_headers() -> None:
    hook = signed("github", "check_run", body={"action": "created"})
    assert dict(hook.headers)[b"x-github-event"] == b"check_run"
    assert dict(hook.headers)[b"x-github-delivery"]


def test_a_check_of_ones_own_needs_a_signer(inbox: Inbox) -> None:
    def genuine(arrival: Arrival, secret: bytes) -> bool:
        return arrival.body.endswith(secret)

    def sign(draft: Arrival, secret: bytes) -> Arrival:
        draft.body += secret
        return draft

    source = inbox.source("own", verify=Custom(genuine, signer=sign), secret="s")
    source.verifier(signed(source, body=b"x"))
    with pytest.raises(SignatureInvalid):
        source.verifier(signed(source, body=b"x", forge=True))
    with pytest.raises(ConfigError, match="nothing that signs"):
        signed(inbox.source("mute", verify=genuine, secret="s"))


# -- over HTTP ---------------------------------------------------------------------------------


@dataclass
class Server:
    address: str
    seen: list[tuple[str, list[tuple[str, str]], bytes]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    """Somebody else's server: it writes down what comes and says 200."""
    served = Server("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            served.seen.append((self.path, self.headers.items(), body))
            answer = json.dumps({"status": "accepted", "n": len(served.seen)}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            """Silent."""

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    yield served
    listening.shutdown()
    thread.join()
    listening.server_close()


async def test_to_any_address(server: Server, inbox: Inbox) -> None:
    url = f"{server.address}/hooks/payments?tenant=7"
    answers = await send(url, inbox.sources["stripe"], "invoice.paid", repeat=2)
    assert [answer.json()["n"] for answer in answers] == [1, 2]
    (path, headers, body), again = server.seen
    assert path == "/hooks/payments?tenant=7"
    assert (body, dict(headers)["stripe-signature"]) == (again[2], dict(again[1])["stripe-signature"])
    names = [name.lower() for name, _ in headers]
    assert names.count("host") == names.count("content-length") == names.count("content-type") == 1
    arrival = Arrival("stripe", [(name.lower().encode(), value.encode()) for name, value in headers], body)
    inbox.sources["stripe"].verifier(arrival)


@pytest.mark.parametrize("preset", ["twilio", "square", "hubspot"])
async def test_a_signature_over_the_address_is_for_that_address(server: Server, preset: str) -> None:
    url = f"{server.address}/hooks/{preset}"
    await send(url, preset)
    [(path, headers, body)] = server.seen
    query = path.partition("?")[2].encode()
    arrival = Arrival(preset, [(name.lower().encode(), value.encode()) for name, value in headers], body, query)
    source = development.source(preset)
    source.scheme.verifier(source.secrets, url=url)(arrival)


async def test_nobody_there() -> None:
    with pytest.raises(OSError, match="refused"):
        await send("http://127.0.0.1:1/in/stripe", "stripe")
