"""The command line from outside: real processes, their exit codes, and what they say on which stream."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request

import pytest
from click.testing import CliRunner
from tests.servers import free_port

from oncehook.cli import COMMANDS, cli, main
from oncehook.cli.browse import attempt_lines
from oncehook.cli.options import address_of
from oncehook.settings import ServerConfig

CONFIG = """
store = "sqlite:./inbox.db"

[server]
port = {port}

[source.orders]
verify = {{ scheme = "hmac", header = "X-Signature", prefix = "sha256=" }}
secret = {{ env = "ORDERS_SECRET" }}
key = ["$.id"]
budget = "90s"

[source.token]
verify = {{ scheme = "token", query = "token" }}
secret = {{ env = "ORDERS_SECRET" }}
key = ["$.id"]
budget = "90s"
"""
HEAVY = ("starlette", "uvicorn", "uvloop", "httptools", "psycopg", "jinja2", "cryptography")


def environment(folder: Path, **more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ONCEHOOK_")}
    return {**ours, "ORDERS_SECRET": "canary-secret", "XDG_STATE_HOME": str(folder / "state"), **more}


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """One command in a folder, as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "oncehook", *arguments],
        capture_output=True, text=True, cwd=folder, env=environment(folder, **env), timeout=60,
    )  # fmt: skip


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, **env: str) -> Iterator[str]:
    """`oncehook serve` until the block ends; gives its address."""
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "oncehook", "serve", *arguments]
        process = subprocess.Popen(command, stderr=log, cwd=folder, env=environment(folder, **env))
    try:
        yield wait_until_ready(process, folder / "log")
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    assert code == 0


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if found := re.search(r"ready on (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.01)
    raise AssertionError(log.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "oncehook.toml").write_text(CONFIG.format(port=free_port()))
    return tmp_path


def status_of(request: Request) -> int:
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def lines(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in text.splitlines()]


# -- manners -----------------------------------------------------------------------------------


BELOW_DB = [("db", name) for name in ("migrate", "status", "sql", "prune", "restored")]


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), *BELOW_DB], ids=" ".join)
def test_every_command_has_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [*command, "--help"])
    assert done.exit_code == 0
    assert done.stdout.startswith("Usage: ")
    assert not done.stderr
    assert not list(tmp_path.iterdir()), "help leaves nothing behind"


CALL = """
import sys
sys.argv = ["oncehook", "{argument}"]
from oncehook.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
"""


@pytest.mark.parametrize(
    "program", ["import oncehook", CALL.format(argument="--help"), CALL.format(argument="version")]
)
def test_nothing_heavy_is_imported_for_little(program: str) -> None:
    assert not loaded_by(program, HEAVY)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "version"])
def test_help_does_not_wait_for_the_inbox(command: str) -> None:
    program = CALL.format(argument='", "'.join((command, "--help")))
    assert not loaded_by(program, (*HEAVY, "oncehook.inbox", "oncehook.settings.build", "oncehook.presets"))


LATE = (
    "anyio", "aiohttp", "cryptography", "email", "http.client", "importlib.metadata", "jinja2", "joserfc",
    "jsonpath_rfc9535", "oncehook.claims", "oncehook.cli.browse", "oncehook.contrib", "oncehook.demo",
    "oncehook.presets.stripe", "oncehook.store.postgres", "oncehook.testing", "oncehook.web.api",
    "oncehook.web.dashboard", "oncehook.whatsapp", "opentelemetry", "prometheus_client", "psycopg", "starlette",
    "webbrowser", "zoneinfo",
)  # fmt: skip
"""Needed by a page, a scraper, another engine or another source: together they would take as long as all the rest."""
WITH_A_DESTINATION = (
    CONFIG
    + """
[destination.shop]
url = "https://shop.example/hooks"

[[route]]
from = "orders"
to = "shop"
"""
)


