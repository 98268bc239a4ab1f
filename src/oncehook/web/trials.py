"""Trying out what is set up: `POST /destinations/{name}/test`, `POST /sources/{name}/sample`, and the same as pages.

An operator may. Of a test only an admin learns more than the class of the status, so that nobody else can use it to
look around in our network (S22).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.responses import Response

from oncehook.errors import BadRequest
from oncehook.samples import Tested as Outcome
from oncehook.web.access import Identity, Role
from oncehook.web.answers import Answer, fill
from oncehook.web.asking import Ask, Body
from oncehook.web.openapi import Endpoint
from oncehook.web.visit import Visit


class Tested(Answer, frozen=True):
    """How a destination answered a test. `status`, `error` and `seconds` are for an admin; for others they are null."""

    destination: str
    answered: str
    status: int | None
    error: str | None
    seconds: float | None


class Sample(Body, frozen=True):
    """Which sample; the preset's first one unless said."""

    type: str = ""


class Sampled(Answer, frozen=True):
    """What became of a sample: the status its sender would have got, and the events it stands for."""

    source: str
    type: str
    status: int
    outcome: str
    event_ids: Sequence[str]


def shown(outcome: Outcome, identity: Identity) -> Tested:
    """What somebody may learn of a test."""
    if identity.role >= Role.admin:
        return fill(Tested, outcome, seconds=round(outcome.seconds, 3))
    return fill(Tested, outcome, status=None, error=None, seconds=None)


async def test_destination(ask: Ask) -> Tested:
    name = ask.request.path_params["name"]
    ask.admin.check_own(name)
    return shown(await ask.admin.test_destination(name, actor=ask.actor), ask.identity)


async def sample_source(ask: Ask) -> Sampled:
    body = await ask.body(Sample)
    return fill(Sampled, await ask.admin.send_sample(ask.request.path_params["name"], body.type, actor=ask.actor))


TEST: Final = Endpoint(
    method="POST",
    path="/destinations/{name}/test",
    role=Role.operator,
    handler=test_destination,
    answer=Tested,
    summary="Send it one harmless, signed test.",
    refusals=(404, 429),
)
SAMPLE: Final = Endpoint(
    method="POST",
    path="/sources/{name}/sample",
    role=Role.operator,
    handler=sample_source,
    answer=Sampled,
    summary="Send it one signed sample.",
    body=Sample,
    refusals=(404,),
)


# -- pages -------------------------------------------------------------------------------------


async def ask_test(visit: Visit) -> Response:
    """The dialog before a test: what is sent, and to whom."""
    one = await visit.admin.destination(visit.request.path_params["name"])
    if not visit.admin.can_test(one.name):
        raise BadRequest(f"{one.name} is no web address; only those can be tested.")
    return await visit.dialog("test.html", shown=one, tested=None)


async def test(visit: Visit) -> Response:
    """Send a test, and show how it was answered."""
    name = visit.request.path_params["name"]
    visit.admin.check_own(name)
    tested = shown(await visit.admin.test_destination(name, actor=visit.actor), visit.identity)
    return await visit.dialog("test.html", shown=await visit.admin.destination(name), tested=tested)


async def ask_sample(visit: Visit) -> Response:
    """The dialog before a sample: which one, and where it will go."""
    name = visit.request.path_params["name"]
    found = [one for one in await visit.admin.sources() if one.name == name]
    kinds = visit.admin.sample_types(name)
    if not found or not kinds:
        raise BadRequest(f"No sample can be made for {name[:60]}.")
    return await visit.dialog("sample.html", source=found[0], kinds=kinds, sampled=None)


async def sample(visit: Visit) -> Response:
    """Send a sample, and show what became of it."""
    name, form = visit.request.path_params["name"], await visit.form()
    sampled = await visit.admin.send_sample(name, form.get("type", ""), actor=visit.actor)
    source = next(one for one in await visit.admin.sources() if one.name == name)
    return await visit.dialog("sample.html", source=source, kinds=(), sampled=sampled)
