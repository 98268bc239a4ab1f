"""Calendly: no event id. What happens to an invitee only once is keyed by event and invitee, the rest by time too."""

from __future__ import annotations

from typing import Final

from oncehook.presets import _base
from oncehook.rules import RuleContext
from oncehook.sources import Preset, Sample
from oncehook.verify import Fields, Hmac

ONCE: Final = frozenset({"invitee.created", "invitee.canceled", "routing_form_submission.created"})


def key(context: RuleContext) -> tuple[str, ...]:
    """Return event and object; for what may happen again (no-shows, updates of event types) also the time."""
    event, about = context.data["event"], context.data["payload"]["uri"]
    return (event, about) if event in ONCE else (event, about, context.data["created_at"])


_INVITEE: Final = (
    '{"event":"%s","created_at":"{now_iso}","created_by":"https://api.calendly.com/users/U42","payload":{'
    '"uri":"https://api.calendly.com/scheduled_events/E{id}/invitees/I{id}","email":"ana@example.com","name":"Ana",'
    '"status":"%s","timezone":"Europe/Lisbon","rescheduled":false,"old_invitee":null,"new_invitee":null,"no_show":%s,'
    '"scheduled_event":{"uri":"https://api.calendly.com/scheduled_events/E{id}","name":"Trial lesson",'
    '"start_time":"2027-01-11T09:00:00Z","end_time":"2027-01-11T09:30:00Z"}}}'
)

PRESET = Preset(
    name="calendly",
    title="Calendly",
    scheme=Hmac(
        header="Calendly-Webhook-Signature",
        fields=Fields(signature="v1", separator=","),
        timestamp="field:t",
        signed="{timestamp}.{body}",
    ),
    key=key,
    on_missing_key="body_hash",
    type="$.event",
    subject="$.payload.uri",
    event_time="$.created_at",
    # After 24 hours of failures the subscription is switched off and must be made anew.
    horizon="1d",
    # 10 s to connect, 15 s to answer.
    budget="5s",
    facts={
        "scheme": "developer.calendly.com/api-docs/overview/webhooks/webhook-signatures (header; formula unverified)",
        "key": "developer.calendly.com/api-docs/calendly-api/webhooks/get-sample-webhook-data (the events there are); "
        "that created_at stays the same across retries is unverified",
        "horizon": "developer.calendly.com/api-docs/overview/webhooks/webhook-errors (24 h)",
        "budget": "developer.calendly.com/api-docs/overview/webhooks/webhook-timeouts (15 s)",
    },
    samples={
        "invitee.created": Sample(_INVITEE % ("invitee.created", "active", "null")),
        "invitee.canceled": Sample(_INVITEE % ("invitee.canceled", "canceled", "null")),
        "invitee_no_show.created": _base.fill(
            _INVITEE,
            "invitee_no_show.created",
            "active",
            '{"uri":"https://api.calendly.com/invitee_no_shows/N{id}","created_at":"{now_iso}"}',
        ),
    },
)
