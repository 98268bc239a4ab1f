"""Commands about the settings: config, init, token, doctor and health.

Problems are lines on stderr; the exit code is 2 for wrong settings, as `serve` has it, and 1 for checks that fail.
What was asked for goes to stdout. Only `token` prints a secret, once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import click

from oncehook import clock
from oncehook.cli.api import Failed, no_answer
from oncehook.cli.complete import complete_preset
from oncehook.cli.help import CommandGroup
from oncehook.cli.options import address_of, app_option, build_setup, config_option, json_option, takes_app, warn
from oncehook.cli.output import answer, document, json_line, say, sentence, table
from oncehook.errors import ConfigError, OncehookError, Undecryptable
from oncehook.human import count, suggest
from oncehook.model import ROLES, Check, Engine, Noun, SchemaState

if TYPE_CHECKING:  # the settings and the store import much: --help must not wait for that
    from oncehook.destinations.base import Destination
    from oncehook.destinations.http import HttpDestination
    from oncehook.inbox import Inbox
    from oncehook.settings import Loaded
    from oncehook.sources import Source
    from oncehook.store.base import Store

# -- config ------------------------------------------------------------------------------------

_existing_config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Settings file, instead of ./oncehook.toml.",
)
NO_FILE: Final = "no settings file here, defaults hold"


@click.group("config", cls=CommandGroup)
def config() -> None:
    """Check, show and describe the settings."""


@config.command("check")
@takes_app
@_existing_config_option
@json_option
@click.option("--without-secrets", is_flag=True, help="Do not ask whether secrets are set: for CI, which has none.")
def check(app: str | None, config_file: Path | None, as_json: bool, without_secrets: bool) -> int:
    """Find everything that is wrong with the settings, and with APP (module:inbox) beside them; exit 2 if so."""
    from oncehook.settings import load

    if app and without_secrets:
        raise click.UsageError("An app is made with its secrets; --without-secrets is for the file alone.")
    try:
        if app:
            setup = build_setup(app, config_file)
            loaded, inbox = setup.loaded, setup.inbox
            summary = _summary(inbox.sources, inbox.destinations, inbox.routes)
        else:
            loaded = load(config_file, secrets=not without_secrets)
            summary = _summary(loaded.config.source, loaded.config.destination, loaded.config.route)
    except ConfigError as error:
        return _refuse(error, as_json)
    if not (app or as_json):  # an app logs these when it is loaded
        warn(loaded.warnings)
    found = " and ".join([*([app] if app else []), *([str(loaded.origin)] if loaded.origin else [])])
    facts = {"ok": True, "origin": _origin(loaded), "problems": [], "warnings": list(loaded.warnings)}
    return answer(facts, [f"OK  {found or NO_FILE}  {summary}"], as_json=as_json)


@config.command("show")
@_existing_config_option
@json_option
def show(config_file: Path | None, as_json: bool) -> int:
    """Show the settings that hold, and where each comes from. Secrets are shown by name only."""
    from oncehook.settings import load

    try:
        loaded = load(config_file, secrets=False, whole=False)
    except ConfigError as error:
        return _refuse(error, as_json=False)
    if as_json:
        settings = {one.name: {"value": one.value, "from": one.origin} for one in loaded.settings()}
        facts = {"origin": _origin(loaded), "settings": settings, "warnings": list(loaded.warnings)}
        return answer(facts, (), as_json=True)
    warn(loaded.warnings)
    shown = [
        (one.name, one.value if isinstance(one.value, str) else json_line(one.value), one.origin)
        for one in loaded.settings()
    ]
    width = min(max(len(value) for _, value, _ in shown), 48)
    rows = [(name, f"{value:<{width}}  {click.style(origin, dim=True)}") for name, value, origin in shown]
    say([f"# {_origin(loaded) or NO_FILE}", *table((), rows)])
    return 0


@config.command("schema")
@_existing_config_option
def schema(config_file: Path | None) -> int:
    """Print the JSON Schema of oncehook.toml, for editors. The same for every file."""
    from oncehook.settings.describe import schema as describe

    return answer(describe(), (), as_json=True)


@config.command("reference")
def reference() -> None:
    """Print every setting with its meaning and default, as a page in Markdown."""
    from oncehook.settings.describe import reference as page

    click.echo(page(), nl=False)


def _refuse(error: ConfigError, as_json: bool) -> int:
    problems = str(error).splitlines()
    if as_json:
        say([document({"ok": False, "problems": problems})])
    else:
        for place, colon, sentence in (line.partition(": ") for line in problems):
            click.echo(f"{click.style(place, bold=True)}{colon}{sentence}", err=True)
        if error.hint:
            click.echo(f"  {click.style(error.hint, dim=True)}", err=True)
    return 2


def _origin(loaded: Loaded) -> str | None:
    return str(loaded.origin) if loaded.origin else None


def _summary(*named: Iterable[object]) -> str:
    words = zip(("source", "destination", "route"), named, strict=True)
    return ", ".join(count(len(list(found)), word) for word, found in words)


# -- init --------------------------------------------------------------------------------------

PYTHON: Final = "python"
SQLITE: Final = "sqlite:./oncehook.db"
NOTHING_WRITTEN: Final = "Nothing was written."


@click.command("init")
@click.option(
    "--from", "origins", multiple=True, metavar="PRESET", shell_complete=complete_preset,
    help="Where hooks come from; may be repeated.",
)  # fmt: skip
@click.option("--to", "goal", metavar="URL", help="Where they go: a web address, or the word python for a handler.")
@click.option("--store", metavar="URL", help="Which store: sqlite:./oncehook.db or postgresql://…")
@click.option(
    "--file", "file", type=click.Path(path_type=Path, dir_okay=False), default="oncehook.toml", show_default=True,
    help="The file to write.",
)  # fmt: skip
def init(origins: tuple[str, ...], goal: str | None, store: str | None, file: Path) -> int:
    """Ask three questions and write an oncehook.toml."""
    from oncehook import presets

    if file.exists():
        raise Failed(f"{file} is there already, and stays as it is.", hint="Write another one with --file NAME.")
    if not (origins and goal and store) and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("There is no terminal to ask on; say --from, --to and --store.")
    if not origins:
        say(sentence(", ".join(presets.names()), "known senders: ", "  ", err=True), err=True)
        asked = "Where do hooks come from? One or several, generic for any other"
        origins = _read_names(_ask(asked, "generic", lambda names: page(_read_names(names), PYTHON, SQLITE)))
    chosen = origins
    goal = goal or _ask(
        "Where do they go? A web address, or the word python for a handler of yours",
        PYTHON,
        lambda goal: page(chosen, goal, SQLITE),
    )
    store = store or _ask(
        "Which store? sqlite:FILE or postgresql://HOST/DATABASE", SQLITE, lambda store: page(chosen, PYTHON, store)
    )
    text = page(origins, goal, store)
    _check_page(text)
    with file.open("x", encoding="utf-8") as new:
        new.write(text)
    say([str(file)])
    say(_next_steps(text, goal, file), err=True)
    return 0


def _ask(question: str, default: str, write: Callable[[str], str]) -> str:
    """Ask until the answer makes a good page."""
    while True:
        answer = str(click.prompt(question, default, err=True)).strip()
        try:
            _check_page(write(answer))
        except ConfigError as error:
            for line in (*str(error).splitlines(), *([error.hint] if error.hint != NOTHING_WRITTEN else [])):
                click.echo(f"  {line}", err=True)
        else:
            return answer


def _read_names(names: str) -> tuple[str, ...]:
    return tuple(re.split(r"[\s,]+", names.strip()))


def _check_page(text: str) -> None:
    """Refuse a page that `oncehook config check` would refuse for other reasons than missing secrets."""
    from oncehook.settings import load

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "oncehook.toml"
        file.write_text(text, encoding="utf-8")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ONCEHOOK_")}
        try:
            load(file, clean, secrets=False)
        except ConfigError as error:
            # Neither the line nor the table is known to who answered: the page does not exist yet.
            told = re.sub(rf"(?m)^{re.escape(str(file))}:\d+: ", "", str(error)).replace(" in [destination.target]", "")
            raise ConfigError(told, hint=NOTHING_WRITTEN) from None


def _next_steps(text: str, goal: str, file: Path) -> list[str]:
    named = "" if file == Path("oncehook.toml") else f" --config {file}"
    variables = dict.fromkeys(re.findall(r'^[^#\n]*\{ env = "(\w+)" \}', text, re.MULTILINE))
    steps = [f"  write app.py, as the end of {file} shows"] if goal == PYTHON and not Path("app.py").exists() else []
    steps += [f"  export {name}=…" for name in variables]
    steps += [f"  oncehook config check{named}", f"  oncehook serve{' app:inbox' if goal == PYTHON else named}"]
    return ["next:", *steps]


# -- the page ----------------------------------------------------------------------------------


def page(origins: Sequence[str], goal: str, store: str) -> str:
    return "\n".join(
        [
            "# Settings of this inbox. `oncehook config check` looks it over, `oncehook config show` says what holds.",
            "# Secrets are named here and never written: this file is safe to commit.",
            "",
            *_store_lines(store),
            "",
            "[server]",
            'host = "127.0.0.1"',
            "port = 4020",
            '# admin_token = { env = "ONCEHOOK_TOKEN" }   # for the API and the dashboard from elsewhere',
            *(line for origin in origins for line in ["", *_source_lines(origin)]),
            "",
            *_goal(origins, goal),
            "",
            "[watermark]",
            "dead = 100             # an alert when so many deliveries were given up",
            'oldest_due = "5m"      # or when something has been due for so long',
            "",
        ]
    )


def _store_lines(store: str) -> list[str]:
    from oncehook.settings.values import hide_password

    if hide_password(store) != store:
        raise ConfigError(
            "The store's address holds a password, which does not belong into this file.",
            hint="Write it without, and set PGPASSWORD, or the whole address as ONCEHOOK_STORE.",
        )
    about = (
        "# one file, any number of processes on this machine"
        if store.startswith("sqlite")
        else "# any number of processes"
    )
    return [f"store = {_quote(store)}   {about}"]


def _source_lines(origin: str) -> list[str]:
    from oncehook import presets

    if origin not in presets.names():
        raise ConfigError(f'There is no preset "{origin}".', hint=suggest(origin, presets.names()))
    preset = presets.load(origin)
    variable = re.sub(r"\W", "_", origin).upper()
    variable = f"_{variable}" if variable[0].isdigit() else variable
    lines = [
        f"[source.{origin}]",
        f"# {preset.title} posts to /in/{origin}; how to set that up:",
        f"# https://github.com/oncehook/oncehook/blob/main/docs/providers/{origin}.md",
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
    if preset.settings.subject is None:
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
    lines = ["[destination.target]", f"url = {_quote(goal)}", 'retry = "durable"       # ten attempts over three days']
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


def _quote(text: str) -> str:
    if not text.isprintable():
        raise ConfigError("An address has no control characters.")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# -- token -------------------------------------------------------------------------------------


@click.command("token")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="viewer", help="What it may do.")
@click.option("--expires", metavar="DURATION", help='After how long it ends, as in "90d".')
@click.option("--sources", metavar="NAMES", help="The only sources it sees and acts on, as in stripe,github.")
@click.option("--accounts", metavar="IDS", help="The only accounts it sees and acts on, as in 42,43.")
@click.option("--no-payloads", is_flag=True, help="It sees events, but neither bodies nor header values.")
@json_option
def token(
    name: str,
    role: str,
    expires: str | None,
    sources: str | None,
    accounts: str | None,
    no_payloads: bool,
    as_json: bool,
) -> None:
    """Make a bearer token for NAME: somebody or something that may use the API.

    Put the token into the environment of the server, and the lines into oncehook.toml.
    """
    from oncehook.secret import new_token

    token = new_token()
    variable = "ONCEHOOK_TOKEN_" + (re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_") or "X")
    if variable == "ONCEHOOK_TOKEN_ENV":
        raise click.UsageError(f"{variable} is the variable of --token-env: give this token another name.")
    limits = _limits(expires, {"sources": sources, "accounts": accounts}, no_payloads)
    if as_json:
        fields = {"name": name, "role": role, "token": token, "variable": variable, **limits}
        say([json_line(fields)])
        return
    click.echo(token)
    click.echo(f"Shown this once. In the server's environment: {variable}\nIn oncehook.toml:\n", err=True)
    lines = [f"name = {json_line(name)}", f'role = "{role}"', f'token = {{ env = "{variable}" }}']
    lines += [f"{key} = {json_line(value)}" for key, value in limits.items()]
    click.echo("\n".join(["[[server.tokens]]", *lines]), err=True)


def _limits(expires: str | None, named: Mapping[str, str | None], no_payloads: bool) -> dict[str, object]:
    from oncehook.settings.values import duration

    limits: dict[str, object] = {}
    if expires is not None:
        ends = clock.now_utc() + timedelta(seconds=duration(expires))
        limits["expires"] = f"{ends:%Y-%m-%dT%H:%M:%SZ}"
    for word, names in named.items():
        if names is not None:
            limits[word] = [name.strip() for name in names.split(",") if name.strip()]
            if not limits[word]:
                raise click.UsageError(f"Which {word}? Name them as in --{word} one,two.")
    return limits | ({"payloads": False} if no_payloads else {})


# -- doctor and health -------------------------------------------------------------------------

LEAST_FREE: Final = 256 << 20
"""Bytes of free disk below which the check fails."""
REACH_SECONDS: Final = 3.0
"""Seconds that a destination has to accept a connection."""
STORED_EXAMINED: Final = 100
"""Stored definitions of a kind that are looked at."""
_UNUSABLE: Final = "Change or delete it, or give the server the key that it was stored with (ONCEHOOK_SECRET_KEY)."


@click.command("doctor")
@takes_app
@config_option
@json_option
def doctor(app: str | None, config_file: Path | None, as_json: bool) -> int:
    """Check settings, secrets, store, schema, disk, clock and destinations, and count everything that must add up.

    With APP (module:inbox) also what it defines. Destinations are connected to, and sent nothing: one that is away is
    a warning, since deliveries wait for it.
    """
    checks = asyncio.run(_examine(app, config_file))
    names = ("name", "ok", "warning", "detail", "hint")
    facts = [{name: getattr(check, name) for name in names} for check in checks]
    answer(facts, (line for check in checks for line in _check_lines(check)), as_json=as_json)
    return 0 if all(check.ok for check in checks) else 1


def _check_lines(check: Check) -> list[str]:
    word, color = ("ok", "green") if check.ok else ("FAIL", "red")
    if check.ok and check.warning:
        word, color = "warn", "yellow"
    has_hint = check.hint and (check.warning or not check.ok)
    indent = " " * 19
    lines = sentence(check.detail, f"{click.style(f'{word:<5}', fg=color)} {check.name:<12} ", indent)
    return lines + (sentence(check.hint, f"{indent}→ ", f"{indent}  ") if has_hint else [])


async def _examine(app: str | None, config_file: Path | None) -> list[Check]:
    from oncehook.inbox import Inbox
    from oncehook.settings import load

    try:
        if app:
            setup = build_setup(app, config_file)
            inbox, origin = setup.inbox, setup.origin
        else:
            loaded = load(config_file)
            inbox, origin = Inbox.from_config(loaded.config), str(loaded.origin or "defaults")
    except OncehookError as error:
        return [Check("settings", False, str(error), error.hint)]
    stored = Stored([], [])
    store = await _examine_store(inbox, stored)
    reached = await _examine_destinations([*inbox.destinations.values(), *stored.destinations])
    detail = f"{origin}: {count(len(inbox.sources), 'source')}, {count(len(inbox.routes), 'route')}, secrets set"
    is_empty = not (app or inbox.sources or stored.sources)
    settings = Check(
        "settings", True, detail, "To check what a program defines: oncehook doctor module:inbox", warning=is_empty
    )
    return [settings, *_examine_sources([*inbox.sources.values(), *stored.sources]), *store, *reached]


def _examine_sources(sources: Iterable[Source]) -> list[Check]:
    from oncehook.reports import describe_coverage
    from oncehook.settings.check import CONFIRMED
    from oncehook.verify import Nothing

    checks, hint = [], f"Give it a scheme and a secret, or say {CONFIRMED}."
    for source in sources:
        if isinstance(source.scheme, Nothing) and source.loopback_only:
            only = "takes direct requests of this machine only; behind a proxy every sender gets 401"
            checks.append(Check("verify", True, f"{source.name}: not verified, so it {only}", hint, warning=True))
        elif isinstance(source.scheme, Nothing):
            checks.append(Check("verify", True, f"{source.name}: not verified, as confirmed: anyone may send"))
        else:
            covered = describe_coverage(source.body_authenticated, source.key_authenticated)
            checks.append(Check("covers", True, f"{source.name}: the check covers {covered}"))
        checks += [Check("secret", True, *warning, warning=True) for warning in source.secret_warnings()]
    return checks


class Stored(NamedTuple):
    """Definitions that were made while it ran, the first of them."""

    sources: list[Source]
    destinations: list[Destination]


async def _examine_stored(inbox: Inbox, stored: Stored) -> list[Check]:
    """Build what is stored, as a server would; what cannot be built, its senders and deliveries wait for in vain."""
    from oncehook.settings.stored import destination_from, source_from

    checks, found = [], dict[Noun, int]()
    for noun in (Noun.source, Noun.destination):
        definitions = await inbox.store.list_definitions(noun, limit=STORED_EXAMINED + 1)
        found[noun] = len(definitions)
        troubles = []
        for one in definitions[:STORED_EXAMINED]:
            try:
                if noun is Noun.source:
                    stored.sources.append(source_from(inbox.vault, one))
                elif one.is_enabled:
                    stored.destinations.append(destination_from(inbox.vault, one)[0])
            except (ConfigError, Undecryptable) as error:
                troubles.append(f"{noun} {one.name}: {error}")
        if troubles:
            more = f" ({len(troubles) - 1} more like it)" if len(troubles) > 1 else ""
            checks.append(Check("stored", False, troubles[0] + more, _UNUSABLE))
    if any(found.values()):
        shown = [
            f"more than {STORED_EXAMINED} {noun}s" if n > STORED_EXAMINED else count(n, noun)
            for noun, n in found.items()
        ]
        checks.append(Check("stored", True, f"{' and '.join(shown)}, made while it ran"))
    return checks


async def _examine_store(inbox: Inbox, stored: Stored) -> list[Check]:
    from oncehook.upkeep import STRAY_HINT, strays

    store = inbox.store
    try:
        schema = await store.schema_state()
        if schema.pending:
            return [_pending_schema(schema, inbox.migrates), *_examine_file(store)]
        await store.open(migrate=False, write=False)
        checks = [Check("schema", True, f"version {schema.current} of {schema.target}"), *await store.check()]
        for name, number in (await strays(store, inbox.destinations)).items():
            detail = f'{number:,} for "{name}", which nobody here knows'
            checks.append(Check("waiting", True, detail, STRAY_HINT, warning=True))
        if dead := sum(level.dead for level in (await store.levels()).values()):
            checks.append(
                Check("dead", True, count(dead, "dead letter"), "Why, and where: oncehook dead", warning=True)
            )
        checks += await _examine_stored(inbox, stored)
        return [*checks, *_examine_file(store), *await _examine_server(store)]
    except OncehookError as error:
        return [Check("store", False, str(error), error.hint)]
    finally:
        await store.close()


def _pending_schema(schema: SchemaState, migrates: bool) -> Check:
    detail = f"version {schema.current} of {schema.target}"
    if not migrates:
        return Check("schema", False, detail, "Run: oncehook db migrate")
    if schema.current == 0:
        return Check("schema", True, "nothing is kept here yet", "The first `oncehook serve` makes it.", warning=True)
    hint = "To do it now, run: oncehook db migrate"
    return Check("schema", True, f"{detail}: the next start brings it up to date", hint, warning=True)


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
    from oncehook.store.sqlite.connection import holder, warn_of_old_library
    from oncehook.upkeep import OLD_LIBRARY_HINT

    assert isinstance(store, SqliteStore)
    exists = store.path.exists()
    folder = next(folder for folder in store.path.absolute().parents if folder.exists())  # a start makes the others
    free = shutil.disk_usage(folder).free
    old = warn_of_old_library()
    held = holder(store.path) if exists else None
    return [
        _examine_rights(store.path, [folder, *([store.path] if exists else [])]),
        Check(
            "disk",
            free >= LEAST_FREE,
            f"{free >> 20} MiB free beside {store.path}",
            "Make room; a full disk means 503.",
        ),
        Check("library", True, old or "SQLite is recent enough", OLD_LIBRARY_HINT, warning=bool(old)),
        Check("owner", True, f"process {held.pid} {held.address}".strip() if held else "nobody has it open"),
        Check("clock", True, f"this machine says {clock.now_utc():%Y-%m-%d %H:%M:%S} UTC"),
    ]


def _examine_rights(path: Path, places: Iterable[Path]) -> Check:
    if all(os.access(place, os.W_OK) for place in places):
        return Check("writable", True, "may be written, and so may its folder")
    hint = "Give them to the user that oncehook runs as."
    return Check("writable", False, f"{path} or its folder may not be written", hint)


async def _examine_destinations(destinations: Iterable[Destination]) -> list[Check]:
    from oncehook.destinations.http import HttpDestination

    return await asyncio.gather(*(_reach(one) for one in destinations if isinstance(one, HttpDestination)))


async def _reach(destination: HttpDestination) -> Check:
    if not destination.has_one_address:
        return Check("reachable", True, f"{destination.name}: not tried, each event names its address")
    await destination.open()
    try:
        tried = await destination.reach(REACH_SECONDS)
    except OncehookError as error:
        return Check("reachable", True, f"{destination.name}: {error}", _advise(error), warning=True)
    finally:
        await destination.close()
    return Check("reachable", True, f"{destination.name}: {'connected' if tried else 'not tried, behind a proxy'}")


def _advise(error: OncehookError) -> str:
    """Return what becomes of deliveries to a destination that was not reached, and what to do."""
    from oncehook.http_client import AddressForbidden, Untrusted

    dead = "Until then its deliveries become dead letters at the first attempt; replay them afterwards."
    if isinstance(error, AddressForbidden):
        return f"If it is meant, set allow_private = true or to its network; otherwise correct the url. {dead}"
    if isinstance(error, Untrusted):
        return f"Renew the certificate there, or set ca to the file of its authority. {dead}"
    return "Deliveries to it are tried again by its policy; nothing is lost."


@click.command("health")
@config_option
@app_option
@click.option("--server", "address", help="Address of the server (default: that of these settings).")
def health(config_file: Path | None, app: str | None, address: str | None) -> int:
    """Exit 0 when the server is ready, 1 when it is not, 3 when nobody answers."""
    from oncehook.model import Arrival
    from oncehook.samples import post
    from oncehook.settings import load

    if address is None:
        loaded = build_setup(app, config_file).loaded if app else load(config_file, secrets=False, whole=False)
        address = address_of(loaded.config.server)
    address = address.rstrip("/")
    try:
        response = post(f"{address}/readyz", Arrival("", [], b"", method="GET"), timeout=5)
    except OSError as error:
        raise no_answer(address, error, hint="") from error
    say([response.json().get("status", "not an oncehook server")])
    return 0 if response.status == 200 else 1
