"""The address that an event itself names, as in `url = "{$.callback_url}"`: read, checked against a list of hosts.

An HTTP destination asks for it before each attempt. Whoever can send an event chooses it, so nothing about it is
trusted: it is read like the address of a setting, must be of a host in `allow_hosts`, and is called by the same guarded
client. What cannot be called is a permanent failure, to be replayed when the list has changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from oncehook.errors import ConfigError
from oncehook.http_client.hosts import AllowedHosts
from oncehook.http_client.urls import host_of, read_url
from oncehook.model import Arrival, StoredEvent, unpack_head
from oncehook.rules import Rule, RuleContext

MOST: Final = 2048
"""Characters of an address: more than any server takes, and far less than a body."""

_INSIDE: Final = re.compile(r"\{(?:\$|header:|query:|form:)")
_FORM: Final = 'Write url = "{$.callback_url}"; a place is the whole address.'


class NoAddress(Exception):
    """The event names no address that may be called. The first line says why, the same for all such events; the second
    one names the host."""


def is_event_address(url: object) -> bool:
    """Tell whether a setting names a place in the event instead of an address."""
    return isinstance(url, str) and url.startswith("{")


def check_event_address(url: str) -> None:
    """Refuse a place that is none, and one that is only a part of an address. Raises ConfigError."""
    if is_event_address(url):
        _read_place(url)
    elif _INSIDE.search(url):
        raise ConfigError("takes a part of the address from the event; only the whole can be.", hint=_FORM)


def _read_place(url: str) -> Rule:
    if not url.endswith("}"):
        raise ConfigError("begins with a brace that is not closed at its end.", hint=_FORM)
    rule = Rule.parse(url[1:-1])
    if rule.constant:
        raise ConfigError("names the same address for every event; write it without braces.")
    return rule


class EventAddress:
    """A place in events that holds an address, and the hosts that it may be of."""

    def __init__(self, url: str, allow_hosts: Sequence[str]) -> None:
        """Raises ConfigError, also for an empty list."""
        self.place = url[1:-1]
        self._rule = _read_place(url)
        if not allow_hosts:
            raise ConfigError(
                "An address from the event needs allow_hosts: whoever sends an event could else have anything called.",
                hint='Write allow_hosts = ["hooks.example.org", "*.example.net"].',
            )
        self._allowed = AllowedHosts(allow_hosts)

    def read(self, event: StoredEvent) -> str:
        """Return the address that this event names, as it will be called. Raises NoAddress."""
        found = self._rule.read(_context_of(event))
        if found is None:
            raise NoAddress(f"the event has no address at {self.place}")
        (text,) = found
        if len(text) > MOST:
            raise NoAddress(f"the address at {self.place} is longer than {MOST} characters")
        try:
            url = read_url(text)
        except ConfigError as error:
            raise NoAddress(f"the address at {self.place} cannot be called: {error}") from None
        allowed = self._allowed.allow(url)
        if allowed is None:
            raise NoAddress(
                f"the address at {self.place} is not allowed by allow_hosts\n{url.partition(':')[0]}://{host_of(url)}"
            )
        return allowed


def _context_of(event: StoredEvent) -> RuleContext:
    method, target, pairs = unpack_head(event.request_head)
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    query = target.partition("?")[2].encode("latin-1")
    return RuleContext(Arrival(event.source, headers, event.body, query, method), event.body)
