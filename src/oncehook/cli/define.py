"""Commands that list, make, change and delete sources, destinations and routes, and carry them and accounts as TOML."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

import click

from oncehook.cli.api import Api, Misused, asks_api, at
from oncehook.cli.browse import list_destinations, list_routes, list_sources
from oncehook.cli.operate import import_
from oncehook.cli.options import json_option, wide_option, yes_option
from oncehook.cli.output import answer, text
from oncehook.human import count, show_key, show_setting

NOUNS: Final = ("source", "destination", "route")
GENERATE: Final = "generate"
GENERATED: Final = {"source": "secret", "destination": "sign"}
"""By noun, the setting that is generated where it is imported, because no secret is exported."""
_NAME_FORM: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# -- settings as arguments ---------------------------------------------------------------------


def _read_settings(pairs: Sequence[str], *, may_remove: bool = False) -> dict[str, Any]:
    """Read SETTING=VALUE arguments: a value is TOML where it can be read so, else text; - is read from stdin."""
    given: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not _NAME_FORM.fullmatch(name):
            raise Misused(f"{pair!r} is not SETTING=VALUE.", hint="For example: preset=n8n secret=generate")
        if name in given:
            raise Misused(f"{name} is given twice.")
        if not value and may_remove:
            given[name] = None
        elif value == "-":
            given[name] = _read_hidden(name)
        else:
            given[name] = _read_value(value)
    return given


def _read_value(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _read_hidden(name: str) -> str:
    """Read a secret that must not be in the shell's history."""
    if sys.stdin.isatty():
        return str(click.prompt(name, hide_input=True, err=True))
    return sys.stdin.readline().rstrip("\r\n")


# -- the commands of each noun -----------------------------------------------------------------


def _group(noun: str, about: str, show: Callable[[Api, bool], int]) -> click.Group:
    """Build the group of a noun: without a subcommand it lists, by `show`."""

    @click.group(f"{noun}s", invoke_without_command=True, help=about)
    @wide_option
    @json_option
    @asks_api
    def group(api: Api, as_json: bool) -> int:
        return show(api, as_json) if click.get_current_context().invoked_subcommand is None else 0

    _add_making(group, noun)
    _add_switches(group, noun)
    return group


def _add_making(group: click.Group, noun: str) -> None:
    name = [] if noun == "route" else [click.Argument(["name"])]
    settings = click.Argument(["settings"], nargs=-1, metavar="SETTING=VALUE...")

    @json_option
    @asks_api
    def create(api: Api, settings: Sequence[str], as_json: bool, name: str | None = None) -> int:
        given = _read_settings(settings)
        body = given if name is None else {"name": name, **given}
        return _print_defined(api.act("POST", f"{noun}s", body), "made", as_json)

    @json_option
    @asks_api
    def change(api: Api, name: str, settings: Sequence[str], as_json: bool) -> int:
        given = _read_settings(settings, may_remove=True)
        if not given:
            raise Misused("Say what to change: SETTING=VALUE.", hint="SETTING= alone takes one out.")
        return _print_defined(api.act("PATCH", at(f"{noun}s", name), given), "changed", as_json)

    shown = "rte_…" if noun == "route" else "NAME"
    create.__doc__ = f"Make a {noun}. The settings are those of the file; `-` as a value is read from stdin."
    change.__doc__ = f"Change settings of the stored {noun} {shown}; SETTING= takes one out."
    _add(group, "create", create, [*name, settings])
    _add(group, "change", change, [click.Argument(["name"]), settings])
    if noun != "route":
        _add_rotate(group, noun)
    _add_delete(group, noun)


def _add(group: click.Group, name: str, function: Callable[..., int], parameters: list[click.Parameter]) -> None:
    command = click.command(name)(function)
    command.params = [*parameters, *command.params]
    group.add_command(command)


def _add_rotate(group: click.Group, noun: str) -> None:
    @group.command("rotate")
    @click.argument("name")
    @click.option("--overlap", default="1h", show_default=True, help="How long the old secret is still valid.")
    @json_option
    @asks_api
    def rotate(api: Api, name: str, overlap: str, as_json: bool) -> int:
        """Give it a new secret, which is shown once; the old one is valid for a while."""
        made = api.act("POST", at(f"{noun}s", name, "rotate"), {"overlap": overlap})
        return _print_defined(made, "rotated", as_json)


