"""WhatsApp, outgoing: one way to send over Meta's Cloud API, Evolution API and Evolution Go.

`sender(api=…, **settings)` builds a `Sender` from plain settings, as configuration and the command line have them;
programs may also use `MetaCloud`, `EvolutionApi` or `EvolutionGo`. Messages are sent at once and from memory: for
retries, dead letters and replays hand the sender to an inbox.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from oncehook.errors import ConfigError
from oncehook.whatsapp.evolution_api import EvolutionApi
from oncehook.whatsapp.evolution_go import EvolutionGo
from oncehook.whatsapp.files import StoredFile
from oncehook.whatsapp.incoming import IncomingMessage, NoMessage
from oncehook.whatsapp.messages import (
    Contact,
    InvalidMessage,
    Link,
    Location,
    Media,
    MediaKind,
    Message,
    Poll,
    Reaction,
    Read,
    Template,
    Text,
    read_message,
    summary,
)
from oncehook.whatsapp.meta import MetaCloud
from oncehook.whatsapp.numbers import normalise
from oncehook.whatsapp.outcomes import Reason, SendFailed, Sent
from oncehook.whatsapp.sender import ChatOptions, Files, Sender, SendOptions

__all__ = [
    "APIS",
    "ChatOptions",
    "Contact",
    "EvolutionApi",
    "EvolutionGo",
    "Files",
    "IncomingMessage",
    "InvalidMessage",
    "Link",
    "Location",
    "Media",
    "MediaKind",
    "Message",
    "MetaCloud",
    "NoMessage",
    "Poll",
    "Reaction",
    "Read",
    "Reason",
    "SendFailed",
    "SendOptions",
    "Sender",
    "Sent",
    "StoredFile",
    "Template",
    "Text",
    "normalise",
    "read_message",
    "sender",
    "summary",
]

APIS: Final[Mapping[str, type[Sender]]] = {kind.api: kind for kind in (MetaCloud, EvolutionApi, EvolutionGo)}
"""Every API, by its name in settings."""

_COMMON: Final = inspect.signature(Sender.__init__).parameters.keys() - {"self", "base_url", "key", "name"}
_SYNONYMS: Final = {"api_key": "token", "token": "api_key"}
"""Names of the credential, which differ between APIs; each takes both."""


def sender(api: str, **settings: Any) -> Sender:
    """Build the sender that settings describe; those that are None are ignored. Raises ConfigError.

    >>> sender("evolution-go", base_url="https://evo.example", token="…").address
    'https://evo.example'
    """
    kind = APIS.get(api)
    if kind is None:
        raise ConfigError(f'There is no WhatsApp API "{api}"; there are {", ".join(APIS)}.')
    own = {
        one.name: one.default is one.empty
        for one in inspect.signature(kind).parameters.values()
        if one.kind is not one.VAR_KEYWORD
    }
    known = own.keys() | _COMMON
    given = {name: value for name, value in settings.items() if value is not None}
    for name in [name for name in given if name not in known and _SYNONYMS.get(name) in known]:
        given.setdefault(_SYNONYMS[name], given.pop(name))
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(f'The WhatsApp API "{api}" has no setting {", ".join(unknown)}.')
    missing = [name for name, needed in own.items() if needed and name not in given]
    if missing:
        raise ConfigError(f'The WhatsApp API "{api}" needs {" and ".join(missing)}.')
    return kind(**given)
