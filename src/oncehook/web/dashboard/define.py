"""Forms that make, change, rotate, disable and delete sources, destinations and routes while the inbox runs.

The settings, checks and sentences are those of `define`. A generated secret is shown in the answer to the post that
made it, and never again: such an answer has no address of its own, and browsers do not keep it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from starlette.responses import Response

from oncehook import clock, presets
from oncehook.define import Define, Defined, NounName
from oncehook.errors import (
    BadRequest,
    ConfigError,
    DefinedElsewhere,
    Exists,
    InUse,
    InvalidSettings,
    NotFound,
    Refused,
    SecretKeyMissing,
)
from oncehook.human import show_setting
from oncehook.model import Level, Noun, StoredDefinition
from oncehook.reports import ShownDestination, ShownRoute, ShownSource
from oncehook.settings import stored
from oncehook.settings.read import fields_of
from oncehook.settings.values import NAME_FORM
from oncehook.sources import Preset
from oncehook.verify.schemes import is_public
from oncehook.web.dashboard.context import PageContext
from oncehook.web.dashboard.setup import address_of
from oncehook.web.language import translate

LABELS: Final[Mapping[NounName, Mapping[str, str]]] = {
    "source": {
        "secret": "Secret",
        "verify_token": "Verify token",
        "public_url": "Public URL",
        "key": "Key",
        "subject": "Subject",
        "account": "Account",
    },
    "destination": {"url": "URL", "sign": "Signing secret", "subscribe": "Subscribe to", "account": "Account"},
    "route": {
        "from": "From",
        "to": "To",
        "when": "Types",
        "coalesce": "Coalesce",
        "latest_wins": "Latest wins",
        "on_dead": "On dead",
        "priority": "Priority",
        "account": "Account",
    },
}
"""Settings that have a field of their own; all others are lines of one text, as in the file."""
FOLDED: Final = ("subject", "account", "coalesce", "latest_wins", "on_dead", "priority")
"""Settings that few need at first."""
USUAL: Final[Mapping[NounName, Sequence[str]]] = {
    "source": ("secret",),
    "destination": ("url", "sign", "subscribe", "account"),
    "route": ("from", "to", "when"),
}
ABOUT: Final[Mapping[str, str]] = {
    "from": "The source whose events it sends.",
    "when": "Types of events, such as order.paid or order.*; empty for all.",
    "account": "Whose route it is; empty for the inbox's own.",
}
"""Hints of a route that differ from those of the file: there `when` is a table, and nobody owns a route."""
SECRET: Final = ("secret", "verify_token", "sign")
MORE: Final = "more"
SHOWN: Final = "shown"
"""Field with the names of the settings that a form shows: of these, what is left out is taken out."""
GOAL: Final = "to"
"""Field of a new source: the destination that a route from it leads to."""
FOR_CUSTOMERS: Final = {
    "url": "Events are posted to this address.",
    "sign": "Proves to you that a request is ours (Standard Webhooks).",
    "subscribe": "Types of events, such as order.paid or order.*; * for all.",
}
"""What is said of settings at the portal, where nobody knows files of settings."""
OVERLAPS: Final = (("1h", "1 hour"), ("1d", "1 day"), ("7d", "7 days"), ("0s", "not at all"))
FLAGS: Final[Mapping[str, bool]] = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Words:
    """The sentences of the forms of one noun."""

    new: str
    create: str
    back: str
    making: str
    off: str
    """What disabling does."""
    deleting: str
    example: str = ""
    """A line of other settings."""


WORDS: Final[Mapping[str, Words]] = {
    "source": Words(
        "New source",
        "Create source",
        "Back to sources",
        "It gets an address and a secret, and counts at once.",
        "A disabled source answers nobody; deleted with it are the routes from it. Its events stay.",
        "Whoever sends to it is refused from now on. The routes from it are deleted with it; its events stay.",
        'type = "$.event"',
    ),
    "destination": Words(
        "New destination",
        "Create destination",
        "Back to destinations",
        "It gets a secret to sign with, and counts at once.",
        "A disabled destination gets nothing new; what waits for it, waits.",
        "It gets nothing any more. The routes to it are deleted with it; the events stay.",
        'rate = "10/s"',
    ),
    "route": Words(
        "New route",
        "Create route",
        "Back to routes",
        "It sends events of a source to a destination, those that come from now on.",
        "A disabled route sends nothing new; what waits already is still delivered.",
        "It sends nothing any more. What waits already is still delivered; source and destination stay.",
        'when = { "$.amount" = ">1000" }',
    ),
    "account": Words(
        "New account",
        "Create account",
        "Back to accounts",
        "It says whose events are. Its id, its aliases and its address count at once.",
        "A disabled account is as if it were not there: its address answers nobody, its customers are logged out.",
        "Its names, its address and its secrets are gone from now on. Its events stay.",
    ),
}


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form."""

    name: str
    label: str
    about: str
    text: str = ""
    is_set: bool = False
    """Whether it holds a secret that is set, and stays where the field is left empty."""
    required: bool = False
    choices: Sequence[str] = ()
    """Texts that are offered; others may be written."""
    options: Sequence[tuple[str, str]] = ()
    """Values and labels, of which one is chosen; the first is for the default."""
    kind: Literal["line", "lines", "check"] = "line"
    can_generate: bool = False
    """Whether "generate" makes its secret."""


