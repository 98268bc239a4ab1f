"""A worker answers probes of its own, and a served inbox knows under which path a proxy shows it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.acceptance.processes import Receiver
from tests.acceptance.sink import Sink
from tests.deploy.test_notify import CONFIG
from tests.servers import free_port
from tests.unit.test_cli import run
from tests.wire import Client


async def test_a_worker_answers_probes_and_tells_its_own_numbers(tmp_path: Path) -> None:
    async with Sink().open() as sink:
        (tmp_path / "oncehook.toml").write_text(CONFIG.format(folder=tmp_path, url=sink.url))
        port = free_port()
        command = [sys.executable, "-m", "oncehook", "worker", "--listen", f"127.0.0.1:{port}"]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=tmp_path, stderr=log)
        try:
            while "worker ready" not in (tmp_path / "log").read_text():
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.01)
            client = Client("127.0.0.1", port)
            assert (await client.get("/livez")).body == b"ok\n"
            assert (await client.get("/readyz")).json == {"status": "ready"}
            assert b"# TYPE oncehook_attempts_total counter" in (await client.get("/metrics")).body
            assert (await client.get("/")).status == 404
            assert (await client.post("/in/orders", b"{}")).status == 404
            client.close()
            health = run(tmp_path, "health", "--server", f"http://127.0.0.1:{port}")
            assert (health.returncode, health.stdout) == (0, "ready\n")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0


@pytest.mark.parametrize("listen", ["4021", "127.0.0.1:http"])
def test_what_is_no_address_is_told_in_a_sentence(tmp_path: Path, listen: str) -> None:
    (tmp_path / "oncehook.toml").write_text(CONFIG.format(folder=tmp_path, url="http://127.0.0.1:1/"))
    ended = run(tmp_path, "worker", "--listen", listen)
    assert ended.returncode == 2
    assert "is not an address" in ended.stderr
    assert "Traceback" not in ended.stderr


# -- under a path of somebody else's -----------------------------------------------------------

PROXIED = """
store = "{store}"

[server]
trusted_proxies = ["127.0.0.1"]
admin_token = {{ env = "ORDERS_SECRET" }}

[source.orders]
verify = {{ scheme = "hmac", header = "X-Signature", prefix = "sha256=" }}
secret = {{ env = "ORDERS_SECRET" }}
"""


def links(page: bytes) -> list[str]:
    return re.findall(r'(?:href|src|action)="(/[^"]*)"', page.decode())


async def test_a_proxys_prefix_is_before_every_link(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path, f"sqlite:{tmp_path}/inbox.db", PROXIED).start()
    client = receiver.client()
    try:
        headers = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https", "X-Forwarded-Prefix": "/a/hooks/"}
        page = await client.get("/login", headers)
        assert page.status == 200
        assert links(page.body)
        assert all(link.startswith("/a/hooks/") for link in links(page.body))
        away = await client.get("/events", headers)
        assert away.status in (302, 303)
        assert away.headers["location"].partition("?")[0].endswith("/a/hooks/login")
        for link in links(page.body):
            if "/static/" in link:  # the proxy takes the prefix off again
                assert (await client.get(link.removeprefix("/a/hooks"), headers)).status == 200
        assert (await client.get("/livez", headers)).status == 200
        for wrong in ("//evil.example", "/a/../b", '/a"onload', "hooks", "/"):
            page = await client.get("/login", {**headers, "X-Forwarded-Prefix": wrong})
            assert all(re.match(r"/(login|static|$)", link) for link in links(page.body)), wrong
    finally:
        assert receiver.stop() == 0


async def test_nobody_else_is_believed(tmp_path: Path) -> None:
    config = PROXIED.replace('"127.0.0.1"', '"192.0.2.0/24"')
    receiver = Receiver(tmp_path, f"sqlite:{tmp_path}/inbox.db", config).start()
    client = receiver.client()
    try:
        page = await client.get("/login", {"X-Forwarded-Prefix": "/evil"})
        assert page.status == 200
        assert b"/evil" not in page.body
    finally:
        assert receiver.stop() == 0
