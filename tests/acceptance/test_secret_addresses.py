"""S25, S26: an address that is a secret, as Slack's are, is called and shown by its host alone, wherever one looks."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.acceptance.conftest import Engine, engine
from tests.acceptance.processes import CONFIG
from tests.acceptance.test_admin_cli import TOKEN, Admin, Done, run
from tests.wire import SECRET

__all__ = ["engine", "run"]

CANARY = "canaryXoxbAddress4471"
REST = f"services/T0canary4471/{CANARY}?hush=canary-query-4471"
SETTINGS = (
    CONFIG
    + """
[server]
admin_token = {{ env = "ADMIN" }}

[destination.whole]
url = {{ env = "WHOLE" }}
allow_private = true
retry = ["0.05s"]

[destination.parted]
url = "http://127.0.0.1:PORT/"
path = {{ env = "REST" }}
allow_private = true
retry = ["0.05s"]

[destination.away]
url = {{ env = "AWAY" }}
allow_private = true
retry = ["0.05s"]

[[route]]
from = "orders"
to = "whole"

[[route]]
from = "orders"
to = "parted"

[[route]]
from = "orders"
to = "away"
"""
)


class Echo(http.server.ThreadingHTTPServer):
    """A destination that repeats the whole address, in several ways, and refuses."""

    daemon_threads = True

    def __init__(self) -> None:
        self.called: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Echo)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Echo(http.server.BaseHTTPRequestHandler):
    server: Echo

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.called.add(self.path)
        address = f"http://{self.headers['host']}{self.path}"
        said = [address, self.path, json.dumps(address).replace("/", "\\/"), *self.path.split("/"), "no such channel"]
        answer = "\n".join(said).encode()
        self.send_response(404)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def admin(engine: Engine, echo: Echo, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    receiver = engine.receiver()
    receiver.config = SETTINGS.replace("PORT", str(echo.port))
    addresses = {"WHOLE": f"http://127.0.0.1:{echo.port}/{REST}", "REST": REST, "AWAY": f"http://127.0.0.1:9/{REST}"}
    for name, value in {"ADMIN": TOKEN, "ORDERS_SECRET": SECRET, **addresses}.items():
        monkeypatch.setenv(name, value)
    receiver.start()
    monkeypatch.chdir(receiver.folder)
    yield Admin(engine, receiver, echo, run)  # type: ignore[arg-type]
    receiver.stop()


def log_in(port: int) -> dict[str, str]:
    headers = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/login", urlencode({"password": TOKEN, "token": TOKEN}), headers)
        answer = connection.getresponse()
        assert answer.status == 303, answer.read()
        return {"cookie": str(answer.getheader("set-cookie")).partition(";")[0]}


def see(port: int, path: str, headers: dict[str, str]) -> str:
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, (path, answer.status, text)
        return text


def test_a_secret_address_is_seen_nowhere(admin: Admin, echo: Echo) -> None:
    [sent] = admin.send("o1")
    event_id = sent["event_id"]
    while True:
        shown = admin.good("show", event_id, "--json").json
        if {one["status"] for one in shown["deliveries"]} == {"dead"}:
            break
        time.sleep(0.05)
    assert echo.called == {f"/{REST}"}, "that is where it was sent"

    port = admin.receiver.port
    bearer, cookie = {"authorization": f"Bearer {TOKEN}"}, log_in(port)
    delivery_id = shown["deliveries"][0]["id"]
    said = {
        "commands": "".join(
            done.out + done.err
            for done in (
                admin.good("destinations"),
                admin.good("destinations", "--json"),
                admin.good("config", "show"),
                admin.good("config", "show", "--json"),
                admin.good("config", "check"),
                admin.run("doctor"),
                admin.good("show", event_id),
                admin.good("show", event_id, "--json"),
                admin.good("dead"),
                admin.good("replay", event_id, "--dry-run"),
                admin.good("export"),
            )
        ),
        "api": "".join(
            see(port, f"/api/v1/{path}", bearer)
            for path in ("destinations", "deliveries", f"deliveries/{delivery_id}", f"events/{event_id}", "stats")
        ),
        "pages": "".join(
            see(port, path, cookie) for path in ("/", "/destinations", "/dead", f"/events/{event_id}", "/system")
        ),
        "metrics": see(port, "/metrics", bearer),
        "log": admin.receiver.log.read_text(),
        "store": repr(admin.engine.rows("SELECT * FROM attempts"))
        + repr(admin.engine.rows("SELECT * FROM deliveries")),
    }
    host = f"http://127.0.0.1:{echo.port}/…"
    assert said["commands"].count(host) >= 4
    assert host in json.loads(see(port, "/api/v1/destinations", bearer))["items"][0]["address"]
    assert host in said["pages"]
    assert "no such channel" in said["store"], "the rest of an answer is kept"
    assert "127.0.0.1:9" in said["store"], "an error says which host was not reached"
    for where, text in said.items():
        assert "canary" not in text.lower(), where
    if admin.engine.name == "sqlite":
        raw = b"".join(file.read_bytes() for file in Path(admin.engine.folder).glob("inbox.db*") if file.is_file())
        assert b"canary" not in raw
