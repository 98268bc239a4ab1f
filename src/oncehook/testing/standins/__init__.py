"""Stand-ins for the providers' servers, for tests of programs that talk to them: real HTTP on the loopback.

>>> async with MetaStandIn() as meta:
...     await meta.deliver(url, meta.message(from_="5511988880142", text="Hi"), copies=2)
"""

from __future__ import annotations

from oncehook.testing.standins.base import UNANSWERED, SentMessage, StandIn, WhatsAppStandIn
from oncehook.testing.standins.evolution_api import EvolutionApiStandIn, EvolutionHook
from oncehook.testing.standins.evolution_go import EvolutionGoHook, EvolutionGoStandIn
from oncehook.testing.standins.meta import MetaHook, MetaStandIn
from oncehook.testing.standins.n8n import Execution, N8nStandIn
from oncehook.testing.standins.s3 import S3StandIn
from oncehook.testing.standins.server import Reply, Request
from oncehook.testing.standins.tunnel import Tunnel

__all__ = [
    "UNANSWERED",
    "EvolutionApiStandIn",
    "EvolutionGoHook",
    "EvolutionGoStandIn",
    "EvolutionHook",
    "Execution",
    "MetaHook",
    "MetaStandIn",
    "N8nStandIn",
    "Reply",
    "Request",
    "S3StandIn",
    "SentMessage",
    "StandIn",
    "Tunnel",
    "WhatsAppStandIn",
]