@dataclass(frozen=True, slots=True)
class DefinitionForm:
    """The fields of one definition, with what is wrong in them."""

    fields: Sequence[FormField]
    folded: Sequence[FormField]
    more: str = ""
    shown: str = ""
    errors: Mapping[str, Sequence[str]] | None = None
    takes_more: bool = True
    """Whether other settings may be given as lines of text."""

    def wrong(self, name: str) -> Sequence[str]:
        """Return what is wrong with a field."""
        return (self.errors or {}).get(name, ())

    @property
    def is_unfolded(self) -> bool:
        return any(self.wrong(name) for name in (MORE, *(one.name for one in self.folded)))

    @property
    def others(self) -> Sequence[str]:
        """Return what is wrong and belongs to no field."""
        known = {MORE, *(one.name for one in (*self.fields, *self.folded))}
        return [text for name, texts in (self.errors or {}).items() if name not in known for text in texts]


# -- making ------------------------------------------------------------------------------------


async def ask_new(context: PageContext, noun: NounName) -> Response:
    """Show the choice of presets, or the form of a new definition."""
    define, name = context.admin.define(context.actor), context.parameter("preset")
    if noun == "source" and not name:
        known = sorted(map(presets.load, presets.names()), key=lambda one: one.title.lower())
        return await context.dialog("preset.html", presets=known)
    preset = _preset(name) if noun == "source" else None
    if noun == "route":
        return await _show_new(context, noun, None, {end: context.parameter(end) for end in ("from", "to")})
    secret = stored.GENERATE if preset is None or not is_public(preset.scheme) else ""
    suggested = await _free_name(define, preset) if preset is not None else _own_name(context)
    given = {stored.SECRET_OF[Noun(noun)]: secret, "name": suggested}
    if context.auth.is_portal:
        given["subscribe"] = "*"  # otherwise it would get nothing, and a customer has no routes
    return await _show_new(context, noun, preset, given)


async def create(context: PageContext, noun: NounName) -> Response:
    form = await context.form()
    preset = _preset(form.get("preset", "")) if noun == "source" else None
    try:
        given = ({} if preset is None else {"preset": preset.name}) | _read(noun, form)
        define = context.admin.define(context.actor)
        goal = form.get(GOAL, "").strip() if noun == "source" else ""
        if goal:
            await define.check_goal(goal)  # before there is a source that leads nowhere
        account = given.pop("account", None) if noun == "route" else None
        made = await define.create(noun, form.get("name", "").strip(), given, account=account)
        if goal:
            route = {"from": made.name, "to": goal}
            await define.create("route", "", route, account=made.definition.account)
    except (InvalidSettings, SecretKeyMissing, Exists, DefinedElsewhere) as error:
        return await _show_new(context, noun, preset, form, error)
    if noun == "route":
        return context.back(f"/routes#{made.name}", "create")
    return await _show_defined(context, noun, made, translate("is ready"), goal=goal, status=201)


