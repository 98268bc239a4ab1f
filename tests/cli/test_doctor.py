"""`oncehook doctor` on destinations that are there, away, forbidden, silent or untrusted, and on PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from oncehook import Event, Inbox
from tests import certificates
from tests.servers import fresh_schema, shared_postgres
from tests.waiting import until

certificate = certificates.fixture("localhost")


PATIENT = "from oncehook.cli import main, settings; settings.REACH_SECONDS = 120.0; main()"


async def doctor(
    folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "oncehook"), **env: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and what was found: by the name of the check, or of the destination."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ONCEHOOK_")}
    run = await asyncio.create_subprocess_exec(
        sys.executable, *program, "doctor", "--json", *arguments,
        cwd=folder, env={**ours, **env}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await run.communicate()
    checks = json.loads(out)
    assert run.returncode is not None
    by_name = {c["name"] if c["name"] != "reachable" else c["detail"].partition(":")[0]: c for c in checks}
    return run.returncode, by_name


@dataclass
class Door:
    """A place that can be connected to, and all that it was told."""

    port: int = 0
    heard: list[bytes] = field(default_factory=list)
    now: int = 0
    most: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        with contextlib.suppress(ConnectionError):
            self.heard.append(await reader.read())
        self.now -= 1
        writer.close()


@contextlib.asynccontextmanager
async def open_door(tls: ssl.SSLContext | None = None) -> AsyncIterator[Door]:
    door = Door()
    server = await asyncio.start_server(door.answer, "127.0.0.1", 0, ssl=tls)
    door.port = server.sockets[0].getsockname()[1]
    try:
        yield door
    finally:
        server.close()


def destination(name: str, url: str, private: bool = True) -> str:
    return f'[destination.{name}]\nurl = "{url}"\nallow_private = {str(private).lower()}\n'


async def test_it_says_what_checks_cover_and_which_secrets_are_over(tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text(
        '[source.git]\npreset = "github"\n'
        'secret = [{ env = "NEW" }, { env = "OLD", until = 2020-12-01 }, { env = "NEXT", until = 2999-12-01 }]\n'
        '[source.weak]\npreset = "stripe"\nsecret = { env = "SHORT" }\n'
        '[source.pay]\npreset = "telegram"\nsecret = { env = "NEW" }\n'
    )
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "oncehook", "doctor", "--json", cwd=tmp_path, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NEW": "new-secret", "OLD": "old-secret", "NEXT": "next-secret", "SHORT": "s3cr3t!"},
    )  # fmt: skip
    out, _ = await run.communicate()
    found = [(c["name"], c["detail"], c["warning"]) for c in json.loads(out) if c["name"] in ("covers", "secret")]
    assert found == [
        ("covers", "git: the check covers body, not the key", False),
        ("secret", "git: env:OLD is over since 2020-12-02 00:00 UTC", True),
        ("covers", "weak: the check covers body and key", False),
        ("secret", "weak: a secret has fewer than 8 bytes, so it is not blanked in what is stored", True),
        ("covers", "pay: the check covers who sends, not the body", False),
    ]
    assert run.returncode == 0


async def test_destinations_are_connected_to_and_asked_nothing(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    async with open_door() as door, open_door() as silent:
        (tmp_path / "oncehook.toml").write_text(
            destination("there", f"http://127.0.0.1:{door.port}/hook")
            + destination("away", f"http://127.0.0.1:{closed}/hook")
            + destination("inside", f"http://127.0.0.1:{door.port}/hook", private=False)
            + destination("silent", f"https://127.0.0.1:{silent.port}/")
            + destination("mute", f"https://127.0.0.1:{silent.port}/")
            + destination("back", "{$.callback_url}")
            + 'allow_hosts = ["hooks.example.org"]\n'
        )
        code, found = await doctor(tmp_path)
        assert silent.most == 2, "all of them at once"
        await until(lambda: door.heard)
    assert code == 0, "a destination that is away is no reason to fail: deliveries wait for it"
    assert found["there"]["detail"] == "there: connected"
    assert found["back"]["detail"] == "back: not tried, each event names its address"
    assert not found["there"]["warning"]
    assert door.heard == [b""], "one connection, and no request; the guarded one was not even tried"
    assert {name for name in found if found[name]["warning"]} >= {"away", "inside", "silent", "mute"}
    assert "Connection refused" in found["away"]["detail"]
    assert "allow_private" in found["inside"]["detail"]
    assert "no answer within 3 s" in found["silent"]["detail"]
    assert "nothing is lost" in found["away"]["hint"]
    assert "allow_private = true" in found["inside"]["hint"]
    assert "dead letters at the first attempt" in found["inside"]["hint"], "no policy tries such an address again"


async def test_tls_is_looked_at_and_the_app_counts(tmp_path: Path, certificate: certificates.Certificate) -> None:
    async with open_door(certificates.served(certificate)) as door:
        (tmp_path / "oncehook.toml").write_text(destination("stranger", f"https://localhost:{door.port}/"))
        (tmp_path / "app.py").write_text(
            "from pathlib import Path\nfrom oncehook import Inbox\ninbox = Inbox('sqlite:./deep/down/app.db')\n"
            f"inbox.destination('known', url='https://localhost:{door.port}/', allow_private=True,"
            f" ca=Path({str(certificate[0])!r}))\n"
        )
        code, found = await doctor(tmp_path, "app:inbox", program=("-c", PATIENT))
    assert code == 0
    assert found["known"]["detail"] == "known: connected"
    assert (found["stranger"]["warning"], "not trusted" in found["stranger"]["detail"]) == (True, True)
    assert found["settings"]["detail"].startswith("app:inbox and ")
    assert (found["schema"]["ok"], found["schema"]["warning"]) == (True, True)
    assert found["writable"]["ok"], "the folders that are not there yet are made by a start"
    assert not (tmp_path / "deep").exists()


async def test_postgresql_takes_a_write(tmp_path: Path) -> None:
    server, schema = shared_postgres(), fresh_schema()
    url = f"{server.url}?schema={schema}"
    code, found = await doctor(tmp_path, ONCEHOOK_STORE=url)
    assert (code, found["schema"]["detail"]) == (0, "nothing is kept here yet")
    code, found = await doctor(tmp_path, ONCEHOOK_STORE=url, ONCEHOOK_MIGRATE="false")
    assert (code, found["schema"]["hint"]) == (1, "Run: oncehook db migrate")
    migrate = [sys.executable, "-m", "oncehook", "db", "migrate"]
    done = await asyncio.create_subprocess_exec(*migrate, cwd=tmp_path, env={**os.environ, "ONCEHOOK_STORE": url})
    assert await done.wait() == 0
    code, found = await doctor(tmp_path, ONCEHOOK_STORE=url)
    assert (code, found["writable"]["detail"]) == (0, "a write was made and committed")
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f'CREATE ROLE "{schema}_reader" LOGIN')
        connection.execute(f'GRANT USAGE ON SCHEMA "{schema}" TO "{schema}_reader"')
        connection.execute(f'GRANT SELECT ON ALL TABLES IN SCHEMA "{schema}" TO "{schema}_reader"')
    code, found = await doctor(tmp_path, ONCEHOOK_STORE=url.replace("oncehook@", f"{schema}_reader@"))
    assert code == 1
    assert (found["schema"]["ok"], found["writable"]["ok"]) == (True, False), found
    assert "permission denied" in found["writable"]["detail"]


async def test_who_waits_for_nobody_is_a_warning(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/oncehook.db")

    @inbox.on("app")
    async def ship(event: Event) -> None: ...

    async with inbox.running(work=False):
        await inbox.emit("app", "t", {})
    code, found = await doctor(tmp_path)
    assert (code, found["waiting"]["warning"]) == (0, True)
    assert found["waiting"]["detail"] == '1 for "ship", which nobody here knows'
    (tmp_path / "oncehook.toml").write_text(destination("ship", "http://127.0.0.1:9/"))
    _, found = await doctor(tmp_path)
    assert "waiting" not in found
