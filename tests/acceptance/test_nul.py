"""NUL is a character that PostgreSQL takes in no text: wherever one comes in, the answer is a 400 that says so."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from urllib.parse import quote, urlencode

import pytest

from oncehook.secret import new_token
from oncehook.web.api.endpoints import ENDPOINTS
from oncehook.web.api.openapi import PREFIX
from oncehook.web.dashboard import PAGES
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, Receiver
from tests.wire import signed

TOKEN = new_token()
SERVER = """
[server]
admin_token = {{ env = "ADMIN_TOKEN" }}

[source.open]
verify = "none"
key = "header:x-key"
type = "$.type"
subject = "$.customer"
"""
ID = "0" * 32
IDS = {"events": f"evt_{ID}", "deliveries": f"dlv_{ID}", "replays": f"rpl_{ID}"}


class Server(Receiver):
    """A server with an admin, asked over its socket."""

    def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, target, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        self.cookie = str(answer.getheader("set-cookie")).partition(";")[0]
        found = answer.status, answer.read()
        connection.close()
        return found

    def api(self, method: str, target: str, body: object = None) -> tuple[int, str]:
        raw = b"" if body is None else json.dumps(body).encode()
        status, said = self.ask(method, target, raw, authorization=f"Bearer {TOKEN}")
        return status, json.loads(said).get("error", "")


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    made = Server(engine.folder / "a", engine.url, CONFIG + SERVER)
    engine.receivers.append(made)
    made.start(env={"ADMIN_TOKEN": TOKEN})
    yield made
    assert made.stop() == 0
    assert "Traceback" not in made.log.read_text()


def places(path: str) -> list[str]:
    """The path as it is asked for, and the same with a NUL in each of its parameters."""
    kind = path.split("/")[1]
    names = re.findall(r"\{(\w+)\}", path)
    usual = {"id": IDS.get(kind, "x"), "arrival": f"arr_{ID}"}
    good = {name: usual.get(name, "x") for name in names}
    return [path.format(**good), *(path.format(**{**good, name: good[name] + "%00"}) for name in names)]


def test_nul_is_refused_by_every_endpoint_of_the_api(server: Server) -> None:
    asked = 0
    for endpoint in ENDPOINTS:
        if endpoint.media == "text/event-stream":
            continue
        good, *bad = (PREFIX + path for path in places(endpoint.path))
        bad += [f"{good}?{name}=a%00b" for name, _ in endpoint.parameters]
        tried: list[tuple[str, object]] = [(target, {} if endpoint.body else None) for target in bad]
        if endpoint.body is not None:
            values = ("a\0b", ["a\0b"], {"x": {"y\0": 1}})
            tried += [(good, {field: value}) for field in endpoint.body.__struct_fields__ for value in values]
            tried.append((good, {"rea\0son": "x"}))
        for target, body in tried:
            asked += 1
            status, said = server.api(endpoint.method, target, body)
            assert (status, "NUL" in said) == (400, True), (endpoint.method, target, body, status, said)
    assert asked > 100
    assert server.api("GET", f"{PREFIX}/now%00here")[0] == 400
    # Escaped text that only looks like one is text.
    assert server.api("POST", f"{PREFIX}/replays/plan", {"query": "key:\\u0000"})[0] == 200


def test_nul_is_refused_by_every_page(server: Server) -> None:
    own = {"sec_fetch_site": "same-origin", "content_type": "application/x-www-form-urlencoded"}
    assert server.ask("POST", "/login", b"password=a%00b", **own)[0] == 400
    assert server.ask("GET", "/login?said=%00")[0] == 400
    assert server.ask("POST", "/login", urlencode({"password": TOKEN}).encode(), **own)[0] == 303
    cookie = server.cookie
    words = ("query", "since", "before", "after", "cursor", "tab", "view", "with", "destination", "cause", "kind")
    for page in PAGES:
        if page.path == "/ui/stream":
            continue
        good, *bad = places(page.path)
        bad += [f"{good}?{name}=a%00b" for name in words]
        for target in bad:
            status, said = server.ask(page.method, target, cookie=cookie, **own)
            assert (status, b"NUL" in said) == (400, True), (page.method, target, status)
        if page.method == "POST":
            for name in ("reason", "query", "plan", "ids", "rate"):
                status, _ = server.ask("POST", good, urlencode({name: "a\0b"}).encode(), cookie=cookie, **own)
                assert status in (400, 404), (good, name, status)
    assert server.ask("GET", "/nowhere%00", cookie=cookie)[0] == 400
    assert server.ask("GET", "/static/a%00b.css")[0] in (400, 404)


def test_nul_from_a_sender_is_its_text_and_no_trouble(server: Server) -> None:
    for path in ("/in/%00", "/in/orders%00", "/in/open%00x"):
        assert server.ask("POST", path, b"{}")[0] == 401
    body = json.dumps({"id": "a\0b", "type": "t\0y", "customer": "c\0d"}).encode()
    assert server.ask("POST", "/in/orders?x=%00", body, **signed(body))[0] == 200
    assert server.ask("POST", f"/in/open/{quote(chr(0))}?{quote(chr(0))}=1", body, x_key="k")[0] == 200
    again = json.loads(server.ask("POST", "/in/orders", body, **signed(body))[1])
    assert again["status"] == "duplicate"
    assert server.api("GET", f"{PREFIX}/events?query=%00")[0] == 400
