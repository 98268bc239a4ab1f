"""`POST /sources/{name}/keys`: keys that were seen elsewhere come in, and are duplicates from then on.

For whoever moves in with a table of what was processed already; `oncehook import keys` calls it, batch by batch. Only
an admin may: what arrives with such a key is never worked.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from oncehook.web.access import Role
from oncehook.web.answers import Answer
from oncehook.web.asking import Ask, Body
from oncehook.web.openapi import Endpoint

MOST_KEYS: Final = 1000
LONGEST_PART: Final = 4096

Part = Annotated[str, Meta(min_length=1, max_length=LONGEST_PART)]
Parts = Annotated[list[Part], Meta(min_length=1, max_length=16)]


class Remember(Body, frozen=True):
    """Keys, each as the list of its parts: one, unless the source's key is a composite."""

    keys: Annotated[list[Parts], Meta(min_length=1, max_length=MOST_KEYS)]


class Remembered(Answer, frozen=True):
    """How many of them were new, and how many were known already."""

    new: int
    known: int


async def remember(ask: Ask) -> Remembered:
    body = await ask.body(Remember)
    new = await ask.admin.import_keys(ask.request.path_params["name"], body.keys, actor=ask.actor)
    return Remembered(new=new, known=len(body.keys) - new)


ENDPOINT: Final = Endpoint(
    method="POST",
    path="/sources/{name}/keys",
    role=Role.admin,
    handler=remember,
    answer=Remembered,
    summary="Take keys as seen elsewhere.",
    body=Remember,
    refusals=(404,),
)
