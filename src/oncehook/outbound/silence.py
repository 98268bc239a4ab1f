"""What is said when nobody answered: one line in which nothing of an address but its host occurs.

Both ways out, `direct` and `proxied`, raise what is made here.
"""

from __future__ import annotations

import os
import socket
import ssl

from oncehook.outbound import Forbidden, Unanswered, Untrusted
from oncehook.outbound.addresses import AddressRefused


def late(seconds: float, *, reached: bool) -> Unanswered:
    """The deadline passed."""
    return Unanswered(f"no answer within {seconds:g} s", reached=reached)


def no_http(host: str) -> Unanswered:
    """Something came back, and it was no answer."""
    return Unanswered(f"{host} did not answer in HTTP")


def closed(host: str) -> Unanswered:
    """The connection ended first."""
    return Unanswered(f"{host} closed the connection before it answered")


def not_found(host: str, error: BaseException, *, reached: bool = False) -> Unanswered:
    """Its name led nowhere, or only where nobody may go."""
    if isinstance(error, AddressRefused):
        return forbidden(host, error, reached=reached)
    return Unanswered(f"the address of {host} cannot be found: {reason(error)}", reached=reached)


def not_connected(host: str, error: BaseException, *, reached: bool = False) -> Unanswered:
    """No connection came about."""
    if isinstance(error, AddressRefused):
        return forbidden(host, error, reached=reached)
    if isinstance(error, ssl.SSLCertVerificationError):
        return Untrusted(f"the certificate of {host} is not trusted: {reason(error)}", reached=reached)
    return Unanswered(f"cannot connect to {host}: {reason(error)}", reached=reached)


def forbidden(host: str, error: AddressRefused, *, reached: bool = False) -> Forbidden:
    """The guard said no."""
    return Forbidden(f"{host} is not called: {error}; see allow_private", reached=reached)


def reason(error: BaseException) -> str:
    """An error of the system, in one line."""
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror | ssl.SSLError) and error.errno:
        return os.strerror(error.errno)  # the loops each put it in words of their own
    text = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error)
    return " ".join(str(text).split()) or type(error).__name__
