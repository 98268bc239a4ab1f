"""`oncehook config`: check the settings, show which ones hold and why, describe them to an editor.

Problems are lines on stderr and exit code 1; what was asked for goes to stdout. No command here ever prints the
value of a secret.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

import click
import msgspec
from click.shell_completion import get_completion_class

from oncehook import __version__, clock
from oncehook.cli.api import Failed
from oncehook.cli.options import address_of, config_option, from_app
from oncehook.cli.output import say
from oncehook.errors import ConfigError, OncehookError
from oncehook.model import ROLES, Check, Engine, SchemaState
from oncehook.secret import new_token
from oncehook.settings import Loaded, load
from oncehook.settings import schema as describe
from oncehook.settings.forms import duration

if TYPE_CHECKING:
    from oncehook.destinations.base import Destination
    from oncehook.destinations.http import HttpDestination
    from oncehook.inbox import Inbox
    from oncehook.sources import Source
    from oncehook.store.base import Store
    from oncehook.store.sqlite import SqliteStore

LEAST_FREE: Final = 256 << 20
"""Below this much free disk the doctor worries."""
REACH_SECONDS: Final = 3.0
"""How long a destination has to answer the door."""


@click.command("doctor")
@click.argument("app", required=False)
@config_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def doctor(app: str | None, config_file: Path | None, as_json: bool) -> int:
    """Look at settings, secrets, store, schema, disk, clock and destinations, and count everything that must add up.

    With APP (module:inbox) also at what it defines. Destinations are connected to, and sent nothing.
    """
    checks = asyncio.run(_examine(app, config_file))
    if as_json:
        fields = ("name", "ok", "warning", "detail", "hint")
        click.echo(json.dumps([{field: getattr(check, field) for field in fields} for check in checks], indent=2))
    else:
        for check in checks:
            print_check(check)
    return 0 if all(check.ok for check in checks) else 1


def print_check(check: Check) -> None:
    word, color = ("ok", "green") if check.ok else ("FAIL", "red")
    if check.ok and check.warning:
        word, color = "warn", "yellow"
    click.echo(f"{click.style(f'{word:<5}', fg=color)} {check.name:<12} {check.detail}")
    if check.hint and (not check.ok or check.warning):
        click.echo(f"{'':<18} → {check.hint}")


async def _examine(app: str | None, config_file: Path | None) -> list[Check]:
    try:
        inbox, origin = load_inbox(app, config_file)
    except OncehookError as error:
        return [Check("settings", False, str(error), error.hint)]
    detail = f"{origin}: {len(inbox.sources)} sources, {len(inbox.routes)} routes, secrets set"
    store, reached = await asyncio.gather(_examine_store(inbox), _examine_destinations(inbox.destinations.values()))
    return [Check("settings", True, detail), *_examine_sources(inbox.sources.values()), *store, *reached]


def load_inbox(app: str | None, config_file: Path | None) -> tuple[Inbox, str]:
    from oncehook.inbox import Inbox
    from oncehook.settings import load

    if app:
        setup = from_app(app, config_file)
        return setup.inbox, setup.origin
    loaded = load(config_file)
    return Inbox.from_config(loaded.config), str(loaded.origin or "defaults")


# -- sources -----------------------------------------------------------------------------------


def _examine_sources(sources: Iterable[Source]) -> list[Check]:
    from oncehook.reports import proven
    from oncehook.verify import Nothing

    checks = []
    for source in sources:
        body, key = source.body_authenticated, source.key_authenticated
        if not isinstance(source.scheme, Nothing):
            checks.append(Check("covers", True, f"{source.name}: the check covers {proven(body, key)}"))
        checks += [Check("secret", True, *warning, warning=True) for warning in source.secret_warnings()]
    return checks


# -- the store ---------------------------------------------------------------------------------


async def _examine_store(inbox: Inbox) -> list[Check]:
    store = inbox.store
    try:
        state = await store.schema_state()
        if state.pending:
            return [_behind(state, inbox.migrates), *_examine_file(store)]
        await store.open(migrate=False, write=False)
        checks = [Check("schema", True, f"version {state.current} of {state.target}"), *await store.check()]
        return [*checks, *await _examine_strays(inbox), *_examine_file(store), *await _examine_server(store)]
    except OncehookError as error:
        return [Check("store", False, str(error), error.hint)]
    finally:
        await store.close()


def _behind(state: SchemaState, migrates: bool) -> Check:
    if not migrates:
        return Check("schema", False, f"version {state.current} of {state.target}", "Run: oncehook db migrate")
    if state.current == 0:
        return Check("schema", True, "nothing is kept here yet", "The first `oncehook serve` makes it.", warning=True)
    detail = f"version {state.current} of {state.target}: the next start brings it up to date"
    return Check("schema", True, detail, "To do it now, run: oncehook db migrate", warning=True)


async def _examine_strays(inbox: Inbox) -> list[Check]:
    from oncehook.upkeep import STRAY_HINT, strays

    return [
        Check("waiting", True, f'{number:,} for "{name}", which nobody here knows', STRAY_HINT, warning=True)
        for name, number in (await strays(inbox.store, inbox.destinations)).items()
    ]


async def _examine_server(store: Store) -> list[Check]:
    if store.engine is Engine.sqlite:
        return []
    try:
        await store.ping()
    except OncehookError as error:
        return [Check("writable", False, str(error), "Give the role of `store` the right to write to its schema.")]
    return [Check("writable", True, "a write was made and committed")]


def _examine_file(store: Store) -> list[Check]:
    if store.engine is not Engine.sqlite:
        return []
    from oncehook.store.sqlite import SqliteStore
    from oncehook.store.sqlite.hold import holder
    from oncehook.store.sqlite.opening import warn_of_old_library

    assert isinstance(store, SqliteStore)
    folder = store_folder(store)
    free = shutil.disk_usage(folder).free
    enough = free >= LEAST_FREE
    old = warn_of_old_library()
    held = holder(store.path) if store.path.exists() else None
    return [
        _examine_rights(store, folder),
        Check("disk", enough, f"{free >> 20} MiB free beside {store.path}", "Make room; a full disk means 503."),
        Check("library", True, old or "SQLite is recent enough", "Use a newer Python or SQLite.", warning=bool(old)),
        Check("writer", True, f"process {held.pid} {held.address}".strip() if held else "nobody writes it now"),
        Check("clock", True, f"this machine says {clock.now_utc():%Y-%m-%d %H:%M:%S} UTC"),
    ]


def store_folder(store: SqliteStore) -> Path:
    """Where the file is, or the nearest folder that is there already: a start makes the others."""
    return next(folder for folder in store.path.absolute().parents if folder.exists())


def _examine_rights(store: SqliteStore, folder: Path) -> Check:
    places = [folder, *([store.path] if store.path.exists() else [])]
    if all(os.access(place, os.W_OK) for place in places):
        return Check("writable", True, "may be written, and so may its folder")
    hint = "Give them to the user that oncehook runs as."
    return Check("writable", False, f"{store.path} or its folder may not be written", hint)


# -- destinations ------------------------------------------------------------------------------


async def _examine_destinations(destinations: Iterable[Destination]) -> list[Check]:
    from oncehook.destinations.http import HttpDestination

    return await asyncio.gather(*(_reach(one) for one in destinations if isinstance(one, HttpDestination)))


async def _reach(destination: HttpDestination) -> Check:
    await destination.open()
    try:
        tried = await destination.reach(REACH_SECONDS)
    except OncehookError as error:
        hint = "Deliveries to it are tried again by its policy; nothing is lost."
        return Check("reachable", True, f"{destination.name}: {error}", hint, warning=True)
    finally:
        await destination.close()
    return Check("reachable", True, f"{destination.name}: {'connected' if tried else 'not tried, behind a proxy'}")


@click.command("health")
@config_option
@click.option("--server", "address", help="Address of the server (default: that of these settings).", show_envvar=True)
def health(config_file: Path | None, address: str | None) -> int:
    """Exit 0 when the server is ready, 1 when it is not, 3 when nobody answers."""
    from oncehook.model import Arrival
    from oncehook.samples import post
    from oncehook.settings import load

    address = (address or address_of(load(config_file, secrets=False, whole=False).config.server)).rstrip("/")
    try:
        answer = post(f"{address}/readyz", Arrival("", [], b"", method="GET"), timeout=5)
    except OSError as error:
        click.echo(f"oncehook: nobody answers at {address} ({error})", err=True)
        return 3
    click.echo(answer.json().get("status", "not an oncehook server"))
    return 0 if answer.status == 200 else 1


PYTHON: Final = "python"
SQLITE: Final = "sqlite:./oncehook.db"


@click.command("init")
@click.option("--from", "origins", multiple=True, metavar="PRESET", help="Where hooks come from; may be repeated.")
@click.option("--to", "goal", metavar="URL", help="Where they go: a web address, or the word python for a handler.")
@click.option("--store", metavar="URL", help="Which store: sqlite:./oncehook.db or postgresql://…")
@click.option(
    "--file", "file", type=click.Path(path_type=Path, dir_okay=False), default="oncehook.toml", show_default=True,
    help="The file to write.",
)  # fmt: skip
def init(origins: tuple[str, ...], goal: str | None, store: str | None, file: Path) -> int:
    """Ask three questions and write an oncehook.toml."""
    if file.exists():
        raise Failed(f"{file} is there already, and stays as it is.", hint="Write another one with --file NAME.")
    if not (origins and goal and store) and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("There is no terminal to ask on; say --from, --to and --store.")
    origins = origins or _ask_origins()
    goal = goal or click.prompt(
        "Where do they go? A web address, or the word python for a handler of yours", PYTHON, err=True
    )
    store = store or click.prompt("Which store? sqlite:FILE or postgresql://HOST/DATABASE", SQLITE, err=True)
    text = page(origins, goal, store)
    check_page(text)
    with file.open("x", encoding="utf-8") as new:
        new.write(text)
    say([str(file)])
    say(_next_steps(text, goal, file), err=True)
    return 0


def _ask_origins() -> tuple[str, ...]:
    from oncehook import presets

    say([f"  known senders: {', '.join(presets.names())}"], err=True)
    said = click.prompt("Where do hooks come from? One or several, generic for any other", "generic", err=True)
    return tuple(re.split(r"[\s,]+", str(said).strip()))


def check_page(text: str) -> None:
    """What is written must be good: the same check as `oncehook config check`, secrets aside."""
    from oncehook.settings import load

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "oncehook.toml"
        file.write_text(text, encoding="utf-8")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ONCEHOOK_")}
        try:
            load(file, clean, secrets=False)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{file}:", "line "), hint="Nothing was written.") from None


def _next_steps(text: str, goal: str, file: Path) -> list[str]:
    named = "" if file == Path("oncehook.toml") else f" --config {file}"
    variables = dict.fromkeys(re.findall(r'^[^#\n]*\{ env = "(\w+)" \}', text, re.MULTILINE))
    steps = [f"  export {name}=…" for name in variables]
    steps += [f"  oncehook config check{named}", f"  oncehook serve{' app:inbox' if goal == PYTHON else named}"]
    return ["next:", *steps]


# -- the page ----------------------------------------------------------------------------------


def page(origins: Sequence[str], goal: str, store: str) -> str:
    """The whole file."""
    return "\n".join(
        [
            "# Settings of this inbox. `oncehook config check` looks it over, `oncehook config show` says what holds.",
            "# Secrets are named here and never written: this file is safe to commit.",
            "",
            *store_line(store),
            "",
            "[server]",
            'host = "127.0.0.1"',
            "port = 4020",
            '# admin_token = { env = "ONCEHOOK_TOKEN" }   # for the API and the dashboard from elsewhere',
            *(line for origin in origins for line in ["", *source_lines(origin)]),
            "",
            *_goal(origins, goal),
            "",
            "[watermark]",
            "dead = 100             # an alert when so many deliveries were given up",
            'oldest_due = "5m"      # or when something has been due for so long',
            "",
        ]
    )


def store_line(store: str) -> list[str]:
    from oncehook.settings.forms import hide_password

    if hide_password(store) != store:
        raise ConfigError(
            "The store's address holds a password, which does not belong into this file.",
            hint="Write it without, and set PGPASSWORD, or the whole address as ONCEHOOK_STORE.",
        )
    about = "# one file, one process that writes it" if store.startswith("sqlite") else "# any number of processes"
    return [f"store = {_quoted(store)}   {about}"]


def source_lines(origin: str) -> list[str]:
    from oncehook import presets

    if origin not in presets.names():
        from difflib import get_close_matches

        near = get_close_matches(origin, presets.names(), 1)
        hint = f'Did you mean "{near[0]}"?' if near else f"There are: {', '.join(presets.names())}."
        raise ConfigError(f'There is no preset "{origin}".', hint=hint)
    preset = presets.load(origin)
    variable = re.sub(r"\W", "_", origin).upper()
    variable = f"_{variable}" if variable[0].isdigit() else variable
    lines = [
        f"[source.{origin}]",
        f"# {preset.title} posts to /in/{origin}; how to set that up is in docs/providers/{origin}.md",
        f'preset = "{origin}"',
    ]
    if "secret" in preset.needs:
        lines.append(f'secret = {{ env = "{variable}_SECRET" }}      # a list while rotating')
    if "verify_token" in preset.needs:
        lines.append(f'verify_token = {{ env = "{variable}_VERIFY_TOKEN" }}')
    if "public_url" in preset.needs:
        lines.append(f'public_url = "https://inbox.example/in/{origin}"   # the address that is registered there')
    if "key" in preset.needs:
        lines.append('key = ["$.id"]                       # what makes two arrivals the same event')
    if preset.subject is None:
        lines.append('# subject = "$.customer.id"          # events of one subject go one at a time, in order')
    return lines


def _goal(origins: Sequence[str], goal: str) -> list[str]:
    if goal == PYTHON:
        return [
            "# Handlers are written in Python, in app.py; serve it with: oncehook serve app:inbox",
            "#",
            "#   from oncehook import Event, Inbox",
            "#",
            "#   inbox = Inbox.from_toml()",
            "#",
            f'#   @inbox.on("{origins[0]}")',
            "#   async def handle(event: Event) -> None: ...",
        ]
    lines = ["[destination.target]", f"url = {_quoted(goal)}", 'retry = "durable"       # ten attempts over three days']
    if _is_private(goal):
        lines.append("allow_private = true    # this address is in a private network")
    lines.append('# sign = { env = "TARGET_SECRET" }   # then it is signed, and the receiver can verify it')
    for origin in origins:
        lines += ["", "[[route]]", f'from = "{origin}"', 'to = "target"', '# when = { type = "message.*" }']
    return lines


def _is_private(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or "." not in host.strip("[]") or ipaddress.ip_address(host).is_private
    except ValueError:
        return False


def _quoted(text: str) -> str:
    if not text.isprintable():
        raise ConfigError("An address has no control characters.")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@click.command("token")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="viewer", help="What it may do.")
@click.option("--expires", metavar="DURATION", help='After how long it ends, as in "90d".')
@click.option("--sources", metavar="NAMES", help="The only sources it sees and acts on, as in stripe,github.")
@click.option("--no-payloads", is_flag=True, help="It sees events, but neither bodies nor header values.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def token(name: str, role: str, expires: str | None, sources: str | None, no_payloads: bool, as_json: bool) -> None:
    """Make a bearer token for NAME: somebody or something that may use the API.

    Put the token into the environment of the server, and the lines into oncehook.toml.
    """
    token = new_token()
    variable = "ONCEHOOK_TOKEN_" + (re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_") or "X")
    limits = _limits(expires, sources, no_payloads)
    if as_json:
        fields = {"name": name, "role": role, "token": token, "variable": variable, **limits}
        click.echo(msgspec.json.encode(fields))
        return
    click.echo(token)
    shown = msgspec.json.encode(name).decode()
    click.echo(f"Shown this once. In the server's environment: {variable}\nIn oncehook.toml:\n", err=True)
    lines = [f"name = {shown}", f'role = "{role}"', f'token = {{ env = "{variable}" }}']
    lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in limits.items()]
    click.echo("\n".join(["[[server.tokens]]", *lines]), err=True)


def _limits(expires: str | None, sources: str | None, no_payloads: bool) -> dict[str, object]:
    """The settings of a token that has limits."""
    limits: dict[str, object] = {}
    if expires is not None:
        ends = clock.now_utc() + timedelta(seconds=duration(expires))
        limits["expires"] = f"{ends:%Y-%m-%dT%H:%M:%SZ}"
    if sources is not None:
        limits["sources"] = [name.strip() for name in sources.split(",") if name.strip()]
        if not limits["sources"]:
            raise click.UsageError("Which sources? Name them as in --sources stripe,github.")
    return limits | ({"payloads": False} if no_payloads else {})


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash   eval "$(oncehook completion bash)"              in ~/.bashrc
    zsh    eval "$(oncehook completion zsh)"               in ~/.zshrc
    fish   oncehook completion fish > ~/.config/fish/completions/oncehook.fish
    """
    from oncehook.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "oncehook", "_ONCEHOOK_COMPLETE").source())


