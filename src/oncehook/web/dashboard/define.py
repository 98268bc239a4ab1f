"""Forms that make, change, rotate, disable and delete sources and destinations while the inbox runs.

The settings, checks and sentences are those of `define`. A generated secret is shown in the answer to the post that
made it, and never again: such an answer has no address of its own, and browsers do not keep it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

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
from oncehook.model import Noun, StoredDefinition
from oncehook.reports import ShownDestination, ShownSource
from oncehook.settings import stored
from oncehook.settings.read import fields_of
from oncehook.settings.values import NAME_FORM
from oncehook.sources import Preset
from oncehook.verify.schemes import is_public
from oncehook.web.dashboard.context import PageContext
from oncehook.web.dashboard.setup import address_of

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
}
"""Settings that have a field of their own; all others are lines of one text, as in the file."""
FOLDED: Final = ("subject", "account")
"""Settings of a source that few need at first."""
USUAL: Final[Mapping[NounName, Sequence[str]]] = {
    "source": ("secret",),
    "destination": ("url", "sign", "subscribe", "account"),
}
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


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of one definition, with what is wrong in them."""

    fields: Sequence[FormField]
    folded: Sequence[FormField]
    more: str = ""
    shown: str = ""
    errors: Mapping[str, Sequence[str]] | None = None

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
        made = await define.create(noun, form.get("name", "").strip(), given)
        if goal:
            route = {"from": made.name, "to": goal}
            await define.create("route", "", route, account=made.definition.account)
    except (InvalidSettings, SecretKeyMissing, Exists, DefinedElsewhere) as error:
        return await _show_new(context, noun, preset, form, error)
    return await _show_defined(context, noun, made, "is ready", goal=goal, status=201)


async def _show_new(
    context: PageContext, noun: NounName, preset: Preset | None, given: Mapping[str, str], error: Refused | None = None
) -> Response:
    wanted = ("name", *(USUAL[noun] if preset is None else preset.needs))
    form = _for_visitor(context, _build_form(noun, given, wanted, left_out=_left_out(context)))
    if noun == "source":
        form = replace(form, fields=[*form.fields, await _build_goal(context, given.get(GOAL, ""))])
    form = _with_errors(form, noun, error)
    status = 200 if error is None else error.status
    return await context.dialog("define_new.html", status=status, noun=noun, preset=preset, form=form)


async def _build_goal(context: PageContext, text: str) -> FormField:
    is_limited = context.admin.scope.is_limited
    known = [one.name for one in await context.admin.destinations() if one.origin == "store" or not is_limited]
    return FormField(GOAL, "Send to", "The destination that gets its events; empty for none yet.", text, choices=known)


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
    """Show what defines a source or destination; of a stored one, the forms that change it."""
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
        return await _show_defined(context, noun, made, "has a secret")
    return context.back(_page(noun, context.name), "change")


async def rotate(context: PageContext, noun: NounName) -> Response:
    form, key = await context.form(), stored.SECRET_OF[Noun(noun)]
    given, overlap = form.get(key, "").strip(), form.get("overlap", "1h")
    secret = None if given in ("", stored.GENERATE) else given
    try:
        made = await context.admin.define(context.actor).rotate(noun, context.name, overlap=overlap, secret=secret)
    except (InvalidSettings, SecretKeyMissing) as error:
        return await _show_definition(context, noun, error=error)
    return await _show_defined(context, noun, made, "has a new secret", is_given=secret is not None)


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
    form: Form | None = None
    key = stored.SECRET_OF[Noun(noun)]
    if shown.origin == "store":
        definition = await context.admin.define(context.actor).get(noun, context.name)
        form = _with_errors(_form_of(noun, definition, given, _left_out(context)), noun, error)
        form = _for_visitor(context, form)
    return await context.page(
        "definition.html",
        status=200 if error is None else error.status,
        base="dialog.html",
        noun=noun,
        one=shown,
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
    status = 200 if error is None else error.status
    return await context.dialog("delete.html", status=status, noun=noun, one=shown, level=level, error=error)


# -- parts of all ------------------------------------------------------------------------------


async def _find(context: PageContext, noun: NounName) -> ShownSource | ShownDestination:
    return await (context.admin.source if noun == "source" else context.admin.destination)(context.name)


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
    context.frames.forget()
    address, can_try = None, False
    if noun == "source":
        address = address_of(context, await context.admin.source(made.name))
        can_try = bool(await context.admin.sample_types(made.name))
    else:
        can_try = await context.admin.can_test(made.name)
    ends = stored.show(made.definition).get(stored.SECRET_OF[Noun(noun)])
    return await context.page(
        "defined.html",
        status=status,
        base="dialog.html",
        noun=noun,
        name=made.name,
        what=what,
        address=address,
        goal=goal,
        secret=None if is_given else made.secret,
        is_rotating=isinstance(ends, list) and len(ends) > 1,
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
        given[name] = text.replace(",", " ").split() if name == "subscribe" else text
    return given


def _for_visitor(context: PageContext, form: Form) -> Form:
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
) -> Form:
    """Build the form of a stored definition: filled as it is stored, or as somebody has filled it."""
    public = stored.public_settings(definition)
    hidden = stored.show(definition).keys() - public.keys()
    texts = {name: text for name in LABELS[noun] if (text := _show_text(public.get(name))) is not None}
    if given is None:
        lines = [show_setting(name, value) for name, value in public.items() if name not in texts]
        given = {**texts, MORE: "\n".join(lines), SHOWN: ",".join(public)}
    wanted = {*USUAL[noun], *public, *hidden} - ({stored.SECRET_OF[Noun(noun)]} & hidden)
    return _build_form(noun, given, wanted, hidden, left_out)


def _build_form(
    noun: NounName,
    given: Mapping[str, str],
    wanted: Collection[str],
    hidden: Collection[str] = (),
    left_out: Collection[str] = (),
) -> Form:
    """Build a form with the fields that are wanted; what few need is folded, or is a line of its text."""
    about = fields_of(stored.TABLES[Noun(noun)])
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
            place.append(FormField(name, label, about[name].about, text, is_set=name in hidden))
    return Form(fields, folded, given.get(MORE, ""), given.get(SHOWN, ""))


def _show_text(value: object) -> str | None:
    """Return a setting as the text of a field; None where it must be a line of TOML."""
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return value if isinstance(value, str) else None


def _with_errors(form: Form, noun: NounName, error: Refused | None) -> Form:
    """Place what is wrong beside its field."""
    if error is None:
        return form
    text = f"{error} {error.hint}".strip()
    placed: dict[str, list[str]] = {}
    if isinstance(error, InvalidSettings):
        for one in error.errors:
            sentence = "; ".join(filter(None, (one["error"], one["hint"])))
            placed.setdefault(one["setting"].partition(".")[0], []).append(sentence)
    elif isinstance(error, SecretKeyMissing):
        placed[stored.SECRET_OF[Noun(noun)]] = [text]
    else:
        placed["name"] = [text]
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
FORMS: Final = tuple((noun, f"/{noun}s{path}", page, method) for noun in LABELS for path, page, method in _EACH)
"""Noun, path, endpoint and method of every form; all are for admins."""
