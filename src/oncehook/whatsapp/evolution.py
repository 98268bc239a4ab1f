"""Common parts of requests and answers of Evolution API and Evolution Go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from oncehook.http_client.proxy import Proxy
from oncehook.whatsapp.messages import Location, Media, Read
from oncehook.whatsapp.outcomes import Reason, SendFailed, build_unsupported


def location_fields(location: Location) -> dict[str, Any]:
    """Return a location with a name and an address: both are required, so the coordinates replace a missing one."""
    at = f"{location.latitude}, {location.longitude}"
    named = {"name": location.name or location.address or at, "address": location.address or at}
    return {"latitude": location.latitude, "longitude": location.longitude, **named}


def media_link(media: Media, api: str) -> str:
    """Return the link of a file. Raises SendFailed for one that only Meta has."""
    if media.link is None:
        raise build_unsupported(api, "media by an id of Meta's; only by link")
    return media.link


def chat_of(read: Read, api: str) -> str:
    """Return the chat of a message that was read. Raises SendFailed where it is missing."""
    if read.to is None:
        raise SendFailed(f"{api} asks whose message was read: `to` is missing.", Reason.invalid)
    return read.to


def wire_id(id: str) -> str:
    """Return a message id of the form that WhatsApp Web makes, always the same one for the same `id`."""
    return "3EB0" + sha256(id.encode()).hexdigest()[:18].upper()


def proxy_fields(proxy: Proxy) -> dict[str, str]:
    return {
        "protocol": proxy.scheme,
        "host": proxy.host,
        "port": str(proxy.port),
        "username": proxy.username,
        "password": proxy.password,
    }


def list_names(names: str | Sequence[str]) -> list[str]:
    """Return names, which may come as one text with commas."""
    return names.split(",") if isinstance(names, str) else list(names)


def summarise(listing: Mapping[str, Any], is_connected: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Return name, id and connection of each instance in a listing, and how many there are."""
    data = listing.get("data")
    known = [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []
    instances = [{"name": one.get("name"), "id": one.get("id"), "connected": is_connected(one)} for one in known]
    return {"instances": instances, "total": len(instances), "connected": sum(one["connected"] for one in instances)}
