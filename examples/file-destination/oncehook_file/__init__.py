"""A kind of destination: every event becomes a line of a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from oncehook.destinations.base import WELL, Result, Terms
from oncehook.destinations.registry import DestinationKind
from oncehook.model import Category, Evidence, Lease
from oncehook.settings import values


class FileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A file to which events are appended, one line of JSON each."""

    path: Annotated[str, values.TEXT, "The file."]
    with_body: Annotated[bool, values.FLAG, "Whether a line holds the body, too."] = True


class FileDestination:
    """Appends a line for each delivery, and has it on disk before the delivery is done."""

    kind = "file"
    crash_tolerance = 3

    def __init__(self, name: str, settings: FileSettings, terms: Terms) -> None:
        self.name = name
        self.id = 0
        self.terms = terms
        self.address = settings.path
        self._settings = settings

    async def open(self) -> None:
        """Nothing is kept open between deliveries."""

    async def close(self) -> None:
        """See `open`."""

    async def attempt(self, lease: Lease) -> Result:
        """Append one line. A full disk passes; a folder that is not there does not."""
        try:
            await asyncio.to_thread(self._append, lease)
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            return Result(Category.permanent, Evidence(error=str(error)))
        except OSError as error:
            return Result(Category.transient, Evidence(error=str(error)))
        return WELL

    def _append(self, lease: Lease) -> None:
        event = lease.event
        line: dict[str, Any] = {"id": str(event.id), "source": event.source, "type": event.type, "key": event.key}
        if self._settings.with_body:
            line["body"] = event.body.decode("utf-8", "replace")
        with Path(self.address).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()


def _build(name: str, file: FileSettings, settings: Any, terms: Terms) -> FileDestination:
    return FileDestination(name, file, terms)


KIND = DestinationKind(settings=FileSettings, build=_build)
