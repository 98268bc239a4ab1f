"""Verification of arrivals: every scheme, and the settings that name one.

`from_config` turns the `verify` value of a source into a `Scheme`; presets build theirs directly. A scheme and its
secrets become a `Verifier`, which is called with every arrival before anything else happens to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from oncehook.errors import ConfigError
from oncehook.human import seconds
from oncehook.verify.asymmetric import Ed25519, PayPal, SendGrid
from oncehook.verify.credentials import Basic, Jwt, Token
from oncehook.verify.development import DevelopmentKeys, development_keys
from oncehook.verify.schemes import (
    Custom,
    Either,
    Fields,
    Genuine,
    Hash,
    Hmac,
    Nothing,
    Scheme,
    SecretError,
    Verifier,
    one_of,
    same,
)
from oncehook.verify.senders import Mailgun, Twilio
from oncehook.verify.standard import StandardWebhooks

__all__ = [
    "Basic",
    "Custom",
    "DevelopmentKeys",
    "Ed25519",
    "Either",
    "Fields",
    "Genuine",
    "Hash",
    "Hmac",
    "Jwt",
    "Mailgun",
    "Nothing",
    "PayPal",
    "Scheme",
    "SecretError",
    "SendGrid",
    "StandardWebhooks",
    "Token",
    "Twilio",
    "Verifier",
    "Verify",
    "development_keys",
    "from_config",
    "same",
]

CONFIRMATION: Final = "anyone may send"
"""The value of `confirm` that is required where nothing is verified on a public address."""


Spec = str | Mapping[str, object]
"""A scheme in the settings: its name, or a table whose `scheme` is that name."""
Verify = Spec | Sequence[Spec] | Scheme | Genuine
"""A value of `verify`: a scheme as settings write it or a list of them, a `Scheme`, or a check of one's own."""


Build = Callable[[dict[str, Any]], Scheme]


def from_config(spec: Spec | Sequence[Spec]) -> Scheme:
    """Build the scheme of a `verify` setting; with a list, any one of them may prove an arrival.

    Raises ConfigError for an unknown scheme, option or value, naming the nearest right one. It never falls back: a
    setting that cannot be read must not weaken verification (S4).
    """
    if not isinstance(spec, str | Mapping):
        return _any_of(spec)
    options = {"scheme": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("scheme", None)
    if name is None:
        raise ConfigError("verify does not say which scheme.", hint='Write verify = { scheme = "hmac", … }.')
    one_of(name, tuple(_SCHEMES), "scheme for verify")
    build, allowed = _SCHEMES[str(name)]
    for option in options:
        one_of(option, allowed, f'option of the scheme "{name}"')
    return build({option: _value(option, value) for option, value in options.items()})


def _any_of(specs: Sequence[Spec]) -> Scheme:
    if not specs or not all(isinstance(spec, str | Mapping) for spec in specs):
        raise ConfigError(
            "verify does not say which schemes.",
            hint='Write one, or a list of them: verify = ["bearer", { scheme = "hmac", … }].',
        )
    schemes = [from_config(spec) for spec in specs]
    if any(isinstance(scheme, Nothing) for scheme in schemes):
        raise ConfigError(
            '"none" cannot be one of several schemes: the others would not be needed.',
            hint='Leave it out of the list; or write verify = "none" alone.',
        )
    return Either(*schemes, every=True) if len(schemes) > 1 else schemes[0]


def _value(option: str, value: object) -> Any:
    """Convert one option: text to a duration, a table to `Fields`."""
    if option in ("tolerance", "leeway"):
        return _span(value)
    if option == "fields":
        return _fields(value)
    if option == "signed" and isinstance(value, list | tuple):
        return tuple(_text(option, text) for text in value)
    if option in ("claims", "bare"):
        kind: type = dict if option == "claims" else bool
        if isinstance(value, kind):
            return value
        raise ConfigError(f"{option} = {value!r} cannot be used in verify.")
    return _text(option, value)


def _text(option: str, value: object) -> str:
    if not isinstance(value, str) or (not value and option != "prefix"):
        raise ConfigError(f"{option} = {value!r} cannot be used in verify.")
    return value


def _span(value: object) -> float:
    if value == "off":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{value!r} is not a span of time.", hint='Write "5m", or "off" by name.')
    return seconds(value)


def _fields(value: object) -> Fields:
    if not isinstance(value, Mapping):
        raise ConfigError("fields must be a table.", hint='Write fields = { signature = "v1", separator = "," }.')
    for option, text in value.items():
        one_of(option, ("signature", "separator"), "option of fields")
        if not isinstance(text, str):
            raise ConfigError(f"fields.{option} = {text!r} must be text.")
    return Fields(**value)


def _signature(kind: type[Hmac | Hash | Ed25519]) -> tuple[Build, tuple[str, ...]]:
    def build(options: dict[str, Any]) -> Scheme:
        if "header" not in options:
            raise ConfigError("verify does not say which header holds the signature.", hint='Add header = "…".')
        return kind(**options)

    return build, _options_of(kind)


def _token(options: dict[str, Any]) -> Scheme:
    prefix = options.pop("prefix", "")
    if len(options) != 1:
        raise ConfigError("A token has one place.", hint="Give one of header, query and body.")
    [(kind, name)] = options.items()
    return Token(place=f"{kind}:{name}", prefix=prefix)


def _bearer(options: dict[str, Any]) -> Scheme:
    return Token(place=f"header:{options.get('header', 'Authorization')}", prefix="Bearer ")


def _nothing(options: dict[str, Any]) -> Scheme:
    if options.get("confirm", CONFIRMATION) != CONFIRMATION:
        raise ConfigError("Nothing would be verified.", hint=f'If that is meant, write confirm = "{CONFIRMATION}".')
    return Nothing()


def _options_of(scheme: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(scheme) if field.init)


_SCHEMES: Final[Mapping[str, tuple[Build, tuple[str, ...]]]] = {
    "none": (_nothing, ("confirm",)),
    "hmac": _signature(Hmac),
    "hash": _signature(Hash),
    "ed25519": _signature(Ed25519),
    "token": (_token, ("header", "query", "body", "prefix")),
    "bearer": (_bearer, ("header",)),
    "basic": (lambda options: Basic(), ()),
    "jwt": (lambda options: Jwt(**options), _options_of(Jwt)),
    "standard-webhooks": (lambda options: StandardWebhooks(**options), _options_of(StandardWebhooks)),
    "twilio": (lambda options: Twilio(), ()),
    "mailgun": (lambda options: Mailgun(**options), ("tolerance",)),
    "sendgrid": (lambda options: SendGrid(**options), ("tolerance",)),
    "paypal": (lambda options: PayPal(**options), ("tolerance",)),
}
