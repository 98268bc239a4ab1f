"""What a person reads before something is delivered again: who gets it, and what it says.

Texts of senders come in, short lines go out. Called by `sources` for what came in and by `whatsapp` for what goes out;
the desk puts both before the person who decides.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Final

LONGEST_BODY: Final = 1 << 20
"""Bytes of a body that is looked into for a preview: a page shows several, and reads each of them whole."""

LONGEST_TEXT: Final = 300

_JOINERS: Final = "\u200c\u200d"
"""They make one emoji, or one word, of two."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A delivery as it is shown before it is made again."""

    to: str
    """Who gets it: the person a message is sent to, or the address of the destination for what came in. Empty where
    only the API knows."""
    text: str
    is_incoming: bool = False
    """Whether somebody else wrote it: `to` is no person then."""


def line(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text in one line, without marks that turn it round or hide it: a person decides by what is seen."""
    shown = " ".join("".join(char for char in text if char.isspace() or not _is_hidden(char)).split())
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in _JOINERS