async def _show_new(
    context: PageContext, noun: NounName, preset: Preset | None, given: Mapping[str, str], error: Refused | None = None
) -> Response:
    wanted = (*(() if noun == "route" else ("name",)), *(USUAL[noun] if preset is None else preset.needs))
    form = _for_visitor(context, _build_form(noun, given, wanted, left_out=_left_out(context)))
    if noun == "source":
        about = "The destination that gets its events; empty for none yet."
        form = replace(form, fields=[*form.fields, FormField(GOAL, "Send to", about, given.get(GOAL, ""))])
    form = place_errors(await _offer_ends(context, noun, form), error, secret=stored.SECRET_OF.get(Noun(noun), ""))
    return await show_form(context, noun, form, error, preset=preset)


async def show_form(
    context: PageContext, noun: str, form: DefinitionForm, error: Refused | None, preset: Preset | None = None
) -> Response:
    """Show the form of what is to be made."""
    status = 200 if error is None else error.status
    shown = {"noun": noun, "words": WORDS[noun], "preset": preset, "form": form}
    return await context.dialog("define_new.html", status=status, **shown)


async def _offer_ends(context: PageContext, noun: NounName, form: DefinitionForm) -> DefinitionForm:
    """Return the form with the names of sources and destinations that a route may have; to whoever is limited to some
    accounts, those of these accounts."""
    known: dict[str, Sequence[ShownSource | ShownDestination]] = {}
    if noun != "destination":
        known["to"] = await context.admin.destinations()
    if noun == "route":
        known["from"] = await context.admin.sources()
    if context.admin.scope.is_limited:
        known = {end: [one for one in found if one.origin == "store"] for end, found in known.items()}
    names = {end: [one.name for one in found] for end, found in known.items()}
    return replace(form, fields=[replace(one, choices=names.get(one.name, ())) for one in form.fields])


def _preset(name: str) -> Preset:
    try:
        return presets.load(name)
    except ConfigError as error:
        raise BadRequest(str(error)) from None


def _own_name(context: PageContext) -> str:
    """Suggest a name to a customer that no other has: names are unique in the whole inbox, and tell of nobody then."""
    return f"webhook-{clock.random_bytes(4).hex()}" if context.auth.is_portal else ""


async def _free_name(define: Define, preset: Preset) -> str:
    """Suggest a name: the preset's, with a number where that is taken."""
    for number in range(1, 100):
        name = preset.name if number == 1 else f"{preset.name}-{number}"
        try:
            await define.get("source", name)
        except NotFound:
            return name
        except DefinedElsewhere:
            continue
    return ""


# -- changing ----------------------------------------------------------------------------------


async def show(context: PageContext, noun: NounName) -> Response:
    """Show what defines a source, destination or route; of a stored one, the forms that change it."""
    return await _show_definition(context, noun)


async def change(context: PageContext, noun: NounName) -> Response:
    form = await context.form()
    try:
        given = _read(noun, form)
        removed = {name: None for name in form.get(SHOWN, "").split(",") if name and name not in given}
        made = await context.admin.define(context.actor).change(noun, context.name, **removed, **given)
    except (InvalidSettings, SecretKeyMissing, Exists) as error:
        return await _show_definition(context, noun, form, error)
    if made.secret is not None:
        return await _show_defined(context, noun, made, translate("has a secret"))
    return context.back(_page(noun, context.name), "change")


async def rotate(context: PageContext, noun: NounName) -> Response:
    form, key = await context.form(), stored.SECRET_OF[Noun(noun)]
    given, overlap = form.get(key, "").strip(), form.get("overlap", "1h")
    secret = None if given in ("", stored.GENERATE) else given
    try:
        made = await context.admin.define(context.actor).rotate(noun, context.name, overlap=overlap, secret=secret)
    except (InvalidSettings, SecretKeyMissing) as error:
        return await _show_definition(context, noun, error=error)
    return await _show_defined(context, noun, made, translate("has a new secret"), is_given=secret is not None)


