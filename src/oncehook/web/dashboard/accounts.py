"""Pages about accounts, for admins of the whole inbox: whose events are, and what their senders sign with.

The forms are those of definitions (`define`). A generated secret and a link to the portal are shown once, in the answer
to the post that made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from starlette.responses import Response

from oncehook.account_definitions import AccountDefinitions, DefinedAccount
from oncehook.errors import BadRequest, Exists, Forbidden, InUse, InvalidSettings, NotFound, Refused, SecretKeyMissing
from oncehook.settings.stored import GENERATE
from oncehook.web.api.request import cursor
from oncehook.web.dashboard import define
from oncehook.web.dashboard.context import PageContext
from oncehook.web.dashboard.define import OVERLAPS, WORDS, Copied, DefinitionForm, FormField, place_errors
from oncehook.web.dashboard.setup import LISTED, address_of
from oncehook.web.language import translate

PREFIX: Final = "secrets."
"""Begins the name of the field with the secret for a source, as it begins the name of the setting."""
MOST_SECRETS: Final = 20
"""Sources for which a form has a field."""
MOVE: Final = "Move aliases that are another account's"
LINKS: Final = (("10m", "10 minutes"), ("1h", "1 hour"), ("1d", "1 day"))


def _accounts(context: PageContext) -> AccountDefinitions:
    """Return the acts on accounts. Raises Forbidden to whoever does not see all of them."""
    if context.admin.scope.is_limited:
        raise Forbidden("Accounts are for an admin of the whole inbox.")
    return context.admin.define(context.actor).accounts


async def accounts(context: PageContext) -> Response:
    """Show accounts by id, a page of them; or the one that has a name."""
    acts, after, name = _accounts(context), context.after("account") or "", context.parameter("name").strip()
    if name:
        one = await acts.find(name)
        found = [] if one is None else [one]
    else:
        found = await acts.all(after=after, limit=LISTED + 1)
    last = found[LISTED - 1].id.encode() if len(found) > LISTED else None
    return await context.page(
        "accounts.html", found=found[:LISTED], name=name, is_first=not after, next=cursor("account", last)
    )


# -- making ------------------------------------------------------------------------------------


async def ask_new(context: PageContext) -> Response:
    _accounts(context)
    return await _show_new(context, {})


async def create(context: PageContext) -> Response:
    acts, form = _accounts(context), await context.form()
    try:
        made = await acts.create(
            form.get("id", "").strip(),
            name=form.get("name", "").strip(),
            aliases=_read_aliases(form),
            secrets=_read_secrets(form),
            move="move" in form,
        )
    except (InvalidSettings, SecretKeyMissing, Exists) as error:
        return await _show_new(context, form, error)
    return await _show_made(context, made, translate("is ready"), made.secrets, status=201)


async def _show_new(context: PageContext, given: Mapping[str, str], error: Refused | None = None) -> Response:
    about = translate("What your product calls this customer: letters, digits and . _ @ + ~ -")
    id_ = FormField("id", "ID", about, given.get("id", ""), required=True)
    form = await _build_form(context, given, (), error)
    form = replace(form, fields=[id_, *form.fields])
    return await define.show_form(context, "account", _place(form, error), error)


# -- changing ----------------------------------------------------------------------------------


async def show(context: PageContext) -> Response:
    return await _show_account(context)


async def change(context: PageContext) -> Response:
    acts, form = _accounts(context), await context.form()
    try:
        made = await acts.change(
            context.name,
            name=form.get("name", "").strip(),
            aliases=_read_aliases(form),
            secrets=_read_secrets(form),
            move="move" in form,
        )
    except (InvalidSettings, SecretKeyMissing, Exists) as error:
        return await _show_account(context, form, error)
    if made.secrets:
        return await _show_made(context, made, translate("has a secret"), made.secrets)
    return _back(context, "change")


async def rotate(context: PageContext) -> Response:
    acts, form = _accounts(context), await context.form()
    source, given = form.get("source", ""), form.get("secret", "").strip()
    secret = None if given in ("", GENERATE) else given
    try:
        made = await acts.rotate(context.name, source, overlap=form.get("overlap", "1h"), secret=secret)
    except (InvalidSettings, SecretKeyMissing) as error:
        return await _show_account(context, error=error)
    is_rotating = form.get("overlap") != "0s"
    shown = made.secrets if secret is None else {}
    return await _show_made(context, made, translate("has a new secret"), shown, is_rotating=is_rotating)


async def remove_secret(context: PageContext) -> Response:
    acts, source = _accounts(context), (await context.form()).get("source", "")
    if source not in (await acts.get(context.name)).secret_sources:
        raise NotFound(f"Account {context.name[:60]} has no secret for {source[:60]}.")
    await acts.change(context.name, secrets={source: None})
    return _back(context, "change")


async def enable(context: PageContext) -> Response:
    await _accounts(context).change(context.name, enabled=True)
    return _back(context, "enable")


async def disable(context: PageContext) -> Response:
    await _accounts(context).change(context.name, enabled=False)
    return _back(context, "disable")


async def link(context: PageContext) -> Response:
    """Make a link to the portal of an account, and show it once."""
    one, form = await _accounts(context).get(context.name), await context.form()
    if not one.enabled:
        raise BadRequest("A disabled account has no portal.")
    person, expires = form.get("person", "").strip(), form.get("expires", LINKS[0][0])
    try:
        url = await context.admin.portal_link(one.id, actor=context.actor, name=person, expires=expires)
    except SecretKeyMissing as error:
        return await _show_account(context, error=error)
    copied = [Copied(translate("Give the customer this link"), url, translate("Copy link"), is_secret=True)]
    once = translate("It is shown here once, and works once.")
    return await define.show_made(
        context, "account", one.id, translate("has a link to its portal"), copied, status=201, once=once
    )


async def _show_account(
    context: PageContext, given: Mapping[str, str] | None = None, error: Refused | None = None
) -> Response:
    one = await _accounts(context).get(context.name)
    texts = {"name": one.name, "aliases": "\n".join(one.aliases)} if given is None else given
    form = _place(await _build_form(context, texts, one.secret_sources, error), error)
    return await context.page(
        "account.html",
        status=200 if error is None else error.status,
        base="dialog.html",
        noun="account",
        words=WORDS["account"],
        name=one.id,
        title=one.id,
        one=one,
        is_enabled=one.enabled,
        form=form,
        overlaps=OVERLAPS,
        links=LINKS,
    )


# -- deleting ----------------------------------------------------------------------------------


async def ask_delete(context: PageContext) -> Response:
    await _accounts(context).get(context.name)
    return await define.show_delete(context, "account", context.name, None)


async def delete(context: PageContext) -> Response:
    try:
        await _accounts(context).delete(context.name)
    except InUse as error:
        return await define.show_delete(context, "account", context.name, error)
    return context.back("/accounts", "delete")


# -- parts of all ------------------------------------------------------------------------------


def _back(context: PageContext, sentence: str) -> Response:
    return context.back(f"/accounts/{context.name}/define", sentence)


def _read_aliases(form: Mapping[str, str]) -> list[str]:
    return [text for line in form.get("aliases", "").split("\n") if (text := line.strip())]


def _read_secrets(form: Mapping[str, str]) -> dict[str, str | None]:
    given = {name.removeprefix(PREFIX): text.strip() for name, text in form.items() if name.startswith(PREFIX)}
    return {source: text for source, text in given.items() if text}


async def _build_form(
    context: PageContext, given: Mapping[str, str], has: Sequence[str], error: Refused | None
) -> DefinitionForm:
    """Build the form of an account. `has`: sources for which it has a secret, which is rotated and not given."""
    fields = [
        FormField("name", "Name", translate("What people call it (optional)."), given.get("name", "")),
        FormField(
            "aliases",
            "Aliases",
            translate("What providers call it, one a line: a number, a shop, a workspace."),
            given.get("aliases", ""),
            kind="lines",
        ),
    ]
    if isinstance(error, Exists) and error.hint:  # an alias is taken, which may be meant
        fields.append(FormField("move", MOVE, "", given.get("move", ""), kind="check"))
    about = translate("What its sender signs with; empty for the source's own secret.")
    for source in await context.admin.sources_by_account(MOST_SECRETS):
        if source not in has:
            label = translate("Secret for {}").format(source)
            text = GENERATE if given.get(PREFIX + source) == GENERATE else ""  # what somebody typed is not sent back
            fields.append(FormField(PREFIX + source, label, about, text, can_generate=True))
    return DefinitionForm(fields, (), takes_more=False)


def _place(form: DefinitionForm, error: Refused | None) -> DefinitionForm:
    """Return the form with what is wrong beside its field: of names that are taken only an alias can be moved."""
    is_id = isinstance(error, Exists) and not error.hint
    return place_errors(form, error, name="id" if is_id else "aliases")


async def _show_made(
    context: PageContext,
    made: DefinedAccount,
    what: str,
    secrets: Mapping[str, str],
    *,
    is_rotating: bool = False,
    status: int = 200,
) -> Response:
    copied: list[Copied] = []
    for source, secret in secrets.items():
        path, mark, query = address_of(context, await context.admin.source(source)).partition("?")
        caption = f"{source}: {translate('Give the provider this address')}"
        copied.append(Copied(caption, f"{path}/{made.id}{mark}{query}", translate("Copy address")))
        copied.append(Copied(translate("and this secret"), secret, translate("Copy secret"), is_secret=True))
    return await define.show_made(context, "account", made.id, what, copied, status=status, is_rotating=is_rotating)


FORMS: Final = (
    ("/accounts/new", ask_new, "GET"),
    ("/accounts", create, "POST"),
    ("/accounts/{name}/define", show, "GET"),
    ("/accounts/{name}/define", change, "POST"),
    ("/accounts/{name}/rotate", rotate, "POST"),
    ("/accounts/{name}/remove-secret", remove_secret, "POST"),
    ("/accounts/{name}/enable", enable, "POST"),
    ("/accounts/{name}/disable", disable, "POST"),
    ("/accounts/{name}/portal", link, "POST"),
    ("/accounts/{name}/delete", ask_delete, "GET"),
    ("/accounts/{name}/delete", delete, "POST"),
)
"""Path, endpoint and method of every form; all are for admins."""
