"""Discord: interactions (commands, buttons, forms) and webhook events, signed with ed25519 over time and body.

Discord tests the address with a PING of either kind and, from then on, with wrong signatures. It waits three seconds.
An interaction is answered as deferred: the user sees that it is being worked on, and a handler has 15 minutes to answer
with the token in the body. A webhook event is answered with an empty 204.
"""

from __future__ import annotations

from typing import Any, Final

from oncehook.model import Arrival
from oncehook.presets import _base
from oncehook.rules import RuleContext
from oncehook.sources import Preset, Reply, Sample, Source
from oncehook.verify import Ed25519

_LONGEST_PING: Final = 16384
"""Bytes above which a body is no PING, so that large ones are not parsed twice."""

EMPTY: Final = Reply(204)
PONG: Final = Reply(200, b'{"type":1}')
_LATER: Final = Reply(200, b'{"type":5}')
_NAMES: Final = {2: "command", 3: "component", 4: "autocomplete", 5: "modal"}
_ANSWERS: Final = {
    2: _LATER,
    3: Reply(200, b'{"type":6}'),
    4: Reply(200, b'{"type":8,"data":{"choices":[]}}'),
    5: _LATER,
}
"""The acknowledgement of each type of interaction; none for suggestions while somebody types."""


def _type_of_interaction(data: Any) -> object:
    """Return the number of an interaction's type; None for a webhook event and for anything else."""
    if not isinstance(data, dict) or "event" in data or "id" not in data:
        return None
    return data.get("type")


def handshake(arrival: Arrival, source: Source) -> Reply | None:
    """Answer a PING: of interactions (`type` 1) with a PONG, of webhook events (`type` 0) with an empty 204."""
    if arrival.method != "POST" or len(arrival.body) > _LONGEST_PING:
        return None
    data = _base.read_body(arrival)
    if isinstance(data, dict) and data.get("type") == 0 and "event" not in data:
        return EMPTY
    return PONG if _type_of_interaction(data) == 1 else None


def answer(arrival: Arrival) -> Reply:
    """Acknowledge an interaction in its own way, and everything else with an empty 204."""
    found = _type_of_interaction(_base.read_body(arrival))
    return _ANSWERS.get(found, EMPTY) if isinstance(found, int) else EMPTY


def kind(context: RuleContext) -> str | None:
    """Return `command.deploy`, `component`, `autocomplete.deploy`, `modal`; of webhook events their own type."""
    data = context.data
    number = _type_of_interaction(data)
    if number is None:
        return str(data["event"]["type"])
    name = _NAMES.get(number, "interaction") if isinstance(number, int) else "interaction"
    return f"{name}.{data['data']['name']}" if name in ("command", "autocomplete") else name


def read_time(context: RuleContext) -> str:
    """Return when a webhook event happened: Discord writes UTC without an offset."""
    written = str(context.data["event"]["timestamp"])
    return written if written.endswith("Z") or "+" in written else f"{written}Z"


_APP: Final = "1234560123453231555"
_INTERACTION: Final = (
    '{"id":"{number}","application_id":"' + _APP + '","type":%d,"data":%s,"guild_id":"290926798626357999",'
    '"channel_id":"645027906669510667","member":{"user":{"id":"53908232506183680","username":"mason"}},'
    '"token":"sample-{id}","version":1,"locale":"en-US"%s}'
)
_EVENT: Final = (
    '{"version":1,"application_id":"' + _APP + '","type":1,"event":{"type":"%s","timestamp":"{now_iso}","data":%s}}'
)

PRESET = Preset(
    name="discord",
    title="Discord",
    scheme=Ed25519(
        header="X-Signature-Ed25519",
        timestamp="header:X-Signature-Timestamp",
        signed="{timestamp}{body}",
        # Webhook events are retried for ten minutes; whether with a new signature is not documented.
        tolerance=900.0,
    ),
    handshake=handshake,
    answer=answer,
    # Webhook events have no id. Their time has microseconds; together with the person it identifies them.
    key=[
        ["$.event.type", "$.event.timestamp", "?$.event.data.id", "?$.event.data.user.id"],
        ["$.application_id", "$.id"],
    ],
    on_missing_key="body_hash",
    type=kind,
    subject=[
        "$.event.data.lobby_id",
        "$.event.data.channel_id",
        "$.event.data.user_id",
        "$.event.data.user.id",
        "$.event.data.id",
        "$.channel_id",
    ],
    event_time=read_time,
    # One comes with every key press, and a late answer is useless.
    ignore=("autocomplete.*",),
    horizon="10m",
    budget="2s",
    facts={
        "scheme": "docs.discord.com/developers/interactions/overview (Validating Security Request Headers); the same "
        "for events; that the time is in seconds is unverified",
        "tolerance": "docs.discord.com/developers/events/webhook-events (tried again for 10 minutes)",
        "handshake": "docs.discord.com/developers/interactions/overview and docs.discord.com/developers/events/"
        "webhook-events (Acknowledging PING requests)",
        "answer": "docs.discord.com/developers/interactions/receiving-and-responding (Interaction Callback Type) and "
        "docs.discord.com/developers/events/webhook-events (Responding to Events)",
        "key": "docs.discord.com/developers/interactions/receiving-and-responding (id); of events there is none",
        "subject": "docs.discord.com/developers/events/webhook-events (Event Types)",
        "event_time": "docs.discord.com/developers/events/webhook-events (ISO 8601 without a zone; UTC is unverified)",
        "horizon": "docs.discord.com/developers/events/webhook-events (up to 10 minutes)",
        "budget": "docs.discord.com/developers/events/webhook-events (3 s)",
    },
    samples={
        "command.deploy": _base.fill(
            _INTERACTION,
            2,
            '{"id":"771825006014889984","name":"deploy","type":1,'
            '"options":[{"name":"to","type":3,"value":"caf\\u00e9"}]}',
            "",
        ),
        "component": Sample(
            _INTERACTION
            % (3, '{"custom_id":"approve","component_type":2}', ',"message":{"id":"790482582005055498","type":0}')
        ),
        "modal": Sample(_INTERACTION % (5, '{"custom_id":"feedback","components":[]}', "")),
        "APPLICATION_AUTHORIZED": _base.fill(
            _EVENT,
            "APPLICATION_AUTHORIZED",
            '{"integration_type":1,"scopes":["applications.commands"],"user":{"id":"{number}","username":"mason"}}',
        ),
        "ENTITLEMENT_CREATE": _base.fill(
            _EVENT,
            "ENTITLEMENT_CREATE",
            '{"application_id":"' + _APP + '","consumed":false,"deleted":false,"gift_code_flags":0,'
            '"id":"{number}","promotion_id":null,"sku_id":"123489045643835123","type":4,'
            '"user_id":"111178765189277770"}',
        ),
    },
)