async def enable(context: PageContext, noun: NounName) -> Response:
    await context.admin.define(context.actor).enable(noun, context.name)
    return context.back(_page(noun, context.name), "enable")


async def disable(context: PageContext, noun: NounName) -> Response:
    await context.admin.define(context.actor).disable(noun, context.name)
    return context.back(_page(noun, context.name), "disable")


async def _show_definition(
    context: PageContext, noun: NounName, given: Mapping[str, str] | None = None, error: Refused | None = None
) -> Response:
    shown = await _find(context, noun)
    form: DefinitionForm | None = None
    key = stored.SECRET_OF.get(Noun(noun), "")
    if shown.origin == "store":
        definition = await context.admin.define(context.actor).get(noun, context.name)
        form = await _offer_ends(context, noun, _form_of(noun, definition, given, _left_out(context)))
        form = _for_visitor(context, place_errors(form, error, secret=key))
    return await context.page(
        "definition.html",
        status=200 if error is None else error.status,
        base="dialog.html",
        noun=noun,
        words=WORDS[noun],
        name=context.name,
        title=_title(shown),
        one=shown,
        is_enabled=shown.is_enabled,
        form=form,
        secret=key,
        has_secret=key in shown.settings,
        overlaps=OVERLAPS,
    )


# -- deleting ----------------------------------------------------------------------------------


async def ask_delete(context: PageContext, noun: NounName) -> Response:
    is_stored = (await _find(context, noun)).origin == "store"
    return await (_show_delete if is_stored else _show_definition)(context, noun)


async def delete(context: PageContext, noun: NounName) -> Response:
    discard = (await context.form()).get("discard") == "on"
    try:
        await context.admin.define(context.actor).delete(noun, context.name, discard=discard)
    except InUse as error:
        return await _show_delete(context, noun, error)
    return context.back(f"/{noun}s", "delete")


async def _show_delete(context: PageContext, noun: NounName, error: InUse | None = None) -> Response:
    shown = await _find(context, noun)
    level = shown.level if isinstance(shown, ShownDestination) else None
    return await show_delete(context, noun, _title(shown), error, level)


async def show_delete(
    context: PageContext, noun: str, title: str, error: InUse | None, level: Level | None = None
) -> Response:
    """Show the question before something is deleted, or why it was not. `level`: that of a destination."""
    status = 200 if error is None else error.status
    shown = {"noun": noun, "words": WORDS[noun], "name": context.name, "title": title, "level": level}
    return await context.dialog("delete.html", status=status, error=error, **shown)


# -- parts of all ------------------------------------------------------------------------------


Shown = ShownSource | ShownDestination | ShownRoute


async def _find(context: PageContext, noun: NounName) -> Shown:
    admin = context.admin
    finders: Mapping[NounName, Callable[[str], Awaitable[Shown]]]
    finders = {"source": admin.source, "destination": admin.destination, "route": admin.route}
    return await finders[noun](context.name)


def _title(shown: Shown) -> str:
    return f"{shown.source} → {shown.destination}" if isinstance(shown, ShownRoute) else shown.name


def _page(noun: NounName, name: str) -> str:
    return f"/{noun}s/{name}/define"