@click.command("version")
def version() -> None:
    """Print the version."""
    click.echo(__version__)


_config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Settings file, instead of ./oncehook.toml.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="As one JSON document.")

Counts: TypeAlias = tuple[int, int, int]
"""How many sources, destinations and routes there are."""


@click.group("config")
def config() -> None:
    """The settings: check them, show them, describe them."""


@config.command("check")
@click.argument("app", required=False)
@_config_option
@_json_option
@click.option("--without-secrets", is_flag=True, help="Do not ask whether secrets are set: for CI, which has none.")
def check(app: str | None, config_file: Path | None, as_json: bool, without_secrets: bool) -> int:
    """Find everything that is wrong with the settings, and with APP (module:inbox) beside them; exit 1 if so."""
    if app and without_secrets:
        raise click.UsageError("An app is made with its secrets; --without-secrets is for the file alone.")
    try:
        loaded, counts = load_app(app, config_file) if app else _file(config_file, secrets=not without_secrets)
    except ConfigError as error:
        return _refuse(error, as_json)
    if as_json:
        document = {"ok": True, "origin": _origin(loaded), "problems": [], "warnings": list(loaded.warnings)}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return 0
    if not app:  # loading an app tells them
        _warn(loaded)
    found = [*([app] if app else []), *([str(loaded.origin)] if loaded.origin else [])]
    click.echo(f"OK  {' and '.join(found) or 'no settings file here, defaults hold'}  {_summary(counts)}")
    return 0


