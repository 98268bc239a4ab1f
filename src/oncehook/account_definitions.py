"""Making, changing and deleting accounts while an inbox runs: their names, and the secrets of their senders.

An account is a stored definition like a source. Its id and its aliases are names that no other account may have; its
secrets are kept encrypted, told when they are generated, and never again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

from oncehook import clock, human
from oncehook.accounts import LONGEST_ALIAS, NO_SECRETS, Account
from oncehook.errors import (
    BadRequest,
    ConfigError,
    DefinitionChanged,
    Forbidden,
    InvalidSettings,
    NotFound,
    Undecryptable,
)
from oncehook.logs import ration
from oncehook.model import DefinitionWrite, Noun, StoredDefinition, check_account_id
from oncehook.secret import SHORTEST_SECRET, Secret
from oncehook.settings import stored
from oncehook.settings.stored import GENERATE, Vault
from oncehook.sources import Source
from oncehook.store.base import Store
from oncehook.verify.development import development_keys
from oncehook.verify.schemes import is_public

log = logging.getLogger("oncehook.definitions")

MOST_ALIASES: Final = 1000
MOST_SECRETS: Final = 100
LONGEST_NAME: Final = 200
TRIES: Final = 10
"""Times that a change is made again because somebody else changed the same at that moment."""
LONGEST_OVERLAP: Final = 90 * 86_400.0


class AccountHost(Protocol):
    """The inbox as accounts need it."""

    sources: dict[str, Source]

    @property
    def store(self) -> Store: ...

    @property
    def vault(self) -> Vault: ...

    async def find_source(self, name: str) -> Source | None:
        """Return a source by its name: the inbox's own, or a stored one."""


