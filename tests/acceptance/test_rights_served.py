"""S27, S32 to S34 at a real server: the dashboard of a limited token, its session, and settings that were changed."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

from oncehook.web.dashboard import PAGES
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import Receiver

ADMIN, LENA, HUGO, OLD = ("ana-" + "a" * 40, "lena-" + "b" * 40, "hugo-" + "c" * 40, "old-" + "d" * 40)
CANARY = "canary-in-the-payload"
CONFIG = """
store = "{store}"

[server]
admin_token = {{ env = "ADMIN_TOKEN" }}

[[server.tokens]]
name = "lena"
role = "admin"
token = {{ env = "LENA_TOKEN" }}
sources = ["shop"]

[[server.tokens]]
name = "hugo"
role = "viewer"
token = {{ env = "HUGO_TOKEN" }}
payloads = false

[[server.tokens]]
name = "old"
role = "viewer"
token = {{ env = "OLD_TOKEN" }}
expires = 2020-01-01

[source.shop]
verify = "none"
key = ["$.id"]
type = "$.type"

[source.bank]
verify = "none"
key = ["$.id"]
type = "$.type"

[destination.nowhere]
url = "http://127.0.0.1:9/nowhere"
allow_private = true
retry = {{ attempts = 1 }}

[[route]]
from = "shop"
to = "nowhere"

[[route]]
from = "bank"
to = "nowhere"
"""
ENV = {"ADMIN_TOKEN": ADMIN, "LENA_TOKEN": LENA, "HUGO_TOKEN": HUGO, "OLD_TOKEN": OLD}


class Server(Receiver):
    """One server, seen by somebody without script."""

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, str]:
        """Status, text and cookie of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"sec-fetch-site": "same-origin", **headers})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, str(answer.getheader("set-cookie")).partition(";")[0]

    def receive(self, source: str) -> str:
        """The id of an event whose body and header say the canary."""
        said = {"id": f"{source}-1", "type": f"{source}.paid", "note": CANARY}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", f"/in/{source}", json.dumps(said), {"x-note": CANARY})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return str(answer["event_id"])

    def login(self, password: str) -> str:
        form = {"content-type": "application/x-www-form-urlencoded"}
        status, _, cookie = self.ask("POST", "/login", urlencode({"password": password}).encode(), **form)
        assert status == 303
        return cookie


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    made = Server(engine.folder / "server", engine.url, CONFIG)
    made.start(env=ENV)
    yield made
    assert made.stop() == 0


def test_no_page_tells_a_limited_token_of_another_source(server: Server) -> None:
    mine, other = server.receive("shop"), server.receive("bank")
    lena, admin = server.login(LENA), server.login(ADMIN)
    told = 0
    for page in PAGES:
        if page.method != "GET" or page.path == "/ui/stream" or "{" in page.path:
            continue
        _, text, _ = server.ask("GET", page.path, cookie=lena)
        assert not re.search(r"\bbank\b", text), page.path
        assert other not in text, page.path
        told += "bank" in server.ask("GET", page.path, cookie=admin)[1]
    assert told >= 4, "an admin is told of it on several"
    for path in (f"/events/{other}", f"/events/{other}/body", f"/events/{other}/json", "/sources/bank/sample"):
        status, text, _ = server.ask("GET", path, cookie=lena)
        assert status in (400, 404), path
        assert CANARY not in text
    assert server.ask("GET", f"/events/{mine}", cookie=lena)[0] == 200
    assert server.ask("POST", "/destinations/nowhere/pause", cookie=lena)[0] == 403


def test_an_event_says_that_its_payload_is_hidden(server: Server) -> None:
    event = server.receive("shop")
    hugo, lena = server.login(HUGO), server.login(LENA)
    for path in ("", "?view=raw", "?view=hex", "?tab=headers", "?tab=arrivals", "?tab=deliveries", "/json"):
        status, text, _ = server.ask("GET", f"/events/{event}{path}", cookie=hugo)
        assert (status, CANARY in text) == (200, False), path
    assert (
        "bodies, header values, previews and answers are hidden"
        in server.ask("GET", f"/events/{event}", cookie=hugo)[1]
    )
    assert server.ask("GET", f"/events/{event}/body", cookie=hugo)[0] == 403
    assert server.ask("GET", "/events?query=body.note:x", cookie=hugo)[0] == 403
    for path in ("?view=raw", "?tab=headers", "/body"):
        assert CANARY in server.ask("GET", f"/events/{event}{path}", cookie=lena)[1]


def test_an_expired_token_is_no_password(server: Server) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    status, text, cookie = server.ask("POST", "/login", urlencode({"password": OLD}).encode(), **form)
    assert (status, cookie) == (401, "None")
    assert "This token expired at 2020-01-01" in text
    assert server.ask("GET", "/api/v1/events", authorization=f"Bearer {OLD}")[0] == 401


def test_the_page_of_the_system_lists_tokens_for_an_admin_of_everything(engine: Engine, server: Server) -> None:
    hugo, lena = server.login(HUGO), server.login(LENA)
    for _ in range(5):
        server.ask("GET", "/events", cookie=hugo)
    _, text, _ = server.ask("GET", "/system", cookie=server.login(ADMIN))
    section = text[text.index('id="tokens"') :].partition("</table>")[0]
    rows = [re.sub(r"<[^>]+>|\s+", " ", row).split() for row in section.split("<tr>")[2:]]
    assert [row[:4] for row in rows] == [
        ["admin", "admin", "all", "shown"],
        ["lena", "admin", "shop", "shown"],
        ["hugo", "viewer", "all", "hidden"],
        ["old", "viewer", "all", "shown"],
    ]
    assert "expired" in rows[3]
    assert rows[3][-2:] == ["not", "yet"]
    assert "not" not in rows[2]
    for cookie in (lena, hugo):
        assert 'id="tokens"' not in server.ask("GET", "/system", cookie=cookie)[1]
    assert {name for (name,) in engine.rows("SELECT name FROM token_uses")} == {"admin", "lena", "hugo"}


def test_the_log_names_settings_that_were_changed(engine: Engine, server: Server) -> None:
    assert server.stop() == 0
    server.start(env=ENV)
    settings = "SELECT actor, target, detail FROM audit WHERE act = 'settings'"
    assert engine.rows(settings) == []
    assert server.stop() == 0
    server.config = CONFIG.replace('role = "viewer"', 'role = "operator"').replace("payloads = false\n", "")
    server.start(env=ENV)
    [(actor, target, detail)] = engine.rows(settings)
    assert (actor, target) == ("oncehook", str(server.folder / "oncehook.toml"))
    assert json.loads(detail) == {
        "changed": ["server.tokens.1.payloads", "server.tokens.1.role", "server.tokens.2.role"]
    }
    assert "operator" not in detail
    assert "settings" in server.ask("GET", "/system", cookie=server.login(ADMIN))[1]