def _add_delete(group: click.Group, noun: str) -> None:
    @json_option
    @yes_option
    @asks_api
    def delete(api: Api, names: Sequence[str], yes: bool, as_json: bool, discard: bool = False) -> int:
        listed = ", ".join(names)
        api.confirm(f"Delete {text(listed)}?", yes=yes)
        query = {"discard": "true"} if discard else {}
        deleted = [api.act("DELETE", at(f"{noun}s", name), None, **query) for name in names]
        return answer({"items": deleted}, [f"deleted {text(one['name'])}" for one in deleted], as_json=as_json)

    also = "" if noun == "route" else ", and the routes from it" if noun == "source" else ", and the routes to it"
    delete.__doc__ = f"Delete stored {noun}s{also}."
    parameters: list[click.Parameter] = [click.Argument(["names"], nargs=-1, required=True, metavar="NAME...")]
    if noun == "destination":
        about = "Discard deliveries that still wait for it, and its dead letters, with it."
        parameters.append(click.Option(["--discard"], is_flag=True, help=about))
    _add(group, "delete", delete, parameters)


def _add_switches(group: click.Group, noun: str) -> None:
    for act, about in (
        ("enable", "Let a disabled one count again."),
        ("disable", "Keep it, but as if it were not there."),
    ):

        @json_option
        @asks_api
        def switch(api: Api, names: Sequence[str], as_json: bool, act: str = act) -> int:
            changed = [api.act("POST", at(f"{noun}s", name, act), {}) for name in names]
            return answer({"items": changed}, [f"{act}d {text(one['name'])}" for one in changed], as_json=as_json)

        switch.__doc__ = about
        _add(group, act, switch, [click.Argument(["names"], nargs=-1, required=True, metavar="NAME...")])


def _print_defined(made: Mapping[str, Any], act: str, as_json: bool) -> int:
    lines = [f"{act} {text(made['name'])}"]
    lines += [f"  address  {text(made['address'])}"] if made["address"] else []
    lines += [f"  secret   {made['secret']}  (shown once)"] if made["secret"] else []
    return answer(dict(made), lines, as_json=as_json)


sources = _group(
    "source",
    "List sources: addresses, verifiers and what they cover, and what came in the last 24 hours; or make, change and"
    " delete stored ones.",
    list_sources,
)
destinations = _group(
    "destination",
    "List destinations: addresses, states, and when they are tried again; or make, change and delete stored ones.",
    list_destinations,
)
routes = _group("route", "List routes; or make, change and delete stored ones.", list_routes)


# -- as TOML -----------------------------------------------------------------------------------


def write_definitions(api: Api) -> Iterator[str]:
    """Yield the stored definitions as lines of TOML; a secret is left to be generated where they are imported."""
    yield "# Definitions of an oncehook inbox. Import them with: oncehook import definitions FILE"
    yield "# No secret is in here: of new ones it is generated and shown once, others keep theirs."
    for noun in NOUNS:
        for one in api.pages(f"{noun}s"):
            if one["origin"] != "store":
                continue
            yield ""
            yield "[[route]]" if noun == "route" else f"[{noun}.{one['name']}]"
            settings = _settings_of(noun, one)
            yield from (show_setting(name, value) for name, value in settings.items())
    for one in api.pages("accounts"):
        yield ""
        yield f"[account.{show_key(one['id'])}]"
        yield from (show_setting(name, value) for name, value in _account_of(one).items())


def _settings_of(noun: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored definition, without its secrets."""
    settings = {name: value for name, value in one["settings"].items() if not _is_hidden(value)}
    if (key := GENERATED.get(noun)) is not None and key in one["settings"] and key not in settings:
        settings[key] = GENERATE
    settings |= {} if one["account"] is None else {"account": one["account"]}
    return settings if one["enabled"] else {**settings, "enabled": False}


def _account_of(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return an account without its secrets."""
    settings: dict[str, Any] = {word: one[word] for word in ("name", "aliases") if one[word]}
    if one["secret_sources"]:
        settings["secrets"] = dict.fromkeys(one["secret_sources"], GENERATE)
    return settings if one["enabled"] else {**settings, "enabled": False}


def _is_hidden(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_hidden, value.values()))
    if isinstance(value, list):
        return any(map(_is_hidden, value))
    return isinstance(value, str) and value.startswith("(set")


