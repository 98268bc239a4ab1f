"""What a file and an app both say: a name that is defined twice is an error, and so is a setting with two values.

`Layout.add_settings` asks here before it takes anything from the file; all that is wrong is told at once, each with the
place in the file and the app.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeVar

from oncehook.settings import Loaded, RetentionConfig
from oncehook.settings.values import hide_password
from oncehook.settings.read import Problem, raise_all
from oncehook.store.cipher import Cipher

T = TypeVar("T")

_UNSAID: Final = RetentionConfig()


class Twice:
    """One comparison of a file with an app."""

    def __init__(self, loaded: Loaded, app: str) -> None:
        self._loaded = loaded
        self._app = app
        self._problems: list[Problem] = []

    def names(self, kind: str, known: Collection[str]) -> None:
        """Note what the file defines and the app has."""
        for name in getattr(self._loaded.config, kind):
            if name in known:
                self._note(f"{kind}.{name}", f"[{kind}.{name}] is defined by {self._app} too; give one another name")

    def store(self, mine: str, is_same: bool) -> None:
        """Note that the file names another store. The environment's may be meant for other programs as well."""
        if not is_same and self._loaded.is_from_file("store"):
            theirs = self._loaded.config.shown_store
            self._note("store", f"store is {theirs}, and {self._app} keeps its events in {hide_password(mine)}")

    def encrypt(self, mine: Cipher, theirs: Cipher) -> None:
        """Note that both name keys, and not the same ones."""
        if mine.has_keys and theirs.has_keys and mine != theirs:
            self._note("encrypt", f"encrypt is set by {self._app} too, to something else; say it once")

    def one_of(self, setting: str, mine: T, unsaid: T, theirs: T) -> T:
        """The value that one of the two has said; where both have, they must agree."""
        if theirs in (unsaid, mine):
            return mine
        if mine != unsaid:
            self._note(setting, f"{setting} is set by {self._app} too, to something else; say it once")
        return theirs

    def retention(self, mine: RetentionConfig) -> RetentionConfig:
        """How long things are kept, by both."""
        theirs = self._loaded.config.retention
        chosen = {
            name: self.one_of(f"retention.{name}", getattr(mine, name), getattr(_UNSAID, name), getattr(theirs, name))
            for name in _UNSAID.__struct_fields__
        }
        return RetentionConfig(**chosen)

    def end(self) -> None:
        """Raise ConfigError if anything was noted."""
        raise_all(self._problems, hint="File and app count together. Inbox.from_toml() begins with what the file says.")

    def _note(self, setting: str, sentence: str) -> None:
        self._problems.append(self._loaded.problem(setting, sentence))
