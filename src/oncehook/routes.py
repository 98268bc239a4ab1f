"""Routes from sources to destinations: type patterns and comparisons, decided when an event arrives.

A route names a source and a destination, and may have conditions: `when = { type = "message.*" }`, a header
(`"header:X-Env" = "prod"`) or a value in the body (`"$.amount" = ">1000"`). All of them must hold.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final, Unpack

from oncehook import rules
from oncehook.errors import ConfigError
from oncehook.model import Arrival, DeliveryId, Item, Options, Planned, subject_key
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

    def __init__(
        self, source: str, destination: str, *, destination_id: int = 0, **settings: Unpack[RouteSettings]
    ) -> None:
        """Raises ConfigError where a setting is wrong or unknown."""
        self.source = source
        self.destination = destination
        self.settings = read_program(RouteSettings, ("route", 0), settings)
        self.destination_id = destination_id
        self.options = Options.none
        """Options of its deliveries, as stored with each; set by `fix_options`."""
        when: Mapping[str, str | Sequence[str]] = self.settings.when
        tests = compile_when(when)
        self._type = None if when.get("type") in ("*", ["*"]) else tests.pop("type", None)
        self._places = [(rules.Rules(subject=place), test) for place, test in tests.items() if place != "type"]

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

    def matches(self, arrival: Arrival, item: Item) -> bool:
        if self._type is not None and not self._type(item.type):
            return False
        for rule, test in self._places:
            found = rule.read(Arrival(arrival.source, arrival.headers, item.body, arrival.query)).subject
            if not test(found or ""):
                return False
        return True


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
            queue_key = None if item.subject is None else subject_key(route.destination, arrival.source, item.subject)
            planned[route.destination_id] = Planned(
                DeliveryId.of(item.event_id, route.destination_id), route.destination_id, queue_key, int(route.options)
            )
    return list(planned.values())


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
