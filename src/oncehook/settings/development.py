"""An inbox without configuration, for the first five minutes: every preset under its own name, on this machine only.

Its keys are made once and kept in the user's state folder, so that they stay the same between restarts and
`oncehook send` knows them too. Every such source takes direct loopback requests only.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from oncehook import clock, presets
from oncehook.errors import ConfigError
from oncehook.private import open_private
from oncehook.rules import DEFAULT_KEY
from oncehook.settings.tables import SourceArguments
from oncehook.sources import Preset, Source, build
from oncehook.verify import Scheme
from oncehook.verify.development import DevelopmentKeys, development_keys


def sources() -> list[Source]:
    """Return one source per preset, and `dev`, which takes anything unsigned."""
    return [build("dev", verify="none"), *_of_presets(presets.names())]


def source(preset: str) -> Source:
    """Return the source of one preset with development keys, for sending where nothing is configured."""
    (made,) = _of_presets([preset])
    return made


def fleeting(preset: str) -> Source:
    """Return the source of one preset with keys that are not kept, for a test."""
    loaded = presets.load(preset)
    return _build(loaded, development_keys(loaded.scheme))


def kept_secret(name: str) -> str:
    """Return a shared secret of Standard Webhooks under this name: made once, the same from then on."""
    with _open_keys() as file:
        kept = _read(file)
        if name not in kept:
            kept[name] = [base64.b64encode(clock.random_bytes(24)).decode()]
            _write(file, kept)
        return f"whsec_{kept[name][0]}"


def _of_presets(names: Iterable[str]) -> list[Source]:
    made = []
    with _open_keys() as file:
        kept = _read(file)
        for name in names:
            preset = presets.load(name)
            made.append(_build(preset, _keys_of(kept, name, preset.scheme)))
        _write(file, kept)
    return made


def _build(preset: Preset, keys: DevelopmentKeys) -> Source:
    settings: SourceArguments = {
        "preset": preset,
        "verify_token": "development",
        "public_url": f"http://127.0.0.1:4020/in/{preset.name}",
    }
    if keys.secrets:
        settings["secret"] = keys.secrets
    if "key" in preset.needs:
        settings["key"] = DEFAULT_KEY
    return build(preset.name, signing=keys.signing, loopback_only=True, **settings)


def _open_keys() -> IO[str]:
    """Open the file of development keys, readable by its owner only and locked until it is closed."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "oncehook"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = open_private(folder / "development-keys.json", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return os.fdopen(descriptor, "r+")


def _read(file: IO[str]) -> dict[str, list[str]]:
    """Read the kept keys; none when a crash left half a file: then they are made anew."""
    try:
        kept = json.load(file)
    except ValueError:
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(file: IO[str], kept: dict[str, list[str]]) -> None:
    file.seek(0)
    file.truncate()
    json.dump(kept, file)


def _keys_of(kept: dict[str, list[str]], name: str, scheme: Scheme) -> DevelopmentKeys:
    if name in kept:
        signing, *secrets = (base64.b64decode(text) for text in kept[name])
        if _fit(scheme, secrets):
            return DevelopmentKeys(tuple(secrets), signing)
    made = development_keys(scheme)
    kept[name] = [base64.b64encode(value).decode() for value in (made.signing, *made.secrets)]
    return made


def _fit(scheme: Scheme, secrets: Sequence[bytes]) -> bool:
    """Tell whether these keys fit the scheme: another version of the preset may have another one."""
    try:
        scheme.verifier(secrets, url="http://127.0.0.1/")
    except ConfigError:
        return False
    return True