async def _show_defined(
    context: PageContext,
    noun: NounName,
    made: Defined,
    what: str,
    *,
    is_given: bool = False,
    goal: str = "",
    status: int = 200,
) -> Response:
    """Show what was made, with its address and the secret that was generated for it."""
    can_try = False
    copied: list[Copied] = []
    if noun == "source":
        address = address_of(context, await context.admin.source(made.name))
        copied.append(Copied(translate("Give the provider this address"), address, translate("Copy address")))
        can_try = bool(await context.admin.sample_types(made.name))
    else:
        can_try = await context.admin.can_test(made.name)
    secret = None if is_given else made.secret
    if secret is not None:
        caption = translate("and this secret") if copied else translate("Give the receiver this secret")
        copied.append(Copied(caption, secret, translate("Copy secret"), is_secret=True))
    ends = stored.show(made.definition).get(stored.SECRET_OF[Noun(noun)])
    is_rotating = isinstance(ends, list) and len(ends) > 1
    return await show_made(
        context, noun, made.name, what, copied, status=status, goal=goal, is_rotating=is_rotating, can_try=can_try
    )


@dataclass(frozen=True, slots=True)
class Copied:
    """A text that is shown to be copied."""

    caption: str
    text: str
    label: str
    """The name of its button."""
    is_secret: bool = False
    """Whether it is shown once."""


async def show_made(
    context: PageContext,
    noun: str,
    name: str,
    what: str,
    copied: Sequence[Copied],
    *,
    status: int = 200,
    goal: str = "",
    once: str = "",
    is_rotating: bool = False,
    can_try: bool = False,
) -> Response:
    """Show something that was made or changed, with what is to be copied now."""
    context.frames.forget()
    return await context.page(
        "defined.html",
        status=status,
        base="dialog.html",
        noun=noun,
        words=WORDS[noun],
        name=name,
        what=what,
        copied=copied,
        goal=goal,
        once=once or translate("It is shown here once and kept encrypted."),
        is_rotating=is_rotating,
        can_try=can_try,
    )


