"""Objects that other packages bring as entry points."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from oncehook.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def find_entry_points(group: str, name: str | None = None) -> Iterable[EntryPoint]:
    """Return the entry points of a group, or those of one name in it. Looks at every package that is installed."""
    from importlib.metadata import entry_points

    found = entry_points(group=group)
    return found if name is None else found.select(name=name)


def load_entry_point(point: EntryPoint, expected: type[T], noun: str) -> T:
    """Import the object of an entry point. Raises ConfigError where that fails, or the object is of another type."""
    package = point.dist.name if point.dist else "another package"
    try:
        found = point.load()
    except Exception as error:
        raise ConfigError(f'The {noun} "{point.name}" of {package} cannot be loaded: {error}.') from error
    if not isinstance(found, expected):
        raise ConfigError(
            f'The {noun} "{point.name}" of {package} is a {type(found).__name__}.',
            hint=f"The entry point {point.value!r} must name a {expected.__name__}.",
        )
    return found