@dataclass(frozen=True, slots=True)
class DefinedAccount:
    """An account as it is shown."""

    id: str
    name: str
    aliases: Sequence[str]
    secret_sources: Sequence[str]
    """Sources for which it has a secret of its own."""
    enabled: bool
    created_at: datetime
    changed_at: datetime
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Secrets that were generated, by source; told here, and never again."""


def account_from(vault: Vault, definition: StoredDefinition) -> Account:
    """Build a stored account as the receiver needs it."""
    if definition.secrets is None:
        return Account(definition.name)
    shown = json.loads(definition.settings)
    generations = shown.get("made_for") or NO_SECRETS
    try:
        found = vault.decrypt(definition)
    except Undecryptable as error:
        fields = {"account": definition.name, "error": str(error), "hint": error.hint}
        ration.log(log, logging.ERROR, "account.unreadable", fields, kind=definition.name)
        return Account(definition.name, NO_SECRETS, shown.get("secrets", ()), generations)
    return Account(definition.name, found, (), generations)


def read_secrets(value: Any) -> list[Secret]:
    """Return stored secrets of an account as a source takes them."""
    listed = value if isinstance(value, list) else [value]
    return [Secret.from_program(stored.revive(one), "account") for one in listed]


class AccountDefinitions:
    """Acts on accounts, in the name of an actor, who may be limited to some of them."""

    def __init__(self, host: AccountHost, actor: str, accounts: frozenset[str] | None) -> None:
        self._host, self._actor, self._accounts = host, actor, accounts

    async def create(
        self,
        id: str | int,
        *,
        name: str = "",
        aliases: Collection[str | int] = (),
        secrets: Mapping[str, str | None] | None = None,
        move: bool = False,
    ) -> DefinedAccount:
        """Make an account. Raises InvalidSettings, SecretKeyMissing, Exists."""
        self._check_unlimited()
        return await self._write(None, _check_id(id), name, aliases, secrets or {}, move=move)

    async def change(
        self,
        id: str | int,
        *,
        name: str | None = None,
        aliases: Collection[str | int] | None = None,
        secrets: Mapping[str, str | None] | None = None,
        enabled: bool | None = None,
        move: bool = False,
    ) -> DefinedAccount:
        """Change an account: its name, all of its aliases, and those of its secrets that are given (None takes one
        away). `enabled=False` keeps it, as if it were not there."""
        self._check_unlimited()
        for _ in range(TRIES):
            found = await self._find(str(id))
            try:
                return await self._write(found, found.name, name, aliases, secrets or {}, enabled=enabled, move=move)
            except DefinitionChanged:
                continue
        raise DefinitionChanged

    async def rotate(
        self, id: str | int, source: str, *, overlap: str | float = "1h", secret: str | None = None
    ) -> DefinedAccount:
        """Give an account a new secret for a source; the old one is valid for `overlap` more."""
        seconds = read_overlap(overlap)
        for _ in range(TRIES):
            found = await self._find(str(id))
            kept = self._host.vault.decrypt(found)
            if source not in kept or (found.name, source) in await self._find_stale([found]):
                raise NotFound(f"Account {found.name} has no secret for {source[:60]}.")
            new, _ = await self._read_secret(source, GENERATE if secret is None else secret)
            rotated = {**kept, source: stored.rotate(kept[source], new, seconds, clock.now_utc())}
            try:
                settings = json.loads(found.settings)
                return await self._keep(found, found.name, settings, None, rotated, {source: new}, "rotate")
            except DefinitionChanged:
                continue
        raise DefinitionChanged

    async def delete(self, id: str | int) -> None:
        """Delete an account, its names and secrets. Its events stay. Raises InUse while anything is defined for it."""
        self._check_unlimited()
        for _ in range(TRIES):
            found = await self._find(str(id))
            try:
                await self._host.store.write_definition(
                    DefinitionWrite(
                        act="delete",
                        noun=Noun.account,
                        name=found.name,
                        actor=self._actor,
                        detail=json.dumps({"before": json.loads(found.settings), "after": None}),
                        expected=found.version,
                    )
                )
                return
            except DefinitionChanged:
                continue
        raise DefinitionChanged

    async def get(self, id: str | int) -> DefinedAccount:
        """Return an account. Raises NotFound."""
        found = await self._find(str(id))
        return await self._show_stored(found)

    async def _show_stored(self, found: StoredDefinition) -> DefinedAccount:
        aliases = (await self._host.store.aliases_of([found.name])).get(found.name, [])
        return _show(found, aliases, stale=await self._find_stale([found]))

    async def find(self, name: str) -> DefinedAccount | None:
        """Return the account that has an id or an alias."""
        found = (await self._host.store.find_accounts([name])).get(name)
        if found is None or (self._accounts is not None and found.name not in self._accounts):
            return None
        return await self._show_stored(found)

    async def all(self, *, after: str = "", limit: int = 50) -> list[DefinedAccount]:
        """Return accounts by id, those after an id."""
        store = self._host.store
        if self._accounts is None:
            found = await store.list_definitions(Noun.account, after=after, limit=limit)
        else:
            mine = sorted(one for one in self._accounts if one > after)[:limit]
            found = await store.find_definitions(Noun.account, mine)
        aliases = await store.aliases_of([one.name for one in found])
        stale = await self._find_stale(found)
        return [_show(one, aliases.get(one.name, []), stale=stale) for one in found]

    # -- checks and writing --------------------------------------------------------------------

    def _check_unlimited(self) -> None:
        if self._accounts is not None:
            raise Forbidden("Accounts are for an admin of the whole inbox.")

    async def _find(self, id: str) -> StoredDefinition:
        is_seen = self._accounts is None or id in self._accounts
        (found,) = (await self._host.store.find_definitions(Noun.account, [id]) if is_seen else ()) or (None,)
        if found is None:
            raise NotFound(f'There is no account "{id[:60]}", or no longer.')
        return found

    async def _find_stale(self, accounts: Collection[StoredDefinition]) -> set[tuple[str, str]]:
        """Return the secrets, by account and source, that were made for a stored source which was deleted since: they
        count no more, also where a source of the same name was made again."""
        made_for = {
            (one.name, source): generation
            for one in accounts
            for source, generation in json.loads(one.settings).get("made_for", {}).items()
            if source not in self._host.sources
        }
        if not made_for:
            return set()
        found = await self._host.store.find_definitions(Noun.source, sorted({source for _, source in made_for}))
        now = {one.name: stored.generation_of(one) for one in found}
        return {one for one, generation in made_for.items() if now.get(one[1]) != generation}

    async def _write(
        self,
        before: StoredDefinition | None,
        id: str,
        name: str | None,
        aliases: Collection[str | int] | None,
        secrets: Mapping[str, str | None],
        *,
        enabled: bool | None = None,
        move: bool,
    ) -> DefinedAccount:
        shown = {} if before is None else json.loads(before.settings)
        kept: dict[str, Any] = {} if before is None else self._host.vault.decrypt(before)
        for _, source in () if before is None else await self._find_stale([before]):
            kept.pop(source, None)
        made_for = {source: one for source, one in shown.get("made_for", {}).items() if source in kept}
        generated: dict[str, str] = {}
        for source, secret in secrets.items():
            made_for.pop(source, None)
            if secret is None:
                kept.pop(source, None)
                continue
            kept[source], generation = await self._read_secret(source, secret)
            if generation is not None:
                made_for[source] = generation
            if secret == GENERATE:
                generated[source] = kept[source]
        if len(kept) > MOST_SECRETS:
            raise _invalid("secrets", f"an account has {MOST_SECRETS} secrets at most")
        settings: dict[str, Any] = {"name": shown.get("name", "") if name is None else _check_name(name)}
        if made_for:
            settings["made_for"] = made_for
        checked = None if aliases is None else _check_aliases(id, aliases)
        act = "create" if before is None else "change"
        return await self._keep(before, id, settings, checked, kept, generated, act, enabled=enabled, move=move)

    async def _keep(
        self,
        before: StoredDefinition | None,
        id: str,
        settings: Mapping[str, Any],
        aliases: Sequence[str] | None,
        secrets: Mapping[str, Any],
        generated: Mapping[str, str],
        act: Any,
        *,
        enabled: bool | None = None,
        move: bool = False,
    ) -> DefinedAccount:
        store = self._host.store
        known = [] if before is None else (await store.aliases_of([id])).get(id, [])
        after = {**settings, "secrets": sorted(secrets)}
        is_enabled = (before is None or before.is_enabled) if enabled is None else enabled
        shown_before = None if before is None else {**json.loads(before.settings), "aliases": known}
        shown_after = {**after, "aliases": known if aliases is None else aliases, "enabled": is_enabled}
        made = await store.write_definition(
            DefinitionWrite(
                act=act,
                noun=Noun.account,
                name=id,
                actor=self._actor,
                detail=json.dumps({"before": shown_before, "after": shown_after}),
                expected=None if before is None else before.version,
                account=id,
                settings=json.dumps(after),
                secrets=self._host.vault.encrypt(Noun.account, id, secrets),
                is_enabled=is_enabled,
                aliases=known if aliases is None else aliases,
                moves=move,
            )
        )
        assert made is not None
        return _show(made, known if aliases is None else aliases, generated)

    async def _read_secret(self, source: str, secret: object) -> tuple[str, str | None]:
        """Return a secret, and the generation of the stored source that it is for."""
        if secret != GENERATE and (not isinstance(secret, str) or len(secret) < SHORTEST_SECRET):
            raise _invalid(f"secrets.{source}", "must be a secret itself", f'give it as text, or write "{GENERATE}"')
        generation = (await self._template(source)).generation
        return (await self._generate(source) if secret == GENERATE else str(secret)), generation

    async def _template(self, source: str) -> Source:
        """Return the source that an account has a secret for. Raises InvalidSettings."""
        found = await self._host.find_source(source)
        if found is None:
            near = human.suggest_clause(source, list(self._host.sources))
            raise _invalid(f"secrets.{source}", f'there is no source "{source[:60]}"', near)
        if not found.has_accounts_by_address:
            hint = 'give it account = "address"'
            raise _invalid(f"secrets.{source}", f"{source} does not have an address for each account", hint)
        return found

    async def _generate(self, source: str) -> str:
        """Make a secret that fits the verifier of a source. Raises InvalidSettings where the sender must make it."""
        scheme = (await self._template(source)).scheme
        if is_public(scheme):
            hint = "copy the key from the sender's own pages"
            raise _invalid(f"secrets.{source}", "the sender makes this one, it cannot be generated here", hint)
        return development_keys(scheme).secrets[0].decode()


def _show(
    definition: StoredDefinition,
    aliases: Sequence[str],
    generated: Mapping[str, str] | None = None,
    *,
    stale: Collection[tuple[str, str]] = (),
) -> DefinedAccount:
    shown = json.loads(definition.settings)
    return DefinedAccount(
        definition.name,
        shown.get("name", ""),
        sorted(aliases),
        [source for source in shown.get("secrets", []) if (definition.name, source) not in stale],
        definition.is_enabled,
        definition.created_at,
        definition.changed_at,
        generated or {},
    )


def _check_id(id: str | int) -> str:
    try:
        return check_account_id(id)
    except ConfigError as error:
        raise _invalid("id", str(error), error.hint) from None


def _check_name(name: object) -> str:
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not _is_storable(name):
        raise _invalid("name", f"must be text of {LONGEST_NAME} characters at most")
    return name


def _check_aliases(id: str, aliases: Collection[str | int]) -> list[str]:
    if isinstance(aliases, str) or not isinstance(aliases, Collection) or len(aliases) > MOST_ALIASES:
        raise _invalid("aliases", f"must be a list of {MOST_ALIASES} at most")
    found = [str(one) for one in aliases if str(one) != id]
    for one in found:
        if not one or len(one) > LONGEST_ALIAS or not _is_storable(one):
            raise _invalid("aliases", f"{one[:60]!r} cannot be an alias", f"use 1 to {LONGEST_ALIAS} characters")
    return list(dict.fromkeys(found))


def _is_storable(text: str) -> bool:
    """Tell whether a database can hold a text, and a line of a log or a list show it."""
    return text.isprintable() and not any("\ud800" <= character <= "\udfff" for character in text)


def read_overlap(overlap: str | float) -> float:
    """Return the seconds for which an old secret stays valid. Raises BadRequest."""
    try:
        seconds = human.seconds(overlap) if isinstance(overlap, str) else float(overlap)
    except ConfigError as error:
        raise BadRequest(f"overlap: {error}", hint='Write for example "1h".') from None
    if not 0 <= seconds <= LONGEST_OVERLAP:
        raise BadRequest("overlap is a duration from 0 to 90 days.")
    return seconds


def _invalid(setting: str, error: str, hint: str = "") -> InvalidSettings:
    return InvalidSettings([{"setting": setting, "error": error, "hint": hint}])
