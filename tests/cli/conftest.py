"""What the command line's tests share: an inbox, somebody at a command line, and commands that go on until stopped."""

from __future__ import annotations

import codecs
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import engine, sqlite
from tests.acceptance.test_admin_cli import Admin, admin, here, run, sink

__all__ = ["Admin", "Process", "admin", "engine", "here", "run", "sink", "sqlite"]


class Process:
    """A command that runs until it is told to stop, and all it has said so far."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], *, terminal: bool = False, **env: str) -> None:
        self.out, self.err = "", ""
        command = [sys.executable, "-m", "oncehook", *arguments]
        shared = {"cwd": folder, "env": {**os.environ, "PYTHONUNBUFFERED": "1", "LINES": "24", "COLUMNS": "160", **env}}
        self.keyboard: int | None = None
        if terminal:
            self.keyboard, theirs = pty.openpty()
            self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **shared)  # type: ignore[call-overload]
            os.close(theirs)
            self._readers = [threading.Thread(target=self._read, args=("out", self.keyboard))]
        else:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, **shared)  # type: ignore[call-overload]
            streams = (("out", self.process.stdout), ("err", self.process.stderr))
            self._readers = [threading.Thread(target=self._read, args=(to, one.fileno())) for to, one in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, to: str, descriptor: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a piece may end in the middle of a character
        while True:
            try:
                piece = os.read(descriptor, 65536)
            except OSError:  # the other end of a terminal was closed
                return
            if not piece:
                return
            setattr(self, to, getattr(self, to) + decoder.decode(piece))

    def type(self, keys: str) -> None:
        assert self.keyboard is not None
        os.write(self.keyboard, keys.encode())

    def wait_for(self, text: str, where: str = "out", times: int = 1) -> None:
        """Until it has said so; fails when it ended before."""
        while getattr(self, where).count(text) < times:
            assert self.process.poll() is None, (self.out, self.err)
            time.sleep(0.02)

    def end(self, number: int = signal.SIGINT) -> int:
        """Stop it as a person would; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        if self.keyboard is not None:
            os.close(self.keyboard)
        return code


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Begin a command in a folder; whatever a test leaves running is ended."""
    begun: list[Process] = []

    def begin(folder: Path, *arguments: str, **options: object) -> Process:
        begun.append(Process(folder, arguments, **options))  # type: ignore[arg-type]
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
            one.end()
