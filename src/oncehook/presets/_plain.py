"""The signature that senders without a scheme of their own make up, for the presets that expect such senders."""

from __future__ import annotations

from typing import Final

from oncehook.verify import Either, Hmac

BODY_HMAC: Final = Either(
    Hmac(header="X-Signature", prefix="sha256="),
    Hmac(header="X-Signature"),
    Hmac(header="X-Webhook-Signature", prefix="sha256="),
    Hmac(header="X-Webhook-Signature"),
    every=True,
)
"""HMAC-SHA256 of the raw body in hex, bare or after `sha256=`, in one of the two usual headers."""