def test_serve_is_ready_before_it_imports_what_only_pages_need(tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text(WITH_A_DESTINATION.format(port=free_port()))
    with serving(tmp_path, PYTHONPROFILEIMPORTTIME="1") as address:
        assert not imported_late(read_log(tmp_path).partition("ready on")[0])
        for path in ("/", "/metrics"):
            assert urllib.request.urlopen(address + path).status == 200
    assert {"starlette", "jinja2", "prometheus_client", "oncehook.web.api"} <= imported_late(read_log(tmp_path))


def test_a_worker_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text(WITH_A_DESTINATION.format(port=free_port()))
    done = run(tmp_path, "worker", "--drain", PYTHONPROFILEIMPORTTIME="1")
    assert "oncehook worker ready" in done.stderr
    assert not imported_late(done.stderr, *LATE, "oncehook.web")


def test_garbage_is_collected_again_once_a_server_is_ready(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import gc\n"
        "from pathlib import Path\n"
        "from oncehook import Event, Inbox\n"
        "inbox = Inbox('sqlite:./app.db')\n"
        "inbox.source('orders', verify='none', key='$.id', budget='90s')\n"
        "at_import = gc.isenabled()\n"
        "@inbox.on('orders')\n"
        "async def note(event: Event) -> None:\n"
        "    Path('new').write_text(f'{at_import} {gc.isenabled()} {gc.get_freeze_count() > 1000}')\n"
        "    Path('new').rename('noted')\n"
    )
    with serving(tmp_path, "app:inbox", "--port", "0") as address:
        urllib.request.urlopen(Request(f"{address}/in/orders", b'{"id": "1"}', {"Content-Type": "application/json"}))
        while not (tmp_path / "noted").exists():
            time.sleep(0.02)
    assert (tmp_path / "noted").read_text() == "False True True"


def imported_late(log: str, *names: str) -> set[str]:
    """Those of LATE, or of other names, that a process with PYTHONPROFILEIMPORTTIME has imported."""
    imported = {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}
    assert "oncehook.inbox" in imported
    return {name for name in names or LATE if any(f"{one}.".startswith(f"{name}.") for one in imported)}


def read_log(folder: Path) -> str:
    return (folder / "log").read_text()


def loaded_by(program: str, names: tuple[str, ...]) -> list[str]:
    program += f"\nimport sys; print('loaded:', *[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("version",), 0, ""),
        (("--version",), 0, ""),
        (("nonsense",), 2, 'There is no command "nonsense"'),
        (("serve", "--nonsense"), 2, "No such option"),
        (("serve", "--port", "99999"), 2, "99999"),
        (("send", "orders", "--repeat", "0"), 2, "repeat"),
        (("send", "nobody"), 2, 'There is no source "nobody"'),
        (("send",), 2, "Which source?"),
        (("send", "orders", "--to", "nowhere"), 2, "not a web address"),
        (("send", "orders", "--to", "http://127.0.0.1:1/in/x"), 3, "nobody answers"),
        (("send", "orders"), 3, "nobody answers"),
        (("health",), 3, "nobody answers"),
        (("health", "--server", "ftp://x"), 2, "not a web address"),
        (("db", "status", "--config", "missing.toml"), 2, "missing.toml"),
        (("serve", "nothing:here"), 2, "There is no nothing.py in"),
        (("serve", "json:nothing"), 2, "Write module:attribute"),
        (("serve", "./app.py"), 2, "Write module:attribute"),
        (("serve", ":inbox"), 2, "Write module:attribute"),
        (("serve", "json:dumps"), 2, "not an Inbox"),
    ],
)
def test_exit_codes(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["oncehook", *arguments])
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert (end.value.code or 0) == code
    assert says in said.err
    if code:
        assert not said.out, "on failure stdout is empty"


def test_a_program_that_is_not_there_is_told_from_one_that_cannot_import(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "app:inbox")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            f"oncehook: There is no app.py in {tmp_path}.",
            "  Run this in the folder of app.py, or write one that makes an inbox.",
        ],
    )
    (tmp_path / "app.py").write_text("import stripey\n")
    done = run(tmp_path, "serve", "app:inbox")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            "oncehook: app:inbox cannot be loaded: No module named 'stripey'",
            "  app.py imports it; is it installed in this environment?",
        ],
    )
    done = run(tmp_path, "serve", "app.py")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "  Write module:attribute, as in app:inbox.")


def test_a_store_that_is_not_reachable_is_3(tmp_path: Path) -> None:
    done = run(tmp_path, "db", "status", ONCEHOOK_STORE="postgresql://user:canary@127.0.0.1:1/none?connect_timeout=2")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "canary" not in done.stderr


