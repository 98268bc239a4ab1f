"""What a page takes for granted: files of the reader's own, a served inbox in which things have failed, a database.

`SCENES` says it for a page, or for one of its sections, which then begins anew in a folder of its own. A scene gets a
`Reader` and the page, and leaves both as the page's first command expects to find them. Pages without one begin in an
empty folder.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote, urlsplit

from oncehook import Inbox, samples
from oncehook.settings import load
from oncehook.testing import signed
from oncehook.testing.standins import EvolutionApiStandIn
from tests.contrib.running import Database, fresh_database
from tests.docs.blocks import ROOT, blocks
from tests.docs.reader import SECRET, Reader
from tests.servers import free_port

Scene = Callable[[Reader, Path], None]

TROUBLED = """
[server]
admin_token = { env = "ONCEHOOK_TOKEN" }

[source.stripe]
preset = "stripe"
secret = { env = "STRIPE_SECRET" }
budget = "90s"

[source.orders]
verify = { scheme = "hmac", header = "X-Signature", prefix = "sha256=" }
secret = { env = "ORDERS_SECRET" }
key = ["$.id"]
budget = "90s"

[source.whatsapp]
preset = "whatsapp-cloud"
secret = { env = "META_APP_SECRET" }
verify_token = { env = "META_VERIFY_TOKEN" }
budget = "90s"

[destination.n8n]
url = "http://127.0.0.1:OTHERS/n8n"
retry = { attempts = 1 }
allow_private = true

[destination.shop]
url = "http://127.0.0.1:OTHERS/shop"
retry = { attempts = 1 }
allow_private = true

[destination.crm]
url = "http://127.0.0.1:OTHERS/crm"
retry = { attempts = 1 }
allow_private = true

[destination.answers]
allow_private = true

[destination.answers.whatsapp]
api = "evolution-api"
base_url = "EVOLUTION"
api_key = { env = "EVOLUTION_KEY" }
instance = "sales"

[[route]]
from = "stripe"
to = "n8n"

[[route]]
from = "stripe"
to = "crm"

