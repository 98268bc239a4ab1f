"""Links to the portal from the command line and from a program, at real servers: all processes agree on them."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from urllib.parse import urlsplit

import pytest

from oncehook import Inbox
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import CONFIG
from tests.acceptance.test_sessions import TOKENS, Server

KEY = base64.b64encode(os.urandom(32)).decode()
PORTAL = """
[server]
admin_token = {{ env = "ADMIN_TOKEN" }}
"""
APART = PORTAL + 'admin_bind = "127.0.0.1:{apart}"\n'


@pytest.fixture
def servers(engine: Engine) -> Iterator[list[Server]]:
    made = [Server(engine.folder / name, engine.url) for name in "ab"]
    yield made
    for server in made:
        if server.process is not None and server.process.poll() is None:
            server.stop()


def started(server: Server, config: str = PORTAL) -> Server:
    server.config = CONFIG + config
    server.start(env={**TOKENS, "ONCEHOOK_SECRET_KEY": KEY})
    return server


def enter(server: Server, link: str) -> str:
    """Use a link; the session's cookie, or nothing."""
    parts = urlsplit(link)
    answer = server.ask("POST", "/portal/enter", link=unescape(parts.query.removeprefix("link=")))
    if answer.status != 303:
        assert answer.status == 401
        return ""
    assert answer.getheader("location") == "/portal/destinations"
    return str(answer.getheader("set-cookie")).partition(";")[0]


def is_in(server: Server, cookie: str) -> bool:
    status = server.ask("GET", "/portal/destinations", cookie).status
    assert status in (200, 401)
    return status == 200


def test_every_process_of_an_inbox_reads_the_same_links(
    engine: Engine, servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", KEY)
    one = started(servers[0])
    command = [sys.executable, "-m", "oncehook", "portal", "link", "--account", "42", "--name", "ana"]
    command += ["--server", f"http://127.0.0.1:{one.port}", "--token-env", "ADMIN_TOKEN"]
    said = subprocess.run(command, env={**os.environ, **TOKENS}, capture_output=True, text=True, check=True)
    link = said.stdout.strip()
    assert re.fullmatch(rf"http://127\.0\.0\.1:{one.port}/portal/enter\?link=\S+", link)
    made = Inbox(engine.url).portal_link(42, url=f"http://127.0.0.1:{one.port}")
    cookies = [enter(one, link), enter(one, made)]
    assert all(is_in(one, cookie) for cookie in cookies)
    waiting = Inbox(engine.url).portal_link(42)
    other = started(servers[1]) if engine.name == "postgres" else restarted(one)
    assert [enter(other, used) for used in (link, made)] == ["", ""]
    assert all(is_in(other, cookie) for cookie in cookies)
    assert is_in(other, enter(other, waiting))


def restarted(server: Server) -> Server:
    assert server.stop() == 0
    return started(server)


def test_the_portal_is_at_the_public_address_also_where_the_dashboard_is_apart(
    engine: Engine, servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", KEY)
    apart = servers[1]._port_of_its_own()
    one = started(servers[0], APART.replace("{apart}", str(apart)))
    assert is_in(one, enter(one, Inbox(engine.url).portal_link(42)))
    assert one.ask("GET", "/events").status == 404
    one.port, public = apart, one.port
    assert one.ask("GET", "/events").status == 303
    assert one.ask("GET", "/portal/destinations").status in (303, 404)
    one.port = public