def _file(config_file: Path | None, *, secrets: bool) -> tuple[Loaded, Counts]:
    loaded = load(config_file, secrets=secrets)
    config = loaded.config
    return loaded, (len(config.source), len(config.destination), len(config.route))


def load_app(app: str, config_file: Path | None) -> tuple[Loaded, Counts]:
    from oncehook.cli.options import from_app

    setup = from_app(app, config_file)
    inbox = setup.inbox
    return setup.loaded, (len(inbox.sources), len(inbox.destinations), len(inbox.routes))


@config.command("show")
@_config_option
@_json_option
def show(config_file: Path | None, as_json: bool) -> int:
    """Show the settings that hold, and where each comes from. Secrets are shown by name only."""
    try:
        loaded = load(config_file, secrets=False, whole=False)
    except ConfigError as error:
        return _refuse(error, as_json=False)
    if as_json:
        settings = {one.name: {"value": one.value, "from": one.origin} for one in loaded.settings()}
        document = {"origin": _origin(loaded), "settings": settings, "warnings": list(loaded.warnings)}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return 0
    _warn(loaded)
    click.echo(f"# {_origin(loaded) or 'no settings file here, defaults hold'}")
    rows = [(one.name, _as_text(one.value), one.origin) for one in loaded.settings()]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        click.echo(f"{name:<{name_width}}  {value:<{min(value_width, 48)}}  {click.style(origin, dim=True)}")
    return 0


@config.command("schema")
@_config_option
def schema(config_file: Path | None) -> None:
    """Print the JSON Schema of oncehook.toml, for editors. The same for every file."""
    click.echo(json.dumps(describe(), indent=2, ensure_ascii=False))


@config.command("reference")
def reference() -> None:
    """Print every setting with its meaning and default, as a page in Markdown."""
    from oncehook.settings.reference import reference as page

    click.echo(page(), nl=False)


def _refuse(error: ConfigError, as_json: bool) -> int:
    problems = str(error).splitlines()
    if as_json:
        click.echo(json.dumps({"ok": False, "problems": problems}, indent=2, ensure_ascii=False))
    else:
        for problem in problems:
            click.echo(problem, err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
    return 1


def _warn(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)


def _origin(loaded: Loaded) -> str | None:
    return str(loaded.origin) if loaded.origin else None


def _summary(counts: Counts) -> str:
    words = zip(("source", "destination", "route"), counts, strict=True)
    return ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for word, number in words)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
