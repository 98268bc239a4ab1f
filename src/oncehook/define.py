"""Making, changing, disabling and deleting sources, destinations and routes while an inbox runs.

`inbox.define` for programs; API, command line and dashboard reach it through `admin`. The settings, checks and
sentences are those of the file. What a file or a program defines is changed there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar, Unpack, cast

from oncehook import clock, human
from oncehook.account_definitions import AccountDefinitions, DefinedAccount, read_overlap
from oncehook.bodies import Bodies
from oncehook.destinations.base import Destination
from oncehook.errors import (
    BadRequest,
    DefinedElsewhere,
    DefinitionChanged,
    Exists,
    Forbidden,
    InvalidSettings,
    NotFound,
    StoreUnavailable,
    Undecryptable,
)
from oncehook.model import DefinitionWrite, Noun, RouteId, StoredDefinition, address_hash, is_account_id, new_id
from oncehook.routes import subscribers
from oncehook.settings import stored
from oncehook.settings.stored import DefinitionDraft, Vault
from oncehook.settings.tables import DestinationArguments, RouteSettings, SourceArguments
from oncehook.sources import Source
from oncehook.store.base import Store

T = TypeVar("T")
NounName: TypeAlias = Literal["source", "destination", "route"]
Act: TypeAlias = Literal["create", "change", "rotate", "enable", "disable", "delete"]

TRIES: Final = 10
"""Times that a change is made again because somebody else changed the same at that moment."""
LATE: Final = 1.5
"""Seconds after which no process makes deliveries for a deleted destination any more."""


class DefineHost(Protocol):
    """The inbox as `Define` needs it."""

    sources: dict[str, Source]
    destinations: dict[str, Destination]

    @property
    def store(self) -> Store: ...

    @property
    def vault(self) -> Vault: ...

    @property
    def bodies(self) -> Bodies: ...

    @property
    def is_started(self) -> bool: ...

    async def find_source(self, name: str) -> Source | None: ...

    async def catch_up(self, version: int) -> None:
        """Wait until a version of the definitions counts in this process."""


@dataclass(frozen=True, slots=True)
class Defined:
    """A definition that was made or changed."""

    definition: StoredDefinition
    secret: str | None = field(default=None, repr=False)
    """The secret that was generated for it; told here, and never again."""
    path: str = field(default="", repr=False)
    """Of a source: the last part of its address."""

    @property
    def name(self) -> str:
        """Return its name; of a route its id, `rte_…`."""
        return self.definition.name

    @property
    def address(self) -> str | None:
        """Return where a source receives, below the address of the server."""
        return f"/in/{self.path}" if self.path else None


class Define:
    """Acts on stored definitions, in the name of an actor."""

    def __init__(self, host: DefineHost) -> None:
        self._host = host
        self._actor = "program"
        self._accounts: frozenset[str] | None = None
        """The accounts whose definitions alone may be seen and changed; None: all."""

    def by(self, actor: str, account: str | Collection[str] | None = None) -> Define:
        """Return the same for another actor, who may be limited to some accounts."""
        made = copy(self)
        made._actor = actor
        made._accounts = None if account is None else frozenset([account] if isinstance(account, str) else account)
        return made

    @property
    def accounts(self) -> AccountDefinitions:
        """Acts on accounts, in the name of the same actor."""
        return AccountDefinitions(self._host, self._actor, self._accounts)

    async def account(
        self,
        id: str | int,
        *,
        name: str = "",
        aliases: Collection[str | int] = (),
        secrets: Mapping[str, str] | None = None,
        move: bool = False,
    ) -> DefinedAccount:
        """Make an account: whose events are. `aliases` are what providers call it; `secrets` are what its senders sign
        with, by source, each itself or "generate".

        With `move`, aliases of other accounts become this one's. Raises InvalidSettings, SecretKeyMissing, Exists.

        >>> made = await inbox.define.account(42, aliases=["1065403"], secrets={"shopify": "generate"})
        """
        return await self.accounts.create(id, name=name, aliases=aliases, secrets=secrets or {}, move=move)

    # -- making --------------------------------------------------------------------------------

    async def source(self, name: str, **settings: Unpack[SourceArguments]) -> Defined:
        """Make a source. Settings are those of `[source.NAME]`, as data; `secret="generate"` makes a secret.

        Raises InvalidSettings, SecretKeyMissing, DefinedElsewhere, Exists.
        """
        return await self.create("source", name, settings)

    async def destination(self, name: str, **settings: Unpack[DestinationArguments]) -> Defined:
        """Make a destination. Settings are those of `[destination.NAME]`; `sign="generate"` makes a key."""
        return await self.create("destination", name, settings)

    async def route(
        self, source: str, to: str, *, account: str | None = None, **settings: Unpack[RouteSettings]
    ) -> Defined:
        """Make a route from a source to a destination; settings are those of `[[route]]`."""
        return await self.create("route", "", {"from": source, "to": to, **settings}, account=account)

    async def create(
        self, noun: NounName, name: str, settings: Mapping[str, Any], *, account: str | None = None
    ) -> Defined:
        """Make a definition of any noun. A route gets its name here."""
        meant = Noun(noun)
        name = str(RouteId(new_id())) if meant is Noun.route else name
        if self._accounts is None:
            self._check_own(meant, name)
        settings, owner = self._own(meant, settings, account)
        draft = await self._read(meant, name, settings)
        self._check_own(meant, name)  # an account is told that a name is taken only where it could have had it
        return await self._write("create", draft, None, account=owner, is_enabled=True)

    def _own(
        self, noun: Noun, settings: Mapping[str, Any], account: str | int | None
    ) -> tuple[Mapping[str, Any], str | None]:
        """Return settings with the account that they belong to, and that account. Whoever is limited to one account
        need not say so. Raises Forbidden for another's."""
        given = settings.get("account") if account is None and noun is not Noun.route else account
        if given is None and self._accounts is not None and len(self._accounts) == 1:
            given = min(self._accounts)
        owner = str(given) if given is not None and is_account_id(str(given)) else None
        if noun is Noun.route and given is not None and owner is None:
            raise InvalidSettings([{"setting": "account", "error": "must be the id of an account", "hint": ""}])
        if self._accounts is not None and owner not in self._accounts:
            raise Forbidden(
                "You may define only what belongs to your account.",
                hint=f"Say account: {min(self._accounts, default='')}",
            )
        return (settings if noun is Noun.route or given is None else {**settings, "account": given}), owner

    async def put(
        self, noun: NounName, name: str, settings: Mapping[str, Any], *, account: str | None = None
    ) -> tuple[Defined, bool]:
        """Make a definition, or give an existing one these settings and no others; also return whether it is new.

        A secret that is left out stays.
        """
        refused: Exists | None = None
        for _ in range(TRIES):
            found = await self._find(Noun(noun), name)
            if found is None and refused is not None:  # nobody has made it meanwhile: the name is somebody else's
                raise refused
            try:
                if found is None:
                    if noun == "route":
                        raise NotFound(f'There is no route "{name}", or no longer.')
                    return await self.create(noun, name, settings, account=account), True
                kept = self._host.vault.decrypt(found)
                key = stored.SECRET_OF.get(found.noun, "")
                given = {**({key: kept[key]} if key in kept else {}), **stored.restore(settings, kept)}
                if found.account is not None and found.noun is not Noun.route:
                    given.setdefault("account", found.account)
                return await self._change(found, given, account), False
            except DefinitionChanged:
                continue
            except Exists as error:
                refused = error
        raise DefinitionChanged

    # -- changing ------------------------------------------------------------------------------

    async def change(self, noun: NounName, name: str, /, **settings: Any) -> Defined:
        """Change some settings of a definition; None takes one out. `enabled` and `account` are changed here, too."""

        def merge(found: StoredDefinition) -> Awaitable[Defined]:
            kept = stored.all_settings(self._host.vault, found)
            given = {**kept, **stored.restore(settings, kept)}
            account = given.pop("account", found.account) if found.noun is Noun.route else None
            is_enabled = given.pop("enabled", found.is_enabled)
            if not isinstance(is_enabled, bool):
                raise InvalidSettings([{"setting": "enabled", "error": "must be true or false", "hint": ""}])
            return self._change(found, given, account, is_enabled=is_enabled)

        return await self._with(Noun(noun), name, merge)

    async def rotate(
        self, noun: NounName, name: str, *, overlap: str | float = "1h", secret: str | None = None
    ) -> Defined:
        """Give a source or destination a new secret; the old one is valid for `overlap` more.

        The new one is generated, unless it is given.
        """
        meant, seconds = Noun(noun), read_overlap(overlap)
        if (key := stored.SECRET_OF.get(meant)) is None:
            raise BadRequest("A route has no secret.")

        def renew(found: StoredDefinition) -> Awaitable[Defined]:
            given = stored.all_settings(self._host.vault, found)
            if not given.get(key):
                error = f"{name} has no {key} that could be rotated"
                raise InvalidSettings([{"setting": key, "error": error, "hint": f"give it one: {key} = generate"}])
            new = stored.generate_secret(meant, name, given) if secret in (None, stored.GENERATE) else secret
            given[key] = stored.rotate(given[key], new, seconds, clock.now_utc())
            return self._change(found, given, None, act="rotate", secret=new)

        return await self._with(meant, name, renew)

    async def enable(self, noun: NounName, name: str) -> Defined:
        """Let a disabled definition count again."""
        return await self._switch(Noun(noun), name, is_enabled=True)

    async def disable(self, noun: NounName, name: str) -> Defined:
        """Keep a definition, but as if it were not there: a source answers nobody, a destination gets nothing new."""
        return await self._switch(Noun(noun), name, is_enabled=False)

    async def _switch(self, noun: Noun, name: str, *, is_enabled: bool) -> Defined:
        act: Act = "enable" if is_enabled else "disable"

        async def write(found: StoredDefinition) -> Defined:
            detail = {"before": {"enabled": found.is_enabled}, "after": {"enabled": is_enabled}}
            made = await self._host.store.write_definition(
                DefinitionWrite(
                    act=act,
                    noun=noun,
                    name=name,
                    actor=self._actor,
                    detail=json.dumps(detail),
                    expected=found.version,
                    account=found.account,
                    address=found.address,
                    source=found.source,
                    destination=found.destination,
                    settings=found.settings,
                    secrets=found.secrets,
                    is_enabled=is_enabled,
                )
            )
            assert made is not None
            await self._host.catch_up(made.version)
            return Defined(made, path=self._path_of(made))

        return await self._with(noun, name, write)

    def _path_of(self, definition: StoredDefinition) -> str:
        """Return the last part of a source's address; nothing where that is secret and cannot be read here."""
        if definition.noun is not Noun.source:
            return ""
        try:
            return str(self._host.vault.decrypt(definition).get("path", definition.name))
        except Undecryptable:
            return ""

    async def delete(self, noun: NounName, name: str, *, discard: bool = False) -> None:
        """Delete a definition, and the routes from a source or to a destination.

        Raises InUse where deliveries wait for a destination, unless they are discarded with it, and its dead letters.
        """
        meant = Noun(noun)
        found: StoredDefinition | None = None

        async def write(one: StoredDefinition) -> None:
            nonlocal found
            found = one
            await self._host.store.write_definition(
                DefinitionWrite(
                    act="delete",
                    noun=meant,
                    name=name,
                    actor=self._actor,
                    detail=json.dumps({"before": _show(one), "after": None, "discard": discard}),
                    expected=one.version,
                    unless_waiting=not discard,
                )
            )

        await self._with(meant, name, write)
        if meant is Noun.destination and found is not None:
            if discard:
                await self._discard(found.id)
            if self._host.is_started:
                # Other processes may have made deliveries for it until they learnt of this.
                task = asyncio.get_running_loop().create_task(self._discard_late(found.id))
                _LATE.add(task)
                task.add_done_callback(_LATE.discard)

    async def _discard_late(self, destination_id: int) -> None:
        await asyncio.sleep(LATE)
        try:
            if not await self._host.store.find_destinations([destination_id]):
                await self._discard(destination_id)
        except StoreUnavailable:
            pass  # they are reported as deliveries that nobody works for

    async def _discard(self, destination_id: int) -> None:
        before = new_id()
        while await self._host.store.discard_waiting(destination_id, before, "its destination was deleted"):
            pass

    # -- looking -------------------------------------------------------------------------------

    async def get(self, noun: NounName, name: str) -> StoredDefinition:
        """Return a stored definition. Raises NotFound, DefinedElsewhere."""
        if (found := await self._find(Noun(noun), name)) is None:
            if self._accounts is None:
                self._check_own(Noun(noun), name)
            raise NotFound(f'There is no {noun} "{name}", or no longer.')
        return found

    async def all(self, noun: NounName, *, after: str = "", limit: int = 50) -> list[StoredDefinition]:
        """Return stored definitions by name, those after a name."""
        store, meant = self._host.store, Noun(noun)
        if self._accounts is None:
            return await store.list_definitions(meant, after=after, limit=limit)
        found = [
            one
            for account in sorted(self._accounts)
            for one in await store.list_definitions(meant, account=account, after=after, limit=limit)
        ]
        return sorted(found, key=lambda one: one.name)[:limit]

    async def path_of(self, definition: StoredDefinition) -> str:
        """Return the last part of a source's address; empty where it is secret and cannot be read here."""
        if "path" not in stored.show(definition):
            return definition.name
        path: str = self._host.vault.decrypt(definition).get("path", "")
        return path

    async def _find(self, noun: Noun, name: str) -> StoredDefinition | None:
        (found,) = await self._host.store.find_definitions(noun, [name]) or (None,)
        # An account learns nothing of what belongs to others.
        return found if found is None or self._accounts is None or found.account in self._accounts else None

    async def _with(self, noun: Noun, name: str, change: Callable[[StoredDefinition], Awaitable[T]]) -> T:
        """Change a definition; once more where somebody else changed it at the same moment."""
        for _ in range(TRIES):
            found = await self.get(cast("NounName", noun.value), name)
            try:
                return await change(found)
            except DefinitionChanged:
                continue
        raise DefinitionChanged

    # -- checks and writing --------------------------------------------------------------------

    def _check_own(self, noun: Noun, name: str) -> None:
        """Raise DefinedElsewhere for a name or path of the inbox's own."""
        own: Collection[str] = {
            Noun.source: {one for source in self._host.sources.values() for one in (source.name, source.path)},
            Noun.destination: self._host.destinations,
            Noun.route: (),
        }[noun]
        if name in own and self._accounts is None:
            raise DefinedElsewhere(f'{noun} "{name}" is defined in the file or in the program.')
        if name in own:
            raise Exists(f'The name "{name}" is taken.')

    async def _read(self, noun: Noun, name: str, settings: Mapping[str, Any]) -> DefinitionDraft:
        draft = stored.read_draft(noun, name, settings, is_scoped=self._accounts is not None)
        if noun is Noun.route:
            await self._check_ends(draft)
        if noun is Noun.source and draft.read.media is not None and self._host.bodies.objects is None:
            hint = 'set bodies = "s3://bucket/prefix", or a folder, for the server'
            raise InvalidSettings([{"setting": "media", "error": "there is no place to keep files at", "hint": hint}])
        return draft

    async def _check_ends(self, draft: DefinitionDraft) -> None:
        """Refuse a route that leads to no destination, and one of an account from what is not the account's."""
        source, to = draft.ends
        assert source is not None
        assert to is not None
        if self._accounts is not None:
            await self._check_owned(Noun.source, "from", source)
        await self.check_goal(to)

    async def check_goal(self, to: str) -> None:
        """Refuse a destination that no route of this actor may lead to. Raises InvalidSettings."""
        if self._accounts is not None:
            await self._check_owned(Noun.destination, "to", to)
            return
        if to in self._host.destinations or await self._host.store.find_definitions(Noun.destination, [to]):
            return
        if all(to not in worker.destinations for worker in await self._host.store.workers()):
            stored = [one.name for one in await self._host.store.list_definitions(Noun.destination)]
            near = human.suggest_clause(to, [*self._host.destinations, *stored])
            raise InvalidSettings([{"setting": "to", "error": f'there is no destination "{to}"', "hint": near}])

    async def _check_owned(self, noun: Noun, setting: str, name: str) -> None:
        """Refuse the end of an account's route that is not the account's: nothing is told of what is another's."""
        if await self._find(noun, name) is None:
            error = f'there is no {noun} "{name}"'
            raise InvalidSettings([{"setting": setting, "error": error, "hint": "name one of your own"}])

    async def _change(
        self,
        found: StoredDefinition,
        given: Mapping[str, Any],
        account: str | None,
        *,
        is_enabled: bool | None = None,
        act: Act = "change",
        secret: str | None = None,
    ) -> Defined:
        given, owner = self._own(found.noun, given, account)
        draft = await self._read(found.noun, found.name, given)
        draft.generated = draft.generated or secret
        enabled = found.is_enabled if is_enabled is None else is_enabled
        return await self._write(act, draft, found, account=owner, is_enabled=enabled)

    async def _write(
        self,
        act: Act,
        draft: DefinitionDraft,
        before: StoredDefinition | None,
        *,
        account: str | None,
        is_enabled: bool,
    ) -> Defined:
        source, to = draft.ends
        if draft.noun is Noun.destination and draft.read.subscribe:
            source, to = subscribers(account), draft.name  # found like a route from there
        path = "" if draft.source is None else draft.source.path
        if path and path != draft.name:
            self._check_own(Noun.source, path)
        after = {**draft.public, **stored.hide_all(draft.secret), "account": account, "enabled": is_enabled}
        made = await self._host.store.write_definition(
            DefinitionWrite(
                act=act,
                noun=draft.noun,
                name=draft.name,
                actor=self._actor,
                detail=json.dumps({"before": None if before is None else _show(before), "after": after}),
                expected=None if before is None else before.version,
                account=account,
                address=address_hash(path) if path else None,
                source=source,
                destination=to,
                settings=stored.encode(draft),
                secrets=self._host.vault.encrypt(draft.noun, draft.name, draft.secret),
                is_enabled=is_enabled,
                largest_body=0 if draft.source is None else draft.source.settings.max_body,
            )
        )
        assert made is not None
        await self._host.catch_up(made.version)
        return Defined(made, draft.generated, path)


def _show(definition: StoredDefinition) -> dict[str, Any]:
    return {**stored.show(definition), "account": definition.account, "enabled": definition.is_enabled}


_LATE: Final[set[asyncio.Task[None]]] = set()
"""Discards under way, so that they are not collected."""
