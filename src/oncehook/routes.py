"""Routes from sources to destinations: type patterns and comparisons, decided when an event arrives.

A route names a source and a destination, and may have conditions: `when = { type = "message.*" }`, a header
(`"header:X-Env" = "prod"`) or a value in the body (`"$.amount" = ">1000"`). All of them must hold.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final, Unpack

from oncehook import rules
from oncehook.destinations.base import Terms
from oncehook.errors import ConfigError
from oncehook.model import (
    PRIORITIES,
    Arrival,
    DeliveryId,
    Item,
    Mark,
    Options,
    Planned,
    Priority,
    fair_hash,
    subject_key,
)
from oncehook.settings.read import read_program
from oncehook.settings.tables import RouteSettings

Test = Callable[[str], bool]
Planner = Callable[[Arrival, Item], Sequence[Planned]]
"""A function from an event to its deliveries."""

_COMPARISONS: Final[Sequence[tuple[str, Callable[[Decimal, Decimal], bool]]]] = (
    (">=", operator.ge),
    ("<=", operator.le),
    (">", operator.gt),
    ("<", operator.lt),
)


class Route:
    """A route from a source to a destination, for the events that its filter matches."""

    is_ordered = True
    """Whether deliveries of one subject wait for each other."""

    def __init__(
        self, source: str, destination: str, *, destination_id: int = 0, **settings: Unpack[RouteSettings]
    ) -> None:
        """Raises ConfigError where a setting is wrong or unknown."""
        self.source = source
        self.destination = destination
        self.settings = read_program(RouteSettings, ("route", 0), settings)
        self.destination_id = destination_id
        self.account: str | None = None
        """The account of its destination, which gets no other account's events."""
        self.index: int | None = None
        """Its place among the routes of the file; None for one that a program or the store defines."""
        self.options = Options.none
        """Options of its deliveries, as stored with each; set by `fix_options`."""
        self._fair: rules.Rules | None = None
        when: Mapping[str, str | Sequence[str]] = self.settings.when
        tests = compile_when(when)
        self._type = None if when.get("type") in ("*", ["*"]) else tests.pop("type", None)
        self._places = [(rules.Rules(subject=place), test) for place, test in tests.items() if place != "type"]

    def is_same(self, other: Route) -> bool:
        """Tell whether both lead the same events to the same destination."""
        return (self.source, self.destination, self.settings.when) == (
            other.source,
            other.destination,
            other.settings.when,
        )

    def fix_options(self, default: bool | str = False) -> None:
        """Set the options of its deliveries. `default`: the preset's value of `coalesce`."""
        coalesce = default if self.settings.coalesce is None else self.settings.coalesce
        self.options = Options.none
        if coalesce:
            self.options |= Options.coalesce_any if coalesce == "any" else Options.coalesce_type
        if self.settings.latest_wins:
            self.options |= Options.latest_wins
        if self.settings.on_dead == "hold":
            self.options |= Options.hold
        if self.settings.priority != "normal":
            self.options |= Options.high if self.settings.priority == "high" else Options.low

    def lead_to(self, terms: Terms) -> None:
        """Take over what its destination says about whose events it gets, and over which value it is leased in
        rounds."""
        self.account = terms.account
        self._fair = None if terms.fair is None else rules.Rules(subject=terms.fair)

    def read_fair(self, arrival: Arrival, item: Item) -> int | None:
        """Return the hash of that value. Events without one are a value of their own."""
        return None if self._fair is None else fair_hash(_read(self._fair, arrival, item))

    def matches(self, arrival: Arrival, item: Item) -> bool:
        if self.account is not None and self.account != item.account:
            return False
        if self._type is not None and not self._type(item.type):
            return False
        return all(test(_read(rule, arrival, item) or "") for rule, test in self._places)


def _read(rule: rules.Rules, arrival: Arrival, item: Item) -> str | None:
    return rule.read(Arrival(arrival.source, arrival.headers, item.body, arrival.query)).subject


