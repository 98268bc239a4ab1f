"""`POST /erase`: everything that is kept of a subject goes, or is counted first. `oncehook erase` calls it (S37).

Only an admin may: nothing brings it back. One request erases a bounded number of events; `remaining` says whether to
ask again.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from oncehook.model import subject_hash
from oncehook.rules import bounded
from oncehook.web.access import Role
from oncehook.web.answers import Answer, fill
from oncehook.web.asking import Ask, Body
from oncehook.web.openapi import Endpoint


class Erase(Body, frozen=True):
    """Whose events to erase, and why. `reason` may be left out of a dry run only."""

    subject: Annotated[str, Meta(min_length=1)]
    source: str | None = None
    reason: str = ""
    dry_run: bool = False


class Erased(Answer, frozen=True):
    """How much was erased, or would be. `shared_batches` are raw requests that held events of others too; these stay.

    `subject_hash` is what the audit log says in place of the subject.
    """

    subject_hash: str
    dry_run: bool
    events: int
    deliveries: int
    attempts: int
    arrivals: int
    batches: int
    shared_batches: int
    remaining: int


async def erase(ask: Ask) -> Erased:
    body = await ask.body(Erase)
    if body.dry_run:
        counted = await ask.admin.count_erasable(body.subject, body.source)
        remaining = counted.events
    else:
        counted, remaining = await ask.admin.erase(body.subject, body.source, actor=ask.actor, reason=body.reason)
    hashed = subject_hash(bounded(body.subject))
    return fill(Erased, counted, subject_hash=hashed, dry_run=body.dry_run, remaining=remaining)


ENDPOINT: Final = Endpoint(
    method="POST",
    path="/erase",
    role=Role.admin,
    handler=erase,
    answer=Erased,
    summary="Erase everything that is kept of a subject.",
    body=Erase,
    refusals=(404,),
)
