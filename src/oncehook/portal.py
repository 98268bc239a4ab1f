"""Links by which a customer enters the portal: the dashboard, narrowed to one account.

A link says whose it is and until when it is valid, signed under a key derived from ONCEHOOK_SECRET_KEY. So every
process of an inbox makes and reads the same links, without asking another one. It works once: the store keeps which
were used.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Final
from urllib.parse import urlencode

import msgspec

from oncehook import clock
from oncehook.errors import BadRequest, ConfigError, Refused
from oncehook.human import seconds, show_span
from oncehook.model import check_account_id, flatten_text
from oncehook.settings.stored import Vault

LINK_SECONDS: Final = 600.0
"""Seconds for which a link is valid, unless its maker says otherwise."""
LONGEST_LINK: Final = 86_400.0
SESSION_SECONDS: Final = 2 * 3600.0
"""Seconds for which a customer is in."""
LONGEST_NAME: Final = 100
PURPOSE: Final = b"portal link"
_LONGEST_TEXT: Final = 2000


class LinkRefused(Refused):
    """This link has been used, is too old, or is not whole."""

    code = "unauthorized"
    status = 401
    hint = "Go back to where you found it and open it again."


class PortalLink(msgspec.Struct, frozen=True):
    """Whom a link lets in."""

    account: str
    until: float
    """The end of its validity, in seconds since 1970."""
    nonce: str
    name: str = ""
    """The person, for the audit log."""
    made_at: float = 0.0

    @property
    def actor(self) -> str:
        """Return the visitor's name in the audit log. The prefix keeps it apart from every token's."""
        return f"portal {self.account}" + (f" ({self.name})" if self.name else "")


def make_link(vault: Vault, account: str | int, name: str = "", expires: str | float = LINK_SECONDS) -> str:
    """Return the path of a new link, with its query. Raises SecretKeyMissing, and BadRequest for what cannot be one."""
    try:
        id_ = check_account_id(account)
        valid_for = seconds(expires)
    except ConfigError as error:
        raise BadRequest(str(error), hint=error.hint) from None
    if not 0 < valid_for <= LONGEST_LINK:
        raise BadRequest(f"A link is valid for {show_span(LONGEST_LINK)} at most.", hint='Write for example "10m".')
    now, nonce = clock.now(), clock.random_bytes(16).hex()
    link = PortalLink(id_, now + valid_for, nonce, flatten_text(name, LONGEST_NAME), now)
    said = msgspec.json.encode(link)
    signed = hmac.digest(vault.derive_keys(PURPOSE)[0], said, "sha256")
    return "/portal/enter?" + urlencode({"link": f"{_encode(said)}.{_encode(signed)}"})


def read_link(vault: Vault, text: str) -> tuple[PortalLink, bytes]:
    """Return whom a link lets in, and the key that signed it. Raises LinkRefused, which says the same of all that
    may be wrong."""
    if len(text) > _LONGEST_TEXT or not vault.has_key:
        raise LinkRefused
    try:
        said, signed = map(_decode, text.split("."))
    except ValueError:
        raise LinkRefused from None
    for key in vault.derive_keys(PURPOSE):
        if hmac.compare_digest(hmac.digest(key, said, "sha256"), signed):
            link = msgspec.json.decode(said, type=PortalLink)  # ours, since it is signed
            if link.until > clock.now():
                return link, key
    raise LinkRefused


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError("no base64") from error
