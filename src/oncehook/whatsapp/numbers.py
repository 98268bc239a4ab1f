"""Recipients in the form that every API takes, from what a person, a form or a webhook wrote.

A number becomes its digits in E.164 without the plus (`5511999990001`); a group, a hidden number (`@lid`), a channel, a
list, and Meta's ids of people and groups stay as they are. Called by senders, and when a message is emitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from oncehook.whatsapp.messages import InvalidMessage

PERSON: Final = "s.whatsapp.net"
"""The server behind a person's id: `5511999990001@s.whatsapp.net`."""

_AS_THEY_ARE: Final = frozenset({"g.us", "lid", "newsletter", "broadcast"})
_PEOPLE: Final = frozenset({PERSON, "c.us"})
_ID: Final = re.compile(r"[0-9A-Za-z._:-]+")
_STATUS: Final = "status@broadcast"
_USER_ID: Final = re.compile(r"[A-Z]{2}\.(?:ENT\.)?[0-9A-Za-z]{1,128}")
"""A business-scoped user id (BSUID) of Meta's, or its parent: `US.13491208655302741918`."""
_GROUP_ID: Final = re.compile(r"Y2FwaV9ncm91cDo[0-9A-Za-z+/=_-]{1,200}")
"""A group of the Cloud API: `capi_group:…` in base64."""
_DEVICE: Final = re.compile(r"[.:][0-9.:]*$")
_BETWEEN: Final = re.compile(r"[\s().\-/\u00ad\u2010-\u2015\u2212\u200b-\u200f\u202a-\u202e\u2066-\u2069]+")
"""Separators between digits: spaces, dashes, brackets, and invisible marks that are copied along."""

_SHORTEST, _LONGEST = 8, 15
_LONGEST_TEXT: Final = 256

_LOCAL: Final[Mapping[str, re.Pattern[str]]] = {
    "1": re.compile(r"[2-9][0-9]{2}[2-9][0-9]{6}"),
    "55": re.compile(r"[1-9]{2}(?:9[0-9]{8}|[2-9][0-9]{7})"),
}
"""Patterns of what follows the calling code. Brazil has an area 55, so there the first digits are ambiguous."""
_LOCAL_SHORTEST: Final = 10
_KEEPS_ZERO: Final = frozenset({"39"})
"""Countries in which the 0 in front belongs to the number."""


def normalise(text: str, *, country: str | None = None) -> str:
    """Return the recipient as every API takes it. Raises InvalidMessage, with what is wrong.

    `country` is the calling code (`55`) of numbers that are written without one. With it, a number of another country
    needs its plus: some are written like local ones.

    >>> normalise("+55 (11) 99999-0001")
    '5511999990001'
    """
    if len(text) > _LONGEST_TEXT:
        raise _wrong(text, "is too long")
    written = text.strip()
    if is_user_id(written) or is_group_id(written):
        return written
    if "@" in written:
        return _from_id(written)
    digits = _BETWEEN.sub("", written)
    if digits.startswith("+"):
        return _check(digits[1:], text)
    if digits.startswith("00"):
        return _check(digits[2:], text)
    if country is None:
        if digits.startswith("0"):
            raise _wrong(
                text, "begins with 0, which is how it is dialled inside a country; write it with + or set country"
            )
        return _check(digits, text)
    return _check(_with_country(_require_digits(digits, text), _calling_code(country)), text)


def is_user_id(to: str) -> bool:
    """Return whether this is Meta's id of a person, whose phone number may be unknown."""
    return _USER_ID.fullmatch(to) is not None


def is_group_id(to: str) -> bool:
    """Return whether this is Meta's id of a group."""
    return _GROUP_ID.fullmatch(to) is not None


def id_of(number: str) -> str:
    """Return the id of a number's chat; an id is returned as is."""
    return number if "@" in number else f"{number}@{PERSON}"


def _from_id(text: str) -> str:
    user, _, server = text.partition("@")
    if not _ID.fullmatch(user):
        raise _wrong(text, "is no WhatsApp id")
    if text == _STATUS:
        raise _wrong(text, "is everybody who sees your status, and nobody to write to")
    if server in _AS_THEY_ARE:
        return text
    if server not in _PEOPLE:
        raise _wrong(text, f"ends in @{server}, which is not WhatsApp's")
    return _check(_DEVICE.sub("", user), text)


def _with_country(digits: str, code: str) -> str:
    local = _LOCAL.get(code)
    if local is None:
        is_whole = digits.startswith(code)
    else:
        bare = digits.removeprefix("0")
        is_whole = local.fullmatch(bare) is None
        if is_whole and len(bare) < _LOCAL_SHORTEST:
            raise _wrong(digits, f"is too short for a number in +{code}; the area code may be missing")
    if is_whole:
        return digits
    return code + (digits if code in _KEEPS_ZERO else digits.removeprefix("0"))


def _calling_code(country: str) -> str:
    code = country.strip().removeprefix("+")
    if not (code.isascii() and code.isdigit() and 1 <= len(code) <= 3 and code[0] != "0"):
        raise InvalidMessage(f"{country!r} is no calling code; country is written like 55.")
    return code


def _require_digits(digits: str, text: str) -> str:
    if not digits:
        raise _wrong(text, "holds no number")
    if not (digits.isascii() and digits.isdigit()):
        raise _wrong(text, "holds more than digits")
    return digits


def _check(digits: str, text: str) -> str:
    _require_digits(digits, text)
    if digits.startswith("0"):
        raise _wrong(text, "has a 0 where its calling code should be")
    if len(digits) < _SHORTEST:
        raise _wrong(text, f"is too short: {len(digits)} digits, and {_SHORTEST} is the least")
    if len(digits) > _LONGEST:
        raise _wrong(text, f"is too long: {len(digits)} digits, and {_LONGEST} is the most")
    return digits


def _wrong(text: str, why: str) -> InvalidMessage:
    shown = text if len(text) <= 40 else text[:39] + "…"
    return InvalidMessage(f"The number {shown!r} {why}.")