[[route]]
from = "orders"
to = "shop"
"""
"""The inbox of all pages that look after one: its destinations bear the names that pages use."""


# -- what others run ---------------------------------------------------------------------------


class Others:
    """Somebody else's server on a free port: answers every POST with `status`."""

    def __init__(self, port: int = 0, status: int = 200) -> None:
        self.status = status
        others = self

        class Answering(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(others.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Answering)
        self.port = self._server.server_port

    def __enter__(self) -> Others:
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def variables(database: Database) -> dict[str, str]:
    """Its address, as libpq's variables."""
    url = urlsplit(database.url)
    return {"PGHOST": "127.0.0.1", "PGPORT": str(url.port), "PGUSER": "oncehook", "PGDATABASE": url.path[1:]}


# -- scenes ------------------------------------------------------------------------------------


def served(reader: Reader, page: Path) -> None:
    """The settings that the page shows first, and a server that runs with them."""
    reader.write("oncehook.toml", next(block.text for block in blocks(page) if block.language == "toml"))
    reader.type("oncehook serve", [])


def development(reader: Reader, page: Path) -> None:
    """A server without settings: every preset, with a secret for development."""
    reader.type("oncehook serve", [])


def troubled(reader: Reader, page: Path) -> None:
    """A served inbox with dead letters of every destination; what was wrong has been mended since."""
    others = _trouble(reader)
    others.status = 200


def _trouble(reader: Reader) -> Others:
    others = reader.others.enter_context(Others(status=503))
    evolution = reader.others.enter_context(EvolutionApiStandIn(instance="sales"))
    reader.env |= {"EVOLUTION_KEY": evolution.api_key, "ONCEHOOK_TOKEN": "of-these-tests"}
    settings = TROUBLED.replace("OTHERS", str(others.port)).replace('"EVOLUTION"', f'"{evolution.url}"')
    reader.write("oncehook.toml", settings)
    reader.type("oncehook serve", [])
    sources = Inbox.from_config(load(reader.folder / "oncehook.toml", reader.env).config).sources
    for source, kind in [*[("stripe", "invoice.paid")] * 3, ("orders", "test.order")]:
        post_to = f"http://127.0.0.1:{reader.rewrites['4020']}/in/{source}"
        assert samples.post(post_to, signed(sources[source], kind)).status == 200
    dead = _until(lambda: ask(reader, "deliveries?query=status:dead")["items"], 7)
    for_n8n = [one for one in dead if one["destination"] == "n8n"]
    reader.rewrites |= {"dlv_019a…": for_n8n[0]["id"], "evt_019c…": for_n8n[-1]["event_id"]}
    return others


def replayed(reader: Reader, page: Path) -> None:
    """Troubled, with a replay that failed a while ago and one that is under way."""
    others = _trouble(reader)
    post(reader, "replays", {"query": "status:dead to:n8n"})
    failed = _until(lambda: [one for one in ask(reader, "replays")["items"] if one["dead"] == 3], 1)[0]
    reader.stop()
    with sqlite3.connect(reader.folder / "oncehook.db") as store:  # a minute passes
        store.execute("UPDATE deliveries SET last_replay_at = last_replay_at - 61000000")
    store.close()
    reader.type("oncehook serve", [])
    post(reader, "destinations/crm/pause", {})
    running = post(reader, "replays", {"query": "status:dead to:crm"})
    others.status = 200
    reader.rewrites |= {"rpl_019d…": failed["id"], "rpl_019e…": running["replay_id"]}


def everything(reader: Reader, page: Path) -> None:
    """Replayed, moved in, and a program that is being written on port 8000."""
    replayed(reader, page)
    _old_program(reader)
    reader.others.enter_context(Others(port=int(reader.rewrites["8000"])))


def moved_in(reader: Reader, page: Path) -> None:
    """Troubled, beside an old program, and a folder for backups."""
    troubled(reader, page)
    _old_program(reader)
    (reader.folder / "backups").mkdir()


def _old_program(reader: Reader) -> None:
    """What it left: a file, and tables in two databases."""
    lines = [f"evt_old_{number},2026-11-01\n" for number in range(2500)]
    (reader.folder / "processed.csv").write_text("event_id,at\n" + "".join(lines))
    with sqlite3.connect(reader.folder / "old.db") as old:
        old.execute("CREATE TABLE seen (id text)")
        old.execute("INSERT INTO seen VALUES ('evt_old_1'), ('evt_older')")
    old.close()
    database = reader.others.enter_context(fresh_database())
    database.do("CREATE TABLE processed (event_id text)")
    database.do("INSERT INTO processed VALUES ('evt_old_1'), ('evt_oldest')")
    reader.env |= variables(database)


def restored(reader: Reader, page: Path) -> None:
    """A store that was put back, and nothing that runs."""
    troubled(reader, page)
    reader.stop()


def backed_up(reader: Reader, page: Path) -> None:
    troubled(reader, page)
    (reader.folder / "backup").mkdir()


def a_database(reader: Reader, page: Path) -> None:
    """A PostgreSQL in which nothing is yet."""
    printed = "postgresql://oncehook:…@db.internal/oncehook?sslmode=verify-full"
    reader.rewrites[printed] = reader.others.enter_context(fresh_database()).url


def a_clone(reader: Reader, page: Path) -> None:
    """This repository's files for machines."""
    shutil.copytree(ROOT / "deploy", reader.folder / "deploy")
    (reader.folder / "etc/systemd/system").mkdir(parents=True)


def a_django_project(reader: Reader, page: Path) -> None:
    """The example that the page links to, and its database."""
    shutil.copytree(ROOT / "examples/django_orders", reader.folder, dirs_exist_ok=True)
    reader.env |= variables(reader.others.enter_context(fresh_database()))
    reader.env["GUNICORN_CMD_ARGS"] = f"--bind 127.0.0.1:{free_port()}"


def installed(reader: Reader, page: Path) -> None:
    """What systemd would have started with the page's settings: it alone has the credentials."""
    a_clone(reader, page)
    settings = next(block.text for block in blocks(page) if block.language == "toml")
    reader.write("etc/oncehook/oncehook.toml", settings)
    credentials = reader.folder / "run/credentials"
    credentials.mkdir(parents=True)
    for name in re.findall(r'credential = "(\w+)"', settings):
        (credentials / name).write_text(SECRET)
    (reader.folder / "var").mkdir(exist_ok=True)
    mine = reader.env
    reader.env = mine | {"CREDENTIALS_DIRECTORY": str(credentials)}
    reader.type("oncehook serve --config /etc/oncehook/oncehook.toml", [])
    reader.env = mine


def a_fish(reader: Reader, page: Path) -> None:
    """The folder that fish makes when it is first started."""
    (reader.folder / ".config/fish/completions").mkdir(parents=True)


def with_files(reader: Reader, page: Path) -> None:
    """Served, with bodies of the reader's own."""
    for name in re.findall(r"--file (\S+\.json)", page.read_text()):
        reader.write(name, json.dumps({"id": "own-1", "idempotency_key": "own-1", "data": {"id": 7}}))
    served(reader, page)


def nothing(reader: Reader, page: Path) -> None:
    """An empty folder."""


SCENES: dict[str, Scene] = {
    "README.md#When it fails": troubled,
    "docs/how-to/charts.md": troubled,
    "docs/how-to/dead-letters.md": troubled,
    "docs/how-to/django.md": a_django_project,
    "docs/how-to/erase.md": troubled,
    "docs/how-to/move-in.md": moved_in,
    "docs/how-to/run/backups.md": backed_up,
    "docs/how-to/run/backups.md#After a restore": restored,
    "docs/how-to/run/docker.md": a_clone,
    "docs/how-to/run/postgresql.md": a_database,
    "docs/how-to/run/systemd.md": installed,
    "docs/providers/discord.md": development,
    "docs/providers/paypal.md": development,
    "docs/providers/sendgrid.md": development,
    "docs/providers/": with_files,
    "docs/reference/api.md": troubled,
    "docs/reference/query.md": troubled,
    "docs/reference/cli.md": everything,
    "docs/reference/cli.md#`oncehook init`": nothing,
    "docs/reference/cli.md#`oncehook completion`": a_fish,
    "docs/runbooks/": troubled,
}
"""By page, folder (for the pages in it that are not named) or section."""


def scene_of(page: str, section: str) -> str | None:
    """Under which name the scene of a section is listed; None: an empty folder."""
    names = [f"{page}#{section}", page, f"{page.rpartition('/')[0]}/"]
    return next((name for name in names if name in SCENES), None)


# -- asking ------------------------------------------------------------------------------------


def ask(reader: Reader, path: str) -> Any:
    return _call(reader, path, None)


def post(reader: Reader, path: str, body: object) -> Any:
    return _call(reader, path, json.dumps(body).encode())


def _call(reader: Reader, path: str, body: bytes | None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{reader.rewrites['4020']}/api/v1/{quote(path, safe='/?=:')}",
        body,
        {"authorization": f"Bearer {reader.env['ONCEHOOK_TOKEN']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def _until(look: Callable[[], list[Any]], many: int) -> list[Any]:
    while len(found := look()) < many:
        time.sleep(0.05)
    return found