def test_a_store_that_cannot_be_opened_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = run(tmp_path, "serve", "--port", "0", ONCEHOOK_STORE="sqlite:./file/inbox.db")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert "listen" not in done.stderr


# -- serve -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_public_address_needs_more_than_a_flag(folder: Path, host: str) -> None:
    done = run(folder, "serve", "--host", host)
    assert done.returncode == 2
    assert "admin_token" in done.stderr
    assert "TLS" in done.stderr
    assert not (folder / "inbox.db").exists()


def test_without_settings_only_this_machine(tmp_path: Path) -> None:
    token = {
        "ONCEHOOK_SERVER__ADMIN_TOKEN": "a token of letters",
        "ONCEHOOK_SERVER__PUBLIC_WITHOUT_TLS": "true",
    }
    done = run(tmp_path, "serve", "--host", "0.0.0.0", **token)
    assert done.returncode == 2
    assert "this machine only" in done.stderr


def test_a_taken_port_is_told(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(folder, "serve", "--port", str(port))
    assert done.returncode == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in done.stderr


def test_flags_lie_over_settings(folder: Path) -> None:
    settings = folder / "oncehook.toml"
    settings.write_text(settings.read_text().replace("[server]", '[server]\nhost = "192.0.2.1"'))
    with serving(folder, "--host", "localhost", "--port", "0") as address:
        assert address.startswith("http://localhost:")


def test_who_is_told_that_it_is_ready_may_stop_it(folder: Path) -> None:
    """R56: in order, however soon."""
    code = (
        "import os, signal; from oncehook.cli import main, run; "
        "run._greet = lambda *_: os.kill(os.getpid(), signal.SIGTERM); main(['serve', '--port', '0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(folder), timeout=60)
    assert done.returncode == 0


def test_the_development_inbox(tmp_path: Path) -> None:
    with serving(tmp_path, "--port", "0") as address:
        for sample in (("dev", "hello"), ("stripe",)):
            words = ("send", *sample, "--repeat", "2", "--json", "--to", f"{address}/in/{sample[0]}")
            while '"http_status": 503' in (sent := run(tmp_path, *words)).stdout:
                """Its senders have little patience, and this machine may be busy."""
            assert sent.returncode == 0
            assert [line["status"] for line in lines(sent.stdout)] == ["accepted", "duplicate"]
        forged = run(tmp_path, "send", "stripe", "--bad-signature", "--to", f"{address}/in/stripe")
        assert "signature_invalid" in forged.stdout
        for tunnel in ({"X-Forwarded-For": "127.0.0.1"}, {"Origin": "https://example.org"}):
            answer = status_of(Request(f"{address}/in/dev", b"{}", tunnel))
            assert answer == 401, "development sources are for direct requests of this machine"
    keys = tmp_path / "state" / "oncehook" / "development-keys.json"
    assert keys.stat().st_mode & 0o777 == 0o600


def test_half_a_file_of_development_keys_is_made_anew(tmp_path: Path) -> None:
    keys = tmp_path / "state" / "oncehook" / "development-keys.json"
    keys.parent.mkdir(parents=True)
    keys.write_text('{"stripe": ["abc')
    done = run(tmp_path, "send", "--list")
    assert done.returncode == 0
    assert isinstance(json.loads(keys.read_text()), dict)


def test_an_inbox_made_in_python(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from oncehook import Inbox\n"
        "inbox = Inbox('sqlite:./app.db')\n"
        "inbox.source('orders', verify={'scheme': 'hmac', 'header': 'X-Signature'}, secret_env='ORDERS_SECRET')\n"
    )
    with serving(tmp_path, "app:inbox", "--port", "0") as address:
        assert run(tmp_path, "health", "--server", address).returncode == 0
    assert (tmp_path / "app.db").exists()


# -- send, health, doctor, db on a running server ----------------------------------------------


def test_send_and_health(folder: Path) -> None:
    with serving(folder) as address:
        sent = run(folder, "send", "orders", "order.paid", "--repeat", "2", "--json")
        assert sent.returncode == 0
        first, second = lines(sent.stdout)
        assert (first["status"], second["status"]) == ("accepted", "duplicate")
        assert first["event_id"] == second["event_id"]
        for source in ("orders", "token"):
            forged = run(folder, "send", source, "--bad-signature", "--json")
            assert forged.returncode == 0
            assert lines(forged.stdout)[0]["code"] == "signature_invalid"
        spoken = run(folder, "send", "orders")
        assert re.match(r"→ 200 in \d+ ms   evt_[0-9a-f]{32}   accepted", spoken.stdout)
        (folder / "body.json").write_text('{"id": "from a file"}')
        assert run(folder, "send", "orders", "--file", "body.json").returncode == 0
        elsewhere = run(folder, "send", "orders", "--to", f"{address}/livez")
        assert elsewhere.returncode == 1
        healthy = run(folder, "health")
        assert (healthy.returncode, healthy.stdout) == (0, "ready\n")
    with contextlib.closing(sqlite3.connect(folder / "inbox.db")) as store:
        kept = store.execute("SELECT key, body, head FROM events ORDER BY id").fetchall()
    assert [key for key, _, _ in kept][-1] == "from a file"
    assert b"canary-secret" not in b"".join(body + head for _, body, head in kept)
    assert kept[0][2].count(b"\r\nhost: ") == 1, "two Host headers are refused by many"


def test_doctor(folder: Path) -> None:
    early = run(folder, "doctor")
    assert early.returncode == 0, early.stdout
    assert re.search(r"warn +schema +nothing is kept here yet\n +→ The first `oncehook serve` makes it.", early.stdout)
    assert re.search(r"ok +writable ", early.stdout)
    assert not (folder / "inbox.db").exists(), "it only looks"
    assert "doctor module:inbox" not in early.stdout
    (folder / "elsewhere").mkdir()
    bare = run(folder / "elsewhere", "doctor")
    assert re.search(r"warn +settings .*\n +→ .*: oncehook doctor module:inbox\n", bare.stdout), (
        "a program may define more"
    )
    held_back = run(folder, "doctor", ONCEHOOK_MIGRATE="false")
    assert (held_back.returncode, "→ Run: oncehook db migrate" in held_back.stdout) == (1, True)
    with serving(folder):
        run(folder, "send", "orders", "--repeat", "3")
        well = run(folder, "doctor")
        assert well.returncode == 0, well.stdout
        told = json.loads(run(folder, "doctor", "--json").stdout)
        assert all(check["ok"] for check in told)
        assert {"settings", "schema", "writable", "file", "arrivals", "events", "keys", "owner"} <= {
            c["name"] for c in told
        }
    with contextlib.closing(sqlite3.connect(folder / "inbox.db", isolation_level=None)) as store:
        store.execute("UPDATE counters SET n = n + 1 WHERE what = 'accepted'")
    ill = run(folder, "doctor")
    assert ill.returncode == 1
    assert re.search(r"FAIL +arrivals +does not hold", ill.stdout)
    assert "→ This must never happen" in ill.stdout


def test_doctor_and_send_know_what_was_made_while_it_ran(folder: Path) -> None:
    keys = {"ONCEHOOK_SECRET_KEY": base64.b64encode(bytes(range(32))).decode()}
    with serving(folder, **keys):
        run(folder, "sources", "create", "trigger", 'verify={scheme="hmac",header="X-Sig"}', "secret=generate", **keys)
        run(folder, "destinations", "create", "crm", "url=http://127.0.0.1:9/hooks", **keys)
        lost = run(folder, "routes", "create", "from=trigger", "to=crn", **keys)
        assert "crm" in lost.stderr, "what is stored is suggested, too"
        run(folder, "routes", "create", "from=trigger", "to=crm", **keys)
        sent = run(folder, "send", "trigger", **keys)
        assert sent.stdout.endswith("accepted\n"), sent
        unread = run(folder, "send", "trigger")
        assert (unread.returncode, "cannot be read here" in unread.stderr) == (2, True)
        while "1 dead letter\n" not in (found := run(folder, "doctor", **keys)).stdout:
            assert found.returncode == 0, found.stdout
        assert "1 source and 1 destination, made while it ran" in found.stdout
        assert re.search(r"ok +covers +trigger: the check covers body and key", found.stdout)
        assert re.search(r"warn +reachable +crm: 127.0.0.1:9 is not called", found.stdout)
        blind = run(folder, "doctor")
        assert (blind.returncode, "FAIL  stored       source trigger: " in blind.stdout) == (1, True)


def test_doctor_warns_of_a_source_that_no_proxy_reaches(tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text(
        '[source.near]\nverify = "none"\n[source.open]\nverify = { scheme = "none", confirm = "anyone may send" }\n'
    )
    found = run(tmp_path, "doctor").stdout
    assert re.search(r"warn +verify +near: .* direct requests of this machine only", found)
    assert re.search(r"ok +verify +open: .* anyone may send", found)


def test_doctor_on_a_file_that_is_no_database(folder: Path) -> None:
    (folder / "inbox.db").write_bytes(b"this is no database" * 1000)
    done = run(folder, "doctor")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "FAIL" in done.stdout


@pytest.mark.parametrize("command", ["serve", "events"])
def test_a_file_that_is_no_database(folder: Path, command: str) -> None:
    (folder / "inbox.db").write_bytes(b"this is no database" * 1000)
    done = run(folder, command)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (3, "", False), done.stderr
    assert "inbox.db cannot be opened: file is not a database" in done.stderr
    (folder / "inbox.db").unlink()
    (folder / "inbox.db").mkdir()
    done = run(folder, command)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (3, "", False), done.stderr
    assert "inbox.db is not a file" in done.stderr


def test_db(folder: Path) -> None:
    behind = run(folder, "db", "status")
    assert behind.returncode == 1
    assert behind.stdout.startswith("version 0 of ")
    done = run(folder, "db", "migrate")
    assert (done.returncode, done.stdout.startswith("applied 0001_")) == (0, True)
    assert "schema at version" in done.stderr
    state = run(folder, "db", "status", "--json")
    assert state.returncode == 0
    assert json.loads(state.stdout)["pending"] == []
    with serving(folder):
        again = run(folder, "db", "migrate")
        assert (again.returncode, again.stdout) == (0, ""), "with nothing to do, a running server is not in the way"
        assert run(folder, "db", "status").returncode == 0


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_db_sql_connects_to_nothing(tmp_path: Path, engine: str) -> None:
    done = run(tmp_path, "db", "sql", "--engine", engine)
    assert done.returncode == 0
    assert "CREATE TABLE events" in done.stdout
    assert not list(tmp_path.iterdir())


def test_health_says_no_while_the_store_cannot_write(folder: Path) -> None:
    with serving(folder), contextlib.closing(sqlite3.connect(folder / "inbox.db", isolation_level=None)) as rival:
        rival.execute("BEGIN IMMEDIATE")
        while (done := run(folder, "health")).returncode == 3:
            """It was not answered within its few seconds."""
        assert (done.returncode, done.stdout) == (1, "not ready\n")
        rival.execute("ROLLBACK")


def test_the_demo(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--seconds", "1", "--rate", "20", "--port", "0", TMPDIR=str(tmp_path))
    assert done.returncode == 0
    assert re.search(r"\d+ hooks sent, .*: \d+ events kept", done.stderr)
    assert not list(tmp_path.glob("oncehook-demo-*"))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        *(("127.0.0.1", "http://127.0.0.1:4020"), ("0.0.0.0", "http://127.0.0.1:4020"), ("::", "http://[::1]:4020")),
        *(("::1", "http://[::1]:4020"), ("localhost", "http://localhost:4020")),
    ],
)
def test_where_commands_find_the_server(host: str, address: str) -> None:
    assert address_of(ServerConfig(host=host)) == address


def test_what_a_handler_returned_is_shown_on_one_line() -> None:
    made = {
        "run": 1, "attempt": 1, "outcome": "done", "category": None, "status": None, "duration": 0.25, "id": "att_1",
        "started_at": "2026-11-17T12:00:00Z", "error": None, "answer": None, "result": None,
        "request": None, "times": None,
    }  # fmt: skip
    assert len(attempt_lines(made)) == 1
    assert attempt_lines({**made, "result": 0})[1:] == ["    returned 0"]
    [_, line] = attempt_lines({**made, "result": {"note": "a\n\x1b[2Kb", "n": 1}})
    assert line.startswith('    returned {"note":"a')
    assert line.isprintable()
