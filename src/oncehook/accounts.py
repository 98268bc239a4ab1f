"""Accounts: whose an event is, for who serves many customers with one inbox.

The receiver asks an `AccountDirectory` for the account that an address or a rule names. The directory loads an account
when its name is first needed and keeps a bounded number of them, so that neither memory nor the way of an arrival grows
with the number of accounts. `forget` makes it look again, when the store tells of a change (decision 27).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from oncehook import clock
from oncehook.errors import Overloaded, SignatureInvalid, StoreUnavailable
from oncehook.secret import Secret
from oncehook.sources import Keys, Source

LONGEST_ALIAS: Final = 200
MOST_KNOWN: Final = 200_000
"""Names whose account is remembered, in each process: 100,000 take some 25 MB."""
MOST_ADDRESSES: Final = 100_000
"""Addresses of accounts whose keys are kept compiled, at 1.5 KB; to compile them again takes 10 to 25 µs."""
MOST_UNKNOWN: Final = 20_000
"""Names remembered to be nobody's: whoever makes them up must not push out those of real accounts."""
MOST_WAITING: Final = 5_000
"""Names that may wait to be looked up."""
AT_ONCE: Final = 500
"""Names that one query looks up."""
UNKNOWN_FOR: Final = 60.0
"""Seconds for which a name is remembered to be nobody's, should a notice be lost."""

_K = TypeVar("_K")
_V = TypeVar("_V")

NO_SECRETS: Final[Mapping[str, Any]] = MappingProxyType({})


class Account(msgspec.Struct, frozen=True, gc=False):
    """An account as the receiver needs it."""

    id: str
    secrets: Mapping[str, Any] = NO_SECRETS
    """Secrets that its senders sign with, by source, as they are stored: texts, which the garbage collector need not
    look at. Without an entry, the source's own secret verifies."""
    unreadable: Collection[str] = ()
    """Sources for which it has a secret that cannot be decrypted here."""
    generations: Mapping[str, str] = NO_SECRETS
    """Generations of the stored sources that its secrets were made for, by source."""

    def has_secret(self, source: Source) -> bool:
        """Tell whether it has a secret for a source, and not for a deleted one of the same name."""
        made_for = self.generations.get(source.name)
        if made_for is not None and source.generation is not None and made_for != source.generation:
            return False
        return source.name in self.secrets or source.name in self.unreadable


Load = Callable[[Sequence[str]], Awaitable[Mapping[str, Account]]]
"""A function that looks names up in the store: ids and aliases. Names of nobody are left out."""


async def load_nobody(names: Sequence[str]) -> Mapping[str, Account]:
    """Find no account: for an inbox that is not started."""
    return {}


class _Address(msgspec.Struct, gc=False):
    """A source at the address of one account, as far as it differs from the source itself."""

    source: Source
    keys: Keys | None
    is_retired: bool = False
    """Whether what was begun here is not acknowledged any more."""


