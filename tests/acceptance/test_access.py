"""Guessing tokens is slow, seen, and in vain; the metrics are not for strangers; a flood of forgeries fills no log."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from oncehook.logs import FEW
from oncehook.secret import new_token
from tests.acceptance.admin_house import TOKENS, admin_house, call
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG, Receiver
from tests.servers import free_port
from tests.wire import SECRET, Client, hook, signed

ADMIN, MADE = "a-word-that-people-type", new_token()
SERVER = """
[server]
admin_token = {{ env = "ADMIN_TOKEN" }}
tokens = [{{ name = "prometheus", role = "viewer", token = {{ env = "MADE_TOKEN" }} }}]
"""
OURS = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
STRANGER = {"Host": "localhost", "X-Forwarded-For": "203.0.113.9"}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class Server(Receiver):
    """A server with tokens, asked over its socket."""

    def begin(self, more: str = "") -> Server:
        self.config = CONFIG + SERVER + more
        self.start(env={"ADMIN_TOKEN": ADMIN, "MADE_TOKEN": MADE})
        return self

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, *, port: int = 0, **form: str
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=60)
        connection.request(method, path, urlencode(form) or None, headers or {})
        answer = connection.getresponse()
        answer.text = answer.read().decode()  # type: ignore[attr-defined]
        connection.close()
        return answer

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    made = Server(engine.folder / "a", engine.url)
    engine.receivers.append(made)
    yield made
    made.stop()


# -- guessing ----------------------------------------------------------------------------------


def test_api_and_login_share_one_throttle_that_is_logged_and_audited(engine: Engine, server: Server) -> None:
    server.begin()
    statuses = [server.ask("GET", "/api/v1/events", bearer(f"guess-{n}")).status for n in range(40)]
    assert statuses == [401] * 5 + [429] * 35
    refused = server.ask("GET", "/api/v1/events", bearer(ADMIN))
    assert (refused.status, json.loads(refused.text)["code"]) == (429, "too_many_tries")  # type: ignore[attr-defined]
    assert int(str(refused.getheader("retry-after"))) >= 1
    assert server.ask("GET", "/api/v1/nowhere", bearer("guess")).status == 429
    assert server.ask("POST", "/login", OURS, password=ADMIN).status == 429, "the login counts with the API"
    assert server.ask("GET", "/metrics", {**STRANGER, **bearer("guess")}).status == 429
    assert server.ask("GET", "/api/v1/events", bearer(MADE)).status == 200, "nobody guesses that one"
    health = subprocess.run(
        [sys.executable, "-m", "oncehook", "events", "--config", "oncehook.toml"],
        cwd=server.folder,
        env={**os.environ, "ORDERS_SECRET": SECRET, "ADMIN_TOKEN": ADMIN, "MADE_TOKEN": MADE},
        capture_output=True,
    )
    assert health.returncode == 0, health.stderr
    assert server.stop() == 0
    refusals = [line for line in server.lines() if line["event"] == "access.refused"]
    sums = [line for line in server.lines() if line["event"] == "access.refused.summary"]
    assert len(refusals) + sum(line["count"] for line in sums) == 44
    assert (refusals[0]["by"], refusals[0]["reason"], refusals[0]["peer"]) == ("token", "wrong", "127.0.0.1")
    assert not any("guess" in json.dumps(line) for line in server.lines())
    rows = engine.rows("SELECT actor, target, detail FROM audit WHERE act = 'refused' ORDER BY n")
    assert 1 <= len(rows) <= 2, "one at once, and one at the end"
    ways: Counter[str] = Counter()
    for actor, target, detail in rows:
        assert (actor, target) == ("unknown", "access")
        found = detail if isinstance(detail, dict) else json.loads(detail)
        ways.update(found["by"])
        assert found["from"] == {"127.0.0.1": sum(found["by"].values())}
    assert ways == {"token": 43, "password": 1}


async def test_one_network_waits_and_another_does_not(tmp_path: Path) -> None:
    async with admin_house(tmp_path) as house:

        async def guess(peer: str, token: str = "guess") -> int:
            named = {"Host": "inbox.example", **bearer(token)}
            return (await call(house.app, "GET", "/api/v1/events", b"", named, peer)).status

        assert [await guess(f"2001:db8:0:1::{n:x}") for n in range(6)] == [401] * 5 + [429]
        assert await guess("2001:db8:0:1:ffff::1", TOKENS["viewer"]) == 429, "one customer has all of a /64"
        assert await guess("2001:db8:0:2::1", TOKENS["viewer"]) == 200
        assert [await guess("203.0.113.7") for _ in range(6)] == [401] * 5 + [429]
        assert await guess("203.0.113.8", TOKENS["viewer"]) == 200
        no_token = await call(house.app, "GET", "/api/v1/events", b"", {"Host": "x"}, "203.0.113.7")
        assert no_token.status == 401, "who presents nothing guesses nothing"


@pytest.mark.parametrize("token", ["x", "a" * 40])
def test_a_weak_token_serves_nobody_in_public(tmp_path: Path, token: str) -> None:
    settings = '[server]\nhost = "0.0.0.0"\npublic_without_tls = true\nadmin_token = { env = "T" }\n'
    (tmp_path / "oncehook.toml").write_text(settings)
    for command in (["config", "check"], ["serve", "--port", str(free_port())]):
        ended = subprocess.run(
            [sys.executable, "-m", "oncehook", *command],
            cwd=tmp_path,
            env={**os.environ, "T": token},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode in (1, 2), ended
        assert "oncehook token" in ended.stderr
        assert "Traceback" not in ended.stderr


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_are_for_this_machine_and_for_viewers(sqlite: Engine) -> None:
    server = Server(sqlite.folder / "a", sqlite.url).begin()
    try:
        assert server.ask("GET", "/metrics").status == 200
        for stranger in (STRANGER, {"Host": "evil.example"}, {"Host": "localhost", "Via": "1.1 tunnel"}):
            refused = server.ask("GET", "/metrics", stranger)
            assert (refused.status, refused.getheader("www-authenticate")) == (401, "Bearer")
            assert "oncehook_" not in refused.text  # type: ignore[attr-defined]
            assert server.ask("GET", "/metrics", {**stranger, **bearer(MADE)}).status == 200
        # Nothing that a stranger may read tells a source that is there from one that is not.
        for name in ("orders", "nobody"):
            before = server.ask("GET", "/metrics", STRANGER)
            server.ask("POST", f"/in/{name}", {}, a="b")
            after = server.ask("GET", "/metrics", STRANGER)
            assert (before.status, before.text) == (after.status, after.text)  # type: ignore[attr-defined]
    finally:
        assert server.stop() == 0


def test_metrics_are_on_admin_bind_only_where_there_is_one(sqlite: Engine) -> None:
    port = free_port()
    server = Server(sqlite.folder / "a", sqlite.url).begin(f'admin_bind = "127.0.0.1:{port}"\n')
    try:
        assert server.ask("GET", "/metrics").status == 404
        assert server.ask("GET", "/metrics", bearer(MADE)).status == 404
        assert server.ask("GET", "/readyz").status == 200
        shown = server.ask("GET", "/metrics", STRANGER, port=port)
        assert (shown.status, "oncehook_build_info" in shown.text) == (200, True)  # type: ignore[attr-defined]
    finally:
        assert server.stop() == 0


def test_metrics_are_counted_once_a_second(sqlite: Engine) -> None:
    server = Server(sqlite.folder / "a", sqlite.url).begin()

    def text() -> str:
        return server.ask("GET", "/metrics").text  # type: ignore[attr-defined, no-any-return]

    try:
        first, began = text(), time.monotonic()
        server.ask("POST", "/in/orders", {}, a="b")
        second, took = text(), time.monotonic() - began
        assert second == first or took >= 1.0
        time.sleep(1.1)
        assert 'oncehook_arrivals_total{outcome="rejected",source="orders"} 1.0' in text()
    finally:
        assert server.stop() == 0


# -- forgeries ---------------------------------------------------------------------------------


async def test_a_flood_of_forgeries_is_no_flood_of_lines(sqlite: Engine) -> None:
    server = Server(sqlite.folder / "a", sqlite.url).begin()
    began = time.monotonic()

    async def forge(path: str, times: int) -> None:
        client = Client("127.0.0.1", server.port)
        for n in range(times):
            assert (await client.post(path, b"{}", {"X-Signature": f"sha256={n:064x}"})).status == 401
        client.close()

    await asyncio.gather(*(forge("/in/orders", 300) for _ in range(3)), forge("/in/nobody", 300))
    client = Client("127.0.0.1", server.port)
    genuine = hook("one")
    assert (await client.post("/in/orders", genuine, signed(genuine))).status == 200
    client.close()
    seconds = time.monotonic() - began
    assert server.stop() == 0
    lines = server.lines()
    each = [line for line in lines if line["event"] == "arrival.rejected"]
    sums = [line for line in lines if line["event"] == "arrival.rejected.summary"]
    assert len(each) <= FEW * (seconds / 0.9 + 2)
    assert len(sums) <= seconds / 0.9 + 2
    kinds = Counter(f"{one['source'].replace('nobody', 'unknown')}: {one['reason']}" for one in each)
    for one in sums:
        kinds.update(one["kinds"])
    assert kinds == {"orders: mismatch": 900, "unknown: unknown source": 300}, "every one is counted"
