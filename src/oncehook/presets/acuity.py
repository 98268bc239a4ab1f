"""Acuity Scheduling: a form with an action and an object's id, and neither an event id nor a time.

Two reschedules of one appointment have the same bytes as one that is sent twice. So only what can happen once to an
object has a key; everything else is stored each time, and one attempt covers all that wait for an appointment.
"""

from __future__ import annotations

from typing import Final

from oncehook.rules import FORM, RuleContext
from oncehook.sources import Preset, Sample
from oncehook.verify import Hmac

ONCE: Final = frozenset({"scheduled", "canceled", "order.completed"})


def action(context: RuleContext) -> str:
    """Return what happened: static webhooks write `scheduled`, dynamic ones `appointment.scheduled`."""
    return (context.form("action") or "").removeprefix("appointment.")


def key(context: RuleContext) -> tuple[str, str] | None:
    """Return the object and what happened to it, where that happens only once."""
    about, what = context.form("id"), action(context)
    return (about, what) if about and what in ONCE else None


PRESET = Preset(
    name="acuity",
    title="Acuity Scheduling",
    scheme=Hmac(header="X-Acuity-Signature", encoding="base64"),
    key=key,
    on_missing_key="accept",
    # The content type decides that the body is a form, and is not signed. Because two reschedules have the same bytes,
    # a mark is all that this leads to.
    key_authenticated=False,
    # One attempt covers all that wait for "appointment 42 was rescheduled": the handler reads the appointment anyway.
    coalesce=True,
    type=action,
    subject="form:id",
    # About a day; not documented.
    horizon="1d",
    facts={
        "scheme": "developers.acuityscheduling.com/docs/webhooks",
        "key": "developers.acuityscheduling.com/docs/webhooks (the fields; `scheduled` is called once)",
        "type": "developers.acuityscheduling.com/page/webhooks-webhooks-webhooks",
        "horizon": "unverified",
    },
    samples={
        "scheduled": Sample("action=scheduled&id={number}&calendarID=1424&appointmentTypeID=4242", content_type=FORM),
        "rescheduled": Sample("action=rescheduled&id=142424&calendarID=1424&appointmentTypeID=4242", content_type=FORM),
        "canceled": Sample("action=canceled&id={number}&calendarID=1424&appointmentTypeID=4242", content_type=FORM),
        "changed": Sample("action=changed&id=142424&calendarID=1424&appointmentTypeID=4242", content_type=FORM),
        "order.completed": Sample("action=order.completed&id={number}", content_type=FORM),
    },
)