class AccountDirectory:
    """Accounts by name, as far as this process knows them."""

    def __init__(
        self,
        load: Load,
        is_usable: Callable[[str | None], bool] = lambda account: True,
        read_secrets: Callable[[Any], Sequence[Secret]] = lambda kept: [],
    ) -> None:
        """`is_usable` tells whether what is known of an account can be used, or must be looked up again; None: that a
        name is nobody's."""
        self._load = load
        self.is_usable = is_usable
        self._read_secrets = read_secrets
        self._known: dict[str, Account] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        """Names in `_known`, by account."""
        self._unknown: dict[str, float] = {}
        """Names of nobody, and until when to believe it."""
        self._addresses: dict[tuple[str, str], _Address] = {}
        """Addresses of accounts, by source and account."""
        self._sources: set[str] = set()
        """Names of the sources in `_addresses`."""
        self._waiting: dict[str, asyncio.Future[Account | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed: set[str] | None = set()
        """Accounts of which a notice came since the read that is under way began; None: it was about all. What it finds
        of them is out of date."""

    def find(self, name: str) -> Account | None:
        """Return the account of an id or alias, or None for nobody's. Raises KeyError where that is not known yet."""
        found = self._known.get(name)
        if found is not None:
            if not self.is_usable(found.id):
                raise KeyError(name)
            return found
        if self._unknown[name] < clock.steady() or not self.is_usable(None):
            del self._unknown[name]
            raise KeyError(name)
        return None

    def is_current(self, account: Account) -> bool:
        """Tell whether an account that was looked up is still what is known of it: no notice came since."""
        is_known = any(self._known[name] is account for name in self._names.get(account.id, ()))
        return is_known and self.is_usable(account.id)

    def at(self, source: Source, account: Account) -> Source:
        """Return a source as it is for one account: with its secret, where it has one there. Raises StoreUnavailable
        where that cannot be decrypted."""
        if source.name in account.unreadable and account.has_secret(source):
            raise StoreUnavailable(f"The secret of account {account.id} for {source.name} cannot be read here.")
        address = self._addresses.get((source.name, account.id))
        if address is None or address.source is not source:
            secrets = self._read_secrets(account.secrets[source.name]) if account.has_secret(source) else None
            address = _Address(source, source.compile_account(account.id, secrets))
            _keep(self._addresses, (source.name, account.id), address, MOST_ADDRESSES)
            self._sources.add(source.name)
        made = source.of_account(account.id, address.keys)
        made.guard = partial(_check_account, address, source.guard)
        return made

    async def load(self, names: Iterable[str]) -> dict[str, Account | None]:
        """Look names up. Those that many arrivals wait for are looked up once, many names by one query."""
        futures: dict[str, asyncio.Future[Account | None]] = {}
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= MOST_WAITING:  # checked once: one arrival may bring many names, and must get through
            raise Overloaded
        for name in names:
            if name not in self._waiting:
                self._waiting[name] = loop.create_future()
            futures[name] = self._waiting[name]
        if self._waiting and (self._task is None or self._task.done()):
            self._task = loop.create_task(self._look_up(), name="oncehook-accounts")
        return {name: await asyncio.shield(future) for name, future in futures.items()}

    async def _look_up(self) -> None:
        while self._waiting:
            names = list(self._waiting)[:AT_ONCE]
            self._changed = set()
            try:
                found = await self._load(names)
            except BaseException as error:
                for name in names:
                    _fail(self._waiting.pop(name), error)
                if not isinstance(error, Exception):
                    raise
                continue
            for name in names:
                account = found.get(name)
                if self._is_up_to_date(account):
                    self._remember(name, account)
                waiting = self._waiting.pop(name)
                if not waiting.done():
                    waiting.set_result(account)

    def _is_up_to_date(self, account: Account | None) -> bool:
        """Tell whether no notice came of what was just read. A name of nobody may have become anybody's."""
        if self._changed is None:
            return False
        return not self._changed if account is None else account.id not in self._changed

    def _remember(self, name: str, account: Account | None) -> None:
        if account is None:
            _keep(self._unknown, name, clock.steady() + UNKNOWN_FOR, MOST_UNKNOWN)
            return
        for first in _superfluous(self._known, MOST_KNOWN):
            self._drop(first)
        self._known[name] = account
        names = self._names.get(account.id, ())
        if name not in names:
            self._names[account.id] = (*names, name)

    def _drop(self, name: str) -> None:
        account = self._known.pop(name)
        names = tuple([one for one in self._names[account.id] if one != name])
        if names:
            self._names[account.id] = names
        else:
            del self._names[account.id]

    def forget(self, accounts: Collection[str] | None = None, *, is_over: bool = False) -> None:
        """Look these accounts up again when they are next named; None: all of them.

        `is_over`: what was begun at their addresses is not acknowledged any more.
        """
        self._unknown.clear()
        if accounts is None:
            accounts = {*self._names, *(account for _, account in self._addresses)}
            self._changed = None
        elif self._changed is not None:
            self._changed.update(accounts)
        for account in accounts:
            for name in self._names.pop(account, ()):
                del self._known[name]
            for source in self._sources:
                address = self._addresses.pop((source, account), None)
                if address is not None:
                    address.is_retired = is_over

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _check_account(address: _Address, guard: Callable[[], None] | None) -> None:
    """Raise where an arrival at an account's address must not be taken, or not be acknowledged any more."""
    if guard is not None:
        guard()
    if address.is_retired:
        raise SignatureInvalid("unknown account")


def _keep(cache: dict[_K, _V], key: _K, value: _V, most: int) -> None:
    """Keep a value, and drop those that were kept first when there are too many."""
    for first in _superfluous(cache, most):
        del cache[first]
    cache[key] = value


def _superfluous(cache: Mapping[_K, object], most: int) -> list[_K]:
    """Return the keys to drop before another is kept: some at once, because a dict from whose beginning much was
    deleted must search for its first key."""
    return list(islice(cache, most // 64 + 1)) if len(cache) >= most else []


def _fail(future: asyncio.Future[Account | None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error if isinstance(error, Exception) else Overloaded())
        future.exception()  # seen: its sender may have gone