def subscription_routes(name: str, destination_id: int, terms: Terms) -> list[Route]:
    """Return the subscriptions of a destination as routes; the source of one for emitted events of any is empty."""
    made = []
    for one in terms.subscribe:
        route = Route(one.source or "", name, destination_id=destination_id, when={"type": one.type, **one.when})
        route.lead_to(terms)
        route.fix_options()
        made.append(route)
    return made


def subscribers(account: str | None) -> str:
    """Return the name under which subscriptions of an account's destinations are stored, like routes from a source;
    None: those of destinations without an account. No source is called so."""
    return "account *" if account is None else f"account {account}"


class Subscriptions:
    """The subscriptions of all destinations, by the account whose events they are for."""

    def __init__(self, routes: Iterable[Route] = ()) -> None:
        self._by_account: dict[str | None, list[Route]] = {}
        """Under None those of destinations without an account, which get everybody's."""
        for route in routes:
            self._by_account.setdefault(route.account, []).append(route)

    def __bool__(self) -> bool:
        return bool(self._by_account)

    def of(self, account: str | None) -> Sequence[Route]:
        return self._by_account.get(account, ())


def is_meant(route: Route, source: str, item: Item) -> bool:
    """Tell whether a subscription is about events of this source, or about emitted ones and this is one."""
    return route.source == source or (not route.source and Mark.emitted in item.marks)


def compile_when(when: Mapping[str, str | Sequence[str]]) -> dict[str, Test]:
    """Compile the conditions of a filter by place. Raises ConfigError for a wrong place or comparison."""
    for place in when:
        if place != "type":
            rules.Rules(subject=place)
    return {place: _any_of([wanted] if isinstance(wanted, str) else wanted) for place, wanted in when.items()}


def plan(routes: Sequence[Route], arrival: Arrival, item: Item) -> list[Planned]:
    """Return the deliveries of an event: one per destination; of several matching routes the first counts."""
    planned: dict[int, Planned] = {}
    for route in routes:
        if route.destination_id not in planned and route.matches(arrival, item):
            ordered = item.subject if route.is_ordered else None
            queue_key = (
                None if ordered is None else subject_key(route.destination, arrival.source, ordered, item.account)
            )
            planned[route.destination_id] = Planned(
                DeliveryId.of(item.event_id, route.destination_id),
                route.destination_id,
                queue_key,
                int(route.options),
                route.read_fair(arrival, item),
            )
    return list(planned.values())


def priorities_of(routes: Iterable[Route]) -> dict[int, set[Priority]]:
    """Return the priorities that routes give to deliveries, by destination."""
    found: dict[int, set[Priority]] = {}
    for route in routes:
        found.setdefault(route.destination_id, set()).add(PRIORITIES[route.options])
    return found


def _any_of(wanted: Sequence[str]) -> Test:
    tests = [_test(text) for text in wanted]
    return tests[0] if len(tests) == 1 else lambda value: any(test(value) for test in tests)


def _test(wanted: str) -> Test:
    """Compile one comparison: `>1000`, `!=draft`, or a pattern with `*` and `?`."""
    if wanted.startswith("!="):
        unwanted = _test(wanted[2:].strip())
        return lambda value: not unwanted(value)
    for sign, compare in _COMPARISONS:
        if wanted.startswith(sign):
            return _numeric(wanted, wanted[len(sign) :].strip(), compare)
    pattern = re.compile(fnmatch.translate(wanted))
    return lambda value: pattern.match(value) is not None


def _numeric(wanted: str, limit: str, compare: Callable[[Decimal, Decimal], bool]) -> Test:
    bound = _number(limit)
    if bound is None:
        raise ConfigError(f"A comparison needs a number, as in >1000; {wanted!r} has none.")

    def test(value: str) -> bool:
        number = _number(value)
        return number is not None and compare(number, bound)

    return test


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
