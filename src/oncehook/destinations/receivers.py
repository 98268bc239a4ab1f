"""Known receivers: how each answers while it is not ready, and how long to wait for it.

`preset = "n8n"` on an HTTP destination names one. Whatever is not about being ready is left to the table of
`categories` and to the destination's own settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from oncehook.errors import ConfigError
from oncehook.http_client import HttpAnswer, Unanswered
from oncehook.retry import Policy, policy

ReceiverName = Literal["n8n"]
NAMES: Final[tuple[ReceiverName, ...]] = get_args(ReceiverName)


@dataclass(slots=True, frozen=True)
class KnownReceiver:
    """A program that many send to, and how it answers."""

    unready: Callable[[HttpAnswer], str | None]
    """A function of an answer that returns why it means "not ready yet"; None when it was ready."""
    retry: Policy
    """Retry policy while it is not ready, instead of the destination's own."""

    def why_unready(self, came: HttpAnswer | Unanswered) -> str | None:
        """Return why the receiver was not ready, or None. A refused connection counts: it may be restarting."""
        if isinstance(came, HttpAnswer):
            return self.unready(came)
        return None if came.reached else str(came)


def _n8n(answer: HttpAnswer) -> str | None:
    """Find out whether n8n is starting: it has no webhooks yet (404), no database (503), or says 200 to everything.

    It answers 404, too, for an inactive workflow and for a wrong method, which no waiting mends.
    """
    if answer.status == 404 and b"is not registered for POST requests" not in answer.body:
        return "HTTP 404: n8n is starting, or the workflow is off"
    if answer.status == 200 and answer.body.startswith(b"n8n is starting up"):
        return "HTTP 200: n8n is starting and did not take it"
    return f"HTTP {answer.status}" if answer.status in (502, 503) else None


_THREE_DAYS: Final = policy(
    ("5s", "10s", "15s", "30s", "1m", "2m", "5m", "15m", "30m", "1h", "2h", "4h", "8h", "12h", "24h", "24h")
)
"""A start takes half a minute, migrations some minutes, and a workflow may be off over a weekend."""

RECEIVERS: Final[Mapping[str, KnownReceiver]] = {"n8n": KnownReceiver(_n8n, _THREE_DAYS)}


def receiver_of(name: str) -> KnownReceiver:
    """Return the receiver that a setting names. Raises ConfigError for one that is not known."""
    if name not in RECEIVERS:
        raise ConfigError(
            f"{name!r} is no preset of a destination; there is {' and '.join(NAMES)}.",
            hint="Presets of sources are for what comes in.",
        )
    return RECEIVERS[name]