def _read(noun: NounName, form: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a form gives. Raises InvalidSettings."""
    try:
        given = tomllib.loads(form.get(MORE, "").replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        hint = 'write each setting as in the file: subject = "$.order.id"'
        raise InvalidSettings([{"setting": MORE, "error": f"this cannot be read: {error}", "hint": hint}]) from None
    for name in LABELS[noun]:
        if not (text := form.get(name, "").strip()):
            continue
        if name in given:
            hint = "leave it out of the text or the field empty"
            raise InvalidSettings([{"setting": name, "error": f"{name} is given twice", "hint": hint}])
        given[name] = _read_text(noun, name, text)
    return given


def _read_text(noun: NounName, name: str, text: str) -> Any:
    """Return the setting that the text of a field means."""
    if name in ("subscribe", "when"):
        types = text.replace(",", " ").split()
        return types if name == "subscribe" else {"type": types[0] if len(types) == 1 else types}
    return FLAGS.get(text, text) if _options(noun, name) else text


def _for_visitor(context: PageContext, form: DefinitionForm) -> DefinitionForm:
    """Return the form with words for a customer, where it is for one."""
    if not context.auth.is_portal:
        return form
    return replace(form, fields=[replace(one, about=FOR_CUSTOMERS.get(one.name, one.about)) for one in form.fields])


def _left_out(context: PageContext) -> Collection[str]:
    """Return the settings that a form does not show: the account, to somebody who has only one."""
    accounts = context.admin.scope.accounts
    return ("account",) if accounts is not None and len(accounts) == 1 else ()


def _form_of(
    noun: NounName, definition: StoredDefinition, given: Mapping[str, str] | None, left_out: Collection[str]
) -> DefinitionForm:
    """Build the form of a stored definition: filled as it is stored, or as somebody has filled it."""
    public = stored.public_settings(definition)
    hidden = stored.show(definition).keys() - public.keys()
    if noun == "route" and definition.account is not None:
        public["account"] = definition.account
    texts = {name: text for name in LABELS[noun] if (text := _show_text(name, public.get(name))) is not None}
    if given is None:
        lines = [show_setting(name, value) for name, value in public.items() if name not in texts]
        given = {**texts, MORE: "\n".join(lines), SHOWN: ",".join(public)}
    wanted = {*USUAL[noun], *public, *hidden} - ({stored.SECRET_OF.get(Noun(noun), "")} & hidden)
    return _build_form(noun, given, wanted, hidden, left_out)


def _build_form(
    noun: NounName,
    given: Mapping[str, str],
    wanted: Collection[str],
    hidden: Collection[str] = (),
    left_out: Collection[str] = (),
) -> DefinitionForm:
    """Build a form with the fields that are wanted; what few need is folded, or is a line of its text."""
    fields: list[FormField] = []
    folded: list[FormField] = []
    if "name" in wanted:
        fields.append(FormField("name", "Name", f"Use {NAME_FORM}.", given.get("name", ""), required=True))
    for name, label in LABELS[noun].items():
        text = given.get(name, "")
        if name in SECRET and text != stored.GENERATE:
            text = ""  # what somebody typed is not sent back
        place = None if name in left_out else fields if name in wanted else folded if name in FOLDED else None
        if place is not None:
            options, about = _options(noun, name), _about(noun, name)
            can_generate = name in stored.SECRET_OF.values()
            place.append(
                FormField(name, label, about, text, name in hidden, options=options, can_generate=can_generate)
            )
    return DefinitionForm(fields, folded, given.get(MORE, ""), given.get(SHOWN, ""))


def _about(noun: NounName, name: str) -> str:
    if noun == "route" and name in ABOUT:
        return translate(ABOUT[name])
    return fields_of(stored.TABLES[Noun(noun)])[name].about


def _options(noun: NounName, name: str) -> Sequence[tuple[str, str]]:
    """Return the values that a setting may have, where they are few, each with its label; first that of the default."""
    field = fields_of(stored.TABLES[Noun(noun)]).get(name)
    schema = {} if field is None or field.form is None else field.form.schema
    values = [True, False] if schema.get("type") == "boolean" else schema.get("enum", ())
    if field is None or not values:
        return ()
    labels = {True: translate("yes"), False: translate("no")}
    usual = "" if field.default is None else f": {labels.get(field.default, field.default)}"
    listed = [(_show_text(name, one) or "", str(labels.get(one, one))) for one in values]
    return [("", translate("default") + usual), *listed]


def _show_text(name: str, value: object) -> str | None:
    """Return a setting as the text of a field; None where it must be a line of TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if name == "when" and isinstance(value, Mapping) and value.keys() == {"type"}:
        value = value["type"]
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return value if isinstance(value, str) else None


def place_errors(
    form: DefinitionForm, error: Refused | None, *, name: str = "name", secret: str = ""
) -> DefinitionForm:
    """Return the form with what is wrong beside its field. `name`: the field of a name that is taken; `secret`: that of
    a secret that cannot be kept."""
    if error is None:
        return form
    text = f"{error} {error.hint}".strip()
    placed: dict[str, list[str]] = {}
    known = {one.name for one in (*form.fields, *form.folded)}
    if isinstance(error, InvalidSettings):
        for one in error.errors:
            setting, between = one["setting"], " " if one["error"].endswith(".") else "; "
            sentence = between.join(filter(None, (one["error"], one["hint"])))
            placed.setdefault(setting if setting in known else setting.partition(".")[0], []).append(sentence)
    else:
        placed[secret if isinstance(error, SecretKeyMissing) else name] = [text]
    return replace(form, errors=placed)


Endpoint = Callable[..., Awaitable[Response]]
_EACH: Final[Sequence[tuple[str, Endpoint, str]]] = (
    ("/new", ask_new, "GET"),
    ("", create, "POST"),
    ("/{name}/define", show, "GET"),
    ("/{name}/define", change, "POST"),
    ("/{name}/rotate", rotate, "POST"),
    ("/{name}/enable", enable, "POST"),
    ("/{name}/disable", disable, "POST"),
    ("/{name}/delete", ask_delete, "GET"),
    ("/{name}/delete", delete, "POST"),
)
FORMS: Final = tuple(
    (noun, f"/{noun}s{path}", page, method)
    for noun in LABELS
    for path, page, method in _EACH
    if page is not rotate or Noun(noun) in stored.SECRET_OF
)
"""Noun, path, endpoint and method of every form; all are for admins."""
