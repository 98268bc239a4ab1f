"""Real server processes: started as a user would, killed as a machine would."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from tests.wire import SECRET, Client

CONFIG = """
store = "{store}"

[source.orders]
verify = {{ scheme = "hmac", header = "X-Signature", prefix = "sha256=" }}
secret = {{ env = "ORDERS_SECRET" }}
key = ["$.id"]
subject = "$.customer"
budget = "20s"
"""

PATIENCE = 90
"""Seconds for which the end of a process is waited for: stopping in order may take it 25 of them."""


@dataclass
class Receiver:
    """One `oncehook serve` process on a port of its own, which stays its own between two starts."""

    folder: Path
    store: str
    config: str = CONFIG
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    clients: list[Client] = field(default_factory=list)

    def start(self, *, fault: str = "", command: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Receiver:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / "oncehook.toml"
        settings.write_text(self.config.format(store=self.store))
        self.port = self.port or self._port_of_its_own()
        arguments = [
            *command,
            sys.executable,
            "-m",
            "oncehook",
            "serve",
            "--config",
            str(settings),
            "--port",
            str(self.port),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                arguments,
                env={**os.environ, "ORDERS_SECRET": SECRET, "ONCEHOOK_FAULT": fault, **(env or {})},
                stderr=log,
                cwd=self.folder,
            )
        self._wait_until_ready()
        return self

    def _port_of_its_own(self) -> int:
        """Bound here and listened to by nobody: whoever looks for a free port while the server is down finds another.

        The server may bind it beside us, since both say SO_REUSEADDR.
        """
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        weakref.finalize(self, os.close, held.detach())
        return port

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        while self.process.poll() is None:
            if re.search(rf"ready on http://\S+:{self.port}\b", self.log.read_text()):
                return
            time.sleep(0.01)
        raise AssertionError(f"the server ended with {self.process.returncode}: {self.log.read_text()}")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def client(self) -> Client:
        """A connection to it, closed when it stops."""
        client = Client("127.0.0.1", self.port)
        self.clients.append(client)
        return client

    def kill(self) -> None:
        """As a machine would: no warning, no clean-up."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """As an operator would; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        for client in self.clients:
            client.close()
        return code

    def wait(self) -> int:
        """Until it ends by itself."""
        assert self.process is not None
        code = self.process.wait(PATIENCE)
        for client in self.clients:
            client.close()
        return code
