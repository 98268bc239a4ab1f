"""Settings of a WhatsApp destination, and the sender that is built from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from oncehook.destinations.base import Terms
from oncehook.destinations.registry import DestinationKind
from oncehook.secret import Secret
from oncehook.settings import values

if TYPE_CHECKING:
    from oncehook.settings.read import SettingsReader
    from oncehook.whatsapp.destination import SenderDestination
    from oncehook.whatsapp.sender import Sender
    from oncehook.whatsapp.storage import S3Files


class FilesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """S3-compatible storage (R2, MinIO, AWS) from which WhatsApp fetches the files that are sent."""

    bucket: Annotated[str, values.TEXT, "The bucket."]
    endpoint: Annotated[str | None, values.URL, "Its address, where it is not AWS."] = None
    region: Annotated[str, values.TEXT, "Its region."] = "auto"
    access_key: Annotated[Secret, values.SECRET, "The key's name."]
    secret_key: Annotated[Secret, values.SECRET, "The key."]
    prefix: Annotated[str, values.TEXT, "What the names of its objects begin with."] = "oncehook/"
    expires: Annotated[float, values.DURATION, "How long a link to a file works."] = 86_400.0
    public_endpoint: Annotated[
        str | None, values.URL, "Where WhatsApp reaches it, when that is not where we do (MinIO in a compose file)."
    ] = None
    public_url: Annotated[
        str | None, values.URL, "The address of a bucket that is open to all: links begin with it, and never expire."
    ] = None


class WhatsAppConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A WhatsApp API: events routed here are messages, and are sent."""

    api: Annotated[Literal["meta", "evolution-api", "evolution-go"], "Which API it speaks."]
    token: Annotated[Secret | None, values.SECRET, "The access token (Meta), or the instance's (Evolution Go)."] = None
    api_key: Annotated[
        Secret | None, values.SECRET, "The API key (Evolution API), or the administrator's (Evolution Go)."
    ] = None
    phone_number_id: Annotated[str | None, values.PHONE, "The number that sends (Meta)."] = None
    instance: Annotated[str | None, values.TEXT, "The instance that sends (Evolution)."] = None
    base_url: Annotated[str | None, values.URL, "Where the API is; Meta's own, unless said."] = None
    version: Annotated[str | None, values.TEXT, "The version of the API (Meta)."] = None
    proxy: Annotated[
        Secret | str | None,
        values.PROXY,
        'A proxy to go through (http://… or socks5://…), or "env": as ONCEHOOK_PROXY says.',
    ] = None
    country: Annotated[str | None, values.COUNTRY, 'The calling code of numbers written without one, as in "55".'] = (
        None
    )
    files: FilesConfig | None = None


_NEEDS: Final = {
    "meta": ("token", "phone_number_id"),
    "evolution-api": ("base_url", "api_key", "instance"),
    "evolution-go": ("base_url", "token"),
}
UNKNOWN_TO: Final = {
    "meta": ("api_key", "instance"),
    "evolution-api": ("token", "phone_number_id", "version"),
    "evolution-go": ("phone_number_id", "version"),
}


def list_missing(whatsapp: WhatsAppConfig) -> list[str]:
    """Return the missing settings that its API requires."""
    return [key for key in _NEEDS[whatsapp.api] if getattr(whatsapp, key) is None]


def _check(name: str, whatsapp: WhatsAppConfig, reader: SettingsReader) -> None:
    path = ("destination", name, "whatsapp")
    for key in list_missing(whatsapp):
        if not reader.has_failed((*path, key)):
            reader.note(path, f'[destination.{name}.whatsapp] needs {key}: the API "{whatsapp.api}" asks for it')
    for key in UNKNOWN_TO[whatsapp.api]:
        if getattr(whatsapp, key) is not None:
            reader.note(
                (*path, key), f'{key} in [destination.{name}.whatsapp]: the API "{whatsapp.api}" has no such thing'
            )


def sender_from(settings: WhatsAppConfig, *, files: S3Files | None = None, **options: Any) -> Sender:
    """Build the sender of checked settings; `files` is the default storage."""
    from oncehook import whatsapp

    options |= {field: getattr(settings, field) for field in settings.__struct_fields__ if field != "files"}
    if settings.api == "evolution-go":
        options["admin_key"] = options.pop("api_key")
    return whatsapp.sender(**options, files=files if settings.files is None else _files(settings.files))


def _files(settings: FilesConfig) -> S3Files:
    from oncehook.whatsapp.storage import S3Files

    return S3Files(**{field: getattr(settings, field) for field in settings.__struct_fields__})


def _build(name: str, whatsapp: WhatsAppConfig, settings: Any, terms: Terms) -> SenderDestination:
    from oncehook.whatsapp.destination import SenderDestination

    sender = sender_from(whatsapp, timeout=settings.timeout, allow_private=settings.allow_private, ca=settings.ca)
    return SenderDestination(name, sender, terms, unsure=settings.unsure)


KIND: Final = DestinationKind(settings=WhatsAppConfig, build=_build, check=_check)