@import_.command("definitions")
@click.argument("file", type=click.File("rb"))
@click.option("--dry-run", is_flag=True, help="Say what would be made and changed, and do nothing.")
@json_option
@asks_api
def import_definitions(api: Api, file: IO[bytes], dry_run: bool, as_json: bool) -> int:
    """Make and change stored sources, accounts, destinations and routes as FILE (- for stdin) says.

    Its words are those of the settings; an account has name, aliases, secrets and enabled. What is not in it is left
    alone, and so is what is as it says: the same file may be imported again. A secret that is to be generated is made
    for new ones only, and shown once.
    """
    try:
        tree = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Misused(f"This is no TOML: {error}.") from None
    if unknown := [name for name in tree if name not in (*NOUNS, "account")]:
        hint = "There are [source.NAME], [account.ID], [destination.NAME], [[route]]."
        raise Misused(f"[{unknown[0]}] is no definition.", hint=hint)
    done = _import_all(api, "source", tree, dry_run=dry_run)
    done += _import_accounts(api, tree.get("account", {}), dry_run=dry_run)  # their secrets are for sources
    done += _import_all(api, "destination", tree, dry_run=dry_run)
    known_routes = [_settings_of("route", one) for one in api.pages("routes") if one["origin"] == "store"]
    for settings in tree.get("route", []):
        is_new = settings not in known_routes
        if is_new and not dry_run:
            _put_enabled(api, "route", settings, lambda given: api.act("POST", "routes", given))
        done.append({"noun": "route", "name": f"{settings.get('from')} to {settings.get('to')}", "new": is_new})
    lines = [_line(one) for one in done if one["new"] or one.get("changed")]
    would = "would be " if dry_run else ""
    lines.append(
        f"{count(len(done), 'definition')} read, {sum(one['new'] for one in done)} {would}made,"
        f" {sum(bool(one.get('changed')) for one in done)} {would}changed"
    )
    return answer({"items": done}, lines, as_json=as_json)


def _import_all(api: Api, noun: str, tree: Mapping[str, Any], *, dry_run: bool) -> list[dict[str, Any]]:
    known = {one["name"]: _settings_of(noun, one) for one in api.pages(f"{noun}s") if one["origin"] == "store"}
    return [
        _import_named(api, noun, name, settings, known.get(name), dry_run=dry_run)
        for name, settings in tree.get(noun, {}).items()
    ]


def _import_accounts(api: Api, accounts: Mapping[str, Any], *, dry_run: bool) -> list[dict[str, Any]]:
    known = {one["id"]: _account_of(one) for one in api.pages("accounts")} if accounts else {}
    return [_import_account(api, one, given, known.get(one), dry_run=dry_run) for one, given in accounts.items()]


def _import_account(
    api: Api, id: str, given: Mapping[str, Any], known: Mapping[str, Any] | None, *, dry_run: bool
) -> dict[str, Any]:
    """Make or change an account. A secret that it has and the file leaves out, or would generate, stays."""
    kept = {} if known is None else known.get("secrets", {})
    secrets = {
        source: secret
        for source, secret in given.get("secrets", {}).items()
        if source not in kept or secret != GENERATE
    }
    after = _complete_account(given, secrets)
    before = None if known is None else _complete_account(known, {})
    outcome = {"noun": "account", "name": id, "new": known is None, "changed": before not in (None, after)}
    if dry_run or before == after:
        return outcome
    if known is None:
        made = api.act("POST", "accounts", {"id": id, **{word: after[word] for word in after if word != "enabled"}})
        if not after["enabled"]:
            api.act("PATCH", at("accounts", id), {"enabled": False})
    else:
        made = api.act("PATCH", at("accounts", id), after)
    return {**outcome, "secrets": made["secrets"]}


def _complete_account(given: Mapping[str, Any], secrets: Mapping[str, str]) -> dict[str, Any]:
    aliases = sorted(map(str, given.get("aliases", ())))
    return {"name": "", "enabled": True, **given, "aliases": aliases, "secrets": secrets}


def _import_named(
    api: Api, noun: str, name: str, settings: dict[str, Any], known: dict[str, Any] | None, *, dry_run: bool
) -> dict[str, Any]:
    outcome: dict[str, Any] = {"noun": noun, "name": name, "new": known is None, "changed": False}
    if known == settings:
        return outcome
    outcome["changed"] = known is not None
    if dry_run:
        return outcome
    key = GENERATED[noun]
    given = {one: value for one, value in settings.items() if known is None or one != key or value != GENERATE}
    made = _put_enabled(api, noun, given, lambda body: api.act("PUT", at(f"{noun}s", name), body))
    return {**outcome, "address": made["address"], "secret": made["secret"]}


def _put_enabled(
    api: Api, noun: str, settings: Mapping[str, Any], put: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Make a definition, and disable it where the file says so."""
    given = dict(settings)
    is_enabled = given.pop("enabled", True)
    made = put(given)
    if made["enabled"] != is_enabled:
        act = "enable" if is_enabled else "disable"
        api.act("POST", at(f"{noun}s", made["name"], act), {})
    return made


def _line(one: Mapping[str, Any]) -> str:
    act = "made" if one["new"] else "changed"
    secret = f"  secret {one['secret']}  (shown once)" if one.get("secret") else ""
    secret += "".join(f"  {text(source)}: {told}  (shown once)" for source, told in one.get("secrets", {}).items())
    return f"{act} {one['noun']} {text(one['name'])}{secret}"
