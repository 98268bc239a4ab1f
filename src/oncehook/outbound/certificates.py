"""Whom a destination with an authority of its own trusts: a file comes in, what TLS needs of it goes out (S23).

The client asks when it is made, and the settings when they are checked, so that a wrong file is told before a start.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from oncehook.errors import ConfigError


def read_certificates(ca: Path) -> ssl.SSLContext:
    """Trust the certificates of a file instead of the system's. Raises ConfigError where it holds none."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError):
        raise ConfigError(
            f'"{ca}" cannot be read as a file of certificates.', hint="It is PEM, and must be readable for oncehook."
        ) from None
    context.set_alpn_protocols(["http/1.1"])
    return context
